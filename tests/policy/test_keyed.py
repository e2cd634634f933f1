"""Keyed randomness: the same everywhere, and permutations that are permutations."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_hpc.policy.keyed import permuted, stable_hash


def test_hash_is_that_of_an_independent_implementation():
    # printf "(7, 'train', 3, 1)" | b2sum -l 64    (GNU coreutils)
    digest = bytes.fromhex("0dff14464e2ea242")
    assert stable_hash(7, "train", 3, 1) == int.from_bytes(digest, "little") // 2


def test_hash_depends_on_order_and_type():
    assert len({stable_hash(1, 2), stable_hash(2, 1), stable_hash("1", 2), stable_hash(12), stable_hash(1, 2, 0)}) == 5


@settings(deadline=None)
@given(count=st.integers(1, 300), key=st.integers(0, 2**63 - 1))
def test_permuted_is_a_permutation(count, key):
    assert sorted(permuted(index, count, key) for index in range(count)) == list(range(count))


@settings(deadline=None)
@given(count=st.integers(2**20, 2**40), key=st.integers(0, 2**63 - 1), data=st.data())
def test_permuted_stays_inside_a_large_range_without_collisions(count, key, data):
    indexes = data.draw(st.lists(st.integers(0, count - 1), unique=True, max_size=30))
    images = [permuted(index, count, key) for index in indexes]
    assert len(set(images)) == len(indexes)
    assert all(0 <= image < count for image in images)


@pytest.mark.parametrize(("count", "index", "limit"), [(5, 3, 18.5), (7, 2, 22.5), (16, 3, 37.7)])
def test_every_place_is_equally_likely_over_keys(count, index, limit):
    """`limit` is the 99.9 % point of the chi-squared distribution with count - 1 degrees of freedom."""
    keys = 5000
    images = Counter(permuted(index, count, key) for key in range(keys))
    expected = keys / count
    chi_squared = sum((images[place] - expected) ** 2 / expected for place in range(count))
    assert chi_squared < limit
