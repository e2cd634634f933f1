"""The quantities that tables and figures share, computed from the record."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from laminar_hpc.record import schema
from laminar_hpc.record.reader import Rows, Run

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

WARM_UP_STEPS = 10
"""Steps left out of mean throughput, as in the paper (section 8.1); a fifth of the steps where that is fewer."""


def columns(rows: Rows, *names: str) -> Iterator[Any]:
    """These columns of each row as a tuple of Python values; far faster than row by row."""
    return zip(*(rows[name].tolist() for name in names), strict=True)


def trajectories(run: Run, purpose: str, state: str) -> Rows:
    """The trajectories of a purpose that ended in a state."""
    table = schema.TABLES["trajectories"]
    rows = run.table("trajectories")
    wanted = (rows["purpose"] == table.code("purpose", purpose)) & (rows["state"] == table.code("state", state))
    chosen: Rows = rows[wanted]
    return chosen


def trained_on(run: Run) -> Rows:
    """The trajectories that a training step has taken."""
    return trajectories(run, "train", "consumed")


def steps(run: Run) -> Rows:
    """The training steps in order; of one that a later attempt did again, the last."""
    rows = run.table("steps")
    last = {int(row["step"]): index for index, row in enumerate(rows)}
    return rows[[last[step] for step in sorted(last)]]


class StepThroughput(NamedTuple):
    """For each step between two publications: when the second one was, seconds between them, and tokens/s."""

    ends_s: Floats
    seconds: Floats
    rates: Floats


def step_throughput(run: Run) -> StepThroughput:
    """A step's tokens over the time between the publication before it and its own; the paper measures throughput so.

    Its tokens are those of the prompts and responses it trained on.
    """
    published = {(int(p["attempt"]), int(p["step"])): float(p["time_s"]) for p in run.table("publications")}
    ends_s, seconds, rates = [], [], []
    for row in steps(run):
        step, attempt = int(row["step"]), int(row["attempt"])
        before, after = published.get((attempt, step - 1)), published.get((attempt, step))
        if before is None or after is None or after <= before:
            continue
        ends_s.append(after)
        seconds.append(after - before)
        rates.append((int(row["prompt_tokens"]) + int(row["response_tokens"])) / (after - before))
    return StepThroughput(np.array(ends_s), np.array(seconds), np.array(rates))


def warm_up(count: int) -> int:
    """How many of `count` steps are left out of means."""
    return min(WARM_UP_STEPS, count // 5)


def fifths(values: Floats) -> tuple[float, float]:
    """Mean of the first and of the last fifth, each of one value at least; NaN where there are none."""
    if not len(values):
        return float("nan"), float("nan")
    part = max(1, len(values) // 5)
    return float(np.mean(values[:part])), float(np.mean(values[-part:]))


def staleness_counts(run: Run) -> tuple[Ints, Ints, Ints]:
    """Staleness 0, 1, ... in versions, and how many trained-on trajectories had it when they finished and were taken."""
    rows = trained_on(run)
    finish = rows["staleness_finish"][rows["staleness_finish"] != schema.MISSING]
    taken = rows["staleness_consumption"][rows["staleness_consumption"] != schema.MISSING]
    length = 1 + max(int(finish.max(initial=-1)), int(taken.max(initial=-1)))
    return np.arange(length), np.bincount(finish, minlength=length), np.bincount(taken, minlength=length)


def phase_seconds(run: Run) -> dict[str, dict[str, float]]:
    """Seconds by role and phase, over all ranks of the role; roles and phases that have none are left out."""
    totals: dict[str, dict[str, float]] = {}
    names = schema.TABLES["phases"].column("phase").names
    for role, phases in schema.PHASES.items():
        sums = np.zeros(len(names))
        for file in run.files:
            if file.role == role:
                rows = file.tables["phases"]
                np.add.at(sums, rows["phase"], rows["seconds"])
        found = {phase: float(sums[names.index(phase)]) for phase in phases if sums[names.index(phase)] > 0}
        if found:
            totals[role] = found
    return totals


def binned(times_s: Floats, values: Floats, bins: int) -> tuple[Floats, Floats, Floats]:
    """Sums and counts of `values` in equal bins of time: middles of the bins in s, sums, counts."""
    low, high = float(times_s.min()), float(times_s.max())
    high = max(high, low + 1e-9)
    sums, edges = np.histogram(times_s, bins=bins, range=(low, high), weights=values)
    counts, _ = np.histogram(times_s, bins=bins, range=(low, high))
    return (edges[:-1] + edges[1:]) / 2, sums, counts.astype(np.float64)
