"""Which relay each rollout reads from: that of its node, or, while its node has none, the nearest other one.

Invariants: a rollout that is alive reads from a relay that is ready, or still to report for the first time, unless there is
none; every change is an `Attach`. A rollout comes home when the relay of its node has what it reads elsewhere. What a lost
rollout reads from is decided when it reports again.
"""

from __future__ import annotations

import msgspec

from laminar_hpc.control.relays import Relay, Relays
from laminar_hpc.protocol.commands import Attach
from laminar_hpc.protocol.events import RolloutReady


class Reader(msgspec.Struct, eq=False):
    """A rollout, as far as its relay is concerned."""

    rank: int
    node: str
    relay: int
    alive: bool = True


class Readers:
    """All rollouts that have reported, with indexes so that no common event looks at all of them."""

    def __init__(self, relays: Relays) -> None:
        self._relays = relays
        self._by_rank: dict[int, Reader] = {}
        self._of_relay: dict[int, dict[int, Reader]] = {}
        self._away: dict[str, dict[int, Reader]] = {}
        """By node, the rollouts that read elsewhere."""

    def relay_rank(self, rollout: int) -> int:
        """The rank of the relay that `rollout` reads from, or read from last if that one is lost."""
        return self._by_rank[rollout].relay

    def relay_of(self, rollout: int) -> Relay | None:
        """The relay that `rollout` reads from, if it is ready."""
        rank = self._by_rank[rollout].relay
        return self._relays[rank] if self._relays.is_ready(rank) else None

    def of(self, relay: int) -> list[int]:
        """The rollouts that read from `relay`."""
        return list(self._of_relay.get(relay, {}))

    def report(self, event: RolloutReady) -> list[Attach]:
        """A rollout is up, for the first time or again. It reads from `event.relay`, as far as it knows."""
        reader = self._by_rank.get(event.rank)
        if reader is None:
            reader = self._by_rank[event.rank] = Reader(event.rank, event.node, event.relay)
            self._enter(reader, event.relay)
        reader.alive = True
        if reader.relay in self._relays and not self._relays.is_ready(reader.relay):
            return self._to_nearest(reader, f"rank {reader.relay} is lost")
        if reader.relay == event.relay or reader.relay not in self._relays:
            return []
        return [self._attach(reader, self._relays[reader.relay], "it was attached to that one before")]

    def lose(self, rollout: int) -> None:
        """The rollout's incarnation is over."""
        self._by_rank[rollout].alive = False

    def relay_lost(self, relay: Relay) -> list[Attach]:
        """Its rollouts read elsewhere from now on, if there is another one."""
        commands = []
        for reader in list(self._of_relay.get(relay.rank, {}).values()):
            if reader.alive:
                commands += self._to_nearest(reader, f"rank {relay.rank} is lost")
        return commands

    def relay_ready(self, relay: Relay) -> list[Attach]:
        """A relay is there: it serves rollouts that had none; those that have one come when it has caught up.

        Where it begins anew, it has forgotten those whose requests it had when it was lost and who found no other one.
        """
        commands = []
        for reader in self._by_rank.values():
            if not reader.alive or reader.relay not in self._relays:
                continue
            if not self._relays.is_ready(reader.relay):
                commands += self._to_nearest(reader, f"rank {reader.relay} is lost")
            elif reader.relay == relay.rank and relay.incarnation > 0:
                commands.append(self._attach(reader, relay, "it begins anew"))
        return commands + self.caught_up(relay)

    def caught_up(self, relay: Relay) -> list[Attach]:
        """The relay has got something: rollouts of its node come home, unless they can read something newer where they are."""
        if relay.version is None:
            return []
        commands = []
        for reader in list(self._away.get(relay.node, {}).values()):
            other = self.relay_of(reader.rank)
            if reader.alive and (other is None or other.version is None or other.version <= relay.version):
                commands.append(self._attach(reader, relay, f"the relay of its node holds version {relay.version}"))
        return commands

    # --- inside -----------------------------------------------------------------------------------------------------

    def _to_nearest(self, reader: Reader, why: str) -> list[Attach]:
        nearest = self._relays.nearest(reader.node)
        if nearest is None:
            return []
        return [self._attach(reader, nearest, f"{why}, this is the nearest relay")]

    def _attach(self, reader: Reader, relay: Relay, reason: str) -> Attach:
        remote = relay.node != reader.node
        self._of_relay[reader.relay].pop(reader.rank, None)
        self._enter(reader, relay.rank)
        away = self._away.setdefault(reader.node, {})
        if remote:
            away[reader.rank] = reader
        else:
            away.pop(reader.rank, None)
        return Attach(reason, reader.rank, relay.rank, remote)

    def _enter(self, reader: Reader, relay: int) -> None:
        reader.relay = relay
        self._of_relay.setdefault(relay, {})[reader.rank] = reader
