"""Prints the tokens of all prompts of a config as its task worker gives them: print_prompts.py CONFIG.json LOG."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from laminar_hpc.config.schema import Config
from laminar_hpc.process.channel import wait_any
from laminar_hpc.process.worker import start_forkserver
from laminar_hpc.protocol.trajectory import Purpose
from laminar_hpc.tasks.grader import Grader


def main(config_path: str, log_path: str) -> None:
    """Start a grader, ask for every prompt, print the answers in order."""
    config = Config.model_validate_json(Path(config_path).read_text())
    start_forkserver()
    grader = Grader(config, log_path)
    grader.start(time.monotonic())
    counts = ((Purpose.TRAIN, config.task.prompts), (Purpose.EVALUATION, config.evaluation.prompts))
    asked = [(purpose, index) for purpose, count in counts for index in range(count)]
    for trajectory, (purpose, index) in enumerate(asked):
        grader.encode(trajectory, purpose, index)
    tokens: list[str] = []
    while len(tokens) < len(asked):
        tokens += [outcome.tokens.hex() for outcome in grader.poll(time.monotonic()) if outcome.tokens is not None]
        wait_any(grader.channels(), 0.1)
    grader.stop()
    print(json.dumps(tokens))


if __name__ == "__main__":
    main(*sys.argv[1:])
