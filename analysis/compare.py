"""Several runs of the same work beside each other, mode by mode: what is compared of each, and the tables of it.

All times and rates are those of the hardware that is emulated, where engines are; time begins with the first publication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from laminar_hpc.config.schema import Control
from laminar_hpc.errors import RecordError
from laminar_hpc.record import schema
from laminar_hpc.record.reader import Run, open_run
from laminar_hpc.record.status import MOST_LAG

from .checks import Check, Result, run_checks
from .series import (
    Floats,
    Ints,
    counted,
    fifths,
    lag_of,
    phase_seconds,
    staleness_counts,
    step_throughput,
    steps,
    trained_on,
    trajectories,
)
from .tables import ABSENT, Table, number

IDLE_PHASES = {"trainer": "wait", "rollout": "idle"}
"""The phase of each role in which it does nothing; the start counts neither as work nor as this."""

HALVES = {"alone-generation": "rollout", "alone-training": "trainer"}
"""The kinds of runs that measure one half of a job, and whose it is: the other half takes no time, so it has no schedule."""

PLACEMENT = ("job", "rollout", "trainer", "paced")
"""Sections of a config that say on what hardware it runs."""


class Member(NamedTuple):
    """A run of a comparison: its mode, or which half of a job it measures alone, and why it `failed` ("": it has finished)."""

    kind: str
    seed: int
    run_dir: str
    failed: str = ""


@dataclass(frozen=True)
class Curve:
    """A quantity over the time of a run, and over the samples trained on until then."""

    seconds: Floats
    samples: Floats
    values: Floats

    def first_at(self, target: float) -> float:
        """Seconds until the first value that is at least `target`; NaN where none is."""
        reached = np.flatnonzero(self.values >= target)
        return float(self.seconds[reached[0]]) if len(reached) else float("nan")


@dataclass(frozen=True)
class Measured:
    """What is compared of one run. `kind` is its mode, or which half of a job it measures alone. NaN is what it does not have.

    `staleness` has mean and largest at finish and at consumption, in versions; `taken` counts trajectories by the latter.
    """

    kind: str
    seed: int
    tokens_per_s: float
    idle: dict[str, float]
    staleness: tuple[float, float, float, float]
    taken: Ints
    prefilled_tokens: int
    discarded_tokens: int
    reward: float
    rewards: Curve
    accuracies: Curve
    lag: float
    check: Check
    commit: str
    config: dict[str, Any]

    @property
    def title(self) -> str:
        """Its kind for people: "alone-training" is training alone."""
        return " ".join(reversed(self.kind.split("-")))

    @property
    def emulated(self) -> bool:
        """Whether its engines are emulated, and its times with them."""
        return _emulates(self.config)

    @property
    def learns(self) -> bool:
        """Whether its responses have a meaning, and so rewards."""
        return not (self.emulated and self.config["paced"]["tokens"] == "lengths")


Column = Callable[[list[Measured]], str]
"""What a column says of the runs of a mode."""


@dataclass(frozen=True)
class Comparison:
    """What is compared: the finished runs of each mode in the order of seeds, those of halves alone, and the runs that failed."""

    runs: dict[str, list[Measured]]
    alone: list[Measured]
    failures: list[Member]
    target: float | None = None

    @property
    def all_runs(self) -> list[Measured]:
        """The finished runs of all modes."""
        return [run for runs in self.runs.values() for run in runs]

    @property
    def reference(self) -> str:
        """The mode that the others are compared with: the default one, or the fastest where it has no finished run."""
        default = Control().mode
        if self.runs.get(default):
            return default
        return max(self.runs, key=lambda mode: max((run.tokens_per_s for run in self.runs[mode]), default=-1.0))

    @property
    def bound(self) -> Measured | None:
        """The half of the job that is the slower one, measured alone; None where not both were."""
        return min(self.alone, key=lambda run: run.tokens_per_s) if len(self.alone) > 1 else None

    @property
    def emulated(self) -> bool:
        """Whether times are those of emulated hardware."""
        return any(run.emulated for run in self.all_runs)

    @property
    def evaluated(self) -> bool:
        """Whether any mode was evaluated on held-out prompts."""
        return any(len(run.accuracies.values) for run in self.all_runs)


def compare(members: list[Member], modes: list[str], target: float | None = None) -> Comparison:
    """Measure the runs, one after the other. `modes` are those to compare; the others are of `HALVES`.

    One whose record cannot be read counts as failed.
    """
    finished, failures = [], []
    for one in members:
        try:
            if one.failed:
                failures.append(one)
            else:
                finished.append(measure(open_run(one.run_dir), one.kind, one.seed))
        except RecordError as error:
            failures.append(one._replace(failed=str(error)))
    return Comparison(
        {mode: [run for run in finished if run.kind == mode] for mode in modes},
        [run for run in finished if run.kind in HALVES],
        failures,
        target,
    )


def measure(run: Run, kind: str, seed: int) -> Measured:
    """What is compared of a run, which need not be kept."""
    scale = run.config["paced"]["time_scale"] if _emulates(run.config) else 1.0
    steady = step_throughput(run).after_warm_up()
    seconds = float(steady.seconds.sum())
    trained, ended = trained_on(run), run.table("trajectories")
    rows, held_out = steps(run), run.table("evaluations")
    _, _, taken = staleness_counts(run)
    return Measured(
        kind=kind,
        seed=seed,
        tokens_per_s=float(steady.tokens.sum()) / seconds * scale if seconds else float("nan"),
        idle=_idle_shares(run),
        staleness=(*_mean_and_most(trained["staleness_finish"]), *_mean_and_most(trained["staleness_consumption"])),
        taken=taken,
        prefilled_tokens=int(ended["prefilled_tokens"].sum()),
        discarded_tokens=int(trajectories(run, "train", "discarded")["response_tokens"].sum()),
        reward=fifths(rows["reward_mean"])[1],
        rewards=_curve(run, scale, rows["finished_s"], rows["step"], rows["reward_mean"]),
        accuracies=_curve(run, scale, held_out["time_s"], held_out["step"], held_out["accuracy"]),
        lag=_worst_lag(run, kind),
        check=_checked(run, kind, seed),
        commit=run.metadata.get("git_commit", ABSENT),
        config=run.config,
    )


def _emulates(config: dict[str, Any]) -> bool:
    return bool(config["rollout"]["engine"] == "paced")


def _idle_shares(run: Run) -> dict[str, float]:
    shares = {}
    for role, idle in IDLE_PHASES.items():
        seconds = phase_seconds(run).get(role, {})
        total = sum(spent for phase, spent in seconds.items() if phase != "start")
        shares[role] = seconds.get(idle, 0.0) / total if total else float("nan")
    return shares


def _mean_and_most(staleness: Ints) -> tuple[float, float]:
    known = staleness[staleness != schema.MISSING]
    return (float(known.mean()), float(known.max())) if len(known) else (float("nan"), float("nan"))


def _curve(run: Run, scale: float, times_s: Floats, step_numbers: Ints, values: Floats) -> Curve:
    """`values` at these moments, each of the weights after so many steps."""
    published_s = run.table("publications")["time_s"]
    begin_s = float(published_s.min()) if len(published_s) else 0.0
    rows = steps(run)
    samples = np.concatenate([[0], np.cumsum(rows["samples"])])
    behind = np.searchsorted(rows["step"], step_numbers, side="right")
    return Curve((times_s - begin_s) / scale, samples[behind].astype(np.float64), values.astype(np.float64))


def _worst_lag(run: Run, kind: str) -> float:
    """The lag of the rank that was late the most; NaN where nothing is emulated, and in simulation, which has none."""
    rows = run.table("pacing")
    roles = {file.rank: file.role for file in run.files}
    ranks = [rank for rank in np.unique(rows["rank"]) if roles[rank] == HALVES.get(kind, roles[rank])]
    return max((lag_of(rows[rows["rank"] == rank]) for rank in ranks), default=float("nan"))


def _checked(run: Run, kind: str, seed: int) -> Check:
    """The checks of a run's own report as one."""
    checks = run_checks(run)
    wrong = [check for check in checks if check.result is Result.VIOLATED]
    details = [f"{check.rule}: {check.figure}" for check in wrong]
    figure = counted(len(checks), "check") + (f", {len(wrong)} violated" if wrong else "")
    rule = f"{kind}, seed {seed}: the rules of its report hold"
    return Check(rule, Result.VIOLATED if wrong else Result.HOLDS, figure, details)


def tables(compared: Comparison) -> list[Table]:
    """All modes beside each other, and how fast each came to the target where one is set."""
    found = [overview(compared), staleness(compared)]
    if compared.target is not None and compared.evaluated:
        found.append(time_to_accuracy(compared, compared.target))
    return found


def overview(compared: Comparison) -> Table:
    """How fast each mode was, how much its ranks stood idle, and what came of it."""
    table = _table(compared, "Modes beside each other", _columns(compared), _note(compared))
    failed = {
        mode: "; ".join(f"seed {one.seed}: {one.failed}" for one in compared.failures if one.kind == mode)
        for mode in compared.runs
    }
    if any(failed.values()):
        table.header.append("failed")
        for row in table.rows:
            row.append(failed[row[0]] or ABSENT)
    return table


def _table(compared: Comparison, title: str, columns: dict[str, Column], note: str) -> Table:
    rows = [[mode, *(cell(runs) for cell in columns.values())] for mode, runs in compared.runs.items()]
    return Table(title, ["mode", *columns], rows, note, wide=True)


def _columns(compared: Comparison) -> dict[str, Column]:
    """Header and contents of each column that there is anything for."""
    reference = compared.reference
    base = {run.seed: run.tokens_per_s for run in compared.runs[reference]}
    columns: dict[str, Column] = {
        "tokens/s": lambda runs: spread(run.tokens_per_s for run in runs),
        f"x {reference}": lambda runs: spread(run.tokens_per_s / base[run.seed] for run in runs if run.seed in base),
    }
    bound = compared.bound
    if bound is not None:
        columns["of the bound"] = lambda runs: spread((run.tokens_per_s / bound.tokens_per_s for run in runs), share)
    columns["trainers idle"] = lambda runs: spread((run.idle["trainer"] for run in runs), share)
    columns["rollouts idle"] = lambda runs: spread((run.idle["rollout"] for run in runs), share)
    if any(run.learns for run in compared.all_runs):
        columns["reward"] = lambda runs: spread(run.reward for run in runs)
    if compared.evaluated:
        columns["accuracy"] = lambda runs: spread(
            run.accuracies.values[-1] for run in runs if len(run.accuracies.values)
        )
    if not all(np.isnan(run.lag) for run in compared.all_runs):
        columns["lag"] = lambda runs: share(max(run.lag for run in runs)) if runs else ABSENT
    return columns


def staleness(compared: Comparison) -> Table:
    """How many versions behind trajectories were, and the tokens that it took more than once or for nothing."""
    columns: dict[str, Column] = {
        "staleness at finish": lambda runs: spread(run.staleness[0] for run in runs),
        "largest": lambda runs: _largest(run.staleness[1] for run in runs),
        "at consumption": lambda runs: spread(run.staleness[2] for run in runs),
        "the largest": lambda runs: _largest(run.staleness[3] for run in runs),
        "tokens prefilled again": lambda runs: spread((run.prefilled_tokens for run in runs), whole),
        "tokens discarded": lambda runs: spread((run.discarded_tokens for run in runs), whole),
    }
    note = "Staleness in versions, of the trajectories that were trained on; tokens of the whole run. Prefilled again: prompts "
    note += "and responses of trajectories that went on elsewhere or under newer weights. Discarded: response tokens."
    return _table(compared, "Staleness, and tokens for nothing", columns, note)


def spread(values: Iterable[float], show: Callable[[float], str] = number) -> str:
    """The mean of these values, and half of their range where there are several; a dash for none."""
    known = np.array([value for value in values if not np.isnan(value)], dtype=np.float64)
    if not len(known):
        return ABSENT
    half = f" ± {show(float(np.ptp(known)) / 2)}" if len(known) > 1 else ""
    return show(float(known.mean())) + half


def share(value: float) -> str:
    """A share in percent."""
    return f"{value:.1%}"


def whole(value: float) -> str:
    """A number of things."""
    return f"{value:,.0f}"


def _largest(values: Iterable[float]) -> str:
    known = [value for value in values if not np.isnan(value)]
    return f"{max(known):.0f}" if known else ABSENT


def _note(compared: Comparison) -> str:
    """What the columns mean, and of what the bound is the bound."""
    seconds = "emulated seconds" if compared.emulated else "seconds"
    parts = [
        f"Means over {counted(len({run.seed for run in compared.all_runs}), 'seed')}, and half of the range where there are "
        f"several. Tokens/s: prompts and responses of the steps after warm-up, from publication to publication, in {seconds}."
    ]
    if any(run.learns for run in compared.all_runs):
        parts.append("Reward: of the last fifth of the steps. Accuracy: of the last evaluation.")
    if any(run.config["control"]["colocated"] for run in compared.all_runs):
        parts.append("Where trainers and rollouts have the same GPUs, one is idle while the other works.")
    return " ".join([*parts, _bound_note(compared)])


def _bound_note(compared: Comparison) -> str:
    bound = compared.bound
    if bound is None:
        why = "; ".join(
            f"{failure.kind} failed: {failure.failed}" for failure in compared.failures if failure.kind in HALVES
        )
        if not why and any(run.learns for run in compared.all_runs):
            why = "it is known only of emulated engines whose responses have a length and no meaning"
        return "The bound was not measured" + (f": {why}." if why else ".")
    default = Control().mode
    placed = default if default in compared.runs else list(compared.runs)[-1]
    rates = " and ".join(f"{run.title} ({number(run.tokens_per_s)} tokens/s)" for run in compared.alone)
    job = bound.config["job"]
    place = f"{counted(job['trainers'], 'trainer')} and {counted(job['rollouts'], 'rollout')}"
    note = f"The bound is the slower of {rates}, with seed {bound.seed} and what {placed} runs on: {place}."
    others = [mode for mode, runs in compared.runs.items() if _runs_elsewhere(runs, compared.runs[placed])]
    return note + (f" It is none of {', '.join(others)}, which ran on something else." if others else "")


def _runs_elsewhere(runs: list[Measured], placed: list[Measured]) -> bool:
    """Whether a mode has a placement or costs of its own."""
    if not runs or not placed:
        return False
    own, other = ({name: run.config[name] for name in PLACEMENT} for run in (runs[0], placed[0]))
    colocated = {run.config["control"]["colocated"] for run in (runs[0], placed[0])}
    return len(colocated) > 1 or own | {"job": _unseeded(own)} != other | {"job": _unseeded(other)}


def _unseeded(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config["job"].items() if key != "seed"}


def time_to_accuracy(compared: Comparison, target: float) -> Table:
    """How long each mode took to the first evaluation at or above `target`."""
    reached = {
        mode: {run.seed: seconds for run in runs if not np.isnan(seconds := run.accuracies.first_at(target))}
        for mode, runs in compared.runs.items()
    }
    base = reached[compared.reference]
    rows = [
        [
            mode,
            f"{len(times)} of {len(compared.runs[mode])}",
            spread(times.values()),
            spread(seconds / base[seed] for seed, seconds in times.items() if seed in base),
        ]
        for mode, times in reached.items()
    ]
    unit = "emulated seconds" if compared.emulated else "seconds"
    note = f"From the first publication to the end of the first evaluation at or above {target:g}; means over the seeds that "
    note += "came to it, and half of their range."
    return Table(f"Time to accuracy {target:g}", ["mode", "runs", unit, f"x {compared.reference}"], rows, note)


def warnings(compared: Comparison) -> list[str]:
    """What makes the comparison, or a part of it, pointless."""
    runs = [*compared.all_runs, *compared.alone]
    found = [
        f"{run.kind}, seed {run.seed}: emulated time lagged by {run.lag:.1%} on the worst rank: its times do not count"
        for run in runs
        if run.lag > MOST_LAG
    ]
    commits = sorted({run.commit for run in runs})
    if len(commits) > 1:
        found.append(f"the runs are of several commits: {', '.join(commits)}")
    found += [f"{failure.kind}, seed {failure.seed}, failed: {failure.failed}" for failure in compared.failures]
    return found
