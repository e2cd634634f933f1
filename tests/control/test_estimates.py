"""Estimates of times and lengths, against numbers that were worked out by hand."""

from __future__ import annotations

import math

import pytest

from laminar_hpc.control.estimates import FEWEST_SAMPLES, LENGTHS, Estimates


def test_steps_follow_the_line_that_made_them():
    estimates = Estimates(100)
    for place in range(FEWEST_SAMPLES):
        assert not estimates.known
        trajectories = 4 + place
        estimates.note_steps(trajectories, 10, 10 * (0.02 + 0.001 * trajectories))
    assert estimates.known
    assert estimates.step_s(1) == pytest.approx(0.021)
    assert estimates.step_s(64) == pytest.approx(0.084)


def test_batches_of_one_size_say_nothing_of_others():
    estimates = Estimates(100)
    for _ in range(100):
        estimates.note_steps(8, 10, 0.3)
    assert not estimates.known


def test_a_step_of_more_trajectories_never_counts_as_shorter():
    estimates = Estimates(100)
    for place in range(20):
        estimates.note_steps(4 + place % 2 * 4, 10, 0.4 - 0.1 * (place % 2))
    assert estimates.step_s(1) == estimates.step_s(64) == pytest.approx(0.035, rel=0.01)


def test_no_step_takes_less_than_no_time():
    estimates = Estimates(100)
    for place in range(20):
        estimates.note_steps(4 + place % 2 * 4, 1, 0.1 + 0.3 * (place % 2))  # the line through both is below zero at 2
    # through the origin: (4 * 0.1 + 8 * 0.4) / (16 + 64)
    assert estimates.step_s(1) == pytest.approx(0.045, rel=0.01)
    assert estimates.step_s(10) == pytest.approx(0.45, rel=0.01)


def test_a_token_of_prefill_costs_a_share_of_a_full_step_until_one_was_seen():
    estimates = Estimates(100)
    for place in range(20):
        estimates.note_steps(4 + place, 1, 0.02)
    assert estimates.prefill_token_s(50) == pytest.approx(0.02 / 50)
    estimates.note_prefill(1000, 0.1)
    estimates.note_prefill(3000, 0.1)
    assert estimates.prefill_token_s(50) == pytest.approx(0.2 / 4000)


def test_while_nothing_has_ended_a_response_is_expected_to_become_as_long_as_it_may():
    assert Estimates(100).steps_left([30]) == 70
    assert Estimates(100).steps_left([30, 90]) == 70
    assert Estimates(100).steps_left([100, 130]) == Estimates(100).steps_left([]) == 0


def test_the_steps_left_are_the_median_of_the_longest():
    estimates = Estimates(200)
    for tokens in range(1, 200):
        estimates.note_length(tokens)  # uniform from 1 to 199, and the limit
    # one response of 100: of the hundred that are longer, ln 2 are left after 31 steps
    assert estimates.steps_left([100]) == pytest.approx(100 * (1 - math.log(2)), abs=2)
    # ten of them: after x steps 10 * (100 - x) / 100 = ln 2
    assert estimates.steps_left([100] * 10) == pytest.approx(100 - 10 * math.log(2), abs=2)
    # the true median of the maximum of ten uniform ones: 100 * 2 ** (-1 / 10) = 93.3
    assert estimates.steps_left([100] * 10) == pytest.approx(100 * 2 ** (-1 / 10), abs=2)
    assert estimates.steps_left([100] * 10 + [199]) == pytest.approx(93, abs=2)


def test_old_lengths_are_forgotten():
    estimates = Estimates(1000)
    for tokens in [400] * 2000 + [5] * LENGTHS:
        estimates.note_length(tokens)
    assert estimates.steps_left([10]) == 990  # of those longer than 10 only the limit is left
    estimates.note_length(400)
    assert 390 <= estimates.steps_left([10]) < 990
