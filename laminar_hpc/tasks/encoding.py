"""From a prompt of a task to the tokens that the model is given."""

from __future__ import annotations

from laminar_hpc.errors import ConfigError
from laminar_hpc.protocol.trajectory import Purpose
from laminar_hpc.tasks.api import Task, TextTokens


def encode_prompt(tokenizer: TextTokens, task: Task, purpose: Purpose, index: int, max_tokens: int) -> list[int]:
    """The tokens of a prompt; ConfigError names the prompt where it is empty or longer than `max_tokens`."""
    text = task.text(purpose, index, tokenizer.quote)
    tokens = tokenizer.encode(text, add_special_tokens=not task.has_special_tokens)
    if not 1 <= len(tokens) <= max_tokens:
        raise ConfigError(
            f"{purpose.value} prompt {index} has {len(tokens)} tokens; rollout.max_prompt_tokens allows 1 to {max_tokens}"
        )
    return tokens
