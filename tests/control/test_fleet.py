"""The fleet and its indexes."""

from __future__ import annotations

import pytest

from laminar_hpc.control.fleet import Fleet, Rollout
from laminar_hpc.errors import ProtocolError
from laminar_hpc.policy.roles import Role
from laminar_hpc.protocol.events import RelayReady, RolloutReady, TrainerReady


@pytest.fixture
def fleet() -> Fleet:
    one = Fleet(trainers=2, relays=1, rollouts=2)
    one.add_relay(RelayReady(3, 0, "x"))
    return one


def rollout(fleet: Fleet, rank: int, version: int | None = None, incarnation: int = 0) -> Rollout:
    one = fleet.add_rollout(RolloutReady(rank, incarnation, "x", 3, 4))
    if version is not None:
        fleet.start_loading(one, version)
        fleet.finish_loading(one, version)
    return one


def test_missing_ranks_are_counted_until_all_have_reported(fleet):
    assert [fleet.missing(role) for role in (Role.TRAINER, Role.RELAY, Role.ROLLOUT)] == [2, 0, 2]
    assert (fleet.all_trainers, fleet.all_relays, fleet.all_rollouts) == (False, True, False)
    fleet.add_trainer(TrainerReady(1, 0, 0))
    fleet.add_trainer(TrainerReady(2, 0, 1))
    rollout(fleet, 4)
    rollout(fleet, 5)
    assert (fleet.all_trainers, fleet.all_relays, fleet.all_rollouts) == (True, True, True)


def test_a_second_claim_to_a_place_is_refused(fleet):
    fleet.add_trainer(TrainerReady(1, 0, 0))
    with pytest.raises(ProtocolError, match="rank 2 reports as trainer 0 of 2: that one has reported already"):
        fleet.add_trainer(TrainerReady(2, 0, 0))
    with pytest.raises(ProtocolError, match="rank 2 reports as trainer 2 of 2: there is no such trainer"):
        fleet.add_trainer(TrainerReady(2, 0, 2))
    with pytest.raises(ProtocolError, match="rank 9 reports as a relay, but all 1 have reported"):
        fleet.add_relay(RelayReady(9, 0, "y"))


def test_newer_weights_are_those_of_the_rollouts_own_relay(fleet):
    one, two = rollout(fleet, 4), rollout(fleet, 5)
    assert fleet.newer_at_relay(one) is None
    fleet.relays[3].version = 2
    assert fleet.newer_at_relay(one) == 2
    fleet.start_loading(one, 2)
    fleet.finish_loading(one, 2)
    assert fleet.newer_at_relay(one) is None
    assert fleet.under_relay(3) == [one, two]


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
    assert fleet.under_relay(3) == [again]


def test_weights_are_never_loaded_under_trajectories(fleet):
    one = rollout(fleet, 4, 1)
    fleet.assign(one, 10)
    with pytest.raises(AssertionError, match="rollout 4 has 1 trajectories"):
        fleet.start_loading(one, 2)
