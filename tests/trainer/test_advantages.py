"""Group advantages against values worked out by hand."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_hpc.trainer.advantages import group_advantages


def test_one_right_of_four() -> None:
    # mean 1/4; squared deviations 9/16 + 3 * 1/16 = 3/4; sample variance 1/4; deviations 3/4 and -1/4 over 1/2
    assert group_advantages([5, 5, 5, 5], [1.0, 0.0, 0.0, 0.0]) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_epsilon_is_added_to_the_deviation() -> None:
    # sample standard deviation 1e-6 * sqrt(2): advantage (1e-6) / (1.41421e-6 + 1e-6) = 0.414214
    assert group_advantages([0, 0], [2e-6, 0.0]) == pytest.approx([0.414214, -0.414214], abs=1e-6)


def test_groups_are_apart_though_interleaved() -> None:
    # group 1: (1, 0), deviation sqrt(1/2), advantages +-1/sqrt(2); group 2: (5, 3), deviation sqrt(2), the same
    advantages = group_advantages([1, 2, 1, 2], [1.0, 5.0, 0.0, 3.0])
    assert advantages == pytest.approx([0.707106, 0.707106, -0.707106, -0.707106], abs=2e-6)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e9])
def test_equal_rewards_have_no_advantage(reward: float) -> None:
    assert group_advantages([3] * 7, [reward] * 7) == [0.0] * 7


def test_a_group_of_one_has_no_advantage() -> None:
    assert group_advantages([1, 2, 2], [9.0, 1.0, 0.0])[0] == 0.0


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="2 groups and 1 rewards"):
        group_advantages([1, 1], [0.5])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10)), max_size=40))
def test_each_group_is_standardised_alone(pairs: list[tuple[int, int]]) -> None:
    groups, rewards = [group for group, _ in pairs], [reward / 10 for _, reward in pairs]
    advantages = group_advantages(groups, rewards)
    for group in set(groups):
        own = [reward for reward, g in zip(rewards, groups, strict=True) if g == group]
        got = [advantage for advantage, g in zip(advantages, groups, strict=True) if g == group]
        spread = statistics.stdev(own) if len(own) > 1 else 0.0
        expected = [(r - statistics.fmean(own)) / (spread + 1e-6) if len(set(own)) > 1 else 0.0 for r in own]
        assert got == pytest.approx(expected, abs=1e-9)
