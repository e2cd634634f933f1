"""The frame of every rank's loop: mail, clock, record, heartbeat, idle back-off, and the reasons to leave.

A role's loop is a `RankLoop`: `start`, then `turn` again and again until `done`. A turn never waits: it does what has
arrived and says whether that was anything. The waiting happens here, in one place, with a bound on everything.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from enum import Enum
from types import FrameType
from typing import Protocol

import msgspec

from laminar_hpc.config.schema import Config
from laminar_hpc.control.settings import Settings
from laminar_hpc.errors import LaminarError
from laminar_hpc.mpi.mail import Mail
from laminar_hpc.mpi.world import World
from laminar_hpc.policy.roles import Placement, Role
from laminar_hpc.process.channel import Channel, wait_any
from laminar_hpc.protocol.events import StopRequested
from laminar_hpc.protocol.peer import Failure, Goodbye, Heartbeat, ManagerAlive, Pace, Paced, Resume, Shutdown
from laminar_hpc.protocol.wire import AnyRecord
from laminar_hpc.record.paths import RunPaths
from laminar_hpc.record.writer import RecordWriter

MANAGER = 0
"""The manager's rank; the store's first shard lives there too."""

SHORTEST_NAP_S = 0.0005
LONGEST_NAP_S = 0.01
"""An idle loop sleeps between these: long enough that many ranks can share a core, short beside any step."""

TRANSFER_NAP_S = 0.001
"""The longest pause while chunks are under way: MPI moves bytes only when it is called."""

FAREWELL_S = 5.0
"""How long ranks wait for each other at the end."""


def say(text: str, error: bool = False) -> None:
    """Print a line, on stderr where it is an error. Whoever reads may be gone: that must not keep a rank from its end."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr if error else sys.stdout, flush=True)


class RankLoop(Protocol):
    """What a role does."""

    done: bool
    clean: bool
    """Whether all ranks leave together in the end, as far as this one knows."""

    def start(self, now: float) -> None:
        """Begin: start workers, say hello."""

    def turn(self, now: float) -> bool:
        """Do all that can be done now; whether that was anything."""

    def receive(self, source: int, message: AnyRecord, now: float) -> None:
        """Take one message from another rank."""

    def waiting_for(self) -> str:
        """What this rank waits for, "" while it works."""

    def phase(self, busy: bool) -> str:
        """The phase that the time since the last turn counts to (record.schema.PHASES of its role)."""

    def longest_nap_s(self) -> float:
        """How long the loop may sleep when there was nothing to do."""

    def channels(self) -> list[Channel]:
        """The workers' channels, so that an idle loop wakes when one speaks."""

    def close(self) -> None:
        """End all workers."""


class Rank:
    """One MPI process of the job."""

    def __init__(
        self,
        config: Config,
        settings: Settings,
        world: World,
        placements: list[Placement],
        resume: Resume | None = None,
    ) -> None:
        """`resume` names the checkpoint that this attempt goes on from, if any."""
        self.config = config
        self.resume = resume
        self.settings = settings
        self.attempt = settings.attempt
        self.world = world
        self.mail = Mail(world)
        self.placements = placements
        self.me = placements[world.rank]
        self.paths = RunPaths(config.run_dir)
        self.terminated: str | None = None
        self._origin = time.monotonic()
        self._parent = os.getppid()
        self._pace: Pace | None = None
        self.record: RecordWriter | None = None

    @property
    def name(self) -> str:
        """Rank and role, for messages."""
        return f"rank {self.world.rank} ({self.me.role.value} {self.me.index} on {self.me.node})"

    def now(self) -> float:
        """Seconds since this rank began."""
        return time.monotonic() - self._origin

    def ranks_of(self, role: Role) -> list[int]:
        """The ranks of a role, in order of their index."""
        return [rank for rank, placement in enumerate(self.placements) if placement.role is role]

    def promote(self, spare: int) -> None:
        """Rank `spare` is the relay of its node from now on, after those that there are."""
        placement = self.placements[spare]
        self.placements[spare] = Placement(Role.RELAY, len(self.ranks_of(Role.RELAY)), placement.node)
        self.me = self.placements[self.world.rank]

    def place_on_node(self) -> int:
        """How many ranks of this role on this node come before this one: which of the node's GPUs is its."""
        here = [placement for placement in self.placements[: self.world.rank] if placement.node == self.me.node]
        return sum(placement.role is self.me.role for placement in here)

    @property
    def heartbeat_s(self) -> float:
        """How often this rank says that it is alive: a relay several times in the time after which it would count as lost."""
        if self.me.role in (Role.RELAY, Role.SPARE):
            return min(self.config.job.heartbeat_s, self.config.weights.relay_timeout_s / 4)
        return self.config.job.heartbeat_s

    def log_path(self, worker: str) -> str:
        """Where a worker of this rank writes its output."""
        return self.paths.log(self.world.rank, f"{self.me.role.value}.{worker}")

    def tell_manager(self, message: AnyRecord) -> None:
        """Send an event or a message to the manager."""
        self.mail.send(MANAGER, message)

    def note_pace(self, pace: Pace | None) -> None:
        """What this rank's worker emulates has kept to its schedule like this since it last said so."""
        if pace is not None:
            self._pace = pace if self._pace is None else self._pace + pace

    def write_pace(self, now: float) -> None:
        """A row of what was noted since the last one, and a word to the manager; nothing where nothing was."""
        if self._pace is None:
            return
        if self.record is not None:
            self.record.add("pacing", time_s=now, **msgspec.structs.asdict(self._pace))
        self.tell_manager(Paced(self.world.rank, self._pace))
        self._pace = None

    def parent_is_gone(self) -> bool:
        """Whether the launcher has died: its children get another parent."""
        return os.getppid() != self._parent

    def watch_signals(self) -> None:
        """SIGTERM, SIGINT and SIGUSR1, to any rank, ask for an orderly end: the manager sees to it, for all ranks.

        SIGINT comes from a person, who does not want to wait; the others from a batch system, whose job is to be resumed.
        """

        def terminate(number: int, _frame: FrameType | None) -> None:
            self.terminated = signal.Signals(number).name

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, terminate)


class Leaving(Enum):
    """How a rank leaves."""

    TOGETHER = "together"
    """With all others: MPI is finalised."""
    ALONE = "alone"
    """As the manager asked, but a rank is missing: nobody waits for the others."""
    LOST = "lost"
    """After an error, or without a word from the manager."""


def run_loop(rank: Rank, loop: RankLoop) -> Leaving:
    """Drive a role's loop until it is done.

    An exception on the manager ends the job; on any other rank it is told to the manager, which decides.
    """
    rank.watch_signals()
    frame = _Frame(rank)
    try:
        loop.start(rank.now())
        while not loop.done:
            now = rank.now()
            busy = frame.deliver(loop, now)
            busy = loop.turn(now) or busy
            frame.attend(loop, now, busy)
            if busy:
                frame.nap_s = SHORTEST_NAP_S
            else:
                wait_any(loop.channels(), frame.nap_s)
                frame.nap_s = min(2 * frame.nap_s, loop.longest_nap_s())
        frame.write_phases(rank.now())
        if frame.left_alone:
            return Leaving.LOST
        return Leaving.TOGETHER if loop.clean else Leaving.ALONE
    except Exception as error:
        _report_failure(rank, error)
        return Leaving.LOST
    finally:
        loop.close()


class _Frame:
    """What all loops share between two turns."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.nap_s = SHORTEST_NAP_S
        self.left_alone = ""
        now = rank.now()
        self._heard_manager = now
        self._attended = now
        self._next_beat = now
        self._waiting_for = ""
        self._waiting_since = now
        self._phase_since = now
        self._phase_seconds: dict[str, float] = {}
        self._next_phase_row = now + rank.config.record.flush_s

    def deliver(self, loop: RankLoop, now: float) -> bool:
        """Hand all mail to the loop."""
        messages = self.rank.mail.poll()
        for source, message in messages:
            if source == MANAGER:
                self._heard_manager = now
            if isinstance(message, Shutdown):
                loop.done, loop.clean = True, message.clean
            elif not isinstance(message, ManagerAlive):
                loop.receive(source, message, now)
        return bool(messages)

    def attend(self, loop: RankLoop, now: float, busy: bool) -> None:
        """Heartbeat, record, and the reasons to leave that are no message."""
        self._account(loop, now, busy)
        self._heard_manager += away_s(self._attended, now, self.rank.heartbeat_s)
        self._attended = now
        if self.rank.world.rank != MANAGER:
            self._beat(loop, now)
            if self.rank.terminated is not None:
                save = self.rank.terminated != signal.SIGINT.name
                self.rank.tell_manager(StopRequested(f"{self.rank.name} got {self.rank.terminated}", save))
                self.rank.terminated = None
            if now - self._heard_manager > self.rank.config.job.silence_timeout_s:
                self.left_alone = f"the manager has said nothing for {now - self._heard_manager:.0f} s"
            if MANAGER in self.rank.mail.lost():
                self.left_alone = "the manager is gone"
        if self.rank.parent_is_gone():
            self.left_alone = "the launcher is gone"
        if self.left_alone:
            say(f"{self.rank.name}: {self.left_alone}; ending", error=True)
            loop.done = True

    def _beat(self, loop: RankLoop, now: float) -> None:
        waiting_for = loop.waiting_for()
        if waiting_for != self._waiting_for:
            self._waiting_for, self._waiting_since = waiting_for, now
        if now >= self._next_beat:
            self._next_beat = now + self.rank.heartbeat_s
            self.rank.tell_manager(Heartbeat(self.rank.world.rank, waiting_for, now - self._waiting_since))

    def write_phases(self, now: float) -> None:
        """A row for each phase since the last ones, and for what was emulated."""
        self.rank.write_pace(now)
        if self.rank.record is not None:
            for name, seconds in self._phase_seconds.items():
                self.rank.record.add("phases", time_s=now, phase=name, seconds=seconds)
        self._phase_seconds.clear()

    def _account(self, loop: RankLoop, now: float, busy: bool) -> None:
        phase = loop.phase(busy)
        self._phase_seconds[phase] = self._phase_seconds.get(phase, 0.0) + now - self._phase_since
        self._phase_since = now
        if now >= self._next_phase_row:
            self._next_phase_row = now + self.rank.config.record.flush_s
            self.write_phases(now)
            if self.rank.record is not None:
                self.rank.record.flush_if_due(now)


def away_s(last: float, now: float, patience_s: float) -> float:
    """For how long, of the time since its last turn, a rank was stopped or kept busy, so that it could hear nobody.

    Nobody's silence counts then. A turn that comes within `patience_s` is as good as any.
    """
    return now - last if now - last > patience_s else 0.0


def _report_failure(rank: Rank, error: Exception) -> None:
    """Say what happened on stderr, and to the manager; the traceback goes to this rank's log."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    with (
        contextlib.suppress(OSError),  # a full disk may be what happened
        open(rank.paths.log(rank.world.rank, rank.me.role.value), "a", encoding="utf-8") as log,
    ):
        traceback.print_exc(file=log)
    say(f"{rank.name}: {text}", error=True)
    if rank.world.rank != MANAGER:
        with contextlib.suppress(LaminarError):  # the line on stderr is what is left
            rank.tell_manager(Failure(rank.world.rank, rank.me.role.value, text))
            _await_shutdown(rank)


def _await_shutdown(rank: Rank) -> None:
    """A rank that leaves before the others makes the launcher kill them: let the manager close the books first."""
    deadline_s = rank.now() + FAREWELL_S
    while rank.now() < deadline_s and not rank.parent_is_gone():
        if any(isinstance(message, Shutdown) for _, message in rank.mail.poll()):
            return
        wait_any([], LONGEST_NAP_S)


def say_goodbye(rank: Rank) -> None:
    """Tell the manager that this rank is about to leave."""
    rank.tell_manager(Goodbye(rank.world.rank))
    rank.mail.flush(FAREWELL_S)
