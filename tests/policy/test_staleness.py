"""Staleness and the bound that a mode gives."""

from __future__ import annotations

import pytest

from laminar_hpc.policy.modes import MODES, Mode, Refresh, TrainOn
from laminar_hpc.policy.staleness import bound, staleness


def test_staleness_counts_later_versions():
    assert staleness(7, 7) == 0
    assert staleness(4, 7) == 3


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_the_table_states_the_bound_that_follows_from_the_rules(mode):
    assert bound(mode) == mode.staleness_bound


def test_cohorts_ahead_and_eviction_bound_each_alone_and_together():
    ahead = Mode(
        name="two ahead",
        refresh=Refresh.TOGETHER,
        train_on=TrainOn.COHORT,
        cohorts_ahead=2,
        staleness_bound=2,
    )
    assert bound(ahead) == 2
    assert bound(ahead, evicted_above=1) == 1
    assert bound(MODES["laminar"], evicted_above=5) == 5
