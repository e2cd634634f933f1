"""Text to tokens and back, from the files in a model directory, without torch or transformers."""

from __future__ import annotations

import os

import tokenizers

from laminar_hpc.errors import ConfigError
from laminar_hpc.protocol.trajectory import Purpose
from laminar_hpc.tasks.api import Task


class Tokenizer:
    """The tokenizer of a model directory."""

    def __init__(self, model_dir: str) -> None:
        """Reads tokenizer.json; ConfigError where it is missing or broken."""
        path = os.path.join(model_dir, "tokenizer.json")
        if not os.path.isfile(path):
            raise ConfigError(
                f"model.path: {path}: no such file; the directory must hold config.json and tokenizer.json"
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(path)
        except Exception as error:  # the library raises no narrower class
            raise ConfigError(f"model.path: {path}: not a tokenizer: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`, with the special tokens that the tokenizer's own post-processor adds, if any."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, tokens: list[int]) -> str:
        """The text of these tokens, special tokens left out."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


def encode_prompt(tokenizer: Tokenizer, task: Task, purpose: Purpose, index: int, max_tokens: int) -> list[int]:
    """The tokens of a prompt; ConfigError names the prompt where it is empty or longer than `max_tokens`."""
    tokens = tokenizer.encode(task.text(purpose, index))
    if not 1 <= len(tokens) <= max_tokens:
        raise ConfigError(
            f"{purpose.value} prompt {index} has {len(tokens)} tokens; rollout.max_prompt_tokens allows 1 to {max_tokens}"
        )
    return tokens
