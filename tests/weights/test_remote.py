"""A rollout that fetches the image from a relay on another node, and what it does when that one is lost."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from memory_net import MemoryNet, MemoryTransport
from relay_job import image_of

from laminar_hpc.process.memory import map_readonly
from laminar_hpc.protocol.peer import ChunkGone, ChunkRequest, ChunkSent, Layout, Lease, LeaseReturn
from laminar_hpc.weights.epochs import Epochs
from laminar_hpc.weights.fetches import SLOT_PATIENCE_S
from laminar_hpc.weights.image import Image
from laminar_hpc.weights.manifest import make_manifest
from laminar_hpc.weights.remote import RemoteImage
from laminar_hpc.weights.serve import ChunkServer, Holdings

MANIFEST = make_manifest([("a", (150,), "uint8"), ("b", (90,), "uint8")], 100)
LAYOUT = Layout(MANIFEST, [])


class Relay:
    """A relay that has every version it is given."""

    def __init__(self, net: MemoryNet, rank: int) -> None:
        from laminar_hpc.weights.digest import chunk_digest

        self.rank = rank
        self.transport = MemoryTransport(net, rank)
        self.image = Image.create(MANIFEST.nbytes, 2)
        self.transport.register(self.image.memory)

        def digest(version: int, chunk: int) -> bytes:
            low, high = MANIFEST.chunk_range(chunk)
            return chunk_digest(self.image.bytes_of(version)[low:high])

        holdings = Holdings(MANIFEST.chunk_range, lambda _v, _c: False, lambda _v: False, digest)
        self.server = ChunkServer(self.transport, self.image, net.sender(rank), holdings, Epochs())

    def hold(self, version: int) -> None:
        buffer = self.image.begin_fill(version)
        assert buffer is not None
        buffer[:] = image_of(MANIFEST, version)
        self.image.complete(version)


class Pair:
    """Relays 1 and 2, and rollout 3."""

    def __init__(self) -> None:
        self.net = MemoryNet(Random(1))
        self.relays = {rank: Relay(self.net, rank) for rank in (1, 2)}
        self.transport = MemoryTransport(self.net, 3)
        self.remote = RemoteImage(self.transport, LAYOUT, self.net.sender(3), window=2, verify=True, epochs=Epochs())
        self.returned: list[tuple[int, int]] = []
        self.now = 0.0

    def turn(self) -> Lease | None:
        lease = self.remote.poll(self.now)
        while (piece := self.net.deliver_one()) is not None:
            dest, message = piece
            match message:
                case ChunkRequest():
                    self.relays[dest].server.ask(message)
                case ChunkSent():
                    self.remote.sent(message)
                case ChunkGone():
                    self.remote.refused(message)
                case LeaseReturn():
                    self.returned.append((dest, message.version))
        for relay in self.relays.values():
            if relay.rank not in self.net.dead:
                relay.server.poll()
        self.net.move_one()
        self.net.settle()
        return lease

    def fetch(self, turns: int = 60) -> Lease | None:
        for _ in range(turns):
            lease = self.turn()
            if lease is not None:
                return lease
        return None


@pytest.fixture
def pair() -> Pair:
    return Pair()


def check(lease: Lease | None, version: int) -> None:
    assert lease is not None
    assert lease.version == version
    with map_readonly(lease.path, lease.offset, MANIFEST.nbytes) as image:
        assert np.array_equal(image, image_of(MANIFEST, version))


def test_one_version_after_the_other(pair: Pair) -> None:
    for version in (4, 5, 9):
        pair.relays[1].hold(version)
        pair.remote.begin(1, version, 0.0)
        assert "from rank 1" in pair.remote.waiting_for or pair.remote.waiting_for
        check(pair.fetch(), version)
        assert pair.remote.waiting_for == ""
        pair.remote.done(version)
        for _ in range(5):
            pair.turn()
        pair.relays[1].image.drop_borrower(3)


def test_a_relay_that_dies_is_replaced(pair: Pair) -> None:
    for relay in pair.relays.values():
        relay.hold(4)
    pair.remote.begin(1, 4, 0.0)
    pair.turn()
    pair.net.kill(1)
    pair.transport.forget(1)
    pair.remote.forget(1)
    assert pair.fetch() is None
    pair.remote.drop()
    pair.remote.begin(2, 4, 0.0)
    check(pair.fetch(), 4)


def test_a_version_that_the_relay_has_not_got_is_gone(pair: Pair) -> None:
    pair.remote.begin(1, 7, 0.0)
    assert pair.fetch(10) is None
    assert pair.remote.gone
    pair.remote.drop()
    assert not pair.remote.gone
    pair.relays[1].hold(8)
    pair.remote.begin(1, 8, 0.0)
    check(pair.fetch(), 8)


def test_what_was_fetched_for_a_worker_that_died_is_not_fetched_again(pair: Pair) -> None:
    pair.relays[1].hold(4)
    pair.remote.begin(1, 4, 0.0)
    check(pair.fetch(), 4)
    pair.remote.done(4)
    moved = sum(pair.net.moved_bytes.values())
    pair.remote.begin(1, 4, 0.0)
    check(pair.fetch(), 4)
    assert sum(pair.net.moved_bytes.values()) == moved


def test_a_fetch_that_was_given_up_gives_back_what_it_borrowed(pair: Pair) -> None:
    pair.relays[1].hold(4)
    pair.remote.begin(1, 4, 0.0)
    pair.turn()
    pair.remote.drop()
    for _ in range(20):
        assert pair.turn() is None
    assert pair.returned == [(1, 4)]


@pytest.mark.parametrize("cut_off", [True, False])
def test_the_next_relay_lends_the_version_whose_chunk_broke_off(pair: Pair, cut_off: bool) -> None:
    """Relay 1 is stopped, or its link cut, when it has begun to send; relay 2 lends the same version."""
    for relay in pair.relays.values():
        relay.hold(4)
    pair.remote.begin(1, 4, 0.0)
    while not pair.net.sends:
        assert pair.remote.poll(0.0) is None
        dest, message = pair.net.deliver_one() or (0, None)
        assert isinstance(message, ChunkRequest)
        pair.relays[dest].server.ask(message)
        pair.relays[dest].server.poll()
    if cut_off:
        pair.net.stall_link(1, 3)
    else:
        pair.net.stall(1)
    pair.transport.forget(1)
    pair.remote.forget(1)
    pair.remote.drop()
    pair.remote.begin(2, 4, 0.0)
    lease = pair.fetch()
    check(lease, 4)
    pair.remote.done(4)
    for relay in pair.relays.values():
        relay.hold(5)
    pair.remote.begin(2, 5, 0.0)
    assert "4 (ready, lent to nobody)" in pair.remote.waiting_for
    assert "one more (dropped, lent to nobody, in a transfer)" in pair.remote.waiting_for
    pair.now = SLOT_PATIENCE_S
    check(pair.fetch(), 5)


def test_an_older_version_of_another_relay_is_taken_by_an_engine_that_begins_anew(pair: Pair) -> None:
    pair.relays[1].hold(5)
    pair.remote.begin(1, 5, 0.0)
    check(pair.fetch(), 5)
    pair.remote.done(5)
    pair.relays[2].hold(4)
    pair.remote.begin(2, 4, 0.0)
    check(pair.fetch(), 4)
    pair.remote.done(4)
    pair.relays[2].hold(5)
    pair.remote.begin(2, 5, 0.0)
    check(pair.fetch(), 5)
