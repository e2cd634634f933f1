"""Emulated batching, by hand: a step of n trajectories takes n seconds here, and a prefilled token a tenth of one."""

from __future__ import annotations

import math
import random

import pytest

from laminar_hpc.policy.batching import Batch
from laminar_hpc.policy.costs import Costs, Points

COSTS = Costs(
    decode=Points((1.0, 2.0), (1.0, 2.0)),
    step_overhead_s=0.0,
    prefill_call_s=0.5,
    prefill_token_s=0.1,
    kv_cache_tokens=0,
    train_call_s=0.0,
    train_token_s=0.0,
    publish_s=0.0,
    load_s=0.0,
)


def ends(batch: Batch, until_s: float) -> dict[int, float]:
    """When each of those that have ended by `until_s` has."""
    return {one.trajectory: pytest.approx(one.ended_s) for one in batch.advance(until_s)}


def test_two_of_known_length_end_when_they_must() -> None:
    batch = Batch(COSTS, 1000, 8)
    batch.add(1, 10, 2, 100.0)
    batch.add(2, 20, 5, 100.0)
    # step 1: prefill 0.5 + 30 * 0.1 and a step of two, 5.5 s; step 2: 2 s, trajectory 1 ends; three steps of one, 1 s each
    assert ends(batch, 105.4) == {}
    assert (batch.left_tokens(1), batch.left_tokens(2), batch.used_tokens) == (2, 5, 30)
    assert ends(batch, 106.0) == {}
    assert (batch.left_tokens(1), batch.left_tokens(2), batch.used_tokens) == (1, 4, 32)
    assert batch.due_s == pytest.approx(107.5)
    assert ends(batch, 200.0) == {1: 107.5, 2: 110.5}
    assert batch.due_s == math.inf
    assert batch.used_tokens == 0


def test_one_that_comes_in_the_middle_of_a_step_is_in_the_next_one() -> None:
    batch = Batch(COSTS, 1000, 8)
    batch.add(1, 10, 4, 0.0)
    assert ends(batch, 3.0) == {}  # step 1 until 2.5, step 2 until 3.5
    batch.add(2, 5, 1, 3.0)
    assert batch.due_s == pytest.approx(3.5)
    # step 3: prefill 0.5 + 0.5 and a step of two: until 6.5; step 4 of one
    assert ends(batch, 100.0) == {2: 6.5, 1: 7.5}


def test_an_idle_engine_begins_when_somebody_comes() -> None:
    batch = Batch(COSTS, 1000, 8)
    assert batch.advance(50.0) == []
    batch.add(1, 10, 1, 50.0)
    assert ends(batch, 60.0) == {1: 52.5}
    batch.add(2, 10, 1, 60.0)
    assert ends(batch, 70.0) == {2: 62.5}


def test_those_without_a_slot_wait_in_order() -> None:
    batch = Batch(COSTS, 1000, 1)
    for trajectory in (1, 2, 3):
        batch.add(trajectory, 5, 1, 0.0)
    assert ends(batch, 0.0) == {}
    assert (batch.running, batch.waiting) == (1, 2)
    assert ends(batch, 100.0) == {1: 2.0, 2: 4.0, 3: 6.0}  # prefill 1.0 and a step of 1.0 each


def test_the_newest_is_preempted_waits_first_and_is_prefilled_again() -> None:
    batch = Batch(COSTS, 30, 8)
    batch.add(1, 8, 9, 0.0)
    batch.add(2, 8, 2, 0.0)
    batch.add(3, 8, 9, 0.0)
    batch.add(4, 3, 1, 0.0)
    # All but 4 are admitted (24 tokens and 3 to come; 4 would make 27 and 4): prefill 2.9 and a step of three.
    assert ends(batch, 5.9) == {}
    assert (batch.running, batch.waiting, batch.used_tokens) == (3, 1, 27)
    # Step 2 takes 3 s and fills the cache: 30; 2 ends.
    assert ends(batch, 8.9) == {2: 8.9}
    # 20 are left; 4 comes in: 23 and 3 to come. Prefill 0.8, step 3 s: until 12.7; 4 ends.
    assert ends(batch, 12.7) == {4: 12.7}
    assert (batch.running, batch.used_tokens, batch.preemptions) == (2, 22, 0)
    # Four steps of two, 2 s each, fill it: 30. Then 3, the newest, loses its place with 8 + 7 tokens.
    assert ends(batch, 20.7) == {}
    assert (batch.running, batch.waiting, batch.preemptions) == (1, 1, 1)
    assert (batch.left_tokens(1), batch.left_tokens(3)) == (2, 2)
    batch.add(5, 2, 1, 20.7)  # behind 3, though there is room for it
    # 1 ends after two steps of one; then 3 and 5 come in: prefill 0.5 + 1.5 + 0.2, a step of two; 5 ends; a step of one.
    assert ends(batch, 100.0) == {1: 22.7, 5: 26.9, 3: 27.9}
    assert batch.prefilled_tokens == 24 + 3 + 15 + 2


def test_who_goes_makes_room_and_costs_nothing_any_more() -> None:
    batch = Batch(COSTS, 30, 8)
    batch.add(1, 20, 5, 0.0)
    batch.add(2, 20, 5, 0.0)
    assert ends(batch, 0.0) == {}
    assert (batch.running, batch.waiting) == (1, 1)
    batch.remove(1)
    batch.remove(99)
    assert (batch.running, batch.waiting, batch.used_tokens) == (0, 1, 0)
    # The step under way ends at 0.5 + 2.0 + 1.0; then 2: prefill 2.5, five steps of one.
    assert ends(batch, 100.0) == {2: 3.5 + 2.5 + 5.0}
    batch.add(3, 20, 5, 100.0)
    batch.advance(101.0)
    batch.remove(3)
    assert batch.due_s == math.inf
    assert batch.advance(200.0) == []


def test_it_does_not_matter_how_often_somebody_looks() -> None:
    def lives(looks: list[float]) -> list[tuple[int, float]]:
        source = random.Random(4)
        batch = Batch(COSTS, 300, 6)
        for trajectory in range(40):
            batch.add(trajectory, source.randint(1, 60), source.randint(1, 90), 0.0)
        found = []
        for look in looks:
            found += [(one.trajectory, one.ended_s) for one in batch.advance(look)]
        assert batch.preemptions > 5
        return found

    often, once = lives([0.7 * n for n in range(6000)]), lives([4200.0])
    assert len(once) == 40
    assert [trajectory for trajectory, _ in often] == [trajectory for trajectory, _ in once]
    assert [ended for _, ended in often] == pytest.approx([ended for _, ended in once])


def test_the_cache_is_never_overfull_and_every_token_is_made_once() -> None:
    source = random.Random(9)
    batch, now, left, made = Batch(COSTS, 200, 5), 0.0, {}, 0
    for trajectory in range(300):
        now += source.random() * 40
        for one in batch.advance(now):
            del left[one.trajectory]
        if left and source.random() < 0.2:
            gone = source.choice(list(left))
            batch.remove(gone)
            del left[gone]
        left[trajectory] = source.randint(1, 90)
        batch.add(trajectory, source.randint(1, 100), left[trajectory], now)
        assert 0 <= batch.used_tokens <= 200
        assert batch.running + batch.waiting == len(left)
        assert all(1 <= batch.left_tokens(one) <= left[one] for one in left)
        made += 1
    while batch.running or batch.waiting:
        now = batch.due_s
        for one in batch.advance(now):
            del left[one.trajectory]
        assert batch.used_tokens <= 200
    assert left == {}
    assert made == 300
