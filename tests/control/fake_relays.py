"""Relays and spares as a list of moves that they could make now, with what can go wrong with them.

A relay does what weights/forward.py says of one: it fetches one version at a time from the one before it in the last chain it
was told, keeps only the newest of those that wait, gives up what its source has not got any more, and never goes back. A
version has CHUNKS chunks, which come in order.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import msgspec

from laminar_hpc.protocol.commands import Broadcast, Command, Drop, Forget, Readmit, TakeOver
from laminar_hpc.protocol.events import Event, LinkStalled, RankHeard, RankLost, RelayHolds, RelayReady, SpareReady

CHUNKS = 3
Move = Callable[[], Event | None]
"""What a rank does; the event that it tells the controller, if any."""


class Fetching(msgspec.Struct, eq=False):
    version: int
    chain: list[int]
    chunks: int = 0

    def source(self, rank: int) -> int | None:
        """The relay before this one; None for the trainers."""
        place = self.chain.index(rank)
        return self.chain[place - 1] if place else None


class RelayRank(msgspec.Struct, eq=False):
    """`process` is up, hung or dead. `lost`: the manager counts it as such; `heard`: it has noticed that this is wrong."""

    rank: int
    node: str
    active: bool
    to_report: bool = True
    incarnation: int = 0
    process: str = "up"
    known: bool = False
    lost: bool = False
    heard: bool = False
    told: int = -1
    now: Fetching | None = None
    next: Fetching | None = None
    held: list[int] = []

    def start(self, command: Broadcast) -> None:
        for fetching in (self.now, self.next):
            if fetching is not None and fetching.version == command.version:
                fetching.chain = command.chain
                return
        if command.version > self.told:
            self.told = command.version
            fetching = Fetching(command.version, command.chain)
            if self.now is None:
                self.now = fetching
            else:
                self.next = fetching

    def drop(self, version: int) -> None:
        if self.next is not None and self.next.version == version:
            self.next = None
        elif self.now is not None and self.now.version == version:
            self.now, self.next = self.next, None
        self.told = max(self.told, version)

    def begin_anew(self, incarnation: int) -> None:
        self.incarnation, self.to_report, self.lost, self.heard = incarnation, True, False, False
        self.told, self.now, self.next, self.held = -1, None, None, []

    def chunks_of(self, version: int) -> int | None:
        """How many chunks of a version can be had from it now; None where there will never be any."""
        if version in self.held:
            return CHUNKS
        if self.now is not None and self.now.version == version:
            return self.now.chunks
        waiting = self.next is not None and self.next.version == version
        return 0 if waiting or version > self.told else None


class FakeRelays:
    """The relays and their spares, rank after rank from `first_rank` on: all relays, then the spares, node by node."""

    def __init__(
        self, random: Random, trainers_keep: Callable[[int], bool], first_rank: int, relays: int, spares: int
    ) -> None:
        """`trainers_keep`: whether all trainers have a version in memory."""
        self._random = random
        self._trainers_keep = trainers_keep
        ranks = range(first_rank, first_rank + relays * (1 + spares))
        self.all = [RelayRank(rank, f"n{place % relays}", place < relays) for place, rank in enumerate(ranks)]
        self.by_rank = {relay.rank: relay for relay in self.all}
        self.ghosts: list[Event] = []

    def living(self) -> list[RelayRank]:
        """The relays that are up and count as such."""
        return [one for one in self.all if one.active and one.process == "up" and not one.lost and not one.to_report]

    def obey(self, command: Command) -> None:
        match command:
            case Broadcast():
                for rank in command.chain:
                    self.by_rank[rank].start(command)
            case Drop():
                for relay in self.all:
                    relay.drop(command.version)
            case Forget():
                self.by_rank[command.rank].lost = True
            case TakeOver():
                relay = self.by_rank[command.rank]
                relay.active = relay.to_report = True
            case Readmit():
                self.by_rank[command.rank].begin_anew(command.incarnation)
            case _:
                pass

    # --- what brings the job forward --------------------------------------------------------------------------------

    def moves(self) -> list[Move]:
        """What relays and the manager's watchdogs could do now; empty when all wait for others."""
        moves: list[Move] = []
        for relay in self.all:
            if relay.process == "hung":
                moves.append(lambda relay=relay: self.resume(relay))
            elif relay.process == "dead":
                if not relay.lost:
                    moves.append(lambda relay=relay: self.notice(relay))
            elif relay.lost:
                if not relay.heard:
                    moves.append(lambda relay=relay: self.hear(relay))
            elif relay.to_report:
                moves.append(lambda relay=relay: self._report(relay))
            elif relay.now is not None and self._available(relay, relay.now) != relay.now.chunks:
                moves.append(lambda relay=relay, now=relay.now: self._fetch(relay, now))
        return moves

    def _report(self, relay: RelayRank) -> Event:
        relay.to_report, relay.known = False, True
        kind = RelayReady if relay.active else SpareReady
        return kind(relay.rank, relay.incarnation, relay.node)

    def _available(self, relay: RelayRank, fetching: Fetching) -> int | None:
        """How many chunks it could have by now; None where the rest will never come."""
        source = fetching.source(relay.rank)
        if source is None:
            return CHUNKS if self._trainers_keep(fetching.version) else None
        upstream = self.by_rank[source]
        if upstream.process != "up" or upstream.lost:
            return fetching.chunks
        available = upstream.chunks_of(fetching.version)
        return available if available is None else max(available, fetching.chunks)

    def _fetch(self, relay: RelayRank, fetching: Fetching) -> Event | None:
        if self._available(relay, fetching) is None:
            relay.now, relay.next = relay.next, None
            return None
        fetching.chunks += 1
        if fetching.chunks < CHUNKS:
            return None
        relay.held.append(fetching.version)
        relay.now, relay.next = relay.next, None
        return RelayHolds(relay.rank, relay.incarnation, fetching.version, 0.1, b"image 8.")

    def resume(self, relay: RelayRank) -> None:
        relay.process = "up"

    def notice(self, relay: RelayRank) -> Event:
        """The manager takes a relay for lost, rightly or not."""
        relay.lost, relay.heard = True, False
        if relay.now is not None and relay.known:
            self.ghosts.append(RelayHolds(relay.rank, relay.incarnation, relay.now.version, 0.1, b""))
            source = relay.now.source(relay.rank)
            if source is not None:
                self.ghosts.append(LinkStalled(relay.rank, relay.incarnation, relay.now.version, source))
        return RankLost(relay.rank, relay.incarnation, "killed" if relay.process == "dead" else "silent")

    def taken_for_lost(self, rank: int) -> None:
        """The manager has said so once more, of this incarnation."""
        relay = self.by_rank[rank]
        relay.lost, relay.heard = True, False

    def hear(self, relay: RelayRank) -> Event:
        relay.heard = True
        relay.lost = relay.active  # a spare that was never called waits on
        return RankHeard(relay.rank, relay.incarnation)

    # --- what can go wrong ------------------------------------------------------------------------------------------

    def fault(self) -> Event | None:
        """One relay dies, hangs, is taken for lost, waits in vain, or lets go of an old version."""
        random = self._random
        kind = random.choice(["kill", "hang", "notice", "stall", "stall", "retire", "retire"])
        if kind == "retire":
            relay = random.choice(self.all)
            relay.held = relay.held[-random.randint(1, 2) :]
            return None
        if kind == "stall":
            waiting = [one for one in self.living() if one.now is not None and one.now.source(one.rank) is not None]
            return self._stall(random.choice(waiting)) if waiting else None
        known = [one for one in self.all if one.known and one.process == "up" and not one.lost]
        if not known or len([one for one in self.all if one.active and one.process != "dead"]) < 2:
            return None
        relay = random.choice(known)
        if kind == "notice":
            return self.notice(relay)
        relay.process = "dead" if kind == "kill" else "hung"
        return None

    def _stall(self, relay: RelayRank) -> Event:
        assert relay.now is not None
        source = relay.now.source(relay.rank)
        assert source is not None
        return LinkStalled(relay.rank, relay.incarnation, relay.now.version, source)
