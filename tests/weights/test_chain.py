"""Trainers, relays and rollouts joined in memory: whatever the order of things, all get every version whole."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_net import MemoryNet, MemoryTransport
from numpy.typing import NDArray

from laminar_hpc.errors import ProtocolError
from laminar_hpc.process.memory import map_readonly, map_writable
from laminar_hpc.protocol.commands import Broadcast, Share
from laminar_hpc.protocol.peer import ChunkRequest, Lease, LeaseRequest, LeaseReturn, Manifest, WeightsWritten
from laminar_hpc.weights.digest import digests_of, range_digests
from laminar_hpc.weights.forward import Forwarder
from laminar_hpc.weights.image import SlotState
from laminar_hpc.weights.manifest import make_manifest
from laminar_hpc.weights.publish import Publisher
from laminar_hpc.weights.pull import Lender, Puller


def tensors_of(manifest: Manifest, version: int) -> list[NDArray[np.uint8]]:
    generator = np.random.default_rng(version)
    return [generator.integers(1, 256, entry.nbytes, dtype=np.uint8) for entry in manifest.tensors]


def image_of(manifest: Manifest, version: int) -> NDArray[np.uint8]:
    image = np.zeros(manifest.nbytes, dtype=np.uint8)
    for entry, tensor in zip(manifest.tensors, tensors_of(manifest, version), strict=True):
        image[entry.offset : entry.offset + entry.nbytes] = tensor
    return image


class Job:
    """Trainers are ranks 0 on, then relays, then a rollout for each relay. The test is controller and event loop."""

    def __init__(
        self, manifest: Manifest, trainers: int, relays: int, window: int, slots: int, versions: int, net: MemoryNet
    ) -> None:
        self.manifest, self.net, self.versions, self.window = manifest, net, versions, window
        self.chain = list(range(trainers, trainers + relays))
        self.publishers = {
            rank: Publisher(MemoryTransport(net, rank), manifest, rank, trainers) for rank in range(trainers)
        }
        self.forwarders = {
            rank: Forwarder(
                MemoryTransport(net, rank), manifest, net.sender(rank), window=window, slots=slots, verify=True
            )
            for rank in self.chain
        }
        self.lenders = {rank: Lender(f.image, net.sender(rank)) for rank, f in self.forwarders.items()}
        self.pullers = {rank + relays: Puller(rank + relays, rank, net.sender(rank + relays)) for rank in self.chain}
        self.loading: dict[int, Lease] = {}
        self.loaded: dict[int, int] = dict.fromkeys(self.pullers, -1)
        self.published = dict.fromkeys(self.publishers, -1)
        self.broadcast = -1
        self.held: dict[int, list[int]] = {rank: [] for rank in self.chain}
        self.now = 0.0

    def close(self) -> None:
        for holder in [*self.publishers.values(), *self.forwarders.values()]:
            holder.close()

    @property
    def finished(self) -> bool:
        return self.net.quiet and all(version == self.versions - 1 for version in self.loaded.values())

    def step(self) -> None:
        """Let something happen, anywhere."""
        self.now += 1.0
        what = self.net.random.choice(
            [self.publish, self.spread, self.net.move_one, self.net.move_one, self.net.settle, self.deliver, self.deliver,
             self.poll_trainer, self.poll_relay, self.poll_relay, self.pull, self.load]
        )  # fmt: skip
        what()

    def publish(self) -> None:
        rank = self.net.random.choice(list(self.publishers))
        version = self.published[rank] + 1
        if version == self.versions or version > self.broadcast + 2:
            return
        message = self.publishers[rank].begin(version)
        if message is None:
            return
        low, high = self.share_bytes(rank)
        data = image_of(self.manifest, version)[low:high]
        with map_writable(message.path, message.offset, high - low) as slot:
            slot[:] = data
        digests = range_digests(self.manifest, message.first_chunk, message.chunks, data)
        self.publishers[rank].written(WeightsWritten(version, digests, 0.0))
        self.published[rank] = version

    def share_bytes(self, rank: int) -> tuple[int, int]:
        publisher = self.publishers[rank]
        low = publisher.first_chunk * self.manifest.chunk_bytes
        return low, min(self.manifest.nbytes, low + publisher.chunks * self.manifest.chunk_bytes)

    def spread(self) -> None:
        if min(self.published.values()) == self.broadcast:
            return
        self.broadcast += 1
        version = self.broadcast
        shares = [Share(rank, p.first_chunk, p.chunks) for rank, p in self.publishers.items()]
        digests = digests_of(tensors_of(self.manifest, version), self.manifest)
        for rank in self.chain:  # as mail from a manager, which is rank -1
            self.net.sender(-1)(rank, Broadcast("test", version, self.chain, shares, digests))

    def deliver(self) -> None:
        piece = self.net.deliver_one()
        if piece is None:
            return
        dest, message = piece
        match message:
            case Broadcast():
                self.forwarders[dest].start(message, self.now)
            case ChunkRequest() if dest in self.publishers:
                self.publishers[dest].serve(message)
            case ChunkRequest():
                self.forwarders[dest].serve(message)
            case LeaseRequest():
                self.lenders[dest].asked(message)
            case LeaseReturn():
                self.lenders[dest].returned(message)
            case Lease():
                lease = self.pullers[dest].lent(message)
                assert lease is not None
                self.loading[dest] = lease
                self.check_lease(lease)

    def poll_trainer(self) -> None:
        self.publishers[self.net.random.choice(list(self.publishers))].poll()

    def poll_relay(self) -> None:
        rank = self.net.random.choice(self.chain)
        self.lenders[rank].poll()
        for held in self.forwarders[rank].poll(self.now):
            self.held[rank].append(held.version)
            assert held.nbytes == self.manifest.nbytes
            assert 0 <= held.seconds <= self.now
            if rank == self.chain[0]:
                for publisher in self.publishers.values():
                    publisher.release(held.version)
        assert self.net.outstanding(rank) <= self.window

    def pull(self) -> None:
        rank = self.net.random.choice(list(self.pullers))
        wanted = self.loaded[rank] + 1
        if not self.pullers[rank].waiting_for and rank not in self.loading and wanted < self.versions:
            self.pullers[rank].request(wanted)

    def load(self) -> None:
        if self.loading:
            rank = self.net.random.choice(list(self.loading))
            lease = self.loading.pop(rank)
            self.check_lease(lease)  # the same bytes as when it came, long ago
            assert lease.version > self.loaded[rank]
            self.loaded[rank] = self.pullers[rank].loaded()

    def check_lease(self, lease: Lease) -> None:
        with map_readonly(lease.path, lease.offset, self.manifest.nbytes) as image:
            assert np.array_equal(image, image_of(self.manifest, lease.version))


def small_manifest(sizes: list[int], chunk_bytes: int) -> Manifest:
    return make_manifest([(f"t{i}", (size,), "uint8") for i, size in enumerate(sizes)], chunk_bytes)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 90), max_size=4),
    chunk_bytes=st.integers(1, 120),
    trainers=st.integers(1, 3),
    relays=st.integers(1, 4),
    window=st.integers(1, 4),
    slots=st.integers(2, 3),
    versions=st.integers(1, 5),
    seed=st.integers(0, 2**32),
)
def test_everyone_gets_every_version(sizes, chunk_bytes, trainers, relays, window, slots, versions, seed) -> None:
    manifest = small_manifest(sizes, chunk_bytes)
    job = Job(manifest, trainers, relays, window, slots, versions, MemoryNet(Random(seed)))
    bound = 3000 + 600 * versions * relays * (manifest.chunks + 4)
    steps = 0
    while not job.finished:
        job.step()
        steps += 1
        assert steps < bound, {rank: f.waiting_for for rank, f in job.forwarders.items()}
    expected = image_of(manifest, versions - 1)
    for rank, forwarder in job.forwarders.items():
        assert job.held[rank] == list(range(versions))
        assert np.array_equal(forwarder.image.bytes_of(versions - 1), expected)
        forwarder.poll(job.now)  # notes the last sends that are done
        assert not forwarder.busy
        live = [v for v in range(versions) if forwarder.image.state(v) is SlotState.READY]
        assert [forwarder.image.leases(v) for v in live] == [0] * len(live)
    job.close()


def relay_of(net: MemoryNet, manifest: Manifest, verify: bool = True) -> tuple[Publisher, Forwarder]:
    """Trainer 0, whose worker has written version 3, and relay 1."""
    publisher = Publisher(MemoryTransport(net, 0), manifest, trainer=0, trainers=1)
    message = publisher.begin(3)
    assert message is not None
    with map_writable(message.path, message.offset, manifest.nbytes) as slot:
        slot[:] = image_of(manifest, 3)
    publisher.written(WeightsWritten(3, digests_of(tensors_of(manifest, 3), manifest), 0.0))
    forwarder = Forwarder(MemoryTransport(net, 1), manifest, net.sender(1), window=2, slots=2, verify=verify)
    return publisher, forwarder


def version_3(manifest: Manifest, chain: list[int], version: int = 3) -> Broadcast:
    digests = digests_of(tensors_of(manifest, 3), manifest)
    return Broadcast("test", version, chain, [Share(0, 0, manifest.chunks)], digests)


def run(net: MemoryNet, publisher: Publisher, forwarder: Forwarder, steps: int = 100) -> list[int]:
    held = []
    for now in range(steps):
        held += [version for version, _, _ in forwarder.poll(float(now))]
        while (piece := net.deliver_one()) is not None:
            assert isinstance(piece[1], ChunkRequest)
            publisher.serve(piece[1])
        publisher.poll()
        net.move_one()
        net.settle()
    return held


def test_a_spoiled_chunk_is_asked_for_again_three_times() -> None:
    manifest = small_manifest([250], chunk_bytes=100)  # only the last chunk has 50 bytes
    net = MemoryNet(Random(1))
    publisher, forwarder = relay_of(net, manifest)
    net.spoil[0, 50] = 3
    forwarder.start(version_3(manifest, [1]), now=0.0)
    assert run(net, publisher, forwarder) == [3]
    assert np.array_equal(forwarder.image.bytes_of(3), image_of(manifest, 3))


def test_a_chunk_that_stays_wrong_is_an_error() -> None:
    manifest = small_manifest([250], chunk_bytes=100)
    net = MemoryNet(Random(1))
    publisher, forwarder = relay_of(net, manifest)
    net.spoil[0, 50] = 4
    forwarder.start(version_3(manifest, [1]), now=0.0)
    with pytest.raises(
        ProtocolError, match="relay rank 1: chunk 2 of version 3 came from rank 0 with a wrong digest 4"
    ):
        run(net, publisher, forwarder)


def test_without_verification_bytes_are_taken_as_they_come() -> None:
    manifest = small_manifest([250], chunk_bytes=100)
    net = MemoryNet(Random(1))
    publisher, forwarder = relay_of(net, manifest, verify=False)
    net.spoil[0, 50] = 1
    forwarder.start(version_3(manifest, [1]), now=0.0)
    assert run(net, publisher, forwarder) == [3]
    expected = image_of(manifest, 3)
    expected[-1] ^= 1
    assert np.array_equal(forwarder.image.bytes_of(3), expected)


def test_a_relay_serves_what_it_has_before_it_has_all() -> None:
    manifest = small_manifest([250], chunk_bytes=100)
    net = MemoryNet(Random(1))
    publisher, forwarder = relay_of(net, manifest)
    forwarder.start(version_3(manifest, [1, 2]), now=0.0)
    buffers = [np.zeros(100, np.uint8), np.zeros(50, np.uint8)]
    received = [MemoryTransport(net, 2).receive(1, tag, buffer) for tag, buffer in enumerate(buffers)]
    forwarder.serve(ChunkRequest(rank=2, version=3, chunk=0, tag=0))
    forwarder.serve(ChunkRequest(rank=2, version=3, chunk=2, tag=1))
    forwarder.poll(0.0)  # asks the trainer for chunks 0 and 1
    for _ in range(2):
        _, request = net.deliver_one() or (0, None)
        assert isinstance(request, ChunkRequest)
        publisher.serve(request)
    publisher.poll()
    net.move_one()
    net.move_one()
    assert forwarder.poll(1.0) == []
    assert forwarder.image.newest is None
    net.move_one()
    assert [transfer.done() for transfer in received] == [True, False]
    assert np.array_equal(buffers[0], image_of(manifest, 3)[:100])
    assert forwarder.waiting_for == "chunk 2 from rank 0 of version 3"


def test_what_moves_nothing_says_so() -> None:
    manifest = small_manifest([50], chunk_bytes=100)
    net = MemoryNet(Random(1))
    publisher, forwarder = relay_of(net, manifest)

    def poll() -> tuple[list[int], bool, bool]:
        held = [each.version for each in forwarder.poll(0.0)]
        publisher.poll()
        return held, forwarder.moved, publisher.moved

    assert poll() == ([], False, False)
    forwarder.start(version_3(manifest, [1]), now=0.0)
    assert poll() == ([], True, False)  # asks for the chunk
    assert poll() == ([], False, False)
    assert forwarder.busy
    _, request = net.deliver_one() or (0, None)
    assert isinstance(request, ChunkRequest)
    publisher.serve(request)
    assert poll() == ([], False, True)  # begins to send it
    assert poll() == ([], False, False)
    assert publisher.busy
    net.move_one()
    assert poll() == ([3], True, False)
    net.settle()
    assert poll() == ([], False, True)  # takes note that it is sent
    assert poll() == ([], False, False)


def test_a_slot_waits_for_the_next_relay_to_give_it_back() -> None:
    manifest = small_manifest([10], chunk_bytes=100)
    net = MemoryNet(Random(1))
    publisher, forwarder = relay_of(net, manifest)
    forwarder.start(version_3(manifest, [1, 2]), now=0.0)
    assert run(net, publisher, forwarder) == [3]
    assert forwarder.image.leases(3) == 1
    Lender(forwarder.image, net.sender(1)).returned(LeaseReturn(rank=2, version=3))
    assert forwarder.image.leases(3) == 0


def test_stopping_takes_receives_back() -> None:
    manifest = small_manifest([250], chunk_bytes=100)
    net = MemoryNet(Random(1))
    _, forwarder = relay_of(net, manifest)
    forwarder.start(version_3(manifest, [1]), now=0.0)
    forwarder.poll(0.0)
    assert forwarder.busy
    assert forwarder.stop()
    assert not forwarder.busy
    assert forwarder.waiting_for == ""
    assert all(receive.cancelled for receive in net.receives.values())


@pytest.mark.parametrize(
    ("broadcast", "message"),
    [
        (lambda m: version_3(m, [2]), r"has the chain \[2\]"),
        (lambda m: version_3(m, [1, 2, 1]), r"has the chain \[1, 2, 1\]"),
        (lambda m: version_3(m, [1], version=0), "version 0 after that of 0"),
        (lambda _: Broadcast("test", 1, [1], [Share(0, 0, 3)], b"short"), "5 bytes of digests, 24 are right"),
        (lambda _: Broadcast("test", 1, [1], [Share(0, 0, 2)], bytes(24)), "hold 2 chunks, the image has 3"),
    ],
)
def test_broadcasts_that_cannot_be_carried_out(broadcast, message: str) -> None:
    manifest = small_manifest([250], chunk_bytes=100)
    _, forwarder = relay_of(MemoryNet(Random(1)), manifest)
    forwarder.start(version_3(manifest, [1], version=0), now=0.0)
    with pytest.raises(ProtocolError, match=message):
        forwarder.start(broadcast(manifest), now=0.0)


def test_requests_that_cannot_be_answered() -> None:
    manifest = small_manifest([250], chunk_bytes=100)
    publisher, _ = relay_of(MemoryNet(Random(1)), manifest)
    with pytest.raises(ProtocolError, match="rank 5 asks for chunk 3 of version 3, but it has chunks 0 to 2"):
        publisher.serve(ChunkRequest(rank=5, version=3, chunk=3, tag=0))
    publisher.serve(ChunkRequest(rank=5, version=2, chunk=0, tag=0))
    with pytest.raises(ProtocolError, match="version 2, but that version is retired, the newest is 3"):
        publisher.poll()


def test_trainers_memory_is_reused_after_release_only() -> None:
    manifest = small_manifest([10], chunk_bytes=100)
    publisher, _ = relay_of(MemoryNet(Random(1)), manifest)
    digests = digests_of(tensors_of(manifest, 3), manifest)
    assert publisher.begin(4) is not None
    publisher.written(WeightsWritten(4, digests, 0.0))
    assert publisher.begin(5) is None
    publisher.release(3)
    message = publisher.begin(5)
    assert message is not None
    assert (message.version, message.first_chunk, message.chunks) == (5, 0, 1)
    with pytest.raises(ProtocolError, match=r"trainer rank 0: version 3 is released, held are \[4\]"):
        publisher.release(3)
    with pytest.raises(ProtocolError, match="version 5 came with 3 bytes of digests, 8 are right"):
        publisher.written(WeightsWritten(5, b"abc", 0.0))


def test_a_trainer_without_chunks_publishes_nothing() -> None:
    manifest = small_manifest([2], chunk_bytes=1)
    publisher = Publisher(MemoryTransport(MemoryNet(Random(1)), 0), manifest, trainer=0, trainers=3)
    message = publisher.begin(0)
    assert message is not None
    assert message.chunks == 0
    publisher.written(WeightsWritten(0, b"", 0.0))
    publisher.release(0)
