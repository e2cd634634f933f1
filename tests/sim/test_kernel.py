"""Virtual time."""

from __future__ import annotations

import pytest

from laminar_hpc.sim.kernel import Kernel


def test_things_happen_in_the_order_of_their_times() -> None:
    kernel, seen = Kernel(), []
    for time_s in (3.0, 1.0, 2.0):
        kernel.at(time_s, lambda time_s=time_s: seen.append((time_s, kernel.now)))
    kernel.run()
    assert seen == [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]
    assert kernel.happened == 3


@pytest.mark.parametrize(("reverse", "order"), [(False, "abc"), (True, "cba")])
def test_ties_are_kept_or_reversed(reverse: bool, order: str) -> None:
    kernel, seen = Kernel(reverse_ties=reverse), []
    for name in "abc":
        kernel.at(1.0, lambda name=name: seen.append(name))
    kernel.run()
    assert "".join(seen) == order


@pytest.mark.parametrize("reverse", [False, True])
def test_messages_of_a_lane_never_overtake_each_other(reverse: bool) -> None:
    kernel, seen = Kernel(reverse_ties=reverse), []
    for place in range(3):
        for lane in ("x", "y"):
            kernel.send(lane, lambda lane=lane, place=place: seen.append((lane, place)))
    kernel.run()
    assert [place for lane, place in seen if lane == "x"] == [0, 1, 2]
    assert [place for lane, place in seen if lane == "y"] == [0, 1, 2]
    assert seen[0][0] == ("y" if reverse else "x")


def test_what_is_cancelled_does_not_happen_and_what_is_late_happens_now() -> None:
    kernel, seen = Kernel(), []
    gone = kernel.at(2.0, lambda: seen.append("gone"))

    def first() -> None:
        gone.cancel()
        kernel.at(0.5, lambda: seen.append(("late", kernel.now)))

    kernel.at(1.0, first)
    kernel.run()
    assert seen == [("late", 1.0)]


def test_a_stop_ends_it() -> None:
    kernel, seen = Kernel(), []
    kernel.at(1.0, kernel.stop)
    kernel.at(2.0, lambda: seen.append("too late"))
    kernel.run()
    assert (seen, kernel.now) == ([], 1.0)
