"""A run in numbers: each table is computed here once, for the terminal and for the page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from laminar_hpc.record import schema
from laminar_hpc.record.reader import Run

from .series import fifths, phase_seconds, staleness_counts, step_throughput, steps, trained_on, warm_up

ABSENT = "–"  # noqa: RUF001 (a dash for people)

_NUMBER = re.compile(r"\d+")

MANY_ROWS = 40
"""Longer lists keep their first and last rows."""


@dataclass(frozen=True)
class Table:
    """A table for people; the first column names the row, the others are numbers as text."""

    title: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""


def all_tables(run: Run) -> list[Table]:
    """The tables that the record has anything for."""
    makers: list[Callable[[Run], Table]] = [
        throughput,
        rewards,
        evaluations,
        staleness,
        phases,
        weights,
        outcomes,
        failures,
    ]
    return [table for table in (make(run) for make in makers) if table.rows]


def throughput(run: Run) -> Table:
    """How fast the run generated and trained."""
    rows: list[list[str]] = []
    engine = run.table("engine")
    if len(engine):
        span_s = float(np.ptp(engine["time_s"]))
        generated = int(engine["generated_tokens"].sum())
        busy_s = float(engine["busy_s"].sum())
        rows.append(["generation, all rollouts", "token/s", _rate(generated, span_s)])
        rows.append(["generation, a rollout while its engine works", "token/s", _rate(generated, busy_s)])
    trained = steps(run)
    tokens = int(trained["prompt_tokens"].sum()) + int(trained["response_tokens"].sum())
    if len(trained):
        rows.append(["training, while a step runs", "token/s", _rate(tokens, float(trained["train_s"].sum()))])
    _, seconds, rates = step_throughput(run)
    skipped = warm_up(len(rates))
    if len(rates):
        rows.append(["a step's tokens / time between publications", "token/s", number(float(np.mean(rates[skipped:])))])
        rows.append(["time between publications", "s", number(float(np.mean(seconds[skipped:])))])
        whole = float(np.sum(rates * seconds)) / float(np.sum(seconds))
        rows.append(["tokens of all steps / time of all steps", "token/s", number(whole)])
    note = "Generation counts new tokens; the other rates count prompt and response tokens of what was trained on."
    if len(rates):
        note += f" Means of {len(rates) - skipped} steps, after {skipped} of warm-up."
    return Table("Throughput", ["", "unit", "mean"], rows, note)


def rewards(run: Run) -> Table:
    """What the training trajectories earned, at the start and at the end."""
    rows = steps(run)
    part = max(1, len(rows) // 5)
    shown = []
    if len(rows):
        lengths = rows["response_tokens"] / np.maximum(1, rows["samples"])
        for name, unit, values in (
            ("reward", "1", rows["reward_mean"]),
            ("response length", "token", lengths),
            ("entropy", "nat", rows["entropy"]),
        ):
            first, last = fifths(values)
            shown.append([name, unit, number(first), number(last), number(last - first, signed=True)])
    note = f"Means over the first and the last fifth of the {len(rows)} steps ({part} each)."
    return Table("Training", ["", "unit", "first fifth", "last fifth", "change"], shown, note)


def evaluations(run: Run) -> Table:
    """What the held-out prompts said."""
    rows = [
        [
            f"version {row['version']}",
            str(row["step"]),
            number(row["accuracy"]),
            number(row["reward_mean"]),
            f"{row['graded']} of {row['prompts']}",
            number(int(row["response_tokens"]) / max(1, int(row["graded"]))),
        ]
        for row in run.table("evaluations")
    ]
    header = ["", "step", "accuracy", "reward", "graded", "tokens a response"]
    return Table("Evaluation on held-out prompts", header, _shortened(rows))


def staleness(run: Run) -> Table:
    """How many versions behind the trained-on trajectories were."""
    versions, finish, taken = staleness_counts(run)
    rows = [
        [
            f"{version}",
            f"{at_finish:,}",
            _share(at_finish, finish.sum()),
            f"{at_taken:,}",
            _share(at_taken, taken.sum()),
        ]
        for version, at_finish, at_taken in zip(versions, finish, taken, strict=True)
    ]
    header = ["versions", "at finish", "share", "at consumption", "share"]
    return Table("Staleness of trained-on trajectories", header, _shortened(rows))


def phases(run: Run) -> Table:
    """What each role spent its time on."""
    ranks = Counter(file.role for file in run.files)
    rows = []
    for role, seconds in phase_seconds(run).items():
        total = sum(seconds.values())
        for phase, spent in seconds.items():
            rows.append([f"{role}: {phase}", number(spent / ranks[role]), _share(spent, total)])
    return Table("Time by phase", ["", "s a rank", "share"], rows)


def weights(run: Run) -> Table:
    """What it took to get weights from the trainers into the rollouts."""
    columns = [
        ("trainers stand still for a publication", "s", run.table("publications")["stall_s"]),
        ("a relay receives a version", "s", run.table("relay_versions")["seconds"]),
        ("a rollout waits for its relay", "s", run.table("pulls")["wait_s"]),
        ("a rollout loads the weights", "s", run.table("pulls")["load_s"]),
    ]
    rows = [
        [name, unit, str(len(values)), *(number(float(f(values))) for f in (np.mean, np.median, np.max))]
        for name, unit, column in columns
        if len(values := column[~np.isnan(column)])
    ]
    sizes = run.table("publications")["nbytes"]
    note = f"An image has {int(sizes[-1]):,} bytes." if len(sizes) else ""
    return Table("Weights", ["", "unit", "times", "mean", "median", "largest"], rows, note)


def outcomes(run: Run) -> Table:
    """How trajectories ended, and why."""
    table = schema.TABLES["trajectories"]
    ended = run.table("trajectories")
    reasons = (_NUMBER.sub("N", text(reason)) for reason in ended["reason"])
    counts = Counter(zip(ended["purpose"], ended["state"], reasons, strict=True))
    names = [table.column(name).names for name in ("purpose", "state")]
    rows = [
        [f"{names[0][purpose]}: {names[1][state]}", reason, f"{count:,}"]
        for (purpose, state, reason), count in counts.most_common(MANY_ROWS)
    ]
    note = "Reasons that differ in a number only are counted together."
    return Table("How trajectories ended", ["", "reason", "trajectories"], sorted(rows), note)


def failures(run: Run) -> Table:
    """What was lost."""
    rows = [
        [
            f"{row['time_s']:.1f} s",
            ABSENT if row["rank"] == schema.MISSING else str(row["rank"]),
            text(row["text"]),
        ]
        for row in run.table("failures")
    ]
    return Table("Failures", ["", "rank", "what happened"], _shortened(rows))


def summary(run: Run) -> list[tuple[str, str]]:
    """What ran and how far it came, as pairs of a name and a text."""
    config = run.config
    job = config.get("job", {})
    roles = Counter(file.role for file in run.files if file.attempt == run.attempts[-1])
    trained = steps(run)
    accuracies = run.table("evaluations")["accuracy"]
    first, last = fifths(trained["reward_mean"])
    pairs = [
        ("Mode", run.setting("mode").get("name", ABSENT)),
        ("Ranks", ", ".join(f"{count} {role}" for role, count in roles.items())),
        ("Attempts", str(len(run.attempts))),
        ("Model", config.get("model", {}).get("path", ABSENT)),
        ("Task", _task(config)),
        ("Seed", str(job.get("seed", ABSENT))),
        ("Steps", f"{len(trained)} of {config.get('control', {}).get('steps', ABSENT)}"),
        ("Versions", str(len(run.table("publications")))),
        ("Trajectories trained on", f"{len(trained_on(run)):,}"),
    ]
    if len(trained):
        pairs.append(("Reward", f"{number(first)} to {number(last)}"))
    if len(accuracies):
        pairs.append(("Accuracy", f"{number(accuracies[0])} to {number(accuracies[-1])}"))
    pairs += [("Commit", run.metadata.get("git_commit", ABSENT)), ("Manager's host", run.metadata.get("host", ABSENT))]
    return pairs


def number(value: float, signed: bool = False) -> str:
    """A number with three or four digits that count; a dash for NaN."""
    if np.isnan(value):
        return ABSENT
    sign = "+" if signed else ""
    size = abs(value)
    if size >= 1000:
        return f"{value:{sign},.0f}"
    if size >= 100:
        return f"{value:{sign}.1f}"
    if size >= 1 or value == 0:
        return f"{value:{sign}.2f}"
    return f"{value:{sign}.3f}" if size >= 0.001 else f"{value:{sign}.2g}"


def text(data: bytes) -> str:
    """Recorded text; a dash where there is none."""
    return data.decode() or ABSENT


def _task(config: dict[str, Any]) -> str:
    task = config.get("task", {})
    if not task:
        return ABSENT
    return f"{task['name']}: {task['dataset'] if task['name'] == 'reasoning_gym' else task['path']}"


def _rate(amount: float, seconds: float) -> str:
    return number(amount / seconds) if seconds > 0 else ABSENT


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ABSENT


def _shortened(rows: list[list[str]]) -> list[list[str]]:
    if len(rows) <= MANY_ROWS:
        return rows
    half = MANY_ROWS // 2
    gap = [f"({len(rows) - 2 * half} more)"] + [""] * (len(rows[0]) - 1)
    return [*rows[:half], gap, *rows[-half:]]
