"""Prompts and answers from a JSON Lines file, graded by a built-in verifier."""

from __future__ import annotations

import os

import msgspec

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError
from laminar_hpc.protocol.trajectory import Purpose
from laminar_hpc.tasks.answers import OPEN_TAG, VERIFIERS, as_response, final_answer, parse_number


class Line(msgspec.Struct, frozen=True):
    """One line of the file; other keys may stand beside these two."""

    prompt: str
    answer: str


class JsonlTask:
    """Training prompts are the file's lines; held-out ones are those of the other file, or the last lines of this one.

    A line whose prompt is also a held-out prompt is left out of training.
    """

    def __init__(self, config: Config) -> None:
        """Reads the files; ConfigError names the first wrong line, or what there is too little of."""
        self._template = config.task.template
        self._tags_required = OPEN_TAG in config.task.template
        self._matches = VERIFIERS[config.task.verifier]
        training, held_out = _split(config)
        if config.task.verifier == "number":
            _require_numbers(training + held_out)
        self._lines = {
            Purpose.TRAIN: [line for _, line in training],
            Purpose.EVALUATION: [line for _, line in held_out],
        }

    @property
    def prompts(self) -> int:
        """Number of training prompts."""
        return len(self._lines[Purpose.TRAIN])

    @property
    def held_out(self) -> int:
        """Number of held-out prompts."""
        return len(self._lines[Purpose.EVALUATION])

    def text(self, purpose: Purpose, index: int) -> str:
        """The prompt of the line, in the template."""
        return self._template.replace("{prompt}", self._lines[purpose][index].prompt)

    def solution(self, purpose: Purpose, index: int) -> str:
        """The answer of the line, between tags where the template asks for them."""
        return as_response(self._lines[purpose][index].answer, self._tags_required)

    def grade(self, purpose: Purpose, index: int, response: str) -> float:
        """1 where the verifier finds the answer of the line in the response, else 0."""
        answer = final_answer(response, self._tags_required)
        return float(answer is not None and self._matches(answer, self._lines[purpose][index].answer))


Numbered = list[tuple[str, Line]]  # each line with its "FILE:LINE"


def _split(config: Config) -> tuple[Numbered, Numbered]:
    """Training lines and held-out lines."""
    training = read_lines(config.task.path, "task.path")
    wanted = config.evaluation.prompts if config.evaluation.every else 0
    if not wanted:
        return training, []
    if config.task.held_out_path:
        held_out = read_lines(config.task.held_out_path, "task.held_out_path")
        if len(held_out) < wanted:
            raise ConfigError(
                f"task.held_out_path: {config.task.held_out_path} has {len(held_out)} lines; "
                f"evaluation.prompts = {wanted} must be at most that"
            )
        held_out = held_out[:wanted]
    else:
        if len(training) <= wanted:
            raise ConfigError(
                f"task.path: {config.task.path} has {len(training)} lines, of which evaluation.prompts = {wanted} are held out "
                f"and none is left to train on; lower evaluation.prompts or set task.held_out_path"
            )
        training, held_out = training[:-wanted], training[-wanted:]
    reserved = {line.prompt for _, line in held_out}
    kept = [(place, line) for place, line in training if line.prompt not in reserved]
    if not kept:
        raise ConfigError(
            f"task.path: {config.task.path}: every prompt is also a held-out prompt, none is left to train on"
        )
    return kept, held_out


def read_lines(path: str, key: str) -> Numbered:
    """The lines of a JSON Lines file; ConfigError with FILE:LINE for the first one that is wrong. `key` names the setting."""
    if os.path.exists(path) and not os.path.isfile(path):  # reading a pipe would wait for ever
        raise ConfigError(f"{key}: {path}: cannot be read: it is no regular file")
    try:
        with open(path, "rb") as file:
            rows = file.read().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{key}: {path}: cannot be read: {error.strerror}") from error
    if rows[-1] == b"":
        rows.pop()
    if not rows:
        raise ConfigError(f'{key}: {path}: is empty; it needs lines like {{"prompt": "...", "answer": "..."}}')
    decoder = msgspec.json.Decoder(Line)
    return [(f"{path}:{number}", _line(row, f"{path}:{number}", decoder)) for number, row in enumerate(rows, start=1)]


def _line(row: bytes, place: str, decoder: msgspec.json.Decoder[Line]) -> Line:
    try:
        return decoder.decode(row.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{place}: not UTF-8: byte {error.start + 1} of the line is 0x{row[error.start]:02x}"
        ) from error
    except msgspec.DecodeError as error:
        raise ConfigError(
            f'{place}: {error}; a line must be a JSON object with the strings "prompt" and "answer"'
        ) from error


def _require_numbers(lines: Numbered) -> None:
    for place, line in lines:
        if parse_number(line.answer) is None:
            raise ConfigError(
                f"{place}: task.verifier = 'number' needs a number as answer (12, -1.5, 1e-3, 3/4), got {line.answer[:80]!r}"
            )
