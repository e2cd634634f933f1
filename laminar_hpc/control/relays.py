"""The relays and their spares: which of them there are, which incarnation of each is current, who takes a lost one's place.

    (reports) -> READY -> LOST
    (reports) -> SPARE -> CALLED (`TakeOver` is out) -> READY -> LOST
                          LOST, heard again -> CALLED (`Readmit` is out) -> READY, in the next incarnation

A node that has lost its relay gets a spare of its own, else the lost relay itself, should it speak again.

Invariants: a node has at most one relay that is READY or CALLED. Incarnations only rise, and only by `Readmit`; what comes
from an earlier one, or from a rank that counts as lost, is dropped. `version` is the newest version that the current
incarnation holds complete, and never falls within it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum

import msgspec

from laminar_hpc.errors import ProtocolError
from laminar_hpc.policy.chain import Place, moved_back, order
from laminar_hpc.protocol.commands import Command, Readmit, TakeOver
from laminar_hpc.protocol.events import RankLost, RelayReady, SpareReady


class Condition(str, Enum):
    """What a relay or spare is."""

    READY = "ready"
    SPARE = "spare"
    CALLED = "called"
    LOST = "lost"


class Relay(msgspec.Struct, eq=False):
    """A relay or a spare.

    `spare`: it has never been called. `slow`: a relay behind it has waited for it in vain, or it for a trainer; it is at the end
    of later chains.
    `heard`: it has spoken since it was lost.
    """

    rank: int
    node: str
    condition: Condition
    incarnation: int
    spare: bool = False
    version: int | None = None
    slow: bool = False
    heard: bool = False


class Relays:
    """All relays and spares that have reported."""

    def __init__(
        self, expected: int, trainer_nodes: Collection[str] = (), switches: Mapping[str, str] | None = None
    ) -> None:
        """`expected` relays report at the start; `switches` has the switch of each node, as far as it is known."""
        self._trainer_nodes = frozenset(trainer_nodes)
        self._switches = dict(switches or {})
        self._by_rank: dict[int, Relay] = {}
        self.missing = expected
        """How many relays have never reported, spares not counted."""

    def __contains__(self, rank: int) -> bool:
        return rank in self._by_rank

    def __getitem__(self, rank: int) -> Relay:
        return self._by_rank[rank]

    @property
    def ready(self) -> list[Relay]:
        """The relays that can take part in a broadcast, in rank order."""
        return [relay for _, relay in sorted(self._by_rank.items()) if relay.condition is Condition.READY]

    @property
    def called(self) -> list[Relay]:
        """The ranks that were called to take a lost relay's place and have not reported yet, in rank order."""
        return [relay for _, relay in sorted(self._by_rank.items()) if relay.condition is Condition.CALLED]

    @property
    def left(self) -> bool:
        """Whether there is a relay, or there will be one."""
        living = (Condition.READY, Condition.CALLED)
        return self.missing > 0 or any(relay.condition in living for relay in self._by_rank.values())

    def ends_without(self, rank: int) -> bool:
        """Whether the loss of `rank` would leave no relay, and no spare of its node to take its place."""
        if self.missing > 0 or not self.is_ready(rank):
            return False
        others = [relay for relay in self._by_rank.values() if relay.rank != rank]
        spare = any(relay.condition is Condition.SPARE and relay.node == self[rank].node for relay in others)
        return not spare and all(relay.condition in (Condition.SPARE, Condition.LOST) for relay in others)

    def current(self, rank: int, incarnation: int) -> Relay | None:
        """The relay, if it is ready and this is its incarnation; what any other one says is dropped."""
        relay = self._known(rank)
        return relay if relay.condition is Condition.READY and relay.incarnation == incarnation else None

    def is_ready(self, rank: int) -> bool:
        """Whether `rank` is a relay that can take part in a broadcast."""
        return rank in self._by_rank and self._by_rank[rank].condition is Condition.READY

    def chain(self) -> list[int]:
        """The ready relays in the order of a new chain."""
        chain = order = self._order(self.ready)
        for rank in order:
            if self._by_rank[rank].slow:
                chain = moved_back(chain, rank)
        return chain

    def nearest(self, node: str) -> Relay | None:
        """The ready relay that is nearest to `node`: on it, else at its switch, else by the distance in the chain's order."""
        places = self._order([relay for relay in self._by_rank.values() if not relay.spare])
        position = {rank: place for place, rank in enumerate(places)}
        home = next((position[rank] for rank in places if self._by_rank[rank].node == node), 0)

        def key(relay: Relay) -> tuple[bool, bool, int, int]:
            away = self._switch(relay.node) != self._switch(node)
            return relay.node != node, away, abs(position[relay.rank] - home), relay.rank

        return min(self.ready, key=key, default=None)

    # --- ranks come and go ------------------------------------------------------------------------------------------

    def report(self, event: RelayReady) -> Relay | None:
        """A relay is ready; None for a message that repeats or comes too late."""
        relay = self._by_rank.get(event.rank)
        if relay is None:
            return self._first_report(event)
        if relay.condition is Condition.SPARE or event.incarnation > relay.incarnation:
            raise ProtocolError(
                f"rank {event.rank} reports as a relay, incarnation {event.incarnation}, which nobody has asked it to be"
            )
        if relay.condition is not Condition.CALLED or event.incarnation < relay.incarnation:
            return None
        relay.condition = Condition.READY
        return relay

    def _first_report(self, event: RelayReady) -> Relay:
        if self.missing == 0:
            raise ProtocolError(f"rank {event.rank} reports as a relay, but all have reported")
        others = [relay for relay in self._by_rank.values() if relay.node == event.node]
        if not all(relay.spare for relay in others):
            raise ProtocolError(f"rank {event.rank} reports as the relay of node {event.node}, which has one already")
        self.missing -= 1
        relay = Relay(event.rank, event.node, Condition.READY, event.incarnation)
        self._by_rank[event.rank] = relay
        return relay

    def report_spare(self, event: SpareReady) -> list[Command]:
        """A spare waits; it is called at once where its node has lost its relay already."""
        if event.rank in self._by_rank:
            return []
        self._by_rank[event.rank] = Relay(event.rank, event.node, Condition.SPARE, event.incarnation, spare=True)
        return self._replace(event.node)

    def lose(self, event: RankLost) -> tuple[Relay | None, list[Command]]:
        """A rank is lost: the relay, if it was ready until now, and the command that calls another one to its place."""
        relay = self._known(event.rank)
        if event.incarnation < relay.incarnation:
            return None, []
        before, relay.condition, relay.heard = relay.condition, Condition.LOST, False
        relay.version, relay.slow = None, False
        return (relay if before is Condition.READY else None), self._replace(relay.node)

    def hear(self, rank: int) -> list[Command]:
        """A rank that counts as lost has spoken: it is taken back if its node has no other relay, now or later.

        A spare that was never called has nothing to begin anew: it waits again.
        """
        relay = self._known(rank)
        if relay.condition is not Condition.LOST:
            return []
        if relay.spare:
            relay.condition = Condition.SPARE
        relay.heard = not relay.spare
        return self._replace(relay.node)

    def _replace(self, node: str) -> list[Command]:
        """Call a relay to `node`, if it has lost its own and somebody is there."""
        here = [relay for _, relay in sorted(self._by_rank.items()) if relay.node == node]
        relays = [relay.condition for relay in here if not relay.spare]
        if set(relays) != {Condition.LOST}:
            return []
        spare = next((relay for relay in here if relay.condition is Condition.SPARE), None)
        if spare is not None:
            spare.condition, spare.spare = Condition.CALLED, False
            return [TakeOver(f"node {node} has lost its relay, and this is a spare of it", spare.rank)]
        heard = next((relay for relay in here if relay.heard), None)
        if heard is None:
            return []
        heard.condition, heard.heard = Condition.CALLED, False
        heard.incarnation += 1
        reason = f"it speaks again, and node {node} has no other relay or spare"
        return [Readmit(reason, heard.rank, heard.incarnation)]

    def _known(self, rank: int) -> Relay:
        if rank not in self._by_rank:
            raise ProtocolError(f"rank {rank} speaks as a relay or spare, but has never reported as one")
        return self._by_rank[rank]

    # --- places -----------------------------------------------------------------------------------------------------

    def _order(self, relays: Collection[Relay]) -> list[int]:
        places = [Place(relay.rank, relay.node, self._switch(relay.node)) for relay in relays]
        return order(places, self._trainer_nodes)

    def _switch(self, node: str) -> str:
        return self._switches.get(node, "")
