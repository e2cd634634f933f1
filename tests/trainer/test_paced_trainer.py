"""The paced trainer in a time of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import EngineError
from laminar_hpc.protocol.peer import Pace
from laminar_hpc.trainer.api import Sequence
from laminar_hpc.trainer.paced import PacedTrainer, TimedTrainer, sequences_of_lengths
from laminar_hpc.weights.digest import chunk_digest

COSTS = {"train_call_s": 5.0, "train_token_s": 0.01, "publish_s": 2.0, "image_bytes": 1001}


class VirtualTime:
    """A clock that goes on as far as somebody sleeps, and `late_s` further."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.now_s, self.late_s = 10.0, late_s

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now_s += seconds + self.late_s


def trainer(
    time: VirtualTime, place: int = 0, trainers: int = 1, control: dict[str, Any] | None = None, **paced: Any
) -> PacedTrainer:
    return PacedTrainer(paced_config(control, **paced), place, trainers, time.now, time.sleep)


def paced_config(control: dict[str, Any] | None = None, **paced: Any) -> Config:
    return Config.model_validate(
        {
            "run_dir": "unused",
            "task": {"name": "synthetic"},
            "rollout": {"engine": "paced"},
            "trainer": {"engine": "paced"},
            "control": control or {},
            "paced": {**COSTS, "time_scale": 0.1, **paced},
        }
    )


def sequence(tokens: int) -> Sequence:
    zeros = np.zeros(tokens, dtype=np.float32)
    return Sequence(np.zeros(tokens, dtype=np.int64), zeros, zeros.astype(np.bool_), 0.0)


def test_a_step_takes_the_time_of_its_tokens() -> None:
    time = VirtualTime()
    paced = trainer(time)
    metrics = paced.train([sequence(300), sequence(200)], version=3)
    assert time.now() == pytest.approx(10.0 + 0.1 * (5.0 + 5.0))
    assert metrics["skipped"] == 0.0
    scores = paced.score([sequence(100)])
    assert time.now() == pytest.approx(11.0 + 0.1 * (5.0 + 1.0) / 3)
    assert [score.shape for score in scores] == [(100,)]
    assert paced.train([]) == metrics


def test_what_was_done_for_a_step_is_part_of_its_time() -> None:
    time = VirtualTime()
    paced = trainer(time)
    time.now_s += 0.3
    paced.schedule.begin(10.0)
    paced.train(sequences_of_lengths([300, 200]))
    assert time.now() == pytest.approx(11.0)
    paced.train([sequence(500)])  # nothing was said to have begun earlier
    assert time.now() == pytest.approx(12.0)
    assert paced.schedule.take_pace().late_s == pytest.approx(0.0, abs=1e-9)


def test_scoring_before_a_step_comes_on_top_of_its_time() -> None:
    time = VirtualTime()
    paced = trainer(time)
    paced.score([sequence(100)])  # 6 s of a mini-batch, a third of them
    paced.schedule.begin(10.0)
    paced.train([sequence(100)])
    assert time.now() == pytest.approx(10.0 + 0.1 * (2.0 + 6.0))
    assert paced.schedule.take_pace() == Pace(pytest.approx(0.8), 0.0, 0.0)


def test_a_publication_takes_its_time_and_no_two_steps_have_the_same_bytes() -> None:
    time = VirtualTime()
    paced, seen = trainer(time), set()
    for _ in range(3):
        memory = np.zeros(1001, dtype=np.uint8)
        before_s = time.now()
        assert paced.write_weights(memory) is None
        assert time.now() - before_s == pytest.approx(0.2)
        seen.add(chunk_digest(memory))
        paced.train([sequence(1)])
    assert len(seen) == 3
    with pytest.raises(EngineError, match="1001 bytes, the memory for it 1000"):
        paced.write_weights(np.zeros(1000, dtype=np.uint8))


def test_where_all_gpus_turn_to_generating_and_back_each_publication_takes_that_too() -> None:
    time = VirtualTime()
    alone = trainer(time, switch_s=3.0)
    memory = np.zeros(1001, dtype=np.uint8)
    alone.write_weights(memory)
    assert time.now() == pytest.approx(10.0 + 0.1 * 2.0)  # it has GPUs of its own
    together = trainer(time, control={"mode": "sync", "colocated": True}, switch_s=3.0)
    together.write_weights(memory)
    assert time.now() == pytest.approx(10.2 + 0.1 * (2.0 + 3.0))


def test_several_trainers_publish_every_byte_once() -> None:
    trainers = [trainer(VirtualTime(), place, 3) for place in range(3)]
    assert {one.manifest.nbytes for one in trainers} == {1001}
    covered = np.zeros(1001, dtype=np.int64)
    for one in trainers:
        for tile in one.tiles:
            assert (tile.runs, tile.run_bytes) == (1, 1001)
            covered[tile.first : tile.first + tile.nbytes] += 1
    assert np.all(covered == 1)


def test_it_says_by_how_much_it_was_late() -> None:
    paced = trainer(VirtualTime(late_s=0.25))
    paced.write_weights(np.zeros(1001, dtype=np.uint8))
    assert paced.schedule.take_pace() == Pace()  # part of the start
    paced.train([sequence(500)])
    paced.write_weights(np.zeros(1001, dtype=np.uint8))
    pace = paced.schedule.take_pace()
    assert (pace.scheduled_s, pace.late_s, pace.worst_s) == pytest.approx((1.2, 0.5, 0.25))
    assert paced.schedule.take_pace().scheduled_s == 0.0


class SlowTrainer(PacedTrainer):
    """Stands for one that learns: each call takes half a second of this machine."""

    def __init__(self, time: VirtualTime, config: Config) -> None:
        super().__init__(config, 0, 1, time.now, lambda _seconds: None)
        self.time = time

    def train(self, sequences: list[Sequence], version: int | None = None) -> dict[str, float]:
        self.time.now_s += 0.5
        return super().train(sequences, version) | {"loss": 3.0}

    def score(self, sequences: list[Sequence], reference: bool = False) -> list[Any]:
        self.time.now_s += 0.5
        return super().score(sequences, reference)


def test_one_that_learns_takes_the_time_of_the_emulated_one_and_says_where_it_took_longer() -> None:
    time = VirtualTime()
    timed = TimedTrainer(SlowTrainer(time, paced_config()), paced_config(), time.now, time.sleep)
    memory = np.zeros(1001, dtype=np.uint8)
    timed.write_weights(memory)
    assert timed.schedule.take_pace() == Pace()
    begin_s = time.now()
    assert timed.train([sequence(500)])["loss"] == 3.0
    assert time.now() == pytest.approx(begin_s + 0.1 * 10.0)
    assert timed.schedule.take_pace() == Pace(pytest.approx(1.0), 0.0, 0.0)
    timed.score([sequence(100)])  # 0.2 s of the schedule
    assert time.now() == pytest.approx(begin_s + 1.5)
    assert timed.schedule.take_pace() == Pace(pytest.approx(0.2), pytest.approx(0.3), pytest.approx(0.3))
    assert timed.write_weights(memory) is None
    assert time.now() == pytest.approx(begin_s + 1.7)
    assert timed.schedule.take_pace() == Pace(pytest.approx(0.2), 0.0, 0.0)
    assert (timed.state().steps, timed.state_shapes) == (1, {"paced": (1,)})
