"""The last lines of `laminar run`: how the run ended, from its status."""

from __future__ import annotations

from rich.console import Console

from laminar_hpc.record.status import MOST_LAG, Status


def print_summary(status: Status, run_dir: str, console: Console) -> None:
    """Print outcome, time, reward, accuracy and where the record is."""
    seconds = (status.ended_s or status.updated_s) - status.started_s
    rows = [
        ("outcome", f"{status.state}: {status.reason}"),
        ("time", f"{seconds:.0f} s, {status.step} of {status.steps} steps"),
        ("reward", f"{_figure(status.reward)} in the last step"),
        ("accuracy", f"{_figure(status.first_accuracy)} at first, {_figure(status.last_accuracy)} at last (held-out)"),
        ("record", run_dir),
    ]
    if status.lag is not None:
        rows.insert(-1, ("pace", pace_line(status)))
    for name, text in rows:
        console.print(f"{name:>9}: {text}", markup=False, soft_wrap=True)


def pace_line(status: Status) -> str:
    """By how much emulated time lagged, of a run that has some."""
    lag, worst = status.lag or 0.0, status.lag_of_worst_rank or 0.0
    text = f"emulated time lagged by {lag:.2%}, on the worst rank by {worst:.2%}"
    return f"{text}; more than {MOST_LAG:.0%}: its times do not count" if worst > MOST_LAG else text


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
