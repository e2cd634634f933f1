"""The chat template of a model directory: messages to the text that the model continues.

A template is a program from elsewhere. It runs in Jinja's sandbox, which keeps it from files and from Python's insides, and
within bounds: of processor time, of memory, and of the text that it makes. Whatever it raises is one line that names its
file. The bound of time is a signal's, so it is there in main threads only, which is where tasks are built and tried.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import threading
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from laminar_hpc.config.model_files import read_json
from laminar_hpc.errors import ConfigError
from laminar_hpc.tasks.table import ChatMessage

LIMIT_S = 2.0
"""Processor time that a template has for one prompt."""

_MEMORY_BYTES = 1 << 30
_LONGEST_TEXT = 10_000_000


class ChatTemplate:
    """A Jinja template in a sandbox, with the variables and functions that transformers gives to one.

    A template that asks for the date (`strftime_now`) makes prompts that change with the day.
    """

    def __init__(self, model_dir: str) -> None:
        """Reads chat_template.jinja, else "chat_template" of tokenizer_config.json; ConfigError where there is none."""
        path = os.path.join(model_dir, "tokenizer_config.json")
        settings = read_json(path) if os.path.exists(path) else {}
        self._tokens = {name: _token(settings.get(name)) for name in ("bos_token", "eos_token")}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise, strftime_now=_now)
        self._path, source = _source(model_dir, settings)
        with _bounds(f"model.path: {self._path}: the chat template is not valid Jinja"):
            self._template = environment.from_string(source)

    def render(self, messages: Iterable[ChatMessage]) -> str:
        """The text up to where the assistant's next message begins; ConfigError where the template refuses the messages."""
        with _bounds(f"model.path: {self._path}: the chat template refuses a prompt"):
            text = self._template.render(
                messages=[message._asdict() for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._tokens,
            )
            if len(text) > _LONGEST_TEXT:
                raise jinja2.TemplateError(
                    f"it makes {len(text)} characters of it; at most {_LONGEST_TEXT} are allowed"
                )
            text.encode("utf-8")  # what is no text is no input of a tokenizer
        return text


class _Generation(jinja2.ext.Extension):
    """{% generation %}, by which transformers finds what the assistant said; what is in it is rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """A scope of its own, as in transformers."""
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _TimeIsUp(BaseException):
    """No Exception, since Jinja catches those."""


@contextlib.contextmanager
def _bounds(what: str) -> Iterator[None]:
    """Bound the time and the memory of what is done inside; ConfigError, one line that begins with `what`, for all it raises."""
    try:
        with _memory_limit(), _time_limit():  # in this order, so that time is never up while a limit is put back
            yield
    except _TimeIsUp as error:
        raise ConfigError(f"{what}: it takes longer than {LIMIT_S:g} s") from error
    except Exception as error:  # division by zero, recursion, memory: whatever a program may raise
        line = " ".join(str(error).split())[:300].encode("utf-8", "backslashreplace").decode()
        known = isinstance(error, jinja2.TemplateError) and line
        raise ConfigError(f"{what}: {line if known else f'{type(error).__name__}: {line}'}") from error


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGPROF, _time_is_up)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S, LIMIT_S)  # again and again, in case that something has swallowed it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before or signal.SIG_DFL)


def _time_is_up(number: int, frame: object) -> NoReturn:
    del number, frame
    raise _TimeIsUp


@contextlib.contextmanager
def _memory_limit() -> Iterator[None]:
    """Bound the address space to what is in use and some more; MemoryError beyond."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + _MEMORY_BYTES
    bounds = [bound for bound in (limit, soft, hard) if bound != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(bounds), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _source(model_dir: str, settings: dict[str, Any]) -> tuple[str, str]:
    """The path of the file that has the template, and the template."""
    path = os.path.join(model_dir, "chat_template.jinja")
    try:
        if os.path.isfile(path):
            with open(path, encoding="utf-8") as file:
                return path, file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.path: {path} cannot be read: {error}") from error
    found = settings.get("chat_template")
    if isinstance(found, list):  # several, by name
        defaults = [entry for entry in found if isinstance(entry, dict) and entry.get("name") == "default"]
        found = defaults[-1].get("template") if defaults else None
    if not isinstance(found, str):
        raise ConfigError(
            f"model.path: {model_dir} has no chat template, which task.chat = true needs: neither chat_template.jinja nor "
            f'"chat_template" in tokenizer_config.json'
        )
    return os.path.join(model_dir, "tokenizer_config.json"), found


def _token(value: Any) -> str:
    """A special token as tokenizer_config.json has it: its text, or an object with its text as "content"."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def _raise(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own would escape what HTML has to."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
