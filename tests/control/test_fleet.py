"""The fleet and its indexes."""

from __future__ import annotations

import pytest

from laminar_hpc.control.fleet import Fleet, Rollout
from laminar_hpc.control.readers import Readers
from laminar_hpc.control.relays import Relays
from laminar_hpc.errors import ProtocolError
from laminar_hpc.policy.roles import Role
from laminar_hpc.protocol.events import RankLost, RelayReady, RolloutReady, TrainerReady


@pytest.fixture
def relays() -> Relays:
    one = Relays(expected=2)
    one.report(RelayReady(3, 0, "x"))
    one.report(RelayReady(9, 0, "y"))
    return one


@pytest.fixture
def readers(relays: Relays) -> Readers:
    return Readers(relays)


@pytest.fixture
def fleet(readers: Readers) -> Fleet:
    return Fleet(2, 2, readers)


def rollout(fleet: Fleet, rank: int, version: int | None = None, incarnation: int = 0) -> Rollout:
    one = fleet.add_rollout(RolloutReady(rank, incarnation, "x", 3, 4))
    if version is not None:
        fleet.start_loading(one, version)
        fleet.finish_loading(one, version)
    return one


def test_missing_ranks_are_counted_until_all_have_reported(fleet):
    assert [fleet.missing(role) for role in (Role.TRAINER, Role.ROLLOUT)] == [2, 2]
    assert (fleet.all_trainers, fleet.all_rollouts) == (False, False)
    fleet.add_trainer(TrainerReady(1, 0, 0))
    fleet.add_trainer(TrainerReady(2, 0, 1))
    rollout(fleet, 4)
    rollout(fleet, 5)
    assert [fleet.missing(role) for role in (Role.TRAINER, Role.ROLLOUT)] == [0, 0]
    assert (fleet.all_trainers, fleet.all_rollouts) == (True, True)


def test_a_second_claim_to_a_place_is_refused(fleet):
    fleet.add_trainer(TrainerReady(1, 0, 0))
    with pytest.raises(ProtocolError, match="rank 2 reports as trainer 0 of 2: that one has reported already"):
        fleet.add_trainer(TrainerReady(2, 0, 0))
    with pytest.raises(ProtocolError, match="rank 2 reports as trainer 2 of 2: there is no such trainer"):
        fleet.add_trainer(TrainerReady(2, 0, 2))


def test_newer_weights_are_those_of_the_relay_that_the_rollout_reads_from(fleet, relays, readers):
    one, two = rollout(fleet, 4), rollout(fleet, 5)
    for rank in (4, 5):
        assert readers.report(RolloutReady(rank, 0, "x", 3, 4)) == []
    assert fleet.newer_at_relay(one) is None
    relays[3].version = 2
    assert fleet.newer_at_relay(one) == 2
    fleet.start_loading(one, 2)
    fleet.finish_loading(one, 2)
    assert fleet.newer_at_relay(one) is None
    assert fleet.under_relay(3) == [one, two]
    relays[9].version = 5
    lost, _ = relays.lose(RankLost(3, 0, "killed"))
    assert fleet.newer_at_relay(two) is None
    readers.relay_lost(lost)
    assert (fleet.newer_at_relay(one), fleet.newer_at_relay(two)) == (5, 5)
    assert (fleet.under_relay(3), fleet.under_relay(9)) == ([], [one, two])


def test_a_void_pull_is_sent_again_and_any_answer_to_the_last_one_ends_it(fleet):
    one = rollout(fleet, 4, 1)
    fleet.start_loading(one, 3)
    fleet.void_pull(one)
    assert fleet.accepts(one, 3)
    fleet.start_loading(one, 5)
    assert not fleet.accepts(one, 2)
    assert fleet.accepts(one, 4)
    assert not fleet.finish_loading(one, 4)  # the answer to the void one; that to the second is still to come
    assert (one.version, one.loading, fleet.idle, fleet.holders(4)) == (4, 5, {}, [])
    fleet.void_pull(one)
    assert fleet.accepts(one, 3)
    fleet.start_loading(one, 6)
    assert fleet.finish_loading(one, 7)
    assert (one.version, one.loading, one.voided, list(fleet.idle), fleet.holders(7)) == (7, None, None, [4], [one])


def test_the_answer_to_a_void_pull_counts_while_there_is_no_other_one(fleet):
    one = rollout(fleet, 4)
    fleet.start_loading(one, 3)
    fleet.void_pull(one)
    assert fleet.finish_loading(one, 3)
    assert (one.version, one.loading, one.pull_due) == (3, None, False)


def test_holders_and_together_follow_loading_and_loss(fleet):
    one, two = rollout(fleet, 4, 1), rollout(fleet, 5, 1)
    assert fleet.holders(1) == [one, two]
    assert fleet.together(1)
    fleet.start_loading(two, 2)
    assert fleet.holders(1) == [one]
    assert not fleet.together(1)
    fleet.lose(one)
    assert fleet.holders(1) == []
    assert not fleet.together(2)
    fleet.finish_loading(two, 2)
    assert fleet.together(2)
    fleet.lose(two)
    assert not fleet.together(2)


def test_idle_and_busy_follow_assignments(fleet):
    one = rollout(fleet, 4, 1)
    assert list(fleet.idle) == [4]
    fleet.assign(one, 10)
    fleet.assign(one, 11)
    assert (list(fleet.idle), fleet.busy_rollouts, one.free) == ([], 1, 2)
    fleet.release(one, 10)
    assert (list(fleet.idle), fleet.busy_rollouts) == ([], 1)
    fleet.release(one, 11)
    assert (list(fleet.idle), fleet.busy_rollouts, one.free) == ([4], 0, 4)


def test_a_lost_rollout_gives_its_trajectories_back_and_returns_empty(fleet):
    one = rollout(fleet, 4, 1)
    fleet.assign(one, 10)
    fleet.assign(one, 12)
    assert fleet.lose(one) == [10, 12]
    assert (fleet.alive_rollouts, fleet.busy_rollouts, fleet.idle) == (0, 0, {})
    again = rollout(fleet, 4, incarnation=1)
    assert fleet.rollouts[4] is fleet.members[4] is again
    assert (again.version, again.trajectories, fleet.alive_rollouts) == (None, {}, 1)


def test_weights_are_never_loaded_under_trajectories(fleet):
    one = rollout(fleet, 4, 1)
    fleet.assign(one, 10)
    with pytest.raises(AssertionError, match="rollout 4 has 1 trajectories"):
        fleet.start_loading(one, 2)
