"""Staleness and the bound that a mode gives."""

from __future__ import annotations

import pytest

from laminar_hpc.policy.modes import MODES, Mode, Refresh
from laminar_hpc.policy.staleness import bound, owed, staleness


def test_staleness_counts_later_versions():
    assert staleness(7, 7) == 0
    assert staleness(4, 7) == 3


@pytest.mark.parametrize(("mode", "expected"), [("sync", 0), ("laminar", None)])
def test_the_bound_of_each_mode(mode, expected):
    assert bound(MODES[mode]) == expected


def test_cohorts_ahead_and_eviction_bound_each_alone_and_together():
    ahead = Mode(name="two ahead", refresh=Refresh.TOGETHER, cohorts_ahead=2, repack=False)
    assert bound(ahead) == 2
    assert bound(ahead, evicted_above=1) == 1
    assert bound(MODES["laminar"], evicted_above=5) == 5


def test_what_a_step_owes_to_old_groups():
    """Two groups a step, at most two versions stale: those of step 0 may wait for two more steps when 1 is the newest."""
    assert owed(4, 0, newest_step=1, most=2, prompts=2) == 2
    assert owed(2, 0, newest_step=1, most=2, prompts=2) == 0
    assert owed(2, 0, newest_step=2, most=2, prompts=2) == 2
    assert owed(6, 1, newest_step=1, most=2, prompts=2) == 2
