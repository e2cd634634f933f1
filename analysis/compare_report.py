"""The report of a comparison: its tables for the terminal, and one page with figures, tables and the configs of all modes."""

from __future__ import annotations

import json

from rich.text import Text

from .compare import Comparison, Measured, tables, warnings
from .compare_figures import all_figures
from .report import plain_console, print_table, write_page
from .series import counted

PAGE = "compare.html"


def print_comparison(compared: Comparison) -> None:
    """Print the tables, and what is wrong."""
    console = plain_console()
    for warning in warnings(compared):
        console.print(Text(f"warning: {warning}", "yellow"))
    for table in tables(compared):
        print_table(console, table)


def write_comparison(compared: Comparison, folder: str) -> str:
    """Write the page and its figures as PNG files into `folder`; the page's path."""
    runs = [*compared.all_runs, *compared.alone]
    return write_page(
        folder,
        PAGE,
        all_figures(compared),
        title=f"Comparison of {', '.join(compared.runs)}",
        ending=f"{counted(len(runs), 'run')} finished, {len(compared.failures)} failed",
        state="failed" if compared.failures else "finished",
        summary=_summary(compared),
        checks=[run.check for run in runs],
        warnings=warnings(compared),
        tables=tables(compared),
        unreadable=[],
        metadata={f"config of {run.kind}": json.dumps(run.config) for run in reversed(runs)},
    )


def _summary(compared: Comparison) -> list[tuple[str, str]]:
    runs = compared.all_runs
    if not runs:
        return []
    config = runs[0].config
    return [
        ("Name", config["job"]["name"]),
        ("Seeds", ", ".join(sorted({str(run.seed) for run in runs}))),
        ("Steps", str(config["control"]["steps"])),
        ("Batch", f"{config['batch']['prompts']} prompts of {config['batch']['group_size']} responses"),
        ("Engines", f"{config['rollout']['engine']}, {config['trainer']['engine']}"),
        *((f"Ranks, {mode}", _ranks(runs[0])) for mode, runs in compared.runs.items() if runs),
        ("Commit", ", ".join(sorted({run.commit for run in runs}))),
    ]


def _ranks(run: Measured) -> str:
    job = run.config["job"]
    same = ", on the same GPUs" if run.config["control"]["colocated"] else ""
    return f"{counted(job['trainers'], 'trainer')}, {counted(job['rollouts'], 'rollout')}{same}"
