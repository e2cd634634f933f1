"""Rank 0 of the bench: in the manager's place, it has versions published and broadcast.

What to do is a script, a generator that gives the loop back to the frame wherever it waits for others. Which relay fetches
from whom is decided by the code that decides it in a job, control/distribution.py.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from laminar_hpc.control.distribution import Distribution
from laminar_hpc.control.relays import Relays
from laminar_hpc.errors import EngineError, ProtocolError
from laminar_hpc.mpi.bare import Notes
from laminar_hpc.policy.chain import best_chunk_bytes
from laminar_hpc.process.channel import Channel
from laminar_hpc.protocol.commands import (
    Broadcast,
    Command,
    Drop,
    EndJob,
    Forget,
    Publish,
    Readmit,
    Release,
    Sever,
    Share,
)
from laminar_hpc.protocol.events import (
    LinkStalled,
    Published,
    RankHeard,
    RankLost,
    RelayHolds,
    RelayReady,
    StopRequested,
    TrainerReady,
)
from laminar_hpc.protocol.peer import (
    Failure,
    Goodbye,
    Heartbeat,
    Layout,
    LinkMeasured,
    Lost,
    MeasureLink,
    Readmitted,
    Shard,
    Shutdown,
)
from laminar_hpc.protocol.wire import AnyRecord
from laminar_hpc.record.writer import RecordWriter
from laminar_hpc.runtime.rank import FAREWELL_S, Rank, say
from laminar_hpc.runtime.relay_bench.plan import Plan, chunk_bytes_for, whole_tiles
from laminar_hpc.runtime.relay_bench.ways import FIRST_RELAY, TRAINER, Order, Ways

START_S = 300.0
WAIT_S = 120.0

LONGEST_NAP_S = 0.001
"""Rank 0 times what it waits for."""


class Holding:
    """A version on its way: when it was published, and when each relay had it; moments of `time.perf_counter`."""

    def __init__(self) -> None:
        self.asked_s = time.perf_counter()
        self.published_s: float | None = None
        self.stall_s = 0.0
        self.held_s: dict[int, float] = {}
        self.digests: dict[int, bytes] = {}

    def held_by(self, relays: Iterable[int]) -> bool:
        """Whether all of them have it."""
        return self.held_s.keys() >= set(relays)


class Answer(NamedTuple):
    """What a rank has answered to an order, and when it was here."""

    rank: int
    at_s: float
    numbers: list[float]


class Director:
    """Rank 0's loop. `run` is what subclasses write: the part of the bench that this start is for."""

    def __init__(self, rank: Rank, notes: Notes, ways: Ways, plan: Plan, record: RecordWriter) -> None:
        self.done = False
        self.clean = True
        self.plan = plan
        self.record = record
        self.notes = notes
        self.ways = ways
        self.relays = list(range(FIRST_RELAY, FIRST_RELAY + max(plan.relays)))
        self.version = 0
        """The newest version that was asked for."""
        self.versions: dict[int, Holding] = {}
        self.answers: dict[Order, list[Answer]] = {order: [] for order in Order}
        """To each order."""
        self.beats: dict[int, float] = {}
        self.waiting: dict[int, str] = {}
        """What each rank said last that it waits for."""
        self.lost: set[int] = set()
        self._rank = rank
        self._script: Iterator[None] = iter(())
        self._ready: dict[int, str] = {}
        self._parting = False  # all have been told to leave
        self._left: set[int] = set()
        self._links: list[LinkMeasured] = []
        self._layout: Layout | None = None
        self._distribution = Distribution(Relays(0))
        self._unreleased: set[int] = set()
        self._epoch = 0
        self._epoch_of: dict[int, int] = {}
        self._silent: set[int] = set()  # relays that were taken for lost, but are not known to be dead
        self._incarnations: dict[int, int] = {}

    # --- as a loop --------------------------------------------------------------------------------------------------

    def start(self, now: float) -> None:
        """Begin the script."""
        self._script = self._whole()

    def receive(self, source: int, message: AnyRecord, now: float) -> None:
        """Take one message from another rank."""
        match message:
            case TrainerReady():
                self._ready[source] = ""
            case RelayReady():
                self._ready[source] = message.node
                if message.incarnation:  # it was taken for lost, and is taken back
                    self.lost.discard(source)
                    self.carry_out(self._distribution.relay_ready(message, now))
            case Published():
                self._take_published(message, now)
            case RelayHolds():
                version = self.versions[message.version]
                version.held_s[source] = time.perf_counter()
                version.digests[source] = message.digest
                self.carry_out(self._distribution.relay_holds(message, now))
            case LinkStalled():
                self.stalled(message, now)
            case LinkMeasured():
                self._links.append(message)
            case Heartbeat():
                self.beats[source] = now
                self.waiting[source] = message.waiting_for
                if source in self._silent:
                    incarnation = self._incarnations.get(source, 0)
                    self.carry_out(self._distribution.rank_heard(RankHeard(source, incarnation)))
            case Goodbye():
                self._left.add(source)
            case StopRequested():
                raise EngineError(f"bench: {message.reason}")
            case Failure():
                raise EngineError(f"rank {source} ({message.role}): {message.text}")
            case _:
                raise ProtocolError(f"bench: unexpected {type(message).__name__} from rank {source}")

    def turn(self, now: float) -> bool:
        """Take the answers to notes, look for the lost, and go on with the script."""
        for rank in range(1, self._rank.world.size):
            while (note := self.notes.poll(rank)) is not None:
                self.answers[Order(int(note[0]))].append(Answer(rank, time.perf_counter(), note[1:]))
        self._bury(now)
        self.record.flush_if_due(now)
        if next(self._script, self) is self:
            self.done = True
        return False

    def waiting_for(self) -> str:
        """Nothing that anybody would look at."""
        return ""

    def phase(self, busy: bool) -> str:
        """The bench keeps no phases."""
        return "work"

    def longest_nap_s(self) -> float:
        """Short."""
        return LONGEST_NAP_S

    def channels(self) -> list[Channel]:
        """None."""
        return []

    def close(self) -> None:
        """Nothing to end."""

    # --- what scripts are made of -----------------------------------------------------------------------------------

    def run(self) -> Iterator[None]:
        """The script."""
        raise NotImplementedError

    def until(self, condition: Callable[[], bool], what: str, bound_s: float = WAIT_S) -> Iterator[None]:
        """Wait; EngineError where it takes longer than `bound_s`."""
        deadline_s = time.monotonic() + bound_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise EngineError(f"bench: waited {bound_s:g} s for {what}")
            yield

    def answered(self, order: Order, count: int = 1, bound_s: float = WAIT_S) -> Iterator[None]:
        """Wait for `count` answers to an order."""
        yield from self.until(lambda: len(self.answers[order]) >= count, f"{count} answers to {order.name}", bound_s)

    def gather(self, relays: int) -> None:
        """From now on the chain is of the first `relays` relays."""
        for version in sorted(self._unreleased):
            self.carry_out([Release("bench: another chain", version)])
        node_of_rank = self._rank.world.node_of_rank()
        chain = self.relays[:relays]
        self._distribution = Distribution(
            Relays(relays, [node_of_rank[TRAINER]]), self._rank.config.weights.relay_timeout_s
        )
        for rank in chain:
            self.carry_out(self._distribution.relay_ready(RelayReady(rank, 0, self._ready[rank]), 0.0))

    @property
    def chain(self) -> list[int]:
        """The relays that are left of those gathered, in the order of a new chain."""
        return self._distribution.relays.chain()

    @property
    def chunks(self) -> int:
        """Chunks of the image."""
        assert self._layout is not None
        return self._layout.manifest.chunks

    def publish(self) -> Iterator[None]:
        """Have the trainer publish the next version; when it has, its broadcast has begun."""
        self.version += 1
        version = self.versions[self.version] = Holding()
        self._rank.mail.send(TRAINER, Publish("bench", self.version, self.version))
        yield from self.until(lambda: version.published_s is not None, f"version {self.version} to be published")

    def complete(self) -> Iterator[None]:
        """Wait until all relays of the chain have the newest version, with equal bytes."""
        version = self.versions[self.version]
        yield from self.until(
            lambda: version.held_by(self.chain), f"relays {self.chain} to hold version {self.version}"
        )
        if len({version.digests[relay] for relay in self.chain}) != 1:
            raise EngineError(f"bench: relays have different digests of version {self.version}")

    @property
    def broadcast_s(self) -> float:
        """From the moment at which the trainer held the newest version until the last relay did."""
        version = self.versions[self.version]
        assert version.published_s is not None, "it is complete"
        return max(version.held_s.values()) - version.published_s

    def lose(self, rank: int, reason: str, now: float) -> None:
        """A relay counts as lost."""
        if rank not in self.relays:
            raise EngineError(f"bench: rank {rank} is lost: {reason}")
        self.lost.add(rank)
        incarnation = self._incarnations.get(rank, 0)
        self.carry_out(self._distribution.relay_lost(RankLost(rank, incarnation, reason), now))

    def stalled(self, message: LinkStalled, now: float) -> None:
        """A relay waits for another one in vain."""
        self.carry_out(self._distribution.link_stalled(message, now))

    def carry_out(self, commands: list[Command]) -> None:
        """What the distribution decides, as the manager of a job does it."""
        send = self._rank.mail.send
        for command in commands:
            match command:
                case Broadcast():
                    for relay in command.chain:
                        send(relay, command)
                case Release():
                    self._unreleased.discard(command.version)
                    send(TRAINER, command)
                case Drop():
                    for relay in self.relays:
                        send(relay, command)
                case Forget():
                    self._epoch += 1
                    self._epoch_of[command.rank] = self._epoch
                    for rank in (TRAINER, *self.relays):
                        if rank != command.rank:
                            send(rank, Lost(command.rank, self._epoch))
                case Sever():
                    self._epoch += 1
                    send(command.rank, Lost(command.source, self._epoch))
                    send(command.source, Lost(command.rank, self._epoch))
                case Readmit():
                    self._silent.discard(command.rank)
                    self._incarnations[command.rank] = command.incarnation
                    send(command.rank, Readmitted(command.incarnation, self._epoch_of.get(command.rank, 0)))
                case EndJob():
                    raise EngineError(f"bench: {command.reason}")
                case _:
                    raise ProtocolError(f"bench: unexpected {type(command).__name__}")

    # --- inside -----------------------------------------------------------------------------------------------------

    def _whole(self) -> Iterator[None]:
        everybody = {TRAINER, *self.relays}
        yield from self.until(lambda: everybody <= self._ready.keys(), "all ranks to start", START_S)
        yield from self._lay_out()
        yield from self.run()
        self.clean = not self.lost
        self._parting = True
        for rank in everybody:
            self._rank.mail.send(rank, Shutdown(clean=self.clean))
        deadline_s = time.monotonic() + FAREWELL_S
        while not everybody <= self._left | self.lost and time.monotonic() < deadline_s:
            yield

    def _lay_out(self) -> Iterator[None]:
        """Choose the chunks' length, as the manager of a job does, and tell all what the image is like."""
        plan = self.plan
        if plan.chunks:
            chunk_bytes = chunk_bytes_for(plan.nbytes, plan.chunks)
        elif len(self.relays) == 1:
            chunk_bytes = best_chunk_bytes(1, plan.nbytes, 0.0, 0.0)
        else:
            for source, relay in zip(self.relays, self.relays[1:], strict=False):
                self._rank.mail.send(relay, MeasureLink(source))
            yield from self.until(lambda: len(self._links) == len(self.relays) - 1, "the links to be measured")
            startup_s = statistics.median(link.startup_s for link in self._links)
            byte_s = statistics.median(link.byte_s for link in self._links)
            chunk_bytes = best_chunk_bytes(len(self.relays), plan.nbytes, startup_s, byte_s)
            say(f"bench: links, for the chunks' length: {startup_s * 1e3:.3f} ms a transfer, {1e-6 / byte_s:.1f} MB/s")
        manifest = plan.manifest(chunk_bytes)
        self._layout = Layout(manifest, [Shard(TRAINER, whole_tiles(manifest))])
        for rank in (TRAINER, *self.relays):
            self._rank.mail.send(rank, self._layout)
        say(f"bench: {manifest.nbytes} bytes in {manifest.chunks} chunks")

    def _take_published(self, message: Published, now: float) -> None:
        version = self.versions[message.version]
        version.published_s, version.stall_s = time.perf_counter(), message.seconds
        self._unreleased.add(message.version)
        share = Share(message.rank, message.digests)
        self.carry_out(self._distribution.published(message.version, [share], now))

    def _bury(self, now: float) -> None:
        """Ranks that MPI has found dead, and relays that say nothing."""
        for rank in self._rank.mail.lost():
            self._silent.discard(rank)
            if self._parting:
                self._left.add(rank)  # MPI may tell of its end before its last word is here
            elif rank not in self.lost and rank not in self._left:
                self.lose(rank, "its process is gone", now)
        if self._parting or not self.listens:
            return
        for rank in self.relays:
            silent_s = now - self.beats.get(rank, now)
            if rank not in self.lost and silent_s > self.plan.timeout_s:
                self._rank.mail.forget(rank)
                self._silent.add(rank)
                self.lose(rank, f"it has said nothing for {silent_s:.1f} s", now)

    @property
    def listens(self) -> bool:
        """Whether relays that say nothing count as lost; not where a plain way keeps them busy."""
        return False
