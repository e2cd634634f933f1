"""The rows of a data set's file: a prompt and an answer each, checked one by one, whatever the file's format."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from laminar_hpc.config.schema import Task as TaskConfig
from laminar_hpc.errors import ConfigError
from laminar_hpc.tasks.answers import parse_number

ROLES = ("system", "user", "assistant")
FINAL_ANSWER = "####"
"""GSM8K ends its worked solutions on this and the answer."""


class ChatMessage(NamedTuple):
    """One message of a prompt that is a conversation."""

    role: str
    content: str


Prompt = str | tuple[ChatMessage, ...]


class Row(NamedTuple):
    """What a task needs of a row."""

    prompt: Prompt
    answer: str


def read_rows(task: TaskConfig, path: str, key: str) -> list[Row]:
    """The rows of the file at `path`, which the setting `key` names, in the format that `task.name` says, each once.

    ConfigError, one line with FILE:ROW (from 1) and what is allowed, for the first row that is wrong.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # reading a pipe would wait for ever
        raise ConfigError(f"{key}: {path}: cannot be read: it is no regular file")
    rows: dict[Row, None] = {}  # DAPO-Math-17k as published has each of its rows a hundred times
    try:
        for place, columns in _open(task, path):
            row = Row(
                _prompt(find_column(columns, task.prompt_column, "task.prompt_column", place), task, place),
                _answer(find_column(columns, task.answer_column, "task.answer_column", place), task, place),
            )
            rows[row] = None
    except MemoryError as error:
        raise ConfigError(f"{key}: {path}: its rows do not fit into memory") from error
    except OSError as error:
        raise ConfigError(f"{key}: {path}: cannot be read: {error.strerror or error}") from error
    if not rows:
        raise ConfigError(f"{key}: {path}: is empty; it needs rows with a prompt and an answer")
    return list(rows)


def find_column(columns: dict[str, Any], name: str, key: str, place: str) -> Any:
    """The value under `name`; where there is none of that very name, dots go into nested columns.

    ConfigError names the place, the setting `key` that asks for the column, and the columns that there are.
    """
    if name in columns:
        return columns[name]
    value: Any = columns
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            there = ", ".join(map(str, value)) if isinstance(value, dict) else f"no columns in {kind_of(value)}"
            raise ConfigError(f"{place}: no column {name!r} ({key}); at {part!r} there are: {there or 'none'}")
        value = value[part]
    return value


def kind_of(value: Any) -> str:
    """The kind of a value in words that do not depend on the file's format."""
    if value is None:
        return "null"
    names = {
        bool: "a truth value",
        int: "a number",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)


def _open(task: TaskConfig, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if task.name == "jsonl":
        from laminar_hpc.tasks.jsonl import iterate_rows

        return iterate_rows(path)
    try:
        from laminar_hpc.tasks.parquet import iterate_rows as iterate_parquet_rows
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"task.name = 'parquet' needs the package {error.name}: pip install 'laminar_hpc[tasks]'"
        ) from error
    return iterate_parquet_rows(
        path, {"task.prompt_column": task.prompt_column, "task.answer_column": task.answer_column}
    )


def _prompt(value: Any, task: TaskConfig, place: str) -> Prompt:
    column = f"{place}: the prompt (column {task.prompt_column!r})"
    if isinstance(value, str):
        if not value.strip():
            raise ConfigError(f"{column} is empty; it must be a text or a list of chat messages")
        return value
    if not isinstance(value, list):
        raise ConfigError(f"{column} must be a text or a list of chat messages, got {kind_of(value)}")
    if not task.chat:
        raise ConfigError(f"{column} is a list of chat messages, which needs task.chat = true")
    if task.template != "{prompt}":
        raise ConfigError(f"{column} is a list of chat messages, to which task.template does not apply; leave it out")
    if not value:
        raise ConfigError(f"{column} is an empty list; it needs at least one chat message")
    return tuple(_message(message, f"{column}, message {number}") for number, message in enumerate(value, start=1))


def _message(value: Any, place: str) -> ChatMessage:
    role, content = (value.get("role"), value.get("content")) if isinstance(value, dict) else (None, None)
    if role not in ROLES or not isinstance(content, str):
        raise ConfigError(
            f'{place}: must be {{"role": ..., "content": ...}} with a role of {", ".join(ROLES)} and a text, '
            f"got {_short(value)}"
        )
    return ChatMessage(role, content)


def _answer(value: Any, task: TaskConfig, place: str) -> str:
    column = f"{place}: the answer (column {task.answer_column!r})"
    if not isinstance(value, str):
        raise ConfigError(f"{column} must be a text, got {kind_of(value)}")
    answer = value.rpartition(FINAL_ANSWER)[2].strip()
    if not answer:
        raise ConfigError(f"{column} is empty; it must be a text")
    if task.verifier == "number" and parse_number(answer) is None:
        raise ConfigError(
            f"{place}: task.verifier = 'number' needs a number as answer (12, -1.5, 1e-3, 3/4), got {_short(answer)}"
        )
    return answer


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
