"""`laminar model tiny`: a small model that begins to answer a task, from the task's own prompts and answers."""

from __future__ import annotations

import os
import shutil
from importlib import resources

from laminar_hpc.config.load import load_config
from laminar_hpc.errors import ConfigError
from laminar_hpc.protocol.trajectory import Purpose

DEMONSTRATIONS = 6000
"""Prompts with answers that the warm start may draw from; the last ones of the task, which a short run never reaches."""

HELD_OUT = 200
"""Held-out prompts that tell when the warm start has gone far enough."""


def make(directory: str, config_path: str | None, seed: int) -> str:
    """Make the model in the new directory `directory`, for the task of a config (None: the quickstart's); what came of it.

    ConfigError where the directory is not empty or cannot be made, or the task cannot be built.
    """
    _check_directory(directory)
    with resources.as_file(resources.files("laminar_hpc.jobs") / "configs" / "quickstart.toml") as quickstart:
        config = load_config(config_path or str(quickstart))
    from laminar_hpc.tasks.build import build_task
    from laminar_hpc.trainer.tiny import make_tiny_model

    task = build_task(config)
    first = max(0, task.prompts - DEMONSTRATIONS)
    examples = [(task.text(Purpose.TRAIN, i), task.solution(Purpose.TRAIN, i)) for i in range(first, task.prompts)]
    held_out = [
        (task.text(Purpose.EVALUATION, i), task.solution(Purpose.EVALUATION, i))
        for i in range(min(HELD_OUT, task.held_out))
    ]
    part = f"{os.path.abspath(directory)}.{os.getpid()}.part"
    try:
        result = make_tiny_model(part, examples, held_out, seed)
        os.replace(part, directory)  # whole or not at all, also when it is interrupted
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be made: {error.strerror}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return (
        f"{directory}: {result.steps} steps of warm start; held-out prompts: {result.accuracy.greedy:.3f} answered "
        f"greedily, the right answer has probability {result.accuracy.sampled:.3f}"
    )


def _check_directory(directory: str) -> None:
    """Before torch is imported, which takes a while."""
    if os.path.isdir(directory) and os.listdir(directory):
        raise ConfigError(f"{directory}: must be a new or an empty directory")
