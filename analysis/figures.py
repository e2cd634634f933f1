"""A run in figures. Each function draws one, or returns None where the record has nothing for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from laminar_hpc.record import schema
from laminar_hpc.record.reader import Run

from .series import (
    Floats,
    StepThroughput,
    counted,
    engine_work,
    last_moment_s,
    phase_seconds,
    rollouts,
    staleness_counts,
    step_throughput,
    steps,
    trained_on,
)

BLUE, ORANGE, GREEN, PINK, SKY, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#8A8F98"
"""Colours that the colour-blind can tell apart: Okabe and Ito 2008, "Color Universal Design"."""

INK = "#30343B"

PHASE_COLOURS = {
    "start": PINK,
    "work": BLUE,
    "train": BLUE,
    "generate": BLUE,
    "transfer": BLUE,
    "publish": ORANGE,
    "pull": ORANGE,
    "grade": GREEN,
    "wait": "#C5CAD1",
    "idle": "#E4E7EB",
}

OTHER_PHASE = SKY

LINE = 1.6

STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "grid.color": "#E4E7EB",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": LINE,
}

WIDTH_INCH = 7.6
TIME_BINS = 80
MARKED_POINTS = 60
"""Up to this many points a line has a mark at each."""


def all_figures(run: Run) -> dict[str, tuple[str, Figure]]:
    """Title and figure by file name (without ending), those that the record has anything for."""
    makers: dict[str, tuple[str, Callable[[Run], Figure | None]]] = {
        "reward": ("Reward and accuracy", reward),
        "throughput": ("Throughput", throughput),
        "staleness": ("Staleness", staleness),
        "length": ("Response length", response_length),
        "phases": ("Time by phase", phases),
        "engine": ("Inference engines", engine),
        "policy": ("Policy", policy),
    }
    figures = {}
    with matplotlib.rc_context(STYLE):
        for name, (title, make) in makers.items():
            figure = make(run)
            if figure is not None:
                figures[name] = (title, figure)
    return figures


def reward(run: Run) -> Figure | None:
    """Reward of the trained-on trajectories by step, and accuracy on held-out prompts."""
    rows, held_out = steps(run), run.table("evaluations")
    if not len(rows) and not len(held_out):
        return None
    figure, (above, below) = _panels(2)
    if len(rows):
        _line(above, rows["step"], rows["reward_mean"], SKY, "each step")
        window = max(1, len(rows) // 20)
        if window > 1:
            _line(above, rows["step"], running_mean(rows["reward_mean"], window), BLUE, f"mean of {window} steps")
            _legend(above)
    above.set(title="Reward of trained-on trajectories", ylabel="reward")
    if len(held_out):
        below.plot(held_out["step"], held_out["accuracy"], color=ORANGE, marker="o", markersize=4)
    below.set(title="Accuracy on held-out prompts", ylabel="share correct", ylim=(-0.03, 1.03))
    _steps_axis(below)
    return figure


def throughput(run: Run) -> Figure | None:
    """Generated tokens and trained-on tokens per second over time."""
    work, timed = engine_work(run), step_throughput(run)
    if not work and not len(timed.rows):
        return None
    end_s = last_moment_s(run)
    figure, (above, below) = _panels(2)
    edges_s = np.linspace(0.0, end_s, TIME_BINS + 1)
    generated = sum(np.diff(one.until(edges_s, one.rows["generated_tokens"].astype(np.float64))) for one in work)
    if work:
        above.stairs(generated / np.diff(edges_s), edges_s, color=BLUE, linewidth=LINE)
    above.set(title="Generation, all rollouts: new tokens", ylabel="token/s")
    for tokens, colour, label in (
        (timed.tokens, ORANGE, "prompts and responses"),
        (timed.response_tokens, BLUE, "responses"),
    ):
        _spans(below, timed, tokens / timed.seconds, end_s, colour, label)
    below.set(title="Training: tokens of a step / its time", ylabel="token/s")
    _legend(below)
    for axes in (above, below):
        from_zero(axes)
    _time_axis(below, end_s)
    return figure


def _spans(axes: Axes, timed: StepThroughput, values: Floats, end_s: float, colour: str, label: str) -> None:
    """A value for each step from publication to publication, and 0 where no step is timed."""
    edges_s = np.concatenate([[0.0], np.column_stack([timed.begins_s, timed.ends_s]).ravel(), [end_s]])
    heights = np.zeros(len(edges_s) - 1)
    heights[1::2] = values
    has_width = np.diff(edges_s) > 0
    axes.stairs(heights[has_width], edges_s[np.append(has_width, True)], color=colour, linewidth=LINE, label=label)


def staleness(run: Run) -> Figure | None:
    """Shares of trained-on trajectories by staleness, when they finished and when they were taken."""
    versions, finish, taken = staleness_counts(run)
    if not len(versions):
        return None
    figure, (axes,) = _panels(1)
    width = 0.38
    for offset, counts, colour, label in (
        (-width / 2, finish, SKY, "when it finished"),
        (width / 2, taken, BLUE, "when a step took it"),
    ):
        axes.bar(versions + offset, counts / max(1, counts.sum()), width=width, color=colour, label=label)
    axes.set(
        title="Staleness of trained-on trajectories", xlabel="staleness (versions)", ylabel="share of trajectories"
    )
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="x", visible=False)
    axes.set_xlim(-0.7, max(3.0, float(versions[-1])) + 0.7)
    _legend(axes)
    return figure


def response_length(run: Run) -> Figure | None:
    """Response length of the trained-on trajectories by step: median and the middle 80 %."""
    rows = trained_on(run)
    rows = rows[rows["step"] != schema.MISSING]
    if not len(rows):
        return None
    numbers = np.unique(rows["step"])
    lengths = [rows["response_tokens"][rows["step"] == step] for step in numbers]
    low, middle, high = (np.array([np.percentile(part, q) for part in lengths]) for q in (10, 50, 90))
    figure, (axes,) = _panels(1)
    axes.fill_between(numbers, low, high, color=SKY, alpha=0.35, linewidth=0, label="10th to 90th percentile")
    _line(axes, numbers, middle, BLUE, "median")
    axes.set(title="Response length of trained-on trajectories", ylabel="response tokens")
    from_zero(axes)
    _steps_axis(axes)
    _legend(axes)
    return figure


def phases(run: Run) -> Figure | None:
    """Share of its time that each role spent on each phase, over all its ranks."""
    totals = phase_seconds(run)
    if not totals:
        return None
    figure = Figure(figsize=(WIDTH_INCH, 1.1 + 0.7 * len(totals)), layout="constrained")
    axes = figure.subplots()
    roles = list(totals)
    for place, role in enumerate(roles):
        _phase_bar(axes, place, totals[role])
    axes.set_yticks(range(len(roles)), roles)
    axes.invert_yaxis()
    axes.set(title="Time by phase, all ranks of a role", xlabel="share of time", xlim=(0, 1))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(visible=False)
    return figure


def _phase_bar(axes: Axes, place: int, seconds: dict[str, float]) -> None:
    """One role's bar: names in the parts that have room for one, those of the others above the bar."""
    left, whole = 0.0, sum(seconds.values())
    narrow = []
    for phase, spent in seconds.items():
        share, colour = spent / whole, PHASE_COLOURS.get(phase, OTHER_PHASE)
        axes.barh(place, share, left=left, height=0.6, color=colour, edgecolor="white")
        if share > 0.07:
            ink = "white" if colour in (BLUE, ORANGE, GREEN) else INK
            middle = left + share / 2
            axes.text(middle, place, f"{phase}\n{share:.0%}", ha="center", va="center", color=ink, fontsize=8)
        else:
            narrow.append(f"{phase} {share:.1%}")
        left += share
    axes.text(0.003, place - 0.32, ", ".join(narrow), va="bottom", color=INK, fontsize=8)


def engine(run: Run) -> Figure | None:
    """Use of the KV cache, and trajectories in the engines, over time: 0 while an engine does not work."""
    work = engine_work(run)
    if not work:
        return None
    end_s, count = last_moment_s(run), rollouts(run)
    edges_s = np.linspace(0.0, end_s, TIME_BINS + 1)
    figure, (above, below) = _panels(2)
    for axes, column, colour, label in (
        (above, "kv_use", GREEN, "in use"),
        (below, "running", BLUE, "running"),
        (below, "waiting", ORANGE, "waiting for a place"),
    ):
        total = sum(np.diff(one.until(edges_s, one.level(column) * one.seconds)) for one in work)
        axes.stairs(total / np.diff(edges_s) / count, edges_s, color=colour, linewidth=LINE, label=label)
    above.set(title=f"KV cache, mean of {counted(count, 'rollout')}, an idle engine as 0", ylabel="share in use")
    above.set_ylim(0, 1.03)
    below.set(title="Trajectories in a rollout's engine, mean", ylabel="trajectories")
    from_zero(below)
    _legend(below)
    _time_axis(below, end_s)
    return figure


def policy(run: Run) -> Figure | None:
    """Entropy, divergence from the policy that generated the tokens, and how often the ratio was clipped."""
    rows = steps(run)
    if not len(rows) or np.isnan(rows["entropy"]).all():
        return None
    figure, (top, middle, bottom) = _panels(3)
    _line(top, rows["step"], rows["entropy"], BLUE, "")
    top.set(title="Entropy", ylabel="nat a token")
    _line(middle, rows["step"], rows["kl_behaviour"], GREEN, "")
    middle.set(title="KL divergence to the behaviour policy", ylabel="nat a token")
    _line(bottom, rows["step"], rows["clip_fraction_high"], ORANGE, "at the upper bound")
    _line(bottom, rows["step"], rows["clip_fraction_low"], PINK, "at the lower bound")
    bottom.set(title="Clipped tokens", ylabel="share of tokens")
    bottom.yaxis.set_major_formatter(PercentFormatter(1.0))
    _steps_axis(bottom)
    _legend(bottom)
    return figure


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    """`count` panels above each other that share the x axis."""
    height_inch = 3.2 if count == 1 else 1.75 * count + 0.4
    figure = Figure(figsize=(WIDTH_INCH, height_inch), layout="constrained")
    axes = figure.subplots(count, 1, sharex=True, squeeze=False)
    return figure, list(axes[:, 0])


def _line(axes: Axes, x: Floats, y: Floats, colour: str, label: str) -> None:
    marker = "o" if len(x) <= MARKED_POINTS else None
    axes.plot(x, y, color=colour, label=label, marker=marker, markersize=3)


def _steps_axis(axes: Axes) -> None:
    axes.set_xlabel("training step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def _time_axis(axes: Axes, end_s: float) -> None:
    """The run's whole time, the same in all figures."""
    axes.set(xlabel="time since the start of the run (s)", xlim=(0.0, end_s))


def from_zero(axes: Axes) -> None:
    """Let the y axis begin at 0, with room above the highest curve."""
    axes.set_ylim(0, max(1e-9, 1.08 * axes.dataLim.y1))


def _legend(axes: Axes) -> None:
    """Above the panel, to the right, where no curve is."""
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, borderaxespad=0.2, fontsize=8.5)


def running_mean(values: Floats, window: int) -> Floats:
    """Mean of each value and the `window` - 1 before it, fewer at the start."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    means: Floats = (sums[ends] - sums[starts]) / (ends - starts)
    return means
