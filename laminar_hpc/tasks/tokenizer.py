"""Text to tokens and back, from the files in a model directory, without torch or transformers."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import tokenizers

from laminar_hpc.errors import ConfigError
from laminar_hpc.protocol.trajectory import Purpose
from laminar_hpc.tasks.api import Task


class Tokenizer:
    """The tokenizer of a model directory, and the tokens that end a response."""

    def __init__(self, model_dir: str) -> None:
        """Reads tokenizer.json, and the end tokens; ConfigError where a file is missing or broken."""
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
        self.end_tokens = read_end_tokens(model_dir)

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


def read_end_tokens(model_dir: str) -> frozenset[int]:
    """The ids that end a response: `eos_token_id` of generation_config.json, else of config.json; ConfigError if neither."""
    for name in ("generation_config.json", "config.json"):
        path = os.path.join(model_dir, name)
        if os.path.isfile(path):
            ids = _eos_token_ids(path)
            if ids:
                return ids
    raise ConfigError(f"model.path: {model_dir}: eos_token_id is in neither generation_config.json nor config.json")


def _eos_token_ids(path: str) -> frozenset[int]:
    try:
        with open(path, "rb") as file:
            content: Any = msgspec.json.decode(file.read())
    except OSError as error:
        raise ConfigError(f"model.path: {path}: cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"model.path: {path}: not valid JSON: {error}") from error
    value = content.get("eos_token_id") if isinstance(content, dict) else None
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ConfigError(f"model.path: {path}: eos_token_id must be an integer or a list of them, got {value!r}")
    return frozenset(ids)
