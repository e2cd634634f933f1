"""Storms over the relay tier alone: relays die, hang, stall and come back while versions are published at any pace."""

from __future__ import annotations

from random import Random

from fake_relays import FakeRelays
from hypothesis import given, settings
from hypothesis import strategies as st
from tier_invariants import TierChecker

from laminar_hpc.control.distribution import Distribution
from laminar_hpc.control.relays import Relays
from laminar_hpc.protocol.commands import Command, EndJob, Share
from laminar_hpc.protocol.events import (
    Event,
    LinkStalled,
    Published,
    RankHeard,
    RankLost,
    RelayHolds,
    RelayReady,
    SpareReady,
)

TRAINER = 1


class TierStorm:
    """A distribution, its relays, and a trainer that may publish whenever it likes."""

    def __init__(self, random: Random, relays: int, spares: int, calm: float) -> None:
        self.random = random
        self.calm = calm
        self.now = 0.0
        self.distribution = Distribution(Relays(relays), stall_s=5.0)
        self.checker = TierChecker(1, relays)
        self.relays = FakeRelays(random, self._kept, 2, relays, spares)
        self.said: list[Event] = []
        self.ended = False

    def _kept(self, version: int) -> bool:
        return version in self.checker.kept(TRAINER)

    def tell(self, event: Event) -> None:
        self.now += self.random.choice([0.1, 0.5, 4.0])
        self.checker.event(event)
        if isinstance(event, RankLost) and self.checker.is_lost(event.rank):
            self.relays.taken_for_lost(event.rank)
        commands = self._decide(event)
        self.checker.commands(commands)
        for command in commands:
            self.ended |= isinstance(command, EndJob)
            self.relays.obey(command)
        self.said.append(event)

    def _decide(self, event: Event) -> list[Command]:
        distribution = self.distribution
        match event:
            case RelayReady():
                return distribution.relay_ready(event, self.now)
            case SpareReady():
                return distribution.spare_ready(event)
            case RankLost():
                return distribution.relay_lost(event, self.now)
            case RankHeard():
                return distribution.rank_heard(event)
            case RelayHolds():
                return distribution.relay_holds(event, self.now)
            case LinkStalled():
                return distribution.link_stalled(event, self.now)
            case Published():
                return distribution.published(event.version, [Share(event.rank, event.digests)], self.now)
        raise AssertionError(event)

    def publish(self) -> int:
        assert len(self.checker.kept(TRAINER)) <= 2, "the trainer would have to wait for a slot"
        version = len(self.checker.published)
        self.tell(Published(TRAINER, 0, version, b"%8d" % version, 0.1))
        return version

    def rage(self, count: int) -> None:
        for _ in range(count):
            if self.ended:
                return
            event = self._something()
            if event is not None:
                self.tell(event)

    def _something(self) -> Event | None:
        random = self.random
        moves = self.relays.moves()
        if random.random() < self.calm and moves:
            return random.choice(moves)()
        kind = random.choice(["publish", "publish", "fault", "fault", "repeat", "ghost"])
        if kind == "publish":
            self.publish()
        elif kind == "fault":
            return self.relays.fault()
        elif kind == "repeat":
            # the manager's own word that a rank is heard again is never late: of a dead one it would call a dead spare
            old = [event for event in self.said if not isinstance(event, Published | RankHeard)]
            return random.choice(old) if old else None
        elif self.relays.ghosts:
            return random.choice(self.relays.ghosts)
        return None

    def settle_down(self) -> None:
        """From now on all goes well, until nobody has anything left to do."""
        while not self.ended and (moves := self.relays.moves()):
            event = self.random.choice(moves)()
            if event is not None:
                self.tell(event)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    relays=st.integers(1, 5),
    spares=st.integers(0, 2),
    calm=st.sampled_from([0.5, 0.8, 0.95]),
    moves=st.integers(0, 200),
)
def test_after_a_storm_one_publication_repairs_everything(seed, relays, spares, calm, moves):
    storm = TierStorm(Random(seed), relays, spares, calm)
    storm.rage(moves)
    storm.settle_down()
    if not storm.ended:
        newest = storm.publish()
        storm.settle_down()
        living = storm.relays.living()
        assert living
        for relay in living:
            assert relay.held[-1] == newest, f"relay {relay.rank} holds {relay.held}, not {newest}"
            assert storm.checker.relays[relay.rank].held[-1] == newest
        assert storm.distribution.late() == []
        on_nodes = [relay.node for relay in living]
        assert len(set(on_nodes)) == len(on_nodes)
    storm.checker.check_record()
