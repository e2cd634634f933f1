"""The report of a run: tables for the terminal, and one page with checks, figures and tables that needs nothing else."""

from __future__ import annotations

import base64
import os
import time
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from laminar_hpc.errors import ConfigError, RecordError
from laminar_hpc.record.reader import Run
from laminar_hpc.record.status import was_killed

from .checks import Check, Result, run_checks, warnings
from .page import render
from .series import steps
from .tables import Table, all_tables, summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLAIN_WIDTH = 120
"""Columns of what is printed where no terminal says how wide it is."""

PAGE = "report.html"

DPI = 130


@dataclass(frozen=True)
class Report:
    """What terminal and page show of a run, computed once."""

    run: Run
    checks: list[Check]
    warnings: list[str]
    tables: list[Table]
    summary: list[tuple[str, str]]


def make_report(run: Run) -> Report:
    """Run all checks and make all tables."""
    return Report(run, run_checks(run), warnings(run), all_tables(run), summary(run))


def print_report(report: Report) -> None:
    """Print how the run ended, the checks and all tables."""
    run = report.run
    console = plain_console()
    console.print(f"{title(run)}: {ending(run)}", markup=False, highlight=False)
    for name, value in report.summary:
        console.print(f"  {name}: {value}", markup=False, highlight=False)
    _print_checks(console, report.checks)
    for warning in report.warnings:
        console.print(Text(f"warning: {warning}", "yellow"))
    for table in report.tables:
        print_table(console, table)
    if not len(steps(run)):
        console.print("No step has been trained yet.")
    for path, reason in run.unreadable:
        console.print(f"Left out: {path}: {reason}", markup=False, highlight=False)


def write_report(report: Report, out_dir: str | None = None) -> str:
    """Write the page and its figures as PNG files into `out_dir` (default: `report` in the run directory); the page's path.

    ConfigError where matplotlib is not installed; RecordError where the files cannot be written.
    """
    try:
        from .figures import all_figures
    except ImportError as error:
        raise ConfigError(f"figures need matplotlib ({error}): pip install 'laminar_hpc[report]'") from error
    run = report.run
    return write_page(
        out_dir or os.path.join(run.run_dir, "report"),
        PAGE,
        all_figures(run),
        title=title(run),
        ending=ending(run),
        state=state(run),
        summary=report.summary,
        checks=report.checks,
        warnings=report.warnings,
        tables=report.tables,
        unreadable=run.unreadable,
        metadata=run.metadata,
    )


def write_page(folder: str, name: str, figures: dict[str, tuple[str, Figure]], **shown: Any) -> str:
    """Write a page with these figures, titles and figures by name, and each as a PNG file, into `folder`; the page's path.

    `shown` is what else the page shows, as `page.render` takes it. RecordError where the files cannot be written.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        pictures = []
        for picture, (figure_title, figure) in figures.items():
            buffer = BytesIO()
            figure.savefig(buffer, format="png", dpi=DPI)
            _write(os.path.join(folder, f"{picture}.png"), buffer.getvalue())
            pictures.append((figure_title, base64.b64encode(buffer.getvalue()).decode()))
        path = os.path.join(folder, name)
        _write(path, render(figures=pictures, **shown).encode())
    except OSError as error:
        raise RecordError(f"{folder}: cannot be written: {error.strerror}") from error
    return path


def plain_console() -> Console:
    """What tables are printed on: a terminal, or `PLAIN_WIDTH` columns."""
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)


def title(run: Run) -> str:
    """Name and directory of the run."""
    name = run.config.get("job", {}).get("name", "run")
    return f"{name} ({os.path.basename(os.path.abspath(run.run_dir))})"


def state(run: Run) -> str:
    """How the run stands: a state of its status file, "killed", or "unknown" without a status file."""
    if run.status is None:
        return "unknown"
    return "killed" if was_killed(run.status) else run.status.state


def ending(run: Run) -> str:
    """How the run stands or ended, in one sentence."""
    status = run.status
    if status is None:
        return "no status file; its record " + ("was closed in order" if run.closed else "ends in mid-run")
    seconds = (status.ended_s or status.updated_s) - status.started_s
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.started_s))
    if was_killed(status):
        return f"killed, without a word, at least {seconds:.0f} s after its start at {began}"
    if not status.over:
        return f"running, {seconds:.0f} s after its start at {began}: {status.reason}"
    return f"{status.state} {seconds:.0f} s after its start at {began}: {status.reason}"


def _write(path: str, data: bytes) -> None:
    part = f"{path}.part"
    with open(part, "wb") as file:
        file.write(data)
    os.rename(part, path)


def _print_checks(console: Console, checks: list[Check]) -> None:
    colours = {Result.HOLDS: "green", Result.VIOLATED: "bold red", Result.NOTHING: "yellow"}
    table = RichTable(title="Checks", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for header in ("result", "rule", "on"):
        table.add_column(header)
    for check in checks:
        table.add_row(Text(check.result.value, colours[check.result]), Text(check.rule), Text(check.figure))
        for detail in check.details:
            table.add_row("", Text(f"  {detail}"), "")
    console.print()
    console.print(table)


def print_table(console: Console, table: Table) -> None:
    """Print a table, its title above and its note below it."""
    shown = RichTable(title=Text(table.title), title_justify="left", box=None, padding=(0, 2, 0, 0))
    for index, header in enumerate(table.header):
        shown.add_column(
            Text(header), justify="left" if index == 0 or header in ("reason", "what happened") else "right"
        )
    for row in table.rows:
        shown.add_row(*(Text(cell) for cell in row))
    console.print()
    console.print(shown)
    if table.note:
        console.print(Text(table.note, "dim"))
