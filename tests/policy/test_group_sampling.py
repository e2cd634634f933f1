"""Samplers and evictions."""

from __future__ import annotations

import math

import pytest

from laminar_hpc.errors import ConfigError
from laminar_hpc.policy.sampling import Candidate, Evicted, make_eviction, make_sampler

NEWEST = 6

CANDIDATES = [Candidate(9, 5, 1.0), Candidate(4, 2, 2.0), Candidate(7, 3, 3.0), Candidate(1, 5, 4.0)]


def test_fifo_takes_what_finished_first():
    assert make_sampler("fifo").choose(CANDIDATES, 3, NEWEST) == [9, 4, 7]


def test_freshest_takes_the_newest_weights_and_of_equals_what_finished_first():
    assert make_sampler("freshest").choose(CANDIDATES, 3, NEWEST) == [9, 1, 7]


def test_weighted_is_a_sample_without_replacement_that_a_seed_names():
    sampler = make_sampler("weighted", 1.0, seed=3)
    chosen = sampler.choose(CANDIDATES, 3, NEWEST)
    assert len(set(chosen)) == 3
    assert sampler.choose(list(reversed(CANDIDATES)), 3, NEWEST) == chosen
    assert sorted(sampler.choose(CANDIDATES, 4, NEWEST)) == [1, 4, 7, 9]
    assert sampler.choose(CANDIDATES, 0, NEWEST) == []


@pytest.mark.parametrize(("half_life", "expected"), [(1.0, 1 / 5), (2.0, 1 / 3), (1e6, 1 / 2)])
def test_weighted_takes_stale_groups_as_much_less_often_as_the_half_life_says(half_life, expected):
    """Two groups, of which one is two versions older: it is drawn first with w / (1 + w), where w = 2 ** (-2 / half_life)."""
    draws = 20_000
    pair = [Candidate(0, 4, 1.0), Candidate(1, 2, 2.0)]
    firsts = sum(make_sampler("weighted", half_life, seed).choose(pair, 1, 4) == [1] for seed in range(draws))
    assert firsts / draws == pytest.approx(
        expected, abs=4 * math.sqrt(0.25 / draws)
    )  # four standard deviations at most


def test_a_weight_that_is_nearly_nothing_is_none_the_less_one():
    old = [Candidate(group, -100_000 + group, 1.0) for group in range(3)]
    assert make_sampler("weighted", 1e-3).choose(old, 2, 5) == [2, 1]


def test_none_evicts_nothing():
    eviction = make_eviction("none", 1)
    assert eviction.above is None
    assert eviction.capacity is None
    assert eviction.evict(CANDIDATES, 100) == []


def test_stale_evicts_what_is_older_than_the_limit():
    eviction = make_eviction("stale", 2)
    assert eviction.above == 2
    assert eviction.evict(CANDIDATES, 5) == [Evicted(4, "3 versions old in the buffer, at most 2")]
    assert [item.group for item in eviction.evict(CANDIDATES, 6)] == [4, 7]


def test_of_more_than_there_is_room_for_the_stalest_go_and_of_equals_what_finished_first():
    eviction = make_eviction("none", 1, capacity=2)
    reason = "the buffer has room for 2 groups, and this is the stalest"
    assert eviction.evict(CANDIDATES, 5) == [Evicted(4, reason), Evicted(7, reason)]
    assert eviction.evict(CANDIDATES[:2], 5) == []
    assert [item.group for item in make_eviction("none", 1, capacity=1).evict(CANDIDATES, 5)] == [4, 7, 9]


def test_what_is_too_old_makes_room():
    evicted = make_eviction("stale", 2, capacity=3).evict(CANDIDATES, 5)
    assert evicted == [Evicted(4, "3 versions old in the buffer, at most 2")]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_sampler("lifo"), "control.sampler: must be one of fifo, freshest, weighted, got 'lifo'"),
        (lambda: make_eviction("old", 1), "control.eviction: must be one of none, stale, wait, got 'old'"),
    ],
)
def test_unknown_names_are_refused_with_the_valid_ones(make, message):
    with pytest.raises(ConfigError) as error:
        make()
    assert str(error.value) == message
