"""Prompts and answers from a JSON Lines or a Parquet file, graded by a built-in verifier."""

from __future__ import annotations

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError
from laminar_hpc.protocol.trajectory import Purpose
from laminar_hpc.tasks.answers import OPEN_TAG, VERIFIERS, Verifier, as_response
from laminar_hpc.tasks.api import Quote, unquoted
from laminar_hpc.tasks.prompts import PromptText
from laminar_hpc.tasks.table import Prompt, Row, read_rows


class FileTask:
    """Training prompts are the file's rows, each once; held-out ones those of the other file, or the last ones of this one.

    No held-out prompt is there twice, and a row whose prompt is also a held-out prompt is left out of training.
    """

    def __init__(self, config: Config) -> None:
        """Reads the files; ConfigError names the first wrong row, or what there is too little of."""
        self._prompt_text = PromptText(config)
        self._tags_required = OPEN_TAG in config.task.template
        self._is_right = find_verifier(config.task.verifier)
        training, held_out = _split(config)
        self._rows = {Purpose.TRAIN: training, Purpose.EVALUATION: held_out}

    @property
    def prompts(self) -> int:
        """Number of training prompts."""
        return len(self._rows[Purpose.TRAIN])

    @property
    def held_out(self) -> int:
        """Number of held-out prompts."""
        return len(self._rows[Purpose.EVALUATION])

    @property
    def has_special_tokens(self) -> bool:
        """Whether the text comes out of a chat template."""
        return self._prompt_text.has_special_tokens

    def text(self, purpose: Purpose, index: int, quote: Quote = unquoted) -> str:
        """The prompt of the row, in the templates."""
        return self._prompt_text.text(self._rows[purpose][index].prompt, quote)

    def solution(self, purpose: Purpose, index: int) -> str:
        """The answer of the row, between tags where the template asks for them."""
        return as_response(self._rows[purpose][index].answer, self._tags_required)

    def grade(self, purpose: Purpose, index: int, response: str) -> float:
        """1 where the verifier finds the answer of the row in the response, else 0."""
        return float(self._is_right(response, self._rows[purpose][index].answer, self._tags_required))


def find_verifier(name: str) -> Verifier:
    """The verifier of that name, tried out; ConfigError where its package is missing or does not work."""
    if name != "math":
        return VERIFIERS[name]
    try:
        from laminar_hpc.tasks.math_verifier import check_math_verify, is_right
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"task.verifier = 'math' needs the package {error.name}: pip install 'laminar_hpc[tasks]'"
        ) from error
    check_math_verify()
    return is_right


def _split(config: Config) -> tuple[list[Row], list[Row]]:
    """Training rows and held-out rows."""
    task = config.task
    training = read_rows(task, task.path, "task.path")
    wanted = config.evaluation.prompts if config.evaluation.every else 0
    if not wanted:
        return training, []
    if task.held_out_path:
        held_out = _one_of_each_prompt(read_rows(task, task.held_out_path, "task.held_out_path"))
        if len(held_out) < wanted:
            raise ConfigError(
                f"task.held_out_path: {task.held_out_path} has {len(held_out)} different prompts; "
                f"evaluation.prompts = {wanted} must be at most that"
            )
        held_out = held_out[:wanted]
    else:
        held_out = _one_of_each_prompt(training)
        if len(held_out) <= wanted:
            raise ConfigError(
                f"task.path: {task.path} has {len(held_out)} different prompts, of which evaluation.prompts = {wanted} are "
                f"held out and none is left to train on; lower evaluation.prompts or set task.held_out_path"
            )
        held_out = held_out[-wanted:]
    reserved = {row.prompt for row in held_out}
    kept = [row for row in training if row.prompt not in reserved]
    if not kept:
        raise ConfigError(f"task.path: {task.path}: every prompt is also a held-out prompt, none is left to train on")
    return kept, held_out


def _one_of_each_prompt(rows: list[Row]) -> list[Row]:
    """The first row of each prompt, in order."""
    first: dict[Prompt, Row] = {}
    for row in rows:
        first.setdefault(row.prompt, row)
    return list(first.values())
