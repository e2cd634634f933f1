"""Faults for a running job, by the names of what they hit, and what the record says became of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from statistics import mean, median
from typing import NamedTuple

from laminar_command import Laminar, pid_of, writers_of

from laminar_hpc.protocol.commands import Generate, Settle
from laminar_hpc.protocol.events import Finished, RankLost, RelayReady, Streamed, Trained
from laminar_hpc.protocol.trajectory import State
from laminar_hpc.protocol.wire import AnyRecord, decode
from laminar_hpc.record.reader import Run, open_run

TURN_S = 0.5
"""An event has the time at which the manager's turn began."""


class Fault(NamedTuple):
    """What was done to which rank, or to which worker of it, in which attempt, and when (Unix time)."""

    kind: str
    rank: int
    worker: str | None
    attempt: int
    at_unix_s: float
    pids: tuple[int, ...] = ()
    replaced_s: float | None = None
    """A task worker's loss is no event: after so many seconds its rank had replaced it."""


class Outcome(NamedTuple):
    """What became of a fault: seconds, None where that cannot be said.

    `noticed_s`: from the fault until the manager knew. From then on, `goes_on_s`: until the first of the `trajectories` that
    the rank had under way is generated again, elsewhere if the rank is lost; `back_s`: until the rank, or the spare in its
    place, works again (of a task worker, from the fault on: until there is another one). `tokens` were generated twice: those
    of trajectories that started over, as the record has them, and those that had not been streamed yet, by the rate of the
    rank's last streams.
    """

    noticed_s: float | None
    goes_on_s: float | None
    back_s: float | None
    trajectories: int
    tokens: int


def workers_of(laminar: Laminar, rank: int, worker: str) -> list[int]:
    """The processes of a rank's worker; none while it waits to be started again."""
    (log,) = laminar.run_dir.glob(f"logs/rank-{rank:05d}.*.{worker}.log")
    return writers_of(laminar.run_dir, log)


def strike(
    laminar: Laminar, kind: str, rank: int, worker: str | None, attempt: int, number: signal.Signals
) -> Fault | None:
    """Send a signal to a rank, or to its worker; None where the worker is not there: it waits to be started again."""
    if worker is None:
        pids = [pid_of(laminar.run_dir, rank)]
    else:
        pids = workers_of(laminar, rank, worker)
    at = time.time()
    for pid in pids:
        os.kill(pid, number)
    return Fault(kind, rank, worker, attempt, at, tuple(pids)) if pids else None


def replaced(laminar: Laminar, fault: Fault) -> bool:
    """Whether all processes that the fault has hit are gone, and their rank has started others."""
    assert fault.worker is not None
    pids = workers_of(laminar, fault.rank, fault.worker)
    return bool(pids) and not set(pids) & set(fault.pids)


def _zero(run: Run, attempt: int) -> float:
    """The Unix time of 0 in the clock of an attempt's manager."""
    (manager,) = [file for file in run.files if file.role == "manager" and file.attempt == attempt]
    assert manager.clock_zero_unix_s is not None
    return manager.clock_zero_unix_s


def noticed(run: Run, fault: Fault) -> bool:
    """Whether the manager has written down that the rank or its worker was lost."""
    lost, zero = run.table("failures"), _zero(run, run.attempts[0])  # the clock of all tables
    after = lost["time_s"] + zero > fault.at_unix_s - TURN_S
    return bool(((lost["rank"] == fault.rank) & (lost["attempt"] == fault.attempt) & after).any())


class History:
    """The events and commands of an attempt, in the order of time, decoded once for all of its faults. Times are Unix times."""

    def __init__(self, run: Run, attempt: int) -> None:
        zero = _zero(run, attempt)
        self.events: list[tuple[float, AnyRecord]] = [
            (one.time_s + zero, decode(one.data)) for one in run.events(attempt)
        ]
        self.commands: list[tuple[float, AnyRecord]] = [
            (one.time_s + zero, decode(one.data)) for one in run.commands(attempt)
        ]

    def loss(self, fault: Fault) -> tuple[float, RankLost] | None:
        """When and as what the manager was told of a fault; None where it was not."""
        for time_s, event in self.events:
            if time_s > fault.at_unix_s - TURN_S and isinstance(event, RankLost) and event.rank == fault.rank:
                return time_s, event
        return None

    def under_way(self, rank: int, at: float) -> set[int]:
        """The trajectories that a rank was generating when it was lost at `at`."""
        had: dict[int, int] = {}  # trajectory: the rank that it was given to last
        for time_s, command in self.commands:
            if time_s >= at:
                break
            if isinstance(command, Generate):
                had.update((spec.id, command.rank) for spec in command.trajectories)
            elif isinstance(command, Settle):
                for one in command.trajectories:
                    had.pop(one.trajectory, None)
        ended = {event.trajectory for time_s, event in self.events if time_s < at and isinstance(event, Finished)}
        return {id for id, owner in had.items() if owner == rank and id not in ended}

    def followed(self, under_way: set[int], at: float) -> tuple[dict[int, int], int]:
        """Who was given first, after `at`, what a rank had under way, or what took its place where its group started over.

        Trajectories and their ranks; and the tokens of all that started over.
        """
        given: dict[int, int] = {}
        over: set[int] = set()
        tokens = 0
        for time_s, command in self.commands:
            if time_s < at:
                continue
            if isinstance(command, Generate):
                for spec in command.trajectories:
                    if spec.id in under_way or spec.group in over:
                        given.setdefault(spec.id, command.rank)
            elif isinstance(command, Settle):
                ended = {group.group for group in command.groups}
                discarded = [one for one in command.trajectories if one.state is State.DISCARDED]
                lost = {one.group for one in discarded if one.trajectory in under_way and one.trajectory not in given}
                over |= lost - ended
                tokens += sum(one.response_tokens for one in discarded if one.group in lost - ended)
        return given, tokens

    def unstreamed(self, fault: Fault) -> float:
        """Tokens that a rank had generated and not streamed when it was struck, if it went on as between its last streams."""
        streams = [
            (time_s, {one.trajectory: one.tokens for one in event.progress})
            for time_s, event in self.events
            if time_s < fault.at_unix_s and isinstance(event, Streamed) and event.rank == fault.rank
        ][-2:]
        if len(streams) < 2:
            return 0.0
        (before_s, before), (last_s, last) = streams
        gains = [last[id] - before[id] for id in last.keys() & before.keys()]
        if not gains or last_s == before_s:
            return 0.0  # all of it has just begun
        return mean(gains) * len(last) / (last_s - before_s) * (fault.at_unix_s - last_s)

    def works_again(self, fault: Fault, at: float, incarnation: int) -> float | None:
        """When what was lost at `at` works again: the rank streams or trains, or a relay has taken a relay's place."""
        for time_s, event in self.events:
            if time_s < at:
                continue
            if isinstance(event, Streamed) and event.rank == fault.rank and event.incarnation > incarnation:
                return time_s
            if isinstance(event, Trained) and event.rank == fault.rank:
                return time_s
            if isinstance(event, RelayReady) and fault.kind.startswith("relay"):
                return time_s
        return None


def outcome(history: History, fault: Fault) -> Outcome:
    """What the record says about a fault; `history` is that of its attempt."""
    loss = None if fault.worker == "task" else history.loss(fault)
    if loss is None:
        return Outcome(None, None, fault.replaced_s, 0, 0)
    at, lost = loss
    under_way = history.under_way(fault.rank, at)
    given, tokens = history.followed(under_way, at)
    resumed = [
        time_s
        for time_s, event in history.events
        if isinstance(event, Streamed)
        and time_s >= at
        and any(given.get(one.trajectory) == event.rank for one in event.progress)
    ]
    back = history.works_again(fault, at, lost.incarnation)
    return Outcome(
        noticed_s=max(0.0, at - fault.at_unix_s),
        goes_on_s=resumed[0] - at if resumed else None,
        back_s=None if back is None else back - at,
        trajectories=len(under_way),
        tokens=round(tokens + (history.unstreamed(fault) if under_way else 0.0)),
    )


def outcomes(run: Run, faults: list[Fault]) -> list[tuple[Fault, Outcome]]:
    """What the record says about each."""
    histories = {attempt: History(run, attempt) for attempt in {fault.attempt for fault in faults}}
    return [(fault, outcome(histories[fault.attempt], fault)) for fault in faults]


def table(faults: list[tuple[Fault, Outcome]]) -> str:
    """A row for each kind: how often, median and largest of each figure."""
    lines = [
        f"{'fault':28} {'n':>3} {'noticed s':>18} {'goes on s':>18} {'back s':>18} {'tokens twice':>18} {'trajectories':>12}"
    ]
    for kind in dict.fromkeys(fault.kind for fault, _ in faults):
        rows = [result for fault, result in faults if fault.kind == kind]
        spreads = [
            spread([row.noticed_s for row in rows]),
            spread([row.goes_on_s for row in rows]),
            spread([row.back_s for row in rows]),
            spread([row.tokens for row in rows if row.trajectories], digits=0),
        ]
        cells = " ".join(f"{cell:>18}" for cell in spreads)
        lines.append(f"{kind:28} {len(rows):3} {cells} {sum(row.trajectories for row in rows):12}")
    return "\n".join(lines)


def spread(values: Sequence[float | None], digits: int = 2) -> str:
    """Median and largest of those that are known."""
    known = sorted(value for value in values if value is not None)
    return f"{median(known):.{digits}f} (to {known[-1]:.{digits}f})" if known else "-"


def opened(laminar: Laminar) -> Run:
    return open_run(str(laminar.run_dir))
