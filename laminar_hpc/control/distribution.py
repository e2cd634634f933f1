"""The way of a weight version from the trainers to the relays, through failures.

    PUBLISHED (waits: a relay is still to report, or an older version is being handed over)
        -> GOING (`Broadcast` is out; the master, the first of its chain, fetches it from the trainers)
        -> HELD (the master has all of it; the others get theirs behind it)
    PUBLISHED -> skipped (a newer one has come; never broadcast)
    GOING -> stopped (`Drop`: a newer one overtakes it)
    HELD -> dropped (`Drop`: its last holder is lost or out of reach, and the trainers have let go of it)

Rules

1. One version is GOING at a time. A newer one stops it (`policy.chain.overtakes`) or waits; of those that wait only the newest
   is kept. When the master holds one, the next starts at once, behind it in the same chain.
2. A version is released to the trainers when no relay will fetch it from them any more: it was skipped or stopped, or it is
   HELD and a newer one is published. So the newest published version is never released, and nothing is lost with a master.
3. Each version has a chain of its own. A lost relay is taken out of it; one whose receiver waits in vain goes to its end, as
   does a master that waits for a trainer in vain; one that joins is put there. Where the first of a chain has not got the
   version, and another has, that one goes to the front: it needs nothing from the trainers. Where nobody has it and the
   trainers have let go of it, it is dropped: a newer one is published then, by rule 2, and repairs everything.
4. A relay that joins catches up from the newest version that any relay holds.

A trainer with three slots never waits. Let n be the newest published version. At most one older version is not released: by
rule 2 it would have to be neither skipped, nor stopped, nor HELD. It is not waiting, as of those only the newest is kept; so
it is GOING, and by rule 1 only one is. A version that turns from HELD to GOING, since its master is lost, is not released only
if it is n (rule 2 again), and then none that is newer is GOING. So two slots hold published versions, and one is free for n + 1.

What a relay holds is never taken back: `Drop` reaches only those that lack the version.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from laminar_hpc.control.readers import Readers
from laminar_hpc.control.relays import Relay, Relays
from laminar_hpc.errors import ProtocolError
from laminar_hpc.policy.chain import brought_forward, moved_back, overtakes, repaired
from laminar_hpc.protocol.commands import Broadcast, Command, Drop, EndJob, Forget, Release, Sever, Share
from laminar_hpc.protocol.events import (
    LinkStalled,
    RankHeard,
    RankLost,
    RelayHolds,
    RelayReady,
    RolloutReady,
    SpareReady,
)


class Delivery(msgspec.Struct, eq=False):
    """A version on its way. `begun_s` is when its hand-over to the present master began (None: it was never broadcast).

    `holders` are relays that have said that they hold it, `stalled` those that a receiver of it has waited for in vain,
    `complaints` has when each relay complained last, and `cut_off` those that have waited for a trainer in vain since all
    had.
    `undisturbed`: it has had one master only, so that its hand-over takes what hand-overs take.
    """

    version: int
    shares: list[Share]
    begun_s: float | None = None
    chain: list[int] = []
    holders: set[int] = set()
    stalled: set[int] = set()
    complaints: dict[int, float] = {}
    cut_off: set[int] = set()
    undisturbed: bool = True
    released: bool = False

    @property
    def held(self) -> bool:
        """Whether the master holds it."""
        return bool(self.chain) and self.chain[0] in self.holders

    @property
    def going(self) -> bool:
        """Whether it is being handed over."""
        return self.begun_s is not None and not self.held


class Distribution:
    """Decides who sends which version to whom. Times are in seconds, in the clock of the caller."""

    def __init__(self, relays: Relays, stall_s: float = 5.0) -> None:
        """`relays` has none yet; `stall_s` is how long a relay waits for a chunk before it complains."""
        self.relays = relays
        self.readers = Readers(relays)
        self._stall_s = stall_s
        self._started = False
        self._deliveries: dict[int, Delivery] = {}
        self._broadcast: set[int] = set()
        self._newest: int | None = None
        self._expected_s: float | None = None
        self._last_stopped = False
        """Whether the version that was begun before the one under way was stopped."""

    # --- versions ---------------------------------------------------------------------------------------------------

    def published(self, version: int, shares: Sequence[Share], now: float) -> list[Command]:
        """All trainers hold their shards of `version`, with these digests. Versions come in order."""
        commands: list[Command] = []
        for other in list(self._deliveries.values()):
            if other.held:
                commands += self._release(other, f"rank {other.chain[0]} holds it, and version {version} is published")
            elif not other.going:
                commands += self._release(
                    other, f"skipped: version {version} is published, and this one was still waiting"
                )
                del self._deliveries[other.version]
        self._newest = version
        self._deliveries[version] = Delivery(version, list(shares))
        return commands + self._stop_for(version, now) + self._send_next(now)

    def relay_holds(self, event: RelayHolds, now: float) -> list[Command]:
        """A relay holds a version complete."""
        if event.version not in self._broadcast:
            raise ProtocolError(
                f"RelayHolds {event.version} from rank {event.rank}, incarnation {event.incarnation}, names version "
                f"{event.version}, which was never broadcast"
            )
        relay = self.relays.current(event.rank, event.incarnation)
        if relay is None or (relay.version is not None and relay.version >= event.version):
            return []
        relay.version = event.version
        commands: list[Command] = []
        delivery = self._deliveries.get(event.version)
        if delivery is not None:
            delivery.holders.add(relay.rank)
            if delivery.chain[:1] == [relay.rank]:
                commands += self._handed_over(delivery, now)
        self._prune()
        return [*commands, *self.readers.caught_up(relay)]

    def link_stalled(self, event: LinkStalled, now: float) -> list[Command]:
        """A relay waits in vain for chunks of a version: its source goes to the end of the chain, unless it waits itself.

        So does the source in the chains of other versions that take the same link, and in chains to come. A master that
        waits for a trainer goes to the end itself: it is the trainer's heartbeats that tell whether it lives.
        """
        relay = self.relays.current(event.rank, event.incarnation)
        delivery = self._deliveries.get(event.version)
        if relay is None or delivery is None:
            return []
        if event.source not in self.relays:  # a trainer: whoever waits for this relay waits for it too
            delivery.complaints[relay.rank] = now
            return self._change_master(delivery, relay, now)
        if not _precedes(delivery.chain, event.source, event.rank):
            return []
        relay.slow = False  # it is another one's victim
        delivery.complaints[relay.rank] = now
        complained_s = delivery.complaints.get(event.source)
        if relay.rank in delivery.holders or (complained_s is not None and now - complained_s <= self._stall_s):
            return []
        self.relays[event.source].slow = True
        why = f"relay rank {relay.rank} waits in vain for rank {event.source}, which goes to the end of chains"
        commands: list[Command] = [Sever(why, event.source, relay.rank)]
        for other in self._begun():
            if other is delivery or self._uses_link(other, event.source, relay):
                other.stalled.add(event.source)
                reason = f"relay rank {relay.rank} waits for rank {event.source}, which goes to the end of the chain"
                commands += self._reroute(other, moved_back(other.chain, event.source), reason, now)
            elif self._uses_link(other, relay.rank, self.relays[event.source]):
                reason = f"what rank {event.source} had asked rank {relay.rank} for is void, and is asked for again"
                commands.append(Broadcast(reason, other.version, list(other.chain), other.shares))
        return commands

    def was_broadcast(self, version: int) -> bool:
        """Whether relays have been told of `version`."""
        return version in self._broadcast

    def late(self) -> list[tuple[int, list[int], list[int]]]:
        """Of each version under way, oldest first: its id, the relays of its chain that lack it, and its chain."""
        return [(one.version, self._lacking(one), one.chain) for one in self._begun() if self._lacking(one)]

    # --- relays and rollouts ----------------------------------------------------------------------------------------

    def relay_ready(self, event: RelayReady, now: float) -> list[Command]:
        """A relay can receive: one of the first, a spare that takes over, or one that was taken back."""
        relay = self.relays.report(event)
        if relay is None:
            return []
        commands: list[Command] = []
        if self._started:
            commands += self._catch_up(relay, now)
        self._started = self._started or self.relays.missing == 0
        commands += self._send_next(now)
        return [*commands, *self.readers.relay_ready(relay)]

    def spare_ready(self, event: SpareReady) -> list[Command]:
        """A spare waits."""
        return self.relays.report_spare(event)

    def relay_lost(self, event: RankLost, now: float) -> list[Command]:
        """A relay or spare is gone: chains are repaired around it, another one is called, its rollouts read elsewhere."""
        relay, calls = self.relays.lose(event)
        commands: list[Command] = []
        if relay is not None:
            why = f"relay rank {relay.rank} on node {relay.node} was lost: {event.reason}"
            commands.append(Forget(why, relay.rank))
            for delivery in self._begun():
                commands += self._leave(delivery, relay.rank, now)
            self._prune()
        commands += calls
        if not self.relays.left:
            return [*commands, self._end(event)]
        if relay is not None:
            commands += self.readers.relay_lost(relay)
        return commands

    def rank_heard(self, event: RankHeard) -> list[Command]:
        """A relay or spare that counts as lost has spoken."""
        return self.relays.hear(event.rank)

    def rollout_ready(self, event: RolloutReady) -> list[Command]:
        """A rollout is up, and may have to be told which relay it reads from."""
        return [*self.readers.report(event)]

    # --- inside: starting and ending versions -----------------------------------------------------------------------

    def _stop_for(self, version: int, now: float) -> list[Command]:
        """Stop the version that is being handed over, if the rule says so."""
        going = next((one for one in self._begun() if one.going), None)
        if going is None or going.begun_s is None:
            return []
        elapsed_s = now - going.begun_s
        if not overtakes(elapsed_s, self._expected_s, self._last_stopped):
            return []
        self._last_stopped = True
        reason = (
            f"stopped: version {version} is published {elapsed_s:.3g} s after the hand-over of this one began, "
            f"which takes {self._expected_s:.3g} s"
        )
        return self._drop(going, reason)

    def _send_next(self, now: float) -> list[Command]:
        """Broadcast the version that waits, if there is one and none is being handed over."""
        waiting = self._deliveries.get(self._newest) if self._newest is not None else None
        if waiting is None or waiting.begun_s is not None or not self._started:
            return []
        chain = self.relays.chain()
        if not chain or any(one.going for one in self._begun()):
            return []
        waiting.begun_s, waiting.chain = now, chain
        self._broadcast.add(waiting.version)
        reason = f"all {len(waiting.shares)} trainers hold their shards of it"
        return [Broadcast(reason, waiting.version, list(chain), waiting.shares)]

    def _handed_over(self, delivery: Delivery, now: float) -> list[Command]:
        """The master holds it: the next one may start."""
        assert delivery.begun_s is not None, "it was broadcast"
        if delivery.undisturbed:
            self._expected_s = now - delivery.begun_s
        self._last_stopped = False
        commands: list[Command] = []
        if self._newest is not None and delivery.version < self._newest:
            reason = f"rank {delivery.chain[0]} holds it, and version {self._newest} is published"
            commands += self._release(delivery, reason)
        return commands + self._send_next(now)

    def _release(self, delivery: Delivery, reason: str) -> list[Command]:
        if delivery.released:
            return []
        delivery.released = True
        return [Release(reason, delivery.version)]

    def _drop(self, delivery: Delivery, reason: str) -> list[Command]:
        del self._deliveries[delivery.version]
        return [Drop(reason, delivery.version), *self._release(delivery, reason)]

    def _prune(self) -> None:
        """Forget the versions that every relay has, or has something newer than; but not the newest one that a relay holds."""
        newest_held = self._newest_held()
        for delivery in self._begun():
            if not self._lacking(delivery) and newest_held is not None and delivery.version < newest_held:
                del self._deliveries[delivery.version]

    # --- inside: chains that change ---------------------------------------------------------------------------------

    def _leave(self, delivery: Delivery, rank: int, now: float) -> list[Command]:
        commands: list[Command] = []
        if rank in delivery.chain:
            commands = self._reroute(delivery, repaired(delivery.chain, rank), f"relay rank {rank} was lost", now)
        delivery.holders.discard(rank)  # not before: whether it was held decides what its new chain means
        delivery.stalled.discard(rank)
        delivery.cut_off.discard(rank)
        delivery.complaints.pop(rank, None)
        return commands

    def _catch_up(self, relay: Relay, now: float) -> list[Command]:
        """A relay joins: the newest version that anybody holds reaches it, and so do those that are newer and under way."""
        newest_held = self._newest_held()
        commands: list[Command] = []
        for delivery in self._begun():
            if newest_held is None or delivery.version >= newest_held:
                reason = f"relay rank {relay.rank} on node {relay.node} joins"
                commands += self._reroute(delivery, [*delivery.chain, relay.rank], reason, now)
        return commands

    def _reroute(self, delivery: Delivery, chain: list[int], why: str, now: float) -> list[Command]:
        """Give a version another chain; or drop it, where nobody could start that chain."""
        was_held, master = delivery.held, delivery.chain[:1]
        holder = next((rank for rank in chain if rank in delivery.holders - delivery.stalled), None)
        if holder is not None and chain[0] not in delivery.holders:
            chain = brought_forward(chain, holder)
        delivery.chain = chain
        if not delivery.held and delivery.released:
            return self._drop(delivery, f"{why}; nobody else holds it completely, and the trainers have let go of it")
        if not delivery.held and (was_held or chain[:1] != master):
            delivery.begun_s, delivery.undisturbed = now, False
        commands: list[Command] = []
        if self._lacking(delivery):
            commands.append(Broadcast(why, delivery.version, list(chain), delivery.shares))
        if delivery.held and not was_held:
            commands += self._handed_over(delivery, now)
        return commands

    def _change_master(self, delivery: Delivery, master: Relay, now: float) -> list[Command]:
        """The master gets nothing from a trainer: let the next relay try, which may have another way to it, in turn for ever."""
        if delivery.held or delivery.chain[0] != master.rank:
            return []
        delivery.cut_off.add(master.rank)
        if delivery.cut_off.issuperset(delivery.chain):
            delivery.cut_off.clear()
        master.slow = True
        why = f"the master, rank {master.rank}, waits in vain for a trainer, and goes to the end of chains"
        chain = moved_back(delivery.chain, master.rank)
        while chain[0] in delivery.cut_off:
            chain = moved_back(chain, chain[0])
        severed = [Sever(why, share.rank, master.rank) for share in delivery.shares]
        return [*severed, *self._reroute(delivery, chain, why, now)]

    def _uses_link(self, delivery: Delivery, source: int, relay: Relay) -> bool:
        """Whether `relay` is still to get this version, or part of it, from `source`."""
        if source not in delivery.chain or relay.rank not in self._lacking(delivery):
            return False
        return delivery.chain.index(source) + 1 == delivery.chain.index(relay.rank)

    def _begun(self) -> list[Delivery]:
        """The versions that were broadcast and may still be needed, oldest first."""
        return [one for _, one in sorted(self._deliveries.items()) if one.begun_s is not None]

    def _lacking(self, delivery: Delivery) -> list[int]:
        """The relays of its chain that have neither this version nor a newer one."""
        found = []
        for rank in delivery.chain:
            version = self.relays[rank].version
            if version is None or version < delivery.version:
                found.append(rank)
        return found

    def _newest_held(self) -> int | None:
        return max((one.version for one in self._deliveries.values() if one.holders), default=None)

    def _end(self, event: RankLost) -> EndJob:
        held = (
            "no version has reached a relay"
            if not self._broadcast
            else f"relays were told of version {max(self._broadcast)}"
        )
        newest = "none is published" if self._newest is None else f"the trainers hold version {self._newest}, unsaved"
        reason = (
            f"relay rank {event.rank} was lost, and no other relay or spare is left: {event.reason}; {held}, {newest}; "
            f"the record up to here is complete"
        )
        return EndJob(reason, "failed")


def _precedes(chain: list[int], source: int, rank: int) -> bool:
    return source in chain and rank in chain and chain.index(source) < chain.index(rank)
