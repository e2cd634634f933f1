"""Samplers and evictions."""

from __future__ import annotations

import pytest

from laminar_hpc.errors import ConfigError
from laminar_hpc.policy.sampling import Candidate, Evicted, make_eviction, make_sampler

CANDIDATES = [Candidate(9, 5, 1.0), Candidate(4, 2, 2.0), Candidate(7, 3, 3.0), Candidate(1, 5, 4.0)]


def test_fifo_takes_what_finished_first():
    assert make_sampler("fifo").choose(CANDIDATES, 3) == [9, 4, 7]


def test_none_evicts_nothing():
    eviction = make_eviction("none", 1)
    assert eviction.above is None
    assert eviction.evict(CANDIDATES, 100) == []


def test_stale_evicts_what_is_older_than_the_limit():
    eviction = make_eviction("stale", 2)
    assert eviction.above == 2
    assert eviction.evict(CANDIDATES, 5) == [Evicted(4, "3 versions old in the buffer, at most 2")]
    assert [item.group for item in eviction.evict(CANDIDATES, 6)] == [4, 7]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_sampler("lifo"), "control.sampler: must be one of fifo, got 'lifo'"),
        (lambda: make_eviction("old", 1), "control.eviction: must be one of none, stale, wait, got 'old'"),
    ],
)
def test_unknown_names_are_refused_with_the_valid_ones(make, message):
    with pytest.raises(ConfigError) as error:
        make()
    assert str(error.value) == message
