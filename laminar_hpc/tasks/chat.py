"""The chat template of a model directory: messages to the text that the model continues."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from laminar_hpc.config.model_files import read_json
from laminar_hpc.errors import ConfigError
from laminar_hpc.tasks.table import ChatMessage


class ChatTemplate:
    """A Jinja template in a sandbox, with the variables and functions that transformers gives to one.

    A template that asks for the date (`strftime_now`) makes prompts that change with the day.
    """

    def __init__(self, model_dir: str) -> None:
        """Reads chat_template.jinja, else "chat_template" of tokenizer_config.json; ConfigError where there is none."""
        self._model_dir = model_dir
        path = os.path.join(model_dir, "tokenizer_config.json")
        settings = read_json(path) if os.path.exists(path) else {}
        self._tokens = {name: _token(settings.get(name)) for name in ("bos_token", "eos_token")}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise, strftime_now=_now)
        try:
            self._template = environment.from_string(_source(model_dir, settings))
        except jinja2.TemplateError as error:
            raise ConfigError(f"model.path: {model_dir}: the chat template is not valid Jinja: {error}") from error

    def render(self, messages: Iterable[ChatMessage]) -> str:
        """The text up to where the assistant's next message begins; ConfigError where the template refuses the messages."""
        try:
            return self._template.render(
                messages=[message._asdict() for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            text = " ".join(str(error).split())
            raise ConfigError(f"model.path: {self._model_dir}: its chat template refuses a prompt: {text}") from error


def _source(model_dir: str, settings: dict[str, Any]) -> str:
    path = os.path.join(model_dir, "chat_template.jinja")
    try:
        if os.path.isfile(path):
            with open(path, encoding="utf-8") as file:
                return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.path: {path} cannot be read: {error}") from error
    found = settings.get("chat_template")
    if isinstance(found, list):  # several, by name
        by_name = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = by_name.get("default")
    if not isinstance(found, str):
        raise ConfigError(
            f"model.path: {model_dir} has no chat template, which task.chat = true needs: neither chat_template.jinja nor "
            f'"chat_template" in tokenizer_config.json'
        )
    return found


def _token(value: Any) -> str:
    """A special token as tokenizer_config.json has it: its text, or an object with its text as "content"."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own would escape what HTML has to."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
