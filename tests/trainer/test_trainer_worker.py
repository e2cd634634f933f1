"""The trainer's worker as the process that its driver starts: one trainer, and two that meet."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from trainer_cases import ADVANTAGES, blocks_of, config_for, mini_batch  # noqa: E402

from laminar_hpc.config.schema import Config  # noqa: E402
from laminar_hpc.process.channel import wait_any  # noqa: E402
from laminar_hpc.process.worker import Worker, start_forkserver  # noqa: E402
from laminar_hpc.protocol.peer import (  # noqa: E402
    Heartbeat,
    Manifest,
    Rendezvous,
    StartTrainer,
    TrainedOn,
    TrainerUp,
    TrainOn,
    WeightsWritten,
    WorkerError,
    WriteWeights,
)
from laminar_hpc.protocol.wire import AnyRecord  # noqa: E402
from laminar_hpc.trainer.advantages import group_advantages  # noqa: E402
from laminar_hpc.trainer.api import Sequence  # noqa: E402
from laminar_hpc.trainer.torch_trainer import TorchTrainer  # noqa: E402
from laminar_hpc.trainer.worker import main  # noqa: E402
from laminar_hpc.weights.digest import range_digests  # noqa: E402

pytestmark = pytest.mark.engine

DEADLINE_S = 120.0
CHUNK_BYTES = 5000
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


def train_on(own: list[int]) -> TrainOn:
    """The mini-batch, with the blocks of the sequences at these places."""
    blocks = [blocks_of(IDS[place], mini_batch()[place]) for place in own]
    return TrainOn(3, 0, 1, IDS, GROUPS, REWARDS, [IDS[place] for place in own], blocks)


def expected_trainer(config: Config) -> tuple[TorchTrainer, dict[str, float]]:
    """A trainer in this process that has made the same step."""
    trainer = TorchTrainer(config, 0, 1)
    advantages = group_advantages(GROUPS, REWARDS)
    sequences = [
        Sequence(s.tokens, s.behaviour_logprobs, s.loss_mask, advantage)
        for s, advantage in zip(mini_batch(), advantages, strict=True)
    ]
    return trainer, trainer.train(sequences)


def write(worker: Worker, manifest: Manifest, first: int, chunks: int) -> tuple[bytes, WeightsWritten]:
    """Have a share written into a memfd behind 100 bytes of something else."""
    low, high = manifest.chunk_range(first)[0], manifest.chunk_range(first + chunks - 1)[1]
    fd = os.memfd_create("image")
    try:
        os.ftruncate(fd, 5000 + high - low)
        os.pwrite(fd, b"\xff" * (5000 + high - low), 0)
        worker.send(WriteWeights(9, f"/proc/{os.getpid()}/fd/{fd}", 4321, first, chunks))
        message = answer(worker)
        assert isinstance(message, WeightsWritten)
        data = os.pread(fd, 5000 + high - low, 0)
    finally:
        os.close(fd)
    assert data[:4321] == b"\xff" * 4321  # nothing before
    assert data[4321 + high - low :] == b"\xff" * (5000 - 4321)  # and nothing after the share is touched
    return data[4321 : 4321 + high - low], message


def image_of(trainer: TorchTrainer) -> np.ndarray:
    """All of a trainer's image."""
    image = np.zeros(trainer.manifest.nbytes, dtype=np.uint8)
    trainer.write_weights(0, trainer.manifest.chunks, image)
    return image


def test_one_trainer_trains_and_writes(model_path: str, tmp_path: Path) -> None:
    config = config_for(model_path, chunk_bytes=CHUNK_BYTES)
    with workers(1, tmp_path) as (worker,):
        worker.send(StartTrainer(config.model_dump_json().encode(), 0, 1))
        up = answer(worker)
        assert isinstance(up, TrainerUp)
        assert up.seconds > 0
        worker.send(train_on(list(range(7))))
        trained = answer(worker)
        assert isinstance(trained, TrainedOn)
        expected, metrics = expected_trainer(config)
        assert up.manifest == expected.manifest
        assert (trained.step, trained.minibatch) == (3, 0)
        assert trained.tokens == sum(len(sequence.tokens) for sequence in mini_batch())
        assert trained.metrics == pytest.approx(metrics, rel=1e-6)
        first, chunks = 2, up.manifest.chunks - 3
        data, written = write(worker, up.manifest, first, chunks)
        low, high = up.manifest.chunk_range(first)[0], up.manifest.chunk_range(first + chunks - 1)[1]
        assert data == image_of(expected)[low:high].tobytes()
        assert written.version == 9
        assert written.digests == range_digests(up.manifest, first, chunks, np.frombuffer(data, dtype=np.uint8))
        worker.stop(timeout_s=20.0)
        assert not worker.alive


def test_two_trainers_meet_and_stay_equal(model_path: str, tmp_path: Path) -> None:
    config = config_for(model_path, chunk_bytes=CHUNK_BYTES, trainers=2)
    with workers(2, tmp_path) as both:
        for place, worker in enumerate(both):
            worker.send(StartTrainer(config.model_dump_json().encode(), place, 2))
        meeting = answer(both[0])
        assert isinstance(meeting, Rendezvous)
        both[1].send(meeting)
        ups = [answer(worker) for worker in both]
        assert isinstance(ups[0], TrainerUp)
        assert isinstance(ups[1], TrainerUp)
        manifest = ups[0].manifest
        assert ups[1].manifest == manifest
        for worker, own in zip(both, ([0, 3, 5], [1, 2, 4, 6]), strict=True):
            worker.send(train_on(own))
        trained = [answer(worker) for worker in both]
        assert isinstance(trained[0], TrainedOn)
        assert isinstance(trained[1], TrainedOn)
        expected, metrics = expected_trainer(config)
        assert trained[0].metrics == trained[1].metrics
        assert trained[0].metrics == pytest.approx(metrics, rel=1e-5, abs=1e-7)
        assert trained[0].tokens + trained[1].tokens == sum(len(sequence.tokens) for sequence in mini_batch())
        images = [write(worker, manifest, 0, manifest.chunks)[0] for worker in both]
        assert images[0] == images[1]
        found = np.frombuffer(images[0], dtype="<f4")
        np.testing.assert_allclose(found, image_of(expected).view("<f4"), atol=2e-3)  # twice the learning rate


def test_a_trainer_waits_for_the_others_as_long_as_the_job_may_stand_still(model_path: str, tmp_path: Path) -> None:
    config = config_for(model_path, trainers=2)
    job = config.job.model_copy(update={"start_timeout_s": 2 * DEADLINE_S, "stall_timeout_s": 5.0})
    config = config.model_copy(update={"job": job})
    with workers(2, tmp_path) as both:
        for place, worker in enumerate(both):
            worker.send(StartTrainer(config.model_dump_json().encode(), place, 2))
        both[1].send(answer(both[0]))
        assert all(isinstance(answer(worker), TrainerUp) for worker in both)
        both[0].send(train_on([0, 3, 5]))
        said = answer(both[0])  # the other one is never told to train
        assert isinstance(said, WorkerError)


def test_a_trainer_that_does_not_come_is_named(model_path: str, tmp_path: Path) -> None:
    config = config_for(model_path, trainers=2)
    config = config.model_copy(update={"job": config.job.model_copy(update={"start_timeout_s": 0.5})})
    with workers(1, tmp_path) as (worker,):
        worker.send(StartTrainer(config.model_dump_json().encode(), 0, 2))
        assert isinstance(answer(worker), Rendezvous)
        said = answer(worker)
        assert isinstance(said, WorkerError)
        assert "trainer worker 0: trainer 1 has not come to the meeting within job.start_timeout_s = 0.5 s" in said.text


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Heartbeat(1, "", 0.0), "ProtocolError: trainer worker: expected StartTrainer, got Heartbeat"),
        (None, "ConfigError: model.path: /nowhere is not a directory"),
    ],
)
def test_what_cannot_start_says_why(tmp_path: Path, message: AnyRecord | None, text: str) -> None:
    config = config_for("/nowhere")
    with workers(1, tmp_path) as (worker,):
        worker.send(message or StartTrainer(config.model_dump_json().encode(), 0, 1))
        said = answer(worker)
        assert isinstance(said, WorkerError)
        assert said.text == text


def test_broken_blocks_end_the_worker_with_the_trajectory(model_path: str, tmp_path: Path) -> None:
    with workers(1, tmp_path) as (worker,):
        worker.send(StartTrainer(config_for(model_path).model_dump_json().encode(), 0, 1))
        assert isinstance(answer(worker), TrainerUp)
        whole = train_on([2])
        worker.send(TrainOn(3, 0, 1, IDS, GROUPS, REWARDS, whole.own, [whole.blocks[0][1:]]))
        said = answer(worker)
        assert isinstance(said, WorkerError)
        assert "trajectory 102" in said.text
        begun_s = time.monotonic()
        while worker.alive and time.monotonic() - begun_s < DEADLINE_S:
            wait_any([worker.channel], 0.1)
        assert not worker.alive
