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
    """The trajectories that a training step has taken; of a step that a later attempt did again, those of the last time."""
    rows = trajectories(run, "train", "consumed")
    if len(run.attempts) == 1:
        return rows
    last = {int(row["step"]): int(row["attempt"]) for row in run.table("steps")}
    counts = [last.get(step, attempt) == attempt for step, attempt in columns(rows, "step", "attempt")]
    chosen: Rows = rows[np.array(counts, dtype=bool)]
    return chosen


def steps(run: Run) -> Rows:
    """The training steps in order; of one that a later attempt did again, the last."""
    rows = run.table("steps")
    last = {int(row["step"]): index for index, row in enumerate(rows)}
    return rows[[last[step] for step in sorted(last)]]


class StepThroughput(NamedTuple):
    """Steps between two publications, of the step before and of their own: their rows, and when both were."""

    rows: Rows
    begins_s: Floats
    ends_s: Floats

    @property
    def seconds(self) -> Floats:
        """Time between the publications."""
        return self.ends_s - self.begins_s

    @property
    def tokens(self) -> Floats:
        """Prompt and response tokens of what each step trained on."""
        prompts: Floats = self.rows["prompt_tokens"].astype(np.float64)
        return prompts + self.response_tokens

    @property
    def response_tokens(self) -> Floats:
        """The response tokens among them."""
        responses: Floats = self.rows["response_tokens"].astype(np.float64)
        return responses

    @property
    def rates(self) -> Floats:
        """Tokens/s of each step; the paper measures throughput so (section 8.1)."""
        return self.tokens / self.seconds

    def after_warm_up(self) -> StepThroughput:
        """Without the steps that are left out of means."""
        skipped = warm_up(len(self.rows))
        return StepThroughput(self.rows[skipped:], self.begins_s[skipped:], self.ends_s[skipped:])


def step_throughput(run: Run) -> StepThroughput:
    """The steps whose own publication and the one before are on record, in order."""
    published = {(int(p["attempt"]), int(p["step"])): float(p["time_s"]) for p in run.table("publications")}
    rows = steps(run)
    found, begins_s, ends_s = [], [], []
    for index, (attempt, step) in enumerate(columns(rows, "attempt", "step")):
        before, after = published.get((attempt, step - 1)), published.get((attempt, step))
        if before is not None and after is not None and after > before:
            found.append(index)
            begins_s.append(before)
            ends_s.append(after)
    return StepThroughput(rows[found], np.array(begins_s), np.array(ends_s))


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


def last_moment_s(run: Run) -> float:
    """The latest moment that the record tells of, in s after the clock's zero."""
    tables = (run.table(name)["time_s"] for name in ("phases", "engine", "publications"))
    return max((float(times_s.max()) for times_s in tables if len(times_s)), default=0.0)


def rollouts(run: Run) -> int:
    """How many rollouts have a file, whether they generated or not."""
    return len({file.rank for file in run.files if file.role == "rollout"})


class EngineWork(NamedTuple):
    """One rollout's rows of the table `engine`, and the stretch in which its engine worked for each.

    The stretch is the `busy_s` before the row; where two would overlap, as the message of the earlier was late, that
    one is moved back. Between stretches the engine does nothing.
    """

    rows: Rows
    begins_s: Floats
    ends_s: Floats

    @property
    def seconds(self) -> Floats:
        """Length of each stretch."""
        return self.ends_s - self.begins_s

    def level(self, column: str) -> Floats:
        """The value of `column` in each stretch.

        It is the larger of those at its two ends: what begins or ends within a stretch is seen at one end only.
        """
        values = self.rows[column].astype(np.float64)
        larger: Floats = np.maximum(values, np.concatenate([[0.0], values[:-1]]))
        return larger

    def until(self, times_s: Floats, amounts: Floats) -> Floats:
        """How much of `amounts`, each spread evenly over its stretch, has come up until each of `times_s`."""
        totals = np.cumsum(amounts)
        knots_s = np.column_stack([self.begins_s, self.ends_s]).ravel()
        sums: Floats = np.interp(times_s, knots_s, np.column_stack([totals - amounts, totals]).ravel())
        return sums


def engine_work(run: Run) -> list[EngineWork]:
    """The work of each rollout that has generated anything."""
    table = run.table("engine")
    found = []
    for rank in np.unique(table["rank"]):
        rows = table[table["rank"] == rank]
        begins_s, ends_s = np.empty(len(rows)), np.empty(len(rows))
        limit_s = np.inf
        for index in reversed(range(len(rows))):
            ends_s[index] = min(float(rows["time_s"][index]), limit_s)
            begins_s[index] = limit_s = ends_s[index] - float(rows["busy_s"][index])
        found.append(EngineWork(rows, begins_s, ends_s))
    return found


def groups_without_signal(run: Run) -> tuple[Ints, NDArray[np.bool_]]:
    """The step of each group that was trained on, and whether its rewards are all equal: it gives no gradient then."""
    rows = trained_on(run)
    _, first, member_of = np.unique(rows[["attempt", "group"]], return_index=True, return_inverse=True)
    low, high = np.full(len(first), np.inf), np.full(len(first), -np.inf)
    np.minimum.at(low, member_of, rows["reward"])
    np.maximum.at(high, member_of, rows["reward"])
    return rows["step"][first], low == high


def counted(count: int, noun: str, plural: str = "") -> str:
    """A number of things: 1 rollout, 2 rollouts."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def lag_of(rows: Rows) -> float:
    """By which share of their schedule these rows of `pacing` were late."""
    return float(rows["late_s"].sum() / max(rows["scheduled_s"].sum(), 1e-9))
