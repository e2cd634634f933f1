"""Trainer workers as their driver has them: started, asked, answered, and what they are asked to train on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from trainer_cases import ADVANTAGES, blocks_of, mini_batch

from laminar_hpc.config.schema import Config
from laminar_hpc.process.worker import Worker, start_forkserver
from laminar_hpc.protocol.peer import Resume, StartTrainer, TrainerUp, TrainOn
from laminar_hpc.protocol.wire import AnyRecord
from laminar_hpc.trainer.worker import main

DEADLINE_S = 120.0
IDS = list(range(100, 100 + len(ADVANTAGES)))
GROUPS = [1, 1, 1, 2, 2, 2, 2]
REWARDS = [1.0, 0.0, 0.25, 0.0, 0.5, 1.0, 0.0]


@contextlib.contextmanager
def workers(count: int, tmp_path: Path) -> Iterator[list[Worker]]:
    """Trainer workers that end with the test."""
    start_forkserver()
    started = [Worker(f"trainer-{place}", main, str(tmp_path / f"log-{place}")) for place in range(count)]
    try:
        yield started
    finally:
        for worker in started:
            worker.kill()


def answer(worker: Worker) -> AnyRecord:
    """The worker's next message, waited for within the deadline."""
    message = worker.channel.receive(DEADLINE_S)
    assert message is not None, f"{worker.name} says nothing"
    return message


def start(worker: Worker, config: Config, resume: Resume | None = None) -> TrainerUp:
    """Start the only trainer; one that resumes makes ready to save, too."""
    worker.send(StartTrainer(config.model_dump_json().encode(), 0, 1, resume, saves=resume is not None))
    up = answer(worker)
    assert isinstance(up, TrainerUp)
    return up


def train_on(own: list[int], step: int = 3) -> TrainOn:
    """The mini-batch, with the blocks of the sequences at these places."""
    blocks = [blocks_of(IDS[place], mini_batch()[place]) for place in own]
    return TrainOn(step, 0, 1, IDS, GROUPS, REWARDS, [IDS[place] for place in own], blocks)
