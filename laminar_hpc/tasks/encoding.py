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


def check_characters(tokenizer: TextTokens, task: Task, purpose: Purpose, index: int) -> None:
    """ConfigError where a prompt has text that the model cannot see; it names the prompt and the first such piece."""
    text = task.text(purpose, index, tokenizer.quote)
    piece = tokenizer.unknown_in(text)
    if piece is not None:
        around = text[max(0, text.index(piece) - 20) :][:40]
        raise ConfigError(
            f"{purpose.value} prompt {index} (at {around!r}) has {piece!r}, for which the tokenizer in model.path has no token"
        )
