"""What people are told while a job starts."""

from __future__ import annotations

from laminar_hpc.protocol.events import RelayReady, RolloutReady, StopRequested, TrainerReady
from laminar_hpc.runtime.starting import MOST_LINES, Starting, counted


def test_each_rank_is_told_of_once() -> None:
    start = Starting(trainers=1, relays=1, rollouts=2)
    assert start.phrase() == "starting: 0 of 1 trainer, 0 of 1 relay, 0 of 2 rollouts ready"
    assert start.hear(TrainerReady(1, 0, 0)) == "trainer ready"
    assert start.hear(RolloutReady(4, 0, "x", 2, 8)) == "rollout 1 of 2 ready"
    assert start.phrase() == "starting: 0 of 1 relay, 1 of 2 rollouts ready"
    assert start.hear(RolloutReady(4, 1, "x", 2, 8)) is None
    assert start.hear(StopRequested("Ctrl-C")) is None
    assert start.hear(RelayReady(2, 0, "x")) == "relay ready"
    assert start.hear(RelayReady(9, 0, "x")) is None
    assert start.hear(RolloutReady(3, 0, "x", 2, 8)) == "rollout 2 of 2 ready"
    assert start.phrase() == "starting: weights of the first version"


def test_many_ranks_take_few_lines_and_the_last_one_is_told_of() -> None:
    start = Starting(trainers=1, relays=1, rollouts=1001)
    told = [start.hear(RolloutReady(3 + index, 0, "x", 2, 8)) for index in range(1001)]
    lines = [line for line in told if line]
    assert len(lines) <= MOST_LINES
    assert lines[0] == "rollout 126 of 1001 ready"
    assert lines[-1] == "rollout 1001 of 1001 ready"


def test_one_is_singular() -> None:
    assert [counted(count, "relay") for count in (0, 1, 2)] == ["0 relays", "1 relay", "2 relays"]
