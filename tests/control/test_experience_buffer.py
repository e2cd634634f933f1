"""The experience buffer."""

from __future__ import annotations

import pytest

from laminar_hpc.control.buffer import Buffer
from laminar_hpc.policy.sampling import Candidate, Evicted, make_eviction, make_sampler


def buffer(eviction: str = "none") -> Buffer:
    one = Buffer(make_sampler("fifo"), make_eviction(eviction, 1))
    for group, version in ((5, 0), (2, 2), (9, 1)):
        assert one.add(Candidate(group, version, float(group)), 1) == []
    return one


def test_groups_are_taken_once_in_the_order_in_which_they_finished():
    one = buffer()
    assert one.take(2, 2) == [5, 2]
    assert len(one) == 1
    assert one.take(1, 2) == [9]


def test_evicted_groups_are_gone():
    one = buffer("stale")
    assert one.evict(2) == [Evicted(5, "2 versions old in the buffer, at most 1")]
    assert one.evict(2) == []
    assert one.take(2, 2) == [2, 9]


def test_what_is_too_old_on_arrival_is_not_kept():
    one = buffer("stale")
    assert [item.group for item in one.evict(2)] == [5]
    assert one.add(Candidate(7, 0, 3.0), 2) == [Evicted(7, "2 versions old in the buffer, at most 1")]
    assert one.add(Candidate(8, 1, 4.0), 2) == []
    assert one.take(3, 2) == [2, 9, 8]


def test_a_group_is_in_the_buffer_at_most_once():
    one = buffer()
    with pytest.raises(AssertionError, match="group 9 is in the buffer already"):
        one.add(Candidate(9, 1, 4.0), 1)


def test_what_comes_into_a_full_buffer_drives_the_stalest_out_perhaps_itself():
    one = Buffer(make_sampler("freshest"), make_eviction("none", 1, capacity=2))
    assert one.add(Candidate(5, 1, 1.0), 3) == []
    assert one.add(Candidate(2, 3, 2.0), 3) == []
    assert [item.group for item in one.add(Candidate(9, 2, 3.0), 3)] == [5]
    assert [item.group for item in one.add(Candidate(7, 0, 4.0), 3)] == [7]
    assert one.take(2, 3) == [2, 9]
