"""Several modes beside each other in figures; one colour for each mode in all of them."""

from __future__ import annotations

from collections.abc import Callable

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from .compare import Comparison, Curve, Measured
from .figures import BLUE, GREEN, INK, ORANGE, PINK, SKY, STYLE, WIDTH_INCH, from_zero, running_mean
from .tables import number

COLOURS = (SKY, PINK, ORANGE, GREEN, BLUE)
"""Of the modes in their order."""

LAST_STALENESS = 8
"""Larger ones share a place in the figure."""

POINTS = 200
"""Of a mean over seeds."""


def all_figures(compared: Comparison) -> dict[str, tuple[str, Figure]]:
    """Title and figure by file name (without ending), those that the runs have anything for."""
    makers: dict[str, tuple[str, Callable[[Comparison], Figure | None]]] = {
        "throughput": ("Throughput by mode", throughput),
        "learning": ("Reward and accuracy", learning),
        "staleness": ("Staleness by mode", staleness),
    }
    figures = {}
    with matplotlib.rc_context(STYLE):
        for name, (title, make) in makers.items():
            figure = make(compared)
            if figure is not None:
                figures[name] = (title, figure)
    return figures


def throughput(compared: Comparison) -> Figure | None:
    """Tokens/s of each mode as a bar, from the slowest to the fastest seed as a line on it, and the bound across all."""
    found = {mode: _rates(runs) for mode, runs in compared.runs.items() if len(_rates(runs))}
    if not found:
        return None
    figure = Figure(figsize=(WIDTH_INCH, 3.6), layout="constrained")
    axes = figure.subplots()
    for place, (mode, rates) in enumerate(found.items()):
        mean = float(rates.mean())
        axes.bar(place, mean, width=0.62, color=_colour(compared, mode))
        if len(rates) > 1:
            ends = [[mean - rates.min()], [rates.max() - mean]]
            axes.errorbar(place, mean, yerr=ends, color=INK, capsize=4, linewidth=1.2)
    if compared.bound is not None:
        label = f"bound: {compared.bound.title}, {number(compared.bound.tokens_per_s)}"
        axes.axhline(compared.bound.tokens_per_s, color=INK, linestyle="--", linewidth=1.2, label=label)
        axes.update_datalim([(0.0, compared.bound.tokens_per_s)])
        figure.legend(loc="outside upper right", fontsize=8.5)
    axes.set_xticks(range(len(found)), [f"{mode}\n{number(float(rates.mean()))}" for mode, rates in found.items()])
    second = "emulated second" if compared.emulated else "second"
    axes.set(
        title="Throughput: prompts and responses trained on", ylabel=f"tokens per {second}", xlabel="mode, and its mean"
    )
    axes.grid(axis="x", visible=False)
    from_zero(axes)
    return figure


def _rates(runs: list[Measured]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([run.tokens_per_s for run in runs if not np.isnan(run.tokens_per_s)])


def learning(compared: Comparison) -> Figure | None:
    """Reward, and accuracy where there is one, against time and against the samples trained on: means and each seed."""
    if not any(run.learns and len(run.rewards.values) for run in compared.all_runs):
        return None
    kinds: list[tuple[str, Callable[[Measured], Curve]]] = [("reward (running mean)", _smoothed)]
    if compared.evaluated:
        kinds.append(("accuracy on held-out prompts", lambda run: run.accuracies))
    figure = Figure(figsize=(WIDTH_INCH, 0.6 + 2.5 * len(kinds)), layout="constrained")
    panels = figure.subplots(len(kinds), 2, sharey="row", sharex="col", squeeze=False)
    second = "emulated s" if compared.emulated else "s"
    for (label, curve_of), (by_time, by_samples) in zip(kinds, panels, strict=True):
        for mode, runs in compared.runs.items():
            curves = [curve for run in runs if len((curve := curve_of(run)).values)]
            _draw(by_time, [(curve.seconds, curve.values) for curve in curves], _colour(compared, mode), mode)
            _draw(by_samples, [(curve.samples, curve.values) for curve in curves], _colour(compared, mode), "")
        by_time.set_ylabel(label)
    panels[-1][0].set_xlabel(f"time since the first publication ({second})")
    panels[-1][1].set_xlabel("samples trained on")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=5)
    return figure


def _smoothed(run: Measured) -> Curve:
    curve = run.rewards
    window = max(1, len(curve.values) // 20)
    return Curve(curve.seconds, curve.samples, running_mean(curve.values, window))


def _draw(axes: Axes, lines: list[tuple[np.ndarray, np.ndarray]], colour: str, label: str) -> None:
    """Each line thin, and their mean where all of them are."""
    if not lines:
        return
    if len(lines) == 1:
        axes.plot(*lines[0], color=colour, label=label)
        return
    for x, y in lines:
        axes.plot(x, y, color=colour, linewidth=0.6, alpha=0.6)
    begin, end = max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines)
    grid = np.linspace(begin, max(begin, end), POINTS)
    axes.plot(grid, np.mean([np.interp(grid, x, y) for x, y in lines], axis=0), color=colour, label=label, linewidth=2)


def staleness(compared: Comparison) -> Figure | None:
    """Shares of the trained-on trajectories of each mode by staleness at consumption."""
    found = {mode: _taken(runs) for mode, runs in compared.runs.items() if _taken(runs).sum()}
    if not found:
        return None
    figure = Figure(figsize=(WIDTH_INCH, 3.4), layout="constrained")
    axes = figure.subplots()
    last = max(int(np.flatnonzero(counts)[-1]) for counts in found.values())
    width = 0.84 / len(found)
    for place, (mode, counts) in enumerate(found.items()):
        offset = (place - (len(found) - 1) / 2) * width
        shares = counts[: last + 1] / counts.sum()
        axes.bar(np.arange(last + 1) + offset, shares, width=0.92 * width, color=_colour(compared, mode), label=mode)
    names = [f"{value} or more" if value == LAST_STALENESS else str(value) for value in range(last + 1)]
    axes.set_xticks(range(last + 1), names)
    axes.set(title="Staleness at consumption", xlabel="versions", ylabel="share of trajectories", ylim=(0, 1.03))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(axis="x", visible=False)
    figure.legend(loc="outside upper center", ncols=5)
    return figure


def _taken(runs: list[Measured]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """How many trajectories of all runs had a staleness of 0, 1, ..., `LAST_STALENESS` or more."""
    counts = np.zeros(LAST_STALENESS + 1, dtype=np.int64)
    for run in runs:
        np.add.at(counts, np.minimum(np.arange(len(run.taken)), LAST_STALENESS), run.taken)
    return counts


def _colour(compared: Comparison, mode: str) -> str:
    return COLOURS[list(compared.runs).index(mode) % len(COLOURS)]
