"""The task that a config names, and its check at the door. Only the chosen task's libraries are imported."""

from __future__ import annotations

import time

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError
from laminar_hpc.protocol.trajectory import Purpose
from laminar_hpc.tasks.api import PromptCounts, Task, TextTokens
from laminar_hpc.tasks.encoding import check_characters, encode_prompt

FILES = ("jsonl", "parquet")
"""Tasks whose prompts are the rows of a file."""

SYNTHETIC = "synthetic"
"""The task whose prompts mean nothing, so that no model's tokenizer is needed."""

_CHECK_LIMIT_S = 3.0
_SAMPLE = 64


def build_task(config: Config, search_limit_s: float | None = None) -> Task:
    """The task of `config.task`; ConfigError where it cannot be.

    With `search_limit_s`, a task that has to search for its held-out prompts gives up after that time with those it has.
    """
    if config.task.name in FILES:
        from laminar_hpc.tasks.file_task import FileTask

        return FileTask(config)
    if config.task.name == SYNTHETIC:
        from laminar_hpc.tasks.synthetic_task import SyntheticTask

        return SyntheticTask(config)
    try:
        from laminar_hpc.tasks.reasoning_gym_task import ReasoningGymTask
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"task.name = 'reasoning_gym' needs the package {error.name}: pip install 'laminar_hpc[tasks]'"
        ) from error
    return ReasoningGymTask(config, search_limit_s)


def build_tokenizer(config: Config) -> TextTokens:
    """The tokenizer of the model, or for the task `SYNTHETIC` the one that makes a character a token; ConfigError as above."""
    if config.task.name == SYNTHETIC:
        from laminar_hpc.tasks.synthetic_task import CharacterTokens

        return CharacterTokens()
    try:
        from laminar_hpc.tasks.tokenizer import Tokenizer
    except ModuleNotFoundError as error:
        raise ConfigError(f"tasks need the package {error.name}: pip install 'laminar_hpc[tasks]'") from error
    return Tokenizer(config.model.path)


def prompt_counts(config: Config) -> PromptCounts:
    """How many prompts the task of this config has, as the task worker will say it; reads the files, draws nothing."""
    if config.task.name in FILES:
        task = build_task(config)
        return PromptCounts(task.prompts, task.held_out)
    return PromptCounts(config.task.prompts, config.evaluation.prompts if config.evaluation.every else 0)


def check_task(config: Config) -> PromptCounts:
    """Build tokenizer and task and encode a sample of prompts, in some seconds and without torch; ConfigError, one line.

    Of a file, all prompts are encoded where the tokenizer does not know every character. Of a data set that draws slowly,
    only what fits into the time is looked at; its task worker looks at all.
    """
    if config.task.overlong_tokens > config.rollout.max_response_tokens:
        raise ConfigError(
            f"task.overlong_tokens must be at most rollout.max_response_tokens ({config.rollout.max_response_tokens}), "
            f"got {config.task.overlong_tokens}"
        )
    tokenizer = build_tokenizer(config)
    task = build_task(config, search_limit_s=_CHECK_LIMIT_S)
    began_s = time.monotonic()
    for purpose, count in ((Purpose.TRAIN, task.prompts), (Purpose.EVALUATION, task.held_out)):
        looks_at_all = config.task.name in FILES and tokenizer.may_not_know  # one odd row in many
        for index in range(0, count, 1 if looks_at_all else max(1, count // _SAMPLE)):
            check_characters(tokenizer, task, purpose, index)
            encode_prompt(tokenizer, task, purpose, index, config.rollout.max_prompt_tokens)
            if time.monotonic() - began_s > _CHECK_LIMIT_S:
                break
    return PromptCounts(task.prompts, task.held_out) if config.task.name in FILES else prompt_counts(config)
