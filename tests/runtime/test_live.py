"""What the line of a step says: means over a window, against sums by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_hpc.protocol.events import RankLost
from laminar_hpc.runtime.live import RecentMean, loss_line


def test_a_mean_covers_its_whole_window_whenever_it_is_asked_for() -> None:
    busy = RecentMean(10.0)
    assert busy.at(3.0) == 0
    busy.note(0, 3.0)
    busy.note(2, 4.0)
    assert busy.at(4.0) == 2
    assert busy.at(6.0) == 2
    busy.note(0, 7.0)
    assert busy.at(8.0) == pytest.approx(2 * 3 / 4)  # from the first moment on: 3 of 4 seconds
    assert busy.at(8.0) == pytest.approx(2 * 3 / 4)  # asking changes nothing
    busy.note(1, 12.0)
    assert busy.at(15.0) == pytest.approx((2 * 2 + 1 * 3) / 10)  # of the seconds from 5 to 15: 5 to 7, and 12 to 15
    assert busy.at(30.0) == 1


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), min_size=1, max_size=40), st.integers(0, 60))
def test_a_mean_is_the_sum_of_its_tenths_of_a_second(changes: list[tuple[int, int]], wait: int) -> None:
    """All times in tenths of a second; the value in each of them, summed up."""
    busy = RecentMean(10.0)
    values: list[int] = []
    first: int | None = None
    for value, pause in changes:
        if value and first is None:
            first = len(values)  # though it may be 0 again at the same moment
        busy.note(value, len(values) / 10)
        values += [value] * pause
    values += [changes[-1][0]] * wait
    recent = values[max(first, len(values) - 100) :] if first is not None else []
    if recent:
        assert busy.at(len(values) / 10) == pytest.approx(sum(recent) / len(recent), abs=1e-6)


def test_a_loss_is_told_once_and_by_what_is_lost() -> None:
    gone = RankLost(4, 0, "rank 4 (rollout 1 on vm:0): its process is gone", "rollout")
    assert loss_line(gone) == "rank 4 (rollout 1 on vm:0): its process is gone"
    assert loss_line(RankLost(4, 0, "signal 9")) == "rank 4 lost its worker: signal 9"
