"""Faults for a running job, by the names of what they hit, and what the record says became of them."""

from __future__ import annotations

import os
import signal
import time
from typing import NamedTuple

from laminar_command import Laminar, pid_of, writers_of

from laminar_hpc.protocol.commands import Generate
from laminar_hpc.protocol.events import Streamed
from laminar_hpc.protocol.wire import decode
from laminar_hpc.record.reader import Run, open_run

TURN_S = 0.5
"""An event has the time at which the manager's turn began."""


class Fault(NamedTuple):
    """What was done to which rank, or to which worker of it, and when (Unix time)."""

    kind: str
    rank: int
    worker: str | None
    at_unix_s: float


class Outcome(NamedTuple):
    """Seconds from the fault until the manager knew, and from then until what the rank had generated goes on elsewhere.

    None where that cannot be said: nobody noticed, or the rank generated nothing. `trajectories` went on.
    """

    noticed_s: float | None
    elsewhere_s: float | None
    trajectories: int


def strike(laminar: Laminar, kind: str, rank: int, worker: str | None, number: signal.Signals) -> Fault:
    """Send a signal to a rank, or to its worker."""
    if worker is None:
        pids = [pid_of(laminar.run_dir, rank)]
    else:
        (log,) = laminar.run_dir.glob(f"logs/rank-{rank:05d}.*.{worker}.log")
        pids = writers_of(laminar.run_dir, log)
    at = time.time()
    for pid in pids:
        os.kill(pid, number)
    return Fault(kind, rank, worker, at)


def seconds_of(run: Run, fault: Fault, attempt: int) -> float:
    """When the fault was, in the clock of the attempt's record."""
    (manager,) = [file for file in run.files if file.role == "manager" and file.attempt == attempt]
    assert manager.clock_zero_unix_s is not None
    return fault.at_unix_s - manager.clock_zero_unix_s


def noticed(run: Run, fault: Fault, attempt: int) -> float | None:
    """When the manager wrote down that the rank or its worker was lost; None where it has not."""
    lost, at_s = run.table("failures"), seconds_of(run, fault, attempt)
    own = lost[(lost["rank"] == fault.rank) & (lost["attempt"] == attempt) & (lost["time_s"] > at_s - TURN_S)]
    return float(own["time_s"][0]) if len(own) else None


def outcome(run: Run, fault: Fault, attempt: int) -> Outcome:
    """What the record of an attempt says about a fault in it."""
    noticed_s, at_s = noticed(run, fault, attempt), seconds_of(run, fault, attempt)
    if noticed_s is None or fault.worker == "task":
        return Outcome(None, None, 0)
    events = [(one.time_s, decode(one.data)) for one in run.events(attempt)]
    had: dict[int, int] = {}  # trajectory: the rank that it was given to last
    given: dict[int, tuple[float, int]] = {}
    for command in run.commands(attempt):
        message = decode(command.data)
        if not isinstance(message, Generate):
            continue
        for spec in message.trajectories:
            if command.time_s < noticed_s:
                had[spec.id] = message.rank
            elif had.get(spec.id) == fault.rank and spec.id not in given and message.incarnation >= 0:
                given[spec.id] = (command.time_s, message.rank)
    began = [
        time_s
        for time_s, event in events
        if isinstance(event, Streamed)
        and time_s >= noticed_s
        and any(given.get(one.trajectory, (0.0, -1))[1] == event.rank for one in event.progress)
    ]
    return Outcome(max(0.0, noticed_s - at_s), began[0] - noticed_s if began else None, len(given))


def table(faults: list[tuple[Fault, Outcome]]) -> str:
    """A row for each kind: how often, median and longest of each time."""
    lines = [f"{'fault':24} {'n':>3} {'noticed s':>18} {'elsewhere s':>18} {'trajectories':>12}"]
    for kind in dict.fromkeys(fault.kind for fault, _ in faults):
        rows = [result for fault, result in faults if fault.kind == kind]
        lines.append(
            f"{kind:24} {len(rows):3} {_spread([row.noticed_s for row in rows]):>18} "
            f"{_spread([row.elsewhere_s for row in rows]):>18} {sum(row.trajectories for row in rows):12}"
        )
    return "\n".join(lines)


def _spread(values: list[float | None]) -> str:
    known = sorted(value for value in values if value is not None)
    return f"{known[len(known) // 2]:.2f} (to {known[-1]:.2f})" if known else "-"


def opened(laminar: Laminar) -> Run:
    return open_run(str(laminar.run_dir))
