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
from laminar_hpc.record.status import MOST_LAG

from .series import (
    Floats,
    StepThroughput,
    counted,
    engine_work,
    fifths,
    groups_without_signal,
    lag_of,
    last_moment_s,
    phase_seconds,
    staleness_counts,
    step_throughput,
    steps,
    trained_on,
)

ABSENT = "–"  # noqa: RUF001 (a dash for people)

_NUMBER = re.compile(r"\d+")

STOPPED_BY_A_PERSON = (b"stopped: signal SIGINT", b"stopped: signal SIGTERM")
"""Ends of a job, on record among the failures, that are none: somebody asked for them."""

MANY_ROWS = 40
"""Longer lists keep their first and last rows."""


@dataclass(frozen=True)
class Table:
    """A table for people; the first column names the row, the others are numbers as text. One that is `wide` has a row of the
    page to itself.
    """

    title: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""
    wide: bool = False


def all_tables(run: Run) -> list[Table]:
    """The tables that the record has anything for."""
    makers: list[Callable[[Run], Table]] = [
        throughput,
        rewards,
        evaluations,
        staleness,
        phases,
        weights,
        repacks,
        pacing,
        outcomes,
        failures,
    ]
    return [table for table in (make(run) for make in makers) if table.rows]


def throughput(run: Run) -> Table:
    """How fast the run generated and trained: sums over the time of the steps after warm-up, the whole run without any."""
    steady = step_throughput(run).after_warm_up()
    whole_s = last_moment_s(run)
    rows, note = [], "Over the whole run."
    if len(steady.rows):
        rows += _generation(run, steady.begins_s, steady.ends_s)
        rows += _training(steady)
        first, last = steady.rows["step"][[0, -1]]
        over = f"step {first}" if first == last else f"steps {first} to {last}"
        note = f"Over {over}, from publication to publication ({steady.seconds.sum():.1f} s), but for the last row."
    else:
        rows += _generation(run, np.zeros(1), np.array([whole_s]))
    note += (
        " Generation counts new tokens, those of evaluations too; training counts prompts and responses, if not said."
    )
    trained = steps(run)
    if len(trained):
        tokens = int(trained["prompt_tokens"].sum()) + int(trained["response_tokens"].sum())
        rows.append(["training, whole run, start-up included", "token/s", _rate(tokens, whole_s)])
    return Table("Throughput", ["", "unit", "value"], rows, note)


def _generation(run: Run, begins_s: Floats, ends_s: Floats) -> list[list[str]]:
    """Throughput of the engines in these spans of time."""
    generated = busy_s = 0.0
    work = engine_work(run)
    for one in work:
        for amounts, sign in ((ends_s, 1), (begins_s, -1)):
            generated += sign * float(one.until(amounts, one.rows["generated_tokens"].astype(np.float64)).sum())
            busy_s += sign * float(one.until(amounts, one.seconds).sum())
    if not work:
        return []
    return [
        ["generation, all rollouts", "token/s", _rate(generated, float((ends_s - begins_s).sum()))],
        ["generation, a rollout while its engine works", "token/s", _rate(generated, busy_s)],
    ]


def _training(steady: StepThroughput) -> list[list[str]]:
    """Throughput of the trainers over these steps."""
    tokens, seconds = float(steady.tokens.sum()), float(steady.seconds.sum())
    return [
        ["training", "token/s", _rate(tokens, seconds)],
        ["training, response tokens only", "token/s", _rate(float(steady.response_tokens.sum()), seconds)],
        ["training, while a step runs", "token/s", _rate(tokens, float(steady.rows["train_s"].sum()))],
        ["time between publications", "s", number(seconds / len(steady.rows))],
        ["as in the paper: mean of tokens of a step / its time", "token/s", number(float(np.mean(steady.rates)))],
    ]


def rewards(run: Run) -> Table:
    """What the training trajectories earned, at the start, at the end and on the whole."""
    rows = steps(run)
    part = max(1, len(rows) // 5)
    series: list[tuple[str, str, Floats, float]] = []
    if len(rows):
        lengths = rows["response_tokens"] / np.maximum(1, rows["samples"])
        for name, unit, values in (
            ("reward", "1", rows["reward_mean"]),
            ("response length", "token", lengths),
            ("entropy", "nat a token", rows["entropy"]),
        ):
            series.append((name, unit, values, float(np.mean(values))))
    step_of, equal = groups_without_signal(run)
    if len(equal):
        numbers = np.unique(step_of)
        shares = np.array([np.mean(equal[step_of == step]) for step in numbers])
        series.append(("groups whose rewards are all equal", "share", shares, float(np.mean(equal))))
    shown = []
    for name, unit, values, whole in series:
        first, last = fifths(values)
        shown.append([name, unit, number(first), number(last), number(last - first, signed=True), number(whole)])
    note = f"Means over the first and the last fifth of {counted(len(rows), 'step')} ({part} each), and over all."
    note += " A group whose rewards are all equal gives no gradient."
    return Table("Training", ["", "unit", "first fifth", "last fifth", "change", "whole run"], shown, note)


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
    return Table("Time by phase", ["", "s per rank", "share"], rows)


def weights(run: Run) -> Table:
    """What it took to get weights from the trainers into the rollouts."""
    pulls, received = run.table("pulls"), run.table("relay_versions")
    received = received[received["what"] == schema.TABLES["relay_versions"].code("what", "complete")]
    columns = [
        ("trainers stand still for a publication", "s", run.table("publications")["stall_s"]),
        ("a relay receives a version", "s", received["seconds"]),
        ("a rollout waits for its relay", "s", pulls["wait_s"]),
        ("a rollout copies the weights from another node", "s", pulls["copy_s"][pulls["copy_s"] > 0]),
        ("a rollout's engine stands still to load them", "s", pulls["pause_s"]),
    ]
    rows = [
        [name, unit, str(len(values)), *(number(float(f(values))) for f in (np.mean, np.median, np.max))]
        for name, unit, column in columns
        if len(values := column[~np.isnan(column)])
    ]
    sizes = run.table("publications")["nbytes"]
    note = f"An image has {int(sizes[-1]):,} bytes." if len(sizes) else ""
    if len(received):
        note += f" A relay takes up to {int(received['memory_bytes'].max()):,} bytes of its node's memory."
    return Table("Weights", ["", "unit", "times", "mean", "median", "largest"], rows, note)


def pacing(run: Run) -> Table:
    """Whether emulated engines and trainers kept to their schedules."""
    rows = run.table("pacing")
    roles = {(file.rank, file.attempt): file.role for file in run.files}
    owners = np.array([roles[row["rank"], row["attempt"]] for row in rows])
    shown = []
    for role in sorted(set(owners)):
        own = rows[owners == role]
        ranks = [own[own["rank"] == rank] for rank in np.unique(own["rank"])]
        worst = max(lag_of(one) for one in ranks)
        shown.append([role, f"{lag_of(own):.2%}", f"{worst:.2%}", f"{own['worst_s'].max() * 1e3:.1f}"])
    scale = run.config.get("paced", {}).get("time_scale", ABSENT)
    note = (
        f"All times of this report are this machine's; an emulated second took {scale} of them. A trajectory, a load or a "
        f"step that is late by a share of its schedule distorts by as much; above {MOST_LAG:.0%} a run does not count."
    )
    return Table("Emulated time lagged by", ["", "all", "worst rank", "longest, ms"], shown, note if shown else "")


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


def repacks(run: Run) -> Table:
    """What moving the last trajectories of rollouts to others was to gain, and has gained."""
    moves = run.table("moves")
    if not len(moves):
        return Table("Repacks", [], [])
    done = moves[moves["ending"] == b"moved"]
    known = done[~np.isnan(done["gain_s"])]
    told = done[~np.isnan(done["expected_gain_s"])]
    handed_s = done["handed_over_s"]
    rows = [
        ["moves", "", f"{len(done)} of {len(moves)} planned"],
        ["trajectories moved", "", f"{done['trajectories'].sum():,}"],
        ["tokens read again", "token", f"{done['tokens'].sum():,}"],
        ["from the plan to the hand-over, mean", "s", _mean(handed_s - done["planned_s"])],
        ["from the hand-over to the next token, mean", "s", _mean(done["resumed_s"] - handed_s)],
        ["from the hand-over to newer weights, mean", "s", _mean(done["loaded_s"] - handed_s)],
        ["gain expected", "s", f"{number(float(told['expected_gain_s'].sum()))} by {counted(len(told), 'move')}"],
        ["gain found afterwards", "s", f"{number(float(known['gain_s'].sum()))} by {counted(len(known), 'move')}"],
    ]
    gains = known[~np.isnan(known["expected_gain_s"])]
    if len(gains):
        expected, actual = float(gains["expected_gain_s"].sum()), float(gains["gain_s"].sum())
        rows.append(["of these, expected and found", "s", f"{number(expected)}, {number(actual)}"])
    note = "A gain is time that rollouts need not spend under old weights, less the time of reading tokens again."
    return Table("Repacks", ["", "unit", "value"], rows, note)


def _mean(values: Floats) -> str:
    """The mean of those that are there."""
    there = values[~np.isnan(values)]
    return number(float(np.mean(there))) if len(there) else ABSENT


def failures(run: Run) -> Table:
    """What was lost."""
    rows = [
        [
            f"{row['time_s']:.1f} s",
            ABSENT if row["rank"] == schema.MISSING else str(row["rank"]),
            text(row["text"]),
        ]
        for row in run.table("failures")
        if row["rank"] != schema.MISSING or row["text"] not in STOPPED_BY_A_PERSON
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
        ("Ranks", ", ".join(counted(count, role) for role, count in roles.items())),
        ("Attempts", str(len(run.attempts))),
        ("Model", config.get("model", {}).get("path", "") or ABSENT),
        ("Task", _task(config)),
        ("Seed", str(job.get("seed", ABSENT))),
        ("Steps", f"{len(trained)} of {config.get('control', {}).get('steps', ABSENT)}"),
        ("Versions", str(len(run.table("publications")))),
        ("Trajectories trained on", f"{len(trained_on(run)):,}"),
    ]
    if len(trained):
        pairs.append(
            ("Reward", f"{number(first)} to {number(last)} (means of the first and the last fifth of the steps)")
        )
    if len(accuracies):
        pairs.append(("Accuracy", f"{number(accuracies[0])} to {number(accuracies[-1])} (first and last evaluation)"))
    pairs += [("Commit", _program(run)), ("Manager's host", run.metadata.get("host", ABSENT))]
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
    what = {"reasoning_gym": task["dataset"], "synthetic": f"{task['prompts']} prompts"}.get(task["name"], task["path"])
    return f"{task['name']}: {what}"


def _program(run: Run) -> str:
    """The commit, which is unknown where the package was installed without its repository, and the package's version."""
    commit = run.metadata.get("git_commit", ABSENT)
    version = run.setting("packages").get("laminar_hpc")
    return f"{commit} (laminar_hpc {version})" if version else commit


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
