"""Checks the relay tier's invariants from outside: from events and commands, never from the state of who decides."""

from __future__ import annotations

import msgspec

from laminar_hpc.protocol.commands import (
    Attach,
    Broadcast,
    Command,
    Drop,
    EndJob,
    Forget,
    Readmit,
    Release,
    Sever,
    TakeOver,
)
from laminar_hpc.protocol.events import Event, Published, RankHeard, RankLost, RelayHolds, RelayReady, SpareReady
from laminar_hpc.record.relay_events import RelayEvents


class SeenRelay(msgspec.Struct, eq=False):
    """`condition` is ready, spare, called or lost; `spare`: it has never been called."""

    node: str
    condition: str
    spare: bool
    incarnation: int = 0
    held: list[int] = []


class TierChecker:
    """Follows relays, spares and versions; any broken invariant is an AssertionError."""

    def __init__(self, trainers: int, relays: int) -> None:
        self._trainers = trainers
        self._relays = relays
        self.relays: dict[int, SeenRelay] = {}
        self.published: list[int] = []
        self.shares: dict[int, dict[int, bytes]] = {}
        self.broadcast: set[int] = set()
        self.released: set[int] = set()
        self.dropped: set[int] = set()
        self.chains: dict[int, list[int]] = {}
        self._rows = RelayEvents()
        self.recorded: dict[str, list[int | None]] = {}
        self._lost_now: int | None = None

    # --- events -----------------------------------------------------------------------------------------------------

    def event(self, event: Event) -> None:
        self._lost_now = None
        self._rows.event(event)
        match event:
            case RelayReady():
                self._reported(event, "ready")
            case SpareReady():
                self._reported(event, "spare")
            case RankLost() if event.rank in self.relays:
                relay = self.relays[event.rank]
                if event.incarnation >= relay.incarnation:
                    self._lost_now = event.rank if relay.condition == "ready" else None
                    relay.condition, relay.held = "lost", []
            case RelayHolds():
                relay = self.relays[event.rank]
                current = relay.condition == "ready" and relay.incarnation == event.incarnation
                if current and (not relay.held or event.version > relay.held[-1]):
                    relay.held.append(event.version)
            case RankHeard():
                relay = self.relays[event.rank]
                if relay.condition == "lost" and relay.spare:
                    relay.condition = "spare"
            case Published():
                self._see_published(event)
            case _:
                pass

    def _reported(self, event: RelayReady | SpareReady, condition: str) -> None:
        relay = self.relays.get(event.rank)
        if relay is None:
            self.relays[event.rank] = SeenRelay(event.node, condition, condition == "spare", event.incarnation)
        elif relay.condition == "called" and condition == "ready" and event.incarnation == relay.incarnation:
            relay.condition = "ready"

    def _see_published(self, event: Published) -> None:
        shares = self.shares.setdefault(event.version, {})
        shares.setdefault(event.rank, event.digests)
        if len(shares) == self._trainers and event.version not in self.published:
            self.published.append(event.version)
        assert len(self.kept(event.rank)) <= 3, f"trainer {event.rank} needs a fourth slot for {event.version}"

    def is_lost(self, rank: int) -> bool:
        """Whether it counts as lost."""
        return rank in self.relays and self.relays[rank].condition == "lost"

    def kept(self, trainer: int) -> list[int]:
        """The versions that a trainer has in memory."""
        return [
            version for version, shares in self.shares.items() if trainer in shares and version not in self.released
        ]

    # --- commands ---------------------------------------------------------------------------------------------------

    def commands(self, commands: list[Command]) -> None:
        for command in commands:
            row = self._rows.command(command)
            if row is not None:
                assert row["reason"]
                self.recorded.setdefault(row["what"], []).append(row["version"])
            see = getattr(self, f"_see_{type(command).__name__}", None)
            if see is not None:
                see(command)
        forgotten = [command.rank for command in commands if isinstance(command, Forget)]
        assert forgotten == ([] if self._lost_now is None else [self._lost_now])

    def _see_Broadcast(self, command: Broadcast) -> None:
        version, chain = command.version, command.chain
        assert version in self.published
        assert version not in self.dropped
        assert version == self.published[-1] or version in self.broadcast, f"{version} was passed over"
        assert len(set(chain)) == len(chain) > 0
        for rank in chain:
            assert self.relays[rank].condition == "ready", f"relay {rank} in the chain of {version} is not there"
        assert [(share.rank, share.digests) for share in command.shares] == sorted(self.shares[version].items())
        if version in self.released:
            assert version in self.relays[chain[0]].held, f"nobody can start the chain {chain} of {version}"
        if version not in self.broadcast:
            assert set(chain) == {rank for rank, relay in self.relays.items() if relay.condition == "ready"}
            assert len(self.relays) >= self._relays
        self.broadcast.add(version)
        self.chains[version] = list(chain)

    def _see_Drop(self, command: Drop) -> None:
        assert command.version in self.broadcast - self.dropped
        assert command.version < self.published[-1], "the newest version is never dropped"
        self.dropped.add(command.version)

    def _see_Release(self, command: Release) -> None:
        version = command.version
        assert version not in self.released
        assert version < self.published[-1], "the newest version is never released"
        if version in self.broadcast - self.dropped:
            living = [rank for rank in self.chains[version] if self.relays[rank].condition == "ready"]
            assert version in self.relays[living[0]].held, f"the master {living[0]} has not got {version}"
        self.released.add(version)

    def _see_Forget(self, command: Forget) -> None:
        assert self.relays[command.rank].condition == "lost"

    def _see_Sever(self, command: Sever) -> None:
        assert self.relays[command.source].condition == self.relays[command.rank].condition == "ready"

    def _see_Attach(self, command: Attach) -> None:
        assert self.relays[command.relay].condition == "ready", f"rollout {command.rank} is sent to a lost relay"

    def _see_TakeOver(self, command: TakeOver) -> None:
        relay = self.relays[command.rank]
        assert relay.condition == "spare"
        self._check_nobody_there(relay.node)
        relay.condition, relay.spare = "called", False

    def _see_Readmit(self, command: Readmit) -> None:
        relay = self.relays[command.rank]
        assert relay.condition == "lost"
        assert command.incarnation == relay.incarnation + 1
        self._check_nobody_there(relay.node)
        relay.condition, relay.incarnation = "called", command.incarnation

    def _check_nobody_there(self, node: str) -> None:
        here = [relay.condition for relay in self.relays.values() if relay.node == node]
        assert "ready" not in here
        assert "called" not in here

    def _see_EndJob(self, command: EndJob) -> None:
        if "no other relay" in command.reason:
            assert not any(relay.condition in ("ready", "called") for relay in self.relays.values())

    # --- at the end -------------------------------------------------------------------------------------------------

    def check_record(self) -> None:
        """What became of each version is on record."""
        skipped = self.released - self.broadcast
        assert sorted(self.recorded.get("skipped", [])) == sorted(skipped)
        ended = [*self.recorded.get("dropped", []), *self.recorded.get("stopped", [])]
        assert sorted(ended) == sorted(self.dropped)
        assert sorted(self.recorded.get("broadcast", [])) == sorted(self.broadcast)
        assert set(self.published) - self.broadcast - skipped <= {self.published[-1] if self.published else 0}
