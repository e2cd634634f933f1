"""The relay bench in tables and one figure: medians over the repetitions of each cell."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from laminar_hpc.errors import ConfigError
from laminar_hpc.record import schema
from laminar_hpc.record.reader import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLAIN_WIDTH = 120

FORMULA = """x one copy: beside one copy between two neighbours in the same rounds. formula: (links + chunks - 1) * (start-up
time + bytes of a chunk / bandwidth), with the start-up time and the bandwidth of a link as pings measured them beforehand."""
"""Explains two columns."""

FIGURE = "relay_bench.png"
DPI = 130

Rows = NDArray[np.void]


class Cell(NamedTuple):
    """Broadcasts that differ in their repetition alone. Times are medians, in seconds; `over_copy` is the ratio to one copy
    between neighbours in the same rounds (NaN: there was none).
    """

    way: str
    transport: str
    relays: int
    nbytes: int
    chunks: int
    rounds: int
    seconds: float
    fastest_s: float
    slowest_s: float
    over_copy: float
    formula_s: float


def broadcasts(run: Run) -> list[Cell]:
    """All cells, by bytes, transport, chunks, number of relays and way."""
    cells = []
    rows = run.table("bench_broadcasts")
    for group in _groups(rows, ("attempt", "nbytes", "relays", "way")):
        first = group[0]
        start = rows[rows["attempt"] == first["attempt"]]
        beside = start[
            (start["relays"] == first["relays"]) & (start["way"] == _code("bench_broadcasts", "way", "copy"))
        ]
        median = float(np.median(group["seconds"]))
        cells.append(
            Cell(
                _name("bench_broadcasts", "way", first["way"]),
                _name("bench_broadcasts", "transport", first["transport"]),
                int(first["relays"]),
                int(first["nbytes"]),
                int(first["chunks"]),
                len(group),
                median,
                float(group["seconds"].min()),
                float(group["seconds"].max()),
                median / float(np.median(beside["seconds"])) if len(beside) else float("nan"),
                float(np.median(group["formula_s"])),
            )
        )
    return cells


def print_bench(run: Run) -> None:
    """Print the tables for which there are rows."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    for make in (_broadcast_table, _publish_table, _pull_table, _failure_table):
        table = make(run)
        if table.row_count:
            console.print(table)


def _broadcast_table(run: Run) -> Table:
    table = Table(title="Broadcasts, from the first byte sent to the last relay complete", title_justify="left")
    table.caption, table.caption_justify = FORMULA, "left"
    for name in ("relays", "MB", "transport", "chunks", "way", "rounds"):
        table.add_column(name, justify="right")
    for name in ("median, s", "fastest, s", "slowest, s", "x one copy", "formula, s", "x formula"):
        table.add_column(name, justify="right")
    for cell in broadcasts(run):
        formula = "" if np.isnan(cell.formula_s) or not cell.formula_s else f"{cell.formula_s:.3f}"
        table.add_row(
            str(cell.relays),
            f"{cell.nbytes / 1e6:g}",
            cell.transport if cell.way == "relays" else "",
            str(cell.chunks),
            cell.way,
            str(cell.rounds),
            f"{cell.seconds:.3f}",
            f"{cell.fastest_s:.3f}",
            f"{cell.slowest_s:.3f}",
            "" if np.isnan(cell.over_copy) else f"{cell.over_copy:.2f}",
            formula,
            f"{cell.seconds / cell.formula_s:.2f}" if formula else "",
        )
    return table


def _publish_table(run: Run) -> Table:
    table = Table(title="A trainer's stall beside a plain copy of the same bytes: medians", title_justify="left")
    for name in ("relays", "MB", "transport", "pairs", "stall, ms", "copy, ms", "ratio of pairs"):
        table.add_column(name, justify="right")
    for group in _groups(run.table("bench_publishes"), ("attempt", "relays")):
        first = group[0]
        table.add_row(
            str(first["relays"]),
            f"{first['nbytes'] / 1e6:g}",
            _name("bench_publishes", "transport", first["transport"]),
            str(len(group)),
            f"{1e3 * np.median(group['publish_s']):.1f}",
            f"{1e3 * np.median(group['copy_s']):.1f}",
            f"{np.median(group['publish_s'] / group['copy_s']):.3f}",
        )
    return table


def _pull_table(run: Run) -> Table:
    table = Table(title="A rollout's load from the image beside a plain copy: medians", title_justify="left")
    for name in ("readers at once", "MB", "rounds", "load, ms", "copy, ms", "share of the copy's bandwidth"):
        table.add_column(name, justify="right")
    for group in _groups(run.table("bench_pulls"), ("attempt", "readers")):
        first = group[0]
        table.add_row(
            str(first["readers"]),
            f"{first['nbytes'] / 1e6:g}",
            str(len(group)),
            f"{1e3 * np.median(group['pull_s']):.0f}",
            f"{1e3 * np.median(group['copy_s']):.0f}",
            f"{np.median(group['copy_s'] / group['pull_s']):.3f}",
        )
    return table


def _failure_table(run: Run) -> Table:
    table = Table(title="Faults in the middle of a broadcast", title_justify="left")
    for name in ("fault", "transport", "rounds", "whole", "lost versions"):
        table.add_column(name, justify="right")
    for name in ("noticed, ms", "moved, ms", "slowest", "complete, ms"):
        table.add_column(name, justify="right")
    for group in _groups(run.table("bench_failures"), ("transport", "fault")):
        first = group[0]
        moved = group["moved_s"][~np.isnan(group["moved_s"])]
        table.add_row(
            _name("bench_failures", "fault", first["fault"]),
            _name("bench_failures", "transport", first["transport"]),
            str(len(group)),
            str(int((group["complete"] == group["survivors"]).sum())),
            str(int(group["lost_publications"].sum())),
            _ms(group["noticed_s"]),
            _ms(moved),
            f"{1e3 * moved.max():.0f}" if len(moved) else "-",
            _ms(group["complete_s"]),
        )
    return table


def write_bench_figure(run: Run) -> str:
    """Write the figure into the run directory; its path. ConfigError where matplotlib is not installed."""
    try:
        import matplotlib

        from .figures import STYLE
    except ImportError as error:
        raise ConfigError(f"figures need matplotlib ({error}): pip install 'laminar_hpc[report]'") from error
    path = os.path.join(run.run_dir, FIGURE)
    with matplotlib.rc_context(STYLE):
        figure = bench_figure(run)
        figure.savefig(path, dpi=DPI)
    return path


def bench_figure(run: Run) -> Figure:
    """A panel for broadcasts and one for failures, as far as there are rows; needs matplotlib."""
    from matplotlib.figure import Figure

    cells, failures = broadcasts(run), run.table("bench_failures")
    panels: list[Callable[[Any], None]] = []
    if cells:
        panels.append(lambda axes: _draw_broadcasts(axes, cells))
    if len(failures):
        panels.append(lambda axes: _draw_failures(axes, failures))
    figure = Figure(figsize=(5.0 * max(1, len(panels)), 4.2), layout="constrained")
    for place, draw in enumerate(panels, start=1):
        draw(figure.add_subplot(1, len(panels), place))
    return figure


def _draw_broadcasts(axes: Any, cells: list[Cell]) -> None:
    """Seconds over the number of relays, a line for each way, dots at the formula's."""
    from matplotlib.ticker import LogLocator, NullFormatter

    nbytes = cells[0].nbytes
    lines: dict[tuple[str, str, int], list[Cell]] = {}
    for cell in cells:
        if cell.nbytes == nbytes:
            ours = cell.way == "relays"
            key = (cell.way, cell.transport if ours else "", cell.chunks if ours else 0)
            lines.setdefault(key, []).append(cell)
    for (way, transport, chunks), line in lines.items():
        label = f"relays, {transport}, {chunks} chunks" if way == "relays" else way
        x = [cell.relays for cell in line]
        drawn = axes.plot(x, [cell.seconds for cell in line], marker="o", markersize=4, label=label)
        if way == "relays":
            formula = [cell.formula_s for cell in line]
            axes.plot(x, formula, linestyle=":", color=drawn[0].get_color(), label=f"formula, {chunks} chunks")
    axes.set(title=f"Broadcast of {nbytes / 1e6:g} MB", xlabel="relays", ylabel="s", yscale="log")
    counts = sorted({cell.relays for line in lines.values() for cell in line})
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlim(counts[0] - 0.5, counts[-1] + 0.5)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend(fontsize=8)


def _draw_failures(axes: Any, rows: Rows) -> None:
    """From noticing a fault to the next chunk: every round of each fault."""
    names = []
    for place, group in enumerate(_groups(rows, ("transport", "fault"))):
        moved = 1e3 * group["moved_s"]
        spread = np.linspace(-0.2, 0.2, len(moved))
        axes.plot(place + spread, moved, linestyle="", marker="o", markersize=3)
        names.append(_name("bench_failures", "fault", group[0]["fault"]))
    axes.set_xticks(range(len(names)), names)
    axes.set(title="From noticing a fault to the next chunk", ylabel="ms")
    axes.set_ylim(bottom=0.0)


def _groups(rows: Rows, columns: tuple[str, ...]) -> Iterator[Rows]:
    """The rows that agree in these columns, group by group, in the order of the columns' values."""
    if len(rows):
        for key in np.unique(rows[list(columns)]):
            chosen = np.ones(len(rows), dtype=np.bool_)
            for column in columns:
                chosen &= rows[column] == key[column]
            yield rows[chosen]


def _name(table: str, column: str, code: int) -> str:
    return schema.TABLES[table].column(column).names[int(code)]


def _code(table: str, column: str, name: str) -> int:
    return schema.TABLES[table].code(column, name)


def _ms(seconds: Any) -> str:
    known = np.asarray(seconds)[~np.isnan(seconds)]
    return f"{1e3 * np.median(known):.0f}" if len(known) else "-"
