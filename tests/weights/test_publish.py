"""Trainers as senders: what of each chunk they send, when their memory is used again, and what they answer to whom."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from random import Random

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_net import MemoryNet, MemoryReceive, MemoryTransport
from numpy.typing import NDArray

from laminar_hpc.errors import PeerLost, ProtocolError
from laminar_hpc.process.memory import map_writable
from laminar_hpc.protocol.peer import ChunkGone, ChunkRequest, Layout, LeaseReturn, Manifest, Shard, WeightsWritten
from laminar_hpc.weights.manifest import make_manifest
from laminar_hpc.weights.publish import Publisher, Ready
from laminar_hpc.weights.reshard import ShardMap, cut, tile_of, whole_tensor
from laminar_hpc.weights.scatter import scatter

RELAY, OTHER_RELAY = 7, 8
DEADLINE_S = 60.0


def layout_of(chunk_bytes: int = 100) -> Layout:
    """A table of 10 x 30 bytes by columns over trainers 1 and 2, and a run of 250 bytes of which both have a part."""
    manifest = make_manifest([("a", (10, 30), "uint8"), ("b", (250,), "uint8")], chunk_bytes)
    a, b = manifest.tensors
    return Layout(
        manifest,
        [
            Shard(1, [tile_of(a, 1, 0, 12), *cut([whole_tensor(b)], 2, 0)]),
            Shard(2, [tile_of(a, 1, 12, 30), *cut([whole_tensor(b)], 2, 1)]),
        ],
    )


def version_bytes(rank: int, version: int, nbytes: int) -> NDArray[np.uint8]:
    return np.random.default_rng([rank, version]).integers(1, 256, nbytes, dtype=np.uint8)


class Trainer:
    """A publisher whose worker is this test, on a net with two relays."""

    def __init__(self, net: MemoryNet, layout: Layout, rank: int = 1, slots: int = 3, verify: bool = True) -> None:
        self.rank, self.layout = rank, layout
        self.tiles = next(shard.tiles for shard in layout.shards if shard.rank == rank)
        self.map = ShardMap(self.tiles)
        self.told: list[Ready] = []
        self.publisher = Publisher(MemoryTransport(net, rank), layout, net.sender(rank), slots=slots, verify=verify)

    def write(self, version: int) -> bool:
        """What the worker does; False where there is no slot."""
        message = self.publisher.begin(version, 0.0)
        if message is None:
            return False
        with map_writable(message.path, message.offset, self.map.nbytes) as memory:
            memory[:] = version_bytes(self.rank, version, self.map.nbytes)
        self.publisher.written(WeightsWritten(version, 0.0))
        return True

    def ready(self) -> Ready:
        """The next version that is ready; the threads that compute digests are given their time."""
        begun_s = time.monotonic()
        while not self.told:
            self.told += self.publisher.poll()
            assert time.monotonic() - begun_s < DEADLINE_S
        return self.told.pop(0)


class Relay:
    """Asks for parts of chunks."""

    def __init__(self, net: MemoryNet, rank: int = RELAY) -> None:
        self.rank, self.net = rank, net
        self.transport = MemoryTransport(net, rank)
        self.memory = np.zeros(1 << 16, dtype=np.uint8)
        self.transport.register(self.memory)
        self.used = 0

    def ask(self, trainer: Trainer, version: int, chunk: int) -> MemoryReceive:
        low, high = trainer.map.part_of_chunk(*trainer.layout.manifest.chunk_range(chunk))
        receive = self.transport.receive(trainer.rank, self.memory[self.used : self.used + high - low])
        self.used += high - low
        trainer.publisher.serve(ChunkRequest(self.rank, version, chunk, receive.ticket))
        return receive


@contextlib.contextmanager
def trainer_of(net: MemoryNet, **keys: object) -> Iterator[Trainer]:
    trainer = Trainer(net, layout_of(), **keys)  # type: ignore[arg-type]
    try:
        yield trainer
    finally:
        trainer.publisher.close()


def move_all(net: MemoryNet, trainer: Trainer) -> None:
    for _ in range(50):
        trainer.publisher.poll()
        net.move_one()
        net.settle()
    trainer.publisher.poll()


@pytest.mark.parametrize("rank", [1, 2])
def test_digests_are_those_of_the_parts_of_chunks(rank: int) -> None:
    with trainer_of(MemoryNet(Random(1)), rank=rank) as trainer:
        trainer.write(5)
        ready = trainer.ready()
        # chunks of 100 bytes over 640: rows of 30 at 0 to 300, then b at 320 to 570. b is cut after 64 of its 250 bytes,
        # where 125 is rounded down to; of the last chunk of a, at 300 to 400, trainer 1 has b's first 64 bytes
        tile = trainer.tiles[0]
        image = np.zeros(trainer.layout.manifest.nbytes, dtype=np.uint8)
        data, row, expected, done = version_bytes(rank, 5, trainer.map.nbytes), {1: 12, 2: 18}[rank], [], 0
        assert (tile.run_bytes, tile.runs) == (row, 10)
        marks = np.zeros(len(image), dtype=bool)
        for number in range(10 * row):
            marks[(0 if rank == 1 else 12) + 30 * (number // row) + number % row] = True
        marks[320:384] = rank == 1
        marks[384:570] = rank == 2
        for low in range(0, 570, 100):
            count = int(marks[low : low + 100].sum())
            if count:
                expected.append(xxhash.xxh3_64_intdigest(data[done : done + count].tobytes()).to_bytes(8, "little"))
            done += count
        assert done == len(data)
        assert ready == (5, b"".join(expected))


def test_without_verification_there_are_no_digests() -> None:
    with trainer_of(MemoryNet(Random(1)), verify=False) as trainer:
        trainer.write(5)
        assert trainer.publisher.busy
        assert trainer.publisher.poll() == [(5, b"")]
        assert trainer.publisher.moved
        assert trainer.publisher.poll() == []
        assert not trainer.publisher.moved
        assert not trainer.publisher.busy


def test_versions_become_ready_in_the_order_in_which_they_were_written() -> None:
    with trainer_of(MemoryNet(Random(1))) as trainer:
        assert [trainer.write(version) for version in (3, 4, 6)] == [True] * 3
        assert [trainer.ready().version for _ in range(3)] == [3, 4, 6]


def test_a_part_is_sent_once_it_is_written_and_not_before() -> None:
    net = MemoryNet(Random(1))
    with trainer_of(net) as trainer:
        relay = Relay(net)
        early = relay.ask(trainer, 0, 0)  # nobody has begun to write it
        move_all(net, trainer)
        assert not early.done()
        message = trainer.publisher.begin(0, 0.0)
        assert message is not None
        move_all(net, trainer)
        assert not early.done()
        with map_writable(message.path, message.offset, trainer.map.nbytes) as memory:
            memory[:] = version_bytes(1, 0, trainer.map.nbytes)
        trainer.publisher.written(WeightsWritten(0, 0.0))
        trainer.publisher.poll()
        assert trainer.publisher.busy
        assert trainer.publisher.moved
        move_all(net, trainer)
        assert early.done()
        # the first 100 bytes of the image: rows of 12 of 30, 3 whole ones and 10 bytes
        assert np.array_equal(early.buffer, version_bytes(1, 0, trainer.map.nbytes)[:46])
        assert not any(net.mail.values())


def test_a_chunk_of_which_a_trainer_has_nothing_is_refused() -> None:
    net = MemoryNet(Random(1))
    with trainer_of(net) as trainer, pytest.raises(ProtocolError, match="rank 7 asks for chunk 5 of version 0"):
        trainer.publisher.serve(ChunkRequest(RELAY, 0, 5, b"1"))  # bytes 500 to 570 are trainer 2's


def test_memory_is_used_again_when_it_is_released_and_returned() -> None:
    net = MemoryNet(Random(1))
    with trainer_of(net) as trainer:
        relay = Relay(net)
        assert [trainer.write(version) for version in (0, 1, 2, 3)] == [True, True, True, False]
        assert [trainer.ready().version for _ in range(3)] == [0, 1, 2]
        received = relay.ask(trainer, 0, 0)
        trainer.publisher.poll()
        trainer.publisher.release(0)
        assert not trainer.write(3)  # it is being sent
        move_all(net, trainer)
        assert received.done()
        assert not trainer.write(3)  # the relay may ask for more of it
        trainer.publisher.returned(LeaseReturn(RELAY, 0))
        assert trainer.write(3)
        trainer.publisher.release(1)
        assert trainer.write(4)
        with pytest.raises(ProtocolError, match=r"trainer rank 1: version 1 is released, held are \[2, 3, 4\]"):
            trainer.publisher.release(1)


def test_who_has_borrowed_nothing_returns_nothing() -> None:
    with trainer_of(MemoryNet(Random(1))) as trainer:
        trainer.write(0)
        trainer.publisher.returned(LeaseReturn(RELAY, 0))
        trainer.publisher.returned(LeaseReturn(RELAY, 99))
        trainer.ready()
        trainer.publisher.release(0)


def test_versions_that_are_no_more_or_will_never_be_are_gone() -> None:
    net = MemoryNet(Random(1))
    with trainer_of(net, slots=2) as trainer:
        relay = Relay(net)
        trainer.write(1)
        trainer.ready()
        trainer.publisher.release(1)
        trainer.write(3)
        trainer.ready()
        assert trainer.write(4)
        for version in (0, 1, 2):
            relay.ask(trainer, version, 0)
        later = relay.ask(trainer, 5, 0)
        trainer.publisher.poll()
        gone = [net.deliver_one() for _ in range(4)]
        assert gone == [(RELAY, ChunkGone(1, version, 0)) for version in (0, 1, 2)] + [None]
        assert not later.done()


def test_a_released_version_is_served_as_long_as_it_is_there() -> None:
    net = MemoryNet(Random(1))
    with trainer_of(net) as trainer:
        trainer.write(0)
        trainer.ready()
        trainer.publisher.release(0)
        received = Relay(net).ask(trainer, 0, 1)
        move_all(net, trainer)
        assert received.done()


def test_a_relay_that_is_gone_keeps_nothing() -> None:
    net = MemoryNet(Random(1))
    with trainer_of(net, slots=2) as trainer:
        relay, other = Relay(net), Relay(net, OTHER_RELAY)
        trainer.write(0)
        trainer.ready()
        stuck = [relay.ask(trainer, 0, chunk) for chunk in range(4)]
        waiting = relay.ask(trainer, 1, 0)
        trainer.publisher.poll()
        assert trainer.publisher.busy
        net.kill(RELAY)
        trainer.publisher.forget(RELAY, 1)
        trainer.publisher.poll()
        assert not trainer.publisher.busy
        trainer.publisher.release(0)
        assert trainer.write(1)
        assert trainer.write(2)  # nothing holds version 0
        assert [trainer.ready().version for _ in range(2)] == [1, 2]
        received = other.ask(trainer, 2, 0)
        move_all(net, trainer)
        assert received.done()
        assert not any(receive.moved for receive in [*stuck, waiting])


def test_a_relay_may_be_lost_before_anybody_says_so() -> None:
    for seed in range(20):  # some transfers with a dead rank end by themselves
        net = MemoryNet(Random(seed))
        with trainer_of(net) as trainer:
            relay = Relay(net)
            trainer.write(0)
            trainer.ready()
            for chunk in range(4):
                relay.ask(trainer, 0, chunk)
            trainer.publisher.poll()
            net.kill(RELAY)
            trainer.publisher.poll()
            trainer.publisher.forget(RELAY, 1)
            trainer.publisher.poll()
            assert not trainer.publisher.busy


def test_a_trainer_without_a_part_publishes_nothing() -> None:
    manifest = make_manifest([("w", (2,), "uint8")], chunk_bytes=1)
    layout = Layout(manifest, [Shard(1, []), Shard(2, [whole_tensor(manifest.tensors[0])])])
    trainer = Trainer(MemoryNet(Random(1)), layout)
    assert trainer.write(0)
    assert trainer.ready() == (0, b"")
    trainer.publisher.release(0)
    trainer.publisher.close()


def test_a_rank_without_a_shard_is_no_trainer() -> None:
    net = MemoryNet(Random(1))
    with pytest.raises(ProtocolError, match="trainer rank 3: the layout has no shard of it"):
        Publisher(MemoryTransport(net, 3), layout_of(), net.sender(3))


@settings(max_examples=40, deadline=None)
@given(chunk_bytes=st.integers(1, 700), versions=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_a_relay_puts_an_image_together_from_all_trainers(chunk_bytes: int, versions: int, seed: int) -> None:
    net, layout = MemoryNet(Random(seed)), layout_of(chunk_bytes)
    trainers = [Trainer(net, layout, rank) for rank in (1, 2)]
    for version in range(versions):
        image = np.zeros(layout.manifest.nbytes, dtype=np.uint8)
        relay = Relay(net)
        asked = []
        for trainer in trainers:
            for chunk in trainer.map.chunks(layout.manifest):
                asked.append((trainer, chunk, relay.ask(trainer, version, chunk)))
            assert trainer.write(version)
        for trainer in trainers:
            assert trainer.ready().version == version
        while not net.quiet or any(trainer.publisher.busy for trainer in trainers):
            net.random.choice(trainers).publisher.poll()
            net.random.choice([net.move_one, net.settle])()
        for trainer, chunk, receive in asked:
            assert receive.done()
            start, stop = trainer.map.part_of_chunk(*layout.manifest.chunk_range(chunk))
            scatter(receive.buffer, trainer.map.rectangles(start, stop), image)
        assert np.array_equal(image, image_of(layout.manifest, version))
        for trainer in trainers:
            trainer.publisher.returned(LeaseReturn(RELAY, version))
            trainer.publisher.release(version)
    for trainer in trainers:
        trainer.publisher.close()


def image_of(manifest: Manifest, version: int) -> NDArray[np.uint8]:
    """By hand: a's columns, and b's first 64 bytes and the rest."""
    one, two = version_bytes(1, version, 184), version_bytes(2, version, 366)
    image = np.zeros(manifest.nbytes, dtype=np.uint8)
    image[:300] = np.concatenate([one[:120].reshape(10, 12), two[:180].reshape(10, 18)], axis=1).reshape(-1)
    image[320:570] = np.concatenate([one[120:], two[180:]])
    return image


def test_a_send_to_a_rank_that_is_known_to_be_gone_is_no_error() -> None:
    net = MemoryNet(Random(1))
    with trainer_of(net) as trainer:
        trainer.write(0)
        trainer.ready()
        relay = Relay(net)
        received = relay.ask(trainer, 0, 0)
        net.kill(RELAY)
        trainer.publisher.poll()
        trainer.publisher.forget(RELAY, 1)
        trainer.publisher.poll()
        assert not trainer.publisher.busy
        relay.transport.forget(1)
        with pytest.raises(PeerLost):
            received.done()
