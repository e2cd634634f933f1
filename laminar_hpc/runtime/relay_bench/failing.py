"""Rank 0's script for faults in the middle of a broadcast: what is noticed when, and whether all survivors get everything."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator

from laminar_hpc.errors import EngineError
from laminar_hpc.mpi.bare import Notes
from laminar_hpc.protocol.commands import Broadcast, Command
from laminar_hpc.protocol.events import LinkStalled
from laminar_hpc.record.writer import RecordWriter
from laminar_hpc.runtime.rank import Rank, say
from laminar_hpc.runtime.relay_bench.director import Director, Holding
from laminar_hpc.runtime.relay_bench.plan import Plan
from laminar_hpc.runtime.relay_bench.ways import FIRST_RELAY, Order, Ways

UNPLUG = "bench-unplug"
"""On stdout, with a host's number: whoever has made the hosts is to unplug that one (launch/bench_relay.py)."""

WARM_UP = 3

FEWEST = 3
"""Relays that a round begins with at least, besides a second victim."""

ROUND_S = 60.0


class Failures(Director):
    """Rounds of: a broadcast, a fault at a random moment of it, the same version at all survivors, and a newer one.

    A lost relay stays lost. A start of the bench ends after `repetitions` rounds, or when too few relays are left.
    """

    def __init__(self, rank: Rank, notes: Notes, ways: Ways, plan: Plan, record: RecordWriter) -> None:
        super().__init__(rank, notes, ways, plan, record)
        self._listening = False
        self._struck = 0  # the version that was under way
        self._watcher: int | None = None
        self._noticed: dict[int, float] = {}

    def run(self) -> Iterator[None]:
        """Round after round."""
        self.gather(len(self.relays))
        draw = random.Random(self.plan.seed)
        warm = []
        for _ in range(WARM_UP):
            yield from self.publish()
            yield from self.complete()
            warm.append(self.versions[self.version])
        self._listening = True
        victims = 2 if self.plan.fault == "pair" else 1
        for turn in range(self.plan.repetitions):
            if len(self.chain) < FEWEST + victims - 1:
                break
            yield from self._round(turn, draw, warm)

    @property
    def listens(self) -> bool:
        """Once all is warm."""
        return self._listening

    def lose(self, rank: int, reason: str, now: float) -> None:
        """Note the moment."""
        self._notice(rank)
        super().lose(rank, reason, now)

    def stalled(self, message: LinkStalled, now: float) -> None:
        """Note the moment."""
        self._notice(message.source)
        super().stalled(message, now)

    def carry_out(self, commands: list[Command]) -> None:
        """And whenever a chain changes, have the relay behind the fault say when it goes on."""
        super().carry_out(commands)
        watcher = self._watcher
        for command in commands:
            repaired = isinstance(command, Broadcast) and command.version == self._struck and self._noticed
            if repaired and watcher is not None and watcher not in self.lost:
                self.answers[Order.WATCH].clear()
                self.notes.send(watcher, Order.WATCH)

    def _notice(self, rank: int) -> None:
        self._noticed.setdefault(rank, time.perf_counter())

    def _round(self, turn: int, draw: random.Random, warm: list[Holding]) -> Iterator[None]:
        chain = self.chain
        victims, watcher = choose(self.plan.fault, chain, draw)
        last = victims[-1] if watcher is None else watcher
        expected_s = statistics.median(version.held_s[last] - (version.published_s or 0.0) for version in warm)
        survivors = [relay for relay in chain if relay not in victims]
        at = draw.uniform(0.05, 0.95)
        yield from self.publish()
        version = self.version
        began_s = self.versions[version].published_s
        assert began_s is not None, "it is published"
        while time.perf_counter() < began_s + at * expected_s:
            yield
        self._noticed, self._watcher, self._struck = {}, watcher, version
        self.answers[Order.WATCH].clear()
        fault_s = time.perf_counter()
        self._strike(victims)
        lost = []
        for _ in range(2):  # the version that was under way, and a newer one
            try:
                yield from self._reaches(survivors)
            except EngineError as error:
                say(f"{error}; {self._late(survivors)}", error=True)
                lost.append(self.version)
            if self.version == version:
                yield from self.publish()
        yield from self.until(lambda: self.lost >= set(victims), "the lost relay to be missed", ROUND_S)
        self._note(turn, at, fault_s, version, chain, survivors, lost)

    def _strike(self, victims: list[int]) -> None:
        for rank in victims:
            if self.plan.fault == "link":
                say(f"{UNPLUG} {rank - FIRST_RELAY}")
            else:
                self.notes.send(rank, Order.STOP if self.plan.fault == "stop" else Order.DIE)

    def _reaches(self, survivors: list[int]) -> Iterator[None]:
        version = self.versions[self.version]
        yield from self.until(lambda: version.held_by(survivors), f"version {self.version} at {survivors}", ROUND_S)

    def _late(self, survivors: list[int]) -> str:
        """Who lacks the newest version, and what the chain knows of it."""
        held_s = self.versions[self.version].held_s
        lines = [
            f"rank {rank} has not got it, waits for {self.waiting.get(rank) or 'nothing'}"
            + (" and counts as lost" if rank in self.lost else "")
            for rank in survivors
            if rank not in held_s
        ]
        under_way = [f"version {version} on its way along {chain}" for version, _, chain in self._distribution.late()]
        return "; ".join([*lines, *under_way, f"chain {self.chain}"])

    def _note(
        self, turn: int, at: float, fault_s: float, number: int, chain: list[int], survivors: list[int], lost: list[int]
    ) -> None:
        noticed_s = max(self._noticed.values(), default=None)
        version, newest = self.versions[number], self.versions[self.version]
        moved_s = complete_s = None
        if noticed_s is not None:
            answers = self.answers[Order.WATCH]
            moved_s = answers[-1].at_s - noticed_s if answers else None
            last_s = max(version.held_s.get(relay, noticed_s) for relay in survivors)
            complete_s = max(0.0, last_s - noticed_s)
        right = max(set(newest.digests.values()), key=list(newest.digests.values()).count, default=b"")
        complete = sum(newest.digests.get(relay) == right for relay in survivors)
        say(
            f"bench: {self.plan.fault} {turn}: noticed after {_ms(noticed_s and noticed_s - fault_s)}, moved after "
            f"{_ms(moved_s)}, complete after {_ms(complete_s)}, {complete} of {len(survivors)} survivors"
        )
        self.record.add(
            "bench_failures",
            fault=self.plan.fault,
            transport=self.plan.transport,
            relays=len(chain),
            nbytes=self.plan.nbytes,
            chunks=self.chunks,
            repetition=turn,
            at=at,
            noticed_s=None if noticed_s is None else noticed_s - fault_s,
            moved_s=moved_s,
            complete_s=complete_s,
            survivors=len(survivors),
            complete=complete,
            lost_publications=len(lost),
        )


def choose(fault: str, chain: list[int], draw: random.Random) -> tuple[list[int], int | None]:
    """Whom a fault strikes, and the relay behind, which waits for its chunks (None: none is).

    A relay in the middle is neither the first nor the last of the chain, and so are both of a pair where that can be.
    """
    if fault == "master":
        return [chain[0]], chain[1]
    if fault == "last":
        return [chain[-1]], None
    count = 2 if fault == "pair" else 1
    first = draw.randrange(1, len(chain) - count)
    return chain[first : first + count], chain[first + count]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.0f} ms"
