"""Balancing tokens over replicas, and which replica a trainer belongs to."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_hpc.policy.balance import balance, replica_of


def loads(tokens: list[int], chosen: list[int], trainers: int) -> list[int]:
    sums = [0] * trainers
    for length, trainer in zip(tokens, chosen, strict=True):
        sums[trainer] += length
    return sums


def test_longest_first_onto_the_least_loaded():
    # 7 -> 0 (7, 0), 6 -> 1 (7, 6), 4 -> 1 (7, 10), 3 -> 0 (10, 10), 2 -> 0 (12, 10), 1 -> 1 (12, 11)
    assert balance([3, 7, 4, 1, 6, 2], 2) == [0, 0, 1, 1, 1, 0]


def test_equal_lengths_go_round_in_order():
    assert balance([5, 5, 5, 5, 5], 3) == [0, 1, 2, 0, 1]


def test_replicas_of_trainers_in_megatrons_order():
    # tensor 2, replicas 3, pipeline 2: the tensor place runs fastest, then the replica, then the stage
    assert [replica_of(trainer, 2, 3) for trainer in range(12)] == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2]
    assert [replica_of(trainer, 1, 4) for trainer in range(4)] == [0, 1, 2, 3]
    assert [replica_of(trainer, 4, 1) for trainer in range(8)] == [0] * 8  # one replica of two stages


def test_more_trainers_than_trajectories_leave_some_without():
    assert balance([2, 9], 4) == [1, 0]
    assert balance([], 3) == []


@settings(deadline=None)
@given(tokens=st.lists(st.integers(1, 50), min_size=1, max_size=7), trainers=st.integers(1, 3))
def test_graham_s_bound_against_all_assignments(tokens, trainers):
    assignments = product(range(trainers), repeat=len(tokens))
    best = min(max(loads(tokens, list(one), trainers)) for one in assignments)
    longest = max(loads(tokens, balance(tokens, trainers), trainers))
    assert 3 * trainers * longest <= (4 * trainers - 1) * best
