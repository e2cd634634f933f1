"""The trainer's worker as the process that its driver starts: one trainer, and two that meet."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import msgspec  # noqa: E402
from plain_formulas import PlainSequence, plain_loss  # noqa: E402
from published import Published, assemble, image_of  # noqa: E402
from trainer_cases import blocks_of, config_for, mini_batch, reference_logprobs  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from worker_cases import DEADLINE_S, GROUPS, IDS, REWARDS, answer, start, train_on, workers  # noqa: E402

from laminar_hpc.config.schema import Config, Control  # noqa: E402
from laminar_hpc.process.channel import wait_any  # noqa: E402
from laminar_hpc.process.worker import Worker  # noqa: E402
from laminar_hpc.protocol.peer import (  # noqa: E402
    Heartbeat,
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
from laminar_hpc.trainer.batch import own_sequences  # noqa: E402
from laminar_hpc.trainer.torch_trainer import TorchTrainer  # noqa: E402

pytestmark = pytest.mark.engine


def half_of_a_step(minibatch: int) -> TrainOn:
    """One of the two mini-batches of step 3: the first group's sequences, or the second one's."""
    places = [place for place, group in enumerate(GROUPS) if group == 1 + minibatch]
    own = [IDS[place] for place in places]
    blocks = [blocks_of(IDS[place], mini_batch()[place]) for place in places]
    rewards = [REWARDS[place] for place in places]
    return TrainOn(3, minibatch, 2, own, [1 + minibatch] * len(own), rewards, own, blocks)


def expected_trainer(config: Config) -> tuple[TorchTrainer, dict[str, float]]:
    """A trainer in this process that has made the same step."""
    trainer = TorchTrainer(config, 0, 1)
    return trainer, trainer.train(train_sequences())


def train_sequences() -> list[Sequence]:
    """The mini-batch as the worker makes it of `train_on`."""
    advantages = group_advantages(GROUPS, REWARDS)
    return [
        Sequence(s.tokens, s.behaviour_logprobs, s.loss_mask, advantage)
        for s, advantage in zip(mini_batch(), advantages, strict=True)
    ]


class Memory:
    """Memory for two versions of a shard, lent to a worker, between bytes that are not the worker's."""

    def __init__(self, up: TrainerUp) -> None:
        self.tiles, self.nbytes = up.tiles, sum(tile.nbytes for tile in up.tiles)
        self.offsets = [4321, 8642 + self.nbytes]
        self.fd = os.memfd_create("shard")
        size = sum(self.offsets) + 2 * self.nbytes
        os.pwrite(self.fd, b"\xff" * size, 0)

    def write(self, worker: Worker, version: int, place: int = 0) -> tuple[Published, WeightsWritten]:
        """Have a version written to one of the two places; what the worker publishes then."""
        offset = self.offsets[place]
        before = os.pread(self.fd, offset, 0)
        after = os.pread(self.fd, sum(self.offsets), offset + self.nbytes)
        worker.send(WriteWeights(version, f"/proc/{os.getpid()}/fd/{self.fd}", offset))
        message = answer(worker)
        assert isinstance(message, WeightsWritten)
        assert message.version == version
        assert os.pread(self.fd, offset, 0) == before
        assert os.pread(self.fd, sum(self.offsets), offset + self.nbytes) == after
        data = os.pread(self.fd, self.nbytes, offset)
        return (self.tiles, np.frombuffer(data, dtype=np.uint8)), message

    def close(self) -> None:
        os.close(self.fd)


def test_one_trainer_trains_and_writes(model_path: str, tmp_path: Path) -> None:
    config = config_for(model_path)
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
        with contextlib.closing(Memory(up)) as memory:
            for version, place in ((8, 0), (9, 1), (10, 0)):
                published, written = memory.write(worker, version, place)
                assert np.array_equal(assemble(up.manifest.nbytes, [published]), image_of(expected))
                assert written.seconds > 0
                expected.train(train_sequences())
                worker.send(train_on(list(range(7))))
                assert isinstance(answer(worker), TrainedOn)
        worker.stop(timeout_s=20.0)
        assert not worker.alive


def test_a_step_is_scored_before_its_first_update(model_path: str, tmp_path: Path) -> None:
    # by hand: transformers in float64, torch's AdamW, and the formulas written out token by token
    keys = {"correction": "decoupled", "kl_coefficient": 0.5, "learning_rate": 1e-2}
    config = config_for(model_path, **keys)
    halves = [own_sequences(half_of_a_step(minibatch)) for minibatch in range(2)]
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64).eval()
    at_start = [[one.detach().tolist() for one in reference_logprobs(model, half)] for half in halves]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    expected = []
    for half, scores in zip(halves, at_start, strict=True):
        now = reference_logprobs(model, half)
        plain = [
            PlainSequence(list(one), s.behaviour_logprobs[s.loss_mask].tolist(), score, s.advantage, score)
            for one, s, score in zip(now, half, scores, strict=True)
        ]
        loss = plain_loss(plain, config.trainer)
        expected.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    late = [msgspec.structs.replace(s, proximal=one.tolist()) for s, one in zip(plain, now, strict=True)]
    assert abs(float(plain_loss(late, config.trainer).detach()) - expected[1]) > 0.02  # the order shows

    with workers(1, tmp_path) as (worker,):
        start(worker, config)
        for minibatch in range(2):
            worker.send(half_of_a_step(minibatch))
        for minibatch in range(2):
            trained = answer(worker)
            assert isinstance(trained, TrainedOn)
            assert (trained.step, trained.minibatch) == (3, minibatch)
            assert trained.tokens == sum(len(sequence.tokens) for sequence in halves[minibatch])
            assert trained.metrics["loss"] == pytest.approx(expected[minibatch], abs=1e-3)
            moved = [score for scores in at_start[minibatch] for score in scores]
            recorded = np.concatenate([s.behaviour_logprobs[s.loss_mask] for s in halves[minibatch]])
            assert trained.metrics["importance_mean"] == pytest.approx(np.exp(moved - recorded).mean(), abs=1e-4)
            assert (trained.metrics["kl_reference"] > 1e-3) is (minibatch == 1)


def test_mini_batches_of_a_step_that_needs_no_scores_are_trained_as_they_come(model_path: str, tmp_path: Path) -> None:
    with workers(1, tmp_path) as (worker,):
        start(worker, config_for(model_path))
        for minibatch in range(2):
            worker.send(half_of_a_step(minibatch))
            trained = answer(worker)
            assert isinstance(trained, TrainedOn)
            assert trained.minibatch == minibatch
            assert "importance_mean" not in trained.metrics


def test_a_mini_batch_that_does_not_come_is_named(model_path: str, tmp_path: Path) -> None:
    config = config_for(model_path, correction="icepop")
    config = config.model_copy(update={"job": config.job.model_copy(update={"stall_timeout_s": 0.5})})
    with workers(1, tmp_path) as (worker,):
        start(worker, config)
        worker.send(half_of_a_step(0))
        said = answer(worker)
        assert isinstance(said, WorkerError)
        assert "mini-batch 1 of step 3 has not come within job.stall_timeout_s = 0.5 s" in said.text


def test_nothing_comes_between_the_mini_batches_of_a_step_that_is_scored(model_path: str, tmp_path: Path) -> None:
    with workers(1, tmp_path) as (worker,):
        start(worker, config_for(model_path, correction="icepop"))
        worker.send(half_of_a_step(0))
        worker.send(WriteWeights(1, "/nowhere", 0))
        said = answer(worker)
        assert isinstance(said, WorkerError)
        assert "expected mini-batch 1 of step 3, got WriteWeights" in said.text


def test_mismatch_is_measured_under_the_version_of_the_weights(model_path: str, tmp_path: Path) -> None:
    whole = train_on(list(range(7)))  # its blocks say version 1
    with workers(1, tmp_path) as (worker,):
        start(worker, config_for(model_path))
        found = []
        for version in (0, 1, None):
            worker.send(msgspec.structs.replace(whole, version=version))
            trained = answer(worker)
            assert isinstance(trained, TrainedOn)
            found.append(trained.metrics.get("mismatch_tokens"))
    assert found == [None, sum(int(s.loss_mask.sum()) for s in mini_batch()), None]


def test_two_trainers_meet_and_stay_equal(model_path: str, tmp_path: Path) -> None:
    config = config_for(model_path, trainers=2)
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
        memories = [Memory(up) for up in ups]
        published = [memory.write(worker, 9)[0] for memory, worker in zip(memories, both, strict=True)]
        for memory in memories:
            memory.close()
        found = assemble(manifest.nbytes, published).view("<f4")
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


def without_a_gradient(minibatch: int) -> TrainOn:
    """`half_of_a_step`, with log-probabilities that are no numbers."""
    message = half_of_a_step(minibatch)
    blocks = [
        [
            msgspec.structs.replace(
                block, logprobs=np.full(block.count, np.nan, "<f4").tobytes() if block.logprobs else b""
            )
            for block in one
        ]
        for one in message.blocks
    ]
    return msgspec.structs.replace(message, blocks=blocks)


def test_steps_that_train_nothing_end_the_job(model_path: str, tmp_path: Path) -> None:
    config = config_for(model_path).model_copy(update={"control": Control(steps=2)})
    with workers(1, tmp_path) as (worker,):
        start(worker, config)
        for minibatch in (0, 1, 0, 1):
            worker.send(without_a_gradient(minibatch))
            trained = answer(worker)
            assert isinstance(trained, TrainedOn)
            assert trained.metrics["skipped"] == 1.0
        end = answer(worker)
        assert isinstance(end, WorkerError)
        assert "nothing was trained in 2 steps up to step 3: no gradient was finite" in end.text
