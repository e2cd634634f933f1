"""`laminar model tiny`: a small model that begins to answer a task, from the task's own prompts and answers."""

from __future__ import annotations

from importlib import resources

from laminar_hpc.config.load import load_config
from laminar_hpc.launch.new_directory import check_new, new_directory
from laminar_hpc.protocol.trajectory import Purpose

DEMONSTRATIONS = 6000
"""Prompts with answers that the warm start may draw from; the last ones of the task, which a short run never reaches."""

HELD_OUT = 200
"""Held-out prompts that tell when the warm start has gone far enough."""


def make(directory: str, config_path: str | None, seed: int) -> str:
    """Make the model in the new directory `directory`, for the task of a config (None: the quickstart's); what came of it.

    ConfigError where the directory is not empty or cannot be made, or the task cannot be built.
    """
    check_new(directory)
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
    with new_directory(directory) as part:
        result = make_tiny_model(part, examples, held_out, seed)
    return (
        f"{directory}: {result.steps} steps of warm start; held-out prompts: {result.accuracy.greedy:.3f} answered "
        f"greedily, the right answer has probability {result.accuracy.sampled:.3f}"
    )
