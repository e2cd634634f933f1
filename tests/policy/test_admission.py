"""Back-pressure, by hand: 4 groups a step, 3 steps."""

from __future__ import annotations

import pytest

from laminar_hpc.policy.admission import room
from laminar_hpc.policy.modes import MODES


def laminar(kept: int, open_groups: int, ahead: float = 0.5) -> int:
    return room(
        MODES["laminar"],
        steps=3,
        prompts=4,
        ahead=ahead,
        kept=kept,
        open_groups=open_groups,
        in_flight=open_groups,
        step_held=None,
    )


def sync(kept: int, step_held: int | None) -> int:
    return cohorts("sync", kept, 0, step_held)


def cohorts(mode: str, kept: int, in_flight: int, step_held: int | None) -> int:
    return room(
        MODES[mode],
        steps=3,
        prompts=4,
        ahead=9.0,
        kept=kept,
        open_groups=kept,
        in_flight=in_flight,
        step_held=step_held,
    )


def test_laminar_keeps_one_and_a_half_steps_open():
    assert laminar(kept=0, open_groups=0) == 6
    assert laminar(kept=6, open_groups=6) == 0
    assert laminar(kept=6, open_groups=2) == 4  # a step has taken 4


def test_laminar_with_fractions_rounds_down():
    assert laminar(kept=0, open_groups=0, ahead=0.3) == 5  # floor(1.3 * 4)


def test_laminar_never_hands_out_more_than_the_run_needs():
    assert laminar(kept=10, open_groups=2) == 2  # 12 in all
    assert laminar(kept=12, open_groups=1) == 0


def test_sync_hands_out_one_cohort_for_each_version_held_by_all():
    assert sync(kept=0, step_held=0) == 4
    assert sync(kept=4, step_held=0) == 0
    assert sync(kept=3, step_held=0) == 1  # one of the cohort was discarded
    assert sync(kept=4, step_held=1) == 4


def test_sync_hands_out_nothing_while_versions_differ_and_nothing_after_the_last_step():
    assert sync(kept=0, step_held=None) == 0
    assert sync(kept=12, step_held=3) == 0


@pytest.mark.parametrize("mode", ["one_step", "stream"])
def test_one_step_ahead_the_next_cohort_follows_as_soon_as_one_is_generated(mode):
    assert cohorts(mode, kept=0, in_flight=0, step_held=0) == 4
    assert cohorts(mode, kept=4, in_flight=1, step_held=0) == 0
    assert cohorts(mode, kept=3, in_flight=1, step_held=0) == 1  # one of the cohort was discarded
    assert cohorts(mode, kept=4, in_flight=0, step_held=0) == 4  # under the weights of the first one
    assert cohorts(mode, kept=8, in_flight=0, step_held=0) == 0  # and no third one
    assert cohorts(mode, kept=8, in_flight=0, step_held=1) == 4
    assert cohorts(mode, kept=12, in_flight=0, step_held=2) == 0  # all that the run needs
