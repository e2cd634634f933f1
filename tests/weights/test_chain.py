"""Trainers, relays and rollouts joined in memory: whatever the order of things, and whoever dies, versions arrive whole."""

from __future__ import annotations

import time
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_net import MemoryNet, MemoryTransport
from relay_job import RelayJob, image_of, shard_bytes

from laminar_hpc.errors import ProtocolError
from laminar_hpc.process.memory import WritableMappings, map_writable
from laminar_hpc.protocol.commands import Broadcast, Share
from laminar_hpc.protocol.peer import (
    ChunkGone,
    ChunkRequest,
    ChunkSent,
    Layout,
    LeaseReturn,
    Shard,
    Tile,
    WeightsWritten,
)
from laminar_hpc.protocol.wire import AnyRecord
from laminar_hpc.weights import digest
from laminar_hpc.weights.epochs import Epochs
from laminar_hpc.weights.filling import SLOT_PATIENCE_S
from laminar_hpc.weights.forward import Forwarder
from laminar_hpc.weights.image import SlotState
from laminar_hpc.weights.manifest import make_manifest
from laminar_hpc.weights.publish import Publisher
from laminar_hpc.weights.pull import Lender


def one_run(offset: int, nbytes: int) -> Tile:
    return Tile(offset, nbytes, 1, nbytes, 0, nbytes)


def layout_of(rows: list[tuple[int, int]], chunk_bytes: int, trainers: int) -> Layout:
    """Matrices of bytes, each cut into columns among the trainers: the first ones get a column more where it does not divide."""
    tensors = [(f"t{i}", shape, "uint8") for i, shape in enumerate(rows)]
    manifest = make_manifest(tensors, chunk_bytes)
    tiles: list[list[Tile]] = [[] for _ in range(trainers)]
    for entry in manifest.tensors:
        height, width = entry.shape
        start = 0
        for rank in range(trainers):
            columns = width // trainers + (rank < width % trainers)
            if columns and height:
                tiles[rank].append(Tile(entry.offset + start, columns, height, width, 0, columns * height))
            start += columns
    return Layout(manifest, [Shard(rank, tiles[rank]) for rank in range(trainers)])


def run_to_the_end(job: RelayJob, bound: int) -> None:
    steps = 0
    while not job.finished and job.ended is None:
        job.step()
        steps += 1
        assert steps < bound, {rank: job.forwarders[rank].waiting_for for rank in job.live}


SHAPES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 17)), max_size=4)


@settings(max_examples=30, deadline=None)
@given(
    rows=SHAPES,
    chunk_bytes=st.integers(1, 120),
    trainers=st.integers(1, 3),
    relays=st.integers(1, 4),
    window=st.integers(1, 4),
    slots=st.integers(2, 3),
    versions=st.integers(1, 5),
    seed=st.integers(0, 2**32),
)
def test_everyone_gets_the_last_version(rows, chunk_bytes, trainers, relays, window, slots, versions, seed) -> None:
    layout = layout_of(rows, chunk_bytes, trainers)
    job = RelayJob(MemoryNet(Random(seed)), layout, relays, window=window, slots=slots, versions=versions)
    run_to_the_end(job, 5000 + 1000 * versions * relays * trainers * (layout.manifest.chunks + 4))
    for rank, forwarder in job.forwarders.items():
        assert job.held[rank] == sorted(set(job.held[rank]))
        assert np.array_equal(forwarder.image.bytes_of(versions - 1), image_of(job.manifest, versions - 1))
        forwarder.poll(job.now)  # notes the last sends that are done
        live = [v for v in range(versions) if forwarder.image.state(v) is SlotState.READY]
        assert [forwarder.image.leases(v) for v in live] == [0] * len(live)
    job.close()


@settings(max_examples=40, deadline=None)
@given(
    rows=SHAPES,
    chunk_bytes=st.integers(20, 120),
    trainers=st.integers(1, 2),
    relays=st.integers(2, 5),
    slots=st.integers(2, 3),
    versions=st.integers(2, 5),
    deaths=st.lists(st.integers(5, 400), min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
)
def test_whoever_dies_the_others_get_the_last_version(
    rows, chunk_bytes, trainers, relays, slots, versions, deaths, seed
) -> None:
    layout = layout_of(rows, chunk_bytes, trainers)
    net = MemoryNet(Random(seed))
    job = RelayJob(net, layout, relays, slots=slots, versions=versions)
    for steps in deaths:
        for _ in range(steps):
            job.step()
        if len(job.live) > 1:
            job.lose(net.random.choice(job.live))
    run_to_the_end(job, 20000 + 1000 * versions * relays * trainers * (layout.manifest.chunks + 4))
    assert job.ended is None
    for forwarder in job.living_forwarders():
        assert np.array_equal(forwarder.image.bytes_of(versions - 1), image_of(job.manifest, versions - 1))
    job.close()


@settings(max_examples=60, deadline=None)
@given(
    chunk_bytes=st.integers(20, 120),
    trainers=st.integers(1, 2),
    relays=st.integers(2, 4),
    slots=st.integers(2, 3),
    versions=st.integers(2, 6),
    hangs=st.lists(st.tuples(st.integers(5, 300), st.integers(0, 300)), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
)
def test_a_relay_that_was_given_up_and_speaks_again_gets_the_last_version(
    chunk_bytes, trainers, relays, slots, versions, hangs, seed
) -> None:
    """In the memory that it had before: what was under way to it or from it then does no harm, and none is taken anew."""
    layout = layout_of([(4, 17), (3, 16)], chunk_bytes, trainers)
    net = MemoryNet(Random(seed))
    job = RelayJob(net, layout, relays, slots=slots, versions=versions)
    images = {rank: forwarder.image for rank, forwarder in job.forwarders.items()}
    for before, away in hangs:
        for _ in range(before):
            job.step()
        if not job.distribution.relays.ends_without(rank := net.random.choice(job.relays)):
            job.hang(rank)
            for _ in range(away):
                job.step()
            job.wake(rank)
    run_to_the_end(job, 20000 + 1000 * versions * relays * trainers * (layout.manifest.chunks + 4))
    assert job.ended is None
    for rank, forwarder in job.forwarders.items():
        assert forwarder.image is images[rank]
        assert np.array_equal(forwarder.image.bytes_of(versions - 1), image_of(job.manifest, versions - 1))
    job.close()


@settings(max_examples=30, deadline=None)
@given(relays=st.integers(3, 5), stalled=st.integers(0, 4), steps=st.integers(5, 300), seed=st.integers(0, 2**32))
def test_a_link_that_stalls_is_gone_around(relays: int, stalled: int, steps: int, seed: int) -> None:
    layout = layout_of([(4, 17), (3, 16)], 20, 1)
    job = RelayJob(MemoryNet(Random(seed)), layout, relays, versions=4)
    source = min(stalled, relays - 1)  # 0 is the trainer
    job.net.stall_link(source, source + 1)
    for _ in range(steps):
        job.step()
    bound = 60_000
    for step in range(bound):
        if job.finished:
            break
        job.step()
        if step % 50 == 0:
            job.report_stalls(timeout_s=200.0)
    assert job.finished, {rank: job.forwarders[rank].waiting_for for rank in job.live}
    job.close()


# --- one relay ------------------------------------------------------------------------------------------------------


class OneRelay:
    """Trainer 0, whose worker has written version 3, and relay 1."""

    def __init__(self, nbytes: int = 250, *, verify: bool = True, slots: int = 2) -> None:
        self.net = MemoryNet(Random(1))
        manifest = make_manifest([("t", (nbytes,), "uint8")], 100)  # of 250 bytes, only the last chunk has 50
        self.layout = Layout(manifest, [Shard(0, [one_run(0, nbytes)])])
        self.publisher = Publisher(MemoryTransport(self.net, 0), self.layout, self.net.sender(0), verify=verify)
        self.transport = MemoryTransport(self.net, 1)
        self.epochs = Epochs()
        self.has_room = True
        self.relay = Forwarder(
            self.transport,
            self.layout,
            self.net.sender(1),
            window=2,
            slots=slots,
            verify=verify,
            epochs=self.epochs,
            has_room=lambda _nbytes: self.has_room,
        )
        self.shares: dict[int, list[Share]] = {}
        self.image = image_of(manifest, 3)
        self.to_others: list[tuple[int, AnyRecord]] = []
        self.write(3)

    def write(self, version: int) -> None:
        message = self.publisher.begin(version, 0.0)
        assert message is not None
        image = image_of(self.layout.manifest, version)
        with map_writable(message.path, message.offset, image.nbytes) as slot:
            slot[:] = shard_bytes(self.layout.shards[0], image)
        self.publisher.written(WeightsWritten(version, 0.0))
        ready = self.publisher.poll()
        while not ready:
            ready = self.publisher.poll()
        self.shares[version] = [Share(0, ready[0].digests)]

    def broadcast(self, version: int, chain: list[int]) -> Broadcast:
        return Broadcast("test", version, chain, self.shares.get(version, self.shares[3]))

    def lose(self, rank: int, epoch: int) -> None:
        self.transport.forget(rank)
        self.epochs.lost(rank, epoch)
        self.relay.forget(rank)

    def deliver(self) -> None:
        while (piece := self.net.deliver_one()) is not None:
            dest, message = piece
            if isinstance(message, ChunkRequest) and dest == 0:
                self.publisher.serve(message)
            elif isinstance(message, LeaseReturn) and dest == 0:
                self.publisher.returned(message)
            elif isinstance(message, ChunkGone) and dest == 1:
                self.relay.refused(message)
            else:
                self.to_others.append(piece)

    def run(self, turns: int = 100, begin: int = 0) -> list[int]:
        held = []
        for now in range(begin, begin + turns):
            held += [each.version for each in self.relay.poll(float(now))]
            self.deliver()
            self.publisher.poll()
            self.net.move_one()
            self.net.settle()
        return held


def pins(one: OneRelay) -> int:
    return one.relay.image.describe().count("in a transfer")


def test_a_spoiled_chunk_is_asked_for_again_three_times() -> None:
    one = OneRelay()
    one.net.spoil[0, 50] = 3
    one.relay.start(one.broadcast(3, [1]), now=0.0)
    assert one.run() == [3]
    assert np.array_equal(one.relay.image.bytes_of(3), one.image)


@pytest.mark.parametrize("trainers", [1, 3])
def test_digests_that_threads_compute_are_waited_for(monkeypatch: pytest.MonkeyPatch, trainers: int) -> None:
    monkeypatch.setattr(digest, "AT_ONCE_BYTES", 0)
    layout = layout_of([(4, 17), (3, 16)], 20, trainers)
    net = MemoryNet(Random(2))
    job = RelayJob(net, layout, relays=3, versions=3)
    net.spoil[job.relays[0], 20] = 2
    deadline_s = time.monotonic() + 30.0
    while not job.finished:
        job.step()
        assert time.monotonic() < deadline_s, {rank: job.forwarders[rank].waiting_for for rank in job.live}
    assert net.spoil[job.relays[0], 20] == 0  # both were asked for again
    for forwarder in job.forwarders.values():
        assert np.array_equal(forwarder.image.bytes_of(2), image_of(job.manifest, 2))
    job.close()


def test_a_chunk_that_stays_wrong_is_an_error() -> None:
    one = OneRelay()
    one.net.spoil[0, 50] = 4
    one.relay.start(one.broadcast(3, [1]), now=0.0)
    with pytest.raises(ProtocolError, match="rank 1: chunk 2 of version 3 came from rank 0 with a wrong digest 4"):
        one.run()


def test_without_verification_bytes_are_taken_as_they_come() -> None:
    one = OneRelay(verify=False)
    one.net.spoil[0, 50] = 1
    one.relay.start(one.broadcast(3, [1]), now=0.0)
    assert one.run() == [3]
    one.image[-1] ^= 1
    assert np.array_equal(one.relay.image.bytes_of(3), one.image)


def test_a_relay_serves_what_it_has_before_it_has_all() -> None:
    one = OneRelay()
    one.relay.start(one.broadcast(3, [1, 2]), now=0.0)
    next_one = MemoryTransport(one.net, 2)
    memory = np.zeros(150, np.uint8)
    next_one.register(memory)
    receives = [next_one.receive(1, memory[:100]), next_one.receive(1, memory[100:])]
    for chunk, receive in zip((0, 2), receives, strict=True):
        one.relay.serve(ChunkRequest(rank=2, version=3, chunk=chunk, ticket=receive.ticket))
    one.relay.poll(0.0)  # asks the trainer for chunks 0 and 1
    one.deliver()
    one.publisher.poll()
    one.net.move_one()
    one.net.move_one()
    assert one.relay.poll(1.0) == []
    assert one.relay.image.newest is None
    one.net.move_one()
    one.deliver()
    assert [receive.done() for receive in receives] == [True, False]
    assert np.array_equal(memory[:100], one.image[:100])
    sent = [message for rank, message in one.to_others if rank == 2]
    assert [(type(message), message.version, message.chunk) for message in sent] == [(ChunkSent, 3, 0)]
    assert one.relay.waiting_for == "chunk 1 from rank 0, 2 from rank 0 of version 3"
    assert one.relay.image.has_lent(2, 3)
    Lender(one.relay.image, one.net.sender(1), Epochs()).returned(LeaseReturn(rank=2, version=3))
    assert not one.relay.image.has_lent(2, 3)


def test_chunks_go_to_one_rank_one_after_the_other() -> None:
    one = OneRelay()
    one.relay.start(one.broadcast(3, [1]), now=0.0)
    one.relay.poll(0.0)  # asks for two
    one.deliver()
    one.publisher.poll()
    assert len(one.net.sends) == 1
    one.net.move_one()
    one.net.settle()
    one.publisher.poll()
    assert len(one.net.sends) == 1


def test_what_moves_nothing_says_so() -> None:
    one = OneRelay(nbytes=50)

    def poll() -> tuple[list[int], bool, bool]:
        held = [each.version for each in one.relay.poll(0.0)]
        one.publisher.poll()
        return held, one.relay.moved, one.publisher.moved

    assert poll() == ([], False, False)
    one.relay.start(one.broadcast(3, [1]), now=0.0)
    assert poll() == ([], True, False)  # asks for the chunk
    assert poll() == ([], False, False)
    assert one.relay.busy
    one.deliver()
    assert poll() == ([], False, True)  # begins to send it
    assert poll() == ([], False, False)
    assert one.publisher.busy
    one.net.move_one()
    assert poll() == ([3], True, False)
    one.net.settle()
    assert poll() == ([], False, True)  # takes note that it is sent
    assert poll() == ([], False, False)


def test_of_versions_that_wait_only_the_newest_is_fetched() -> None:
    one = OneRelay()
    one.write(4)
    one.write(5)
    for version in (3, 4, 5):
        one.relay.start(one.broadcast(version, [1]), now=0.0)
    assert one.run() == [3, 5]
    assert one.relay.skipped == [4]


def test_a_version_that_was_passed_over_is_refused_to_the_next_relay() -> None:
    one = OneRelay()
    one.relay.start(one.broadcast(3, [1, 2]), now=0.0)
    one.relay.drop(3)
    one.relay.serve(ChunkRequest(rank=2, version=3, chunk=0, ticket=b""))
    one.relay.serve(ChunkRequest(rank=2, version=4, chunk=0, ticket=b""))  # nobody has told of that one yet
    one.run(5)
    assert [message for rank, message in one.to_others if rank == 2] == [ChunkGone(1, 3, 0)]


def test_a_version_given_up_half_way_leaves_a_slot_when_its_receives_have_ended() -> None:
    one = OneRelay()
    one.relay.start(one.broadcast(3, [1]), now=0.0)
    one.relay.poll(0.0)
    one.deliver()
    one.publisher.poll()  # both chunks that were asked for are being sent
    one.relay.drop(3)
    assert one.relay.skipped == [3]
    one.write(4)
    one.relay.start(one.broadcast(4, [1]), now=0.0)
    one.relay.poll(0.0)
    assert one.relay.image.state(3) is SlotState.DROPPED
    assert pins(one) == 1
    assert one.run() == [4]
    assert pins(one) == 0
    assert np.array_equal(one.relay.image.bytes_of(4), image_of(one.layout.manifest, 4))


def break_off(one: OneRelay, version: int) -> None:
    """Relay 2 is cut off from relay 1, which it has begun to send chunk 0 of `version`."""
    source = MemoryTransport(one.net, 2)
    image = image_of(one.layout.manifest, version)
    source.register(image)
    one.relay.start(one.broadcast(version, [2, 1]), now=0.0)
    one.relay.poll(0.0)
    one.deliver()
    asked = {message.chunk: message for rank, message in one.to_others if rank == 2 and message.version == version}
    source.send(1, asked[0].ticket, image[:100])
    one.net.stall_link(1, 2)
    one.lose(2, version)


def test_a_chunk_that_broke_off_costs_a_slot_and_another_one_is_made() -> None:
    """With two slots: in each of two versions a chunk from relay 2, which is cut off, is never done."""
    one = OneRelay(slots=2)
    for version in (3, 4):
        if version == 4:
            one.write(4)
        one.net.resume_link(1, 2)
        break_off(one, version)
        one.relay.start(one.broadcast(version, [1]), now=0.0)
        assert one.run() == [version]
    assert pins(one) == 2
    one.publisher.release(3)
    one.write(5)
    one.relay.start(one.broadcast(5, [1]), now=10.0)
    one.relay.poll(10.0)
    first = "3 (ready, lent to nobody, in a transfer)"
    assert one.relay.waiting_for.startswith(f"a slot for version 5: {first}, 4 (ready, lent to nobody, in a transfer)")
    one.has_room = False
    one.relay.poll(10.0 + SLOT_PATIENCE_S)
    assert one.relay.waiting_for.endswith("; there is no memory for another one")
    one.has_room = True
    one.relay.poll(10.0 + 2 * SLOT_PATIENCE_S)
    one.relay.poll(10.0 + 2 * SLOT_PATIENCE_S)
    assert one.run() == [5]
    assert one.relay.image.slots == 3
    one.net.resume_link(1, 2)
    for _ in range(2):  # the rest comes after all, and changes nothing that anybody has
        one.net.move_one()
    one.relay.poll(20.0)
    assert pins(one) == 0
    for version in (3, 4, 5):
        assert np.array_equal(one.relay.image.bytes_of(version), image_of(one.layout.manifest, version))


def test_a_version_whose_chunk_broke_off_is_taken_when_it_is_offered_again() -> None:
    """The rest of the chunk comes into the slot where it began, not into that which the version has now."""
    one = OneRelay(slots=2)
    break_off(one, 3)
    one.relay.begin_anew([])
    one.relay.start(one.broadcast(3, [1]), now=1.0)
    assert one.run() == [3]
    assert pins(one) == 1
    taken = one.relay.image.bytes_of(3).copy()
    one.relay.image.bytes_of(3)[:] = 0
    one.net.resume_link(1, 2)
    one.net.move_one()
    one.relay.poll(200.0)
    assert pins(one) == 0
    assert not one.relay.image.bytes_of(3).any()
    assert np.array_equal(taken, one.image)


def test_a_send_that_broke_off_keeps_its_bytes_and_holds_nothing_up() -> None:
    """Relay 2 is cut off while relay 1 sends it chunk 0 of version 3, and gets the bytes of that one when it is back."""
    one = OneRelay(slots=2)
    one.relay.start(one.broadcast(3, [1, 2]), now=0.0)
    assert one.run() == [3]
    next_one, memory = MemoryTransport(one.net, 2), np.zeros(200, np.uint8)
    next_one.register(memory)
    receives = [next_one.receive(1, memory[:100]), next_one.receive(1, memory[100:])]
    one.relay.serve(ChunkRequest(rank=2, version=3, chunk=0, ticket=receives[0].ticket))
    one.relay.poll(100.0)
    assert one.relay.busy
    one.net.stall_link(1, 2)
    one.lose(2, 1)
    assert not one.relay.busy
    for version in (4, 5, 6):
        one.write(version)
        one.publisher.release(version - 1)
        one.relay.start(one.broadcast(version, [1]), now=100.0 * version)
        assert one.run(begin=100 * version) == [version]
    assert one.relay.image.slots == 3  # the newest version, and one to fill, beside the one that is pinned
    assert pins(one) == 1
    one.relay.serve(ChunkRequest(rank=2, version=6, chunk=1, ticket=receives[1].ticket, epoch=1))
    one.relay.poll(700.0)
    one.net.resume_link(1, 2)
    assert len(one.net.sends) == 2  # what broke off does not keep the relay from sending more
    for _ in range(2):
        one.net.move_one()
        one.net.settle()
    one.relay.poll(701.0)
    assert pins(one) == 0
    assert [receive.done() for receive in receives] == [True, True]
    assert np.array_equal(memory[:100], one.image[:100])
    assert np.array_equal(memory[100:], image_of(one.layout.manifest, 6)[100:200])


def test_a_trainer_publishes_on_though_relays_are_cut_off_in_the_middle() -> None:
    one = OneRelay()
    cut = [MemoryTransport(one.net, rank) for rank in (2, 3, 4)]
    memory = np.zeros((3, 100), np.uint8)
    for version, transport, line in zip((3, 4, 5), cut, memory, strict=True):
        if version > 3:
            one.write(version)
        transport.register(line)
        receive = transport.receive(0, line)
        one.publisher.serve(ChunkRequest(rank=transport.rank, version=version, chunk=0, ticket=receive.ticket))
        one.publisher.poll()
        one.net.stall_link(0, transport.rank)
        one.publisher.forget(transport.rank, version)
        one.publisher.release(version)
    assert one.publisher.begin(6, 0.0) is None
    assert one.publisher.begin(6, SLOT_PATIENCE_S / 2) is None
    assert one.publisher.begin(6, SLOT_PATIENCE_S) is None
    message = one.publisher.begin(6, SLOT_PATIENCE_S)
    assert message is not None
    mappings = WritableMappings()
    mappings.view(message.path, 0, 1)
    mappings.view(message.path, message.offset, 250)[:] = image_of(one.layout.manifest, 6)
    one.publisher.written(WeightsWritten(6, 0.0))
    assert np.array_equal(one.publisher._image.bytes_of(6), image_of(one.layout.manifest, 6))
    for transport in cut:
        one.net.resume_link(0, transport.rank)
    while one.net.sends:
        one.net.move_one()
        one.net.settle()
    for version, line in zip((3, 4, 5), memory, strict=True):
        assert np.array_equal(line, image_of(one.layout.manifest, version)[:100])


def test_a_refusal_does_not_end_an_earlier_question_that_is_being_answered() -> None:
    """Relay 2 is asked twice for chunk 0, with others asked in between, answers the first time and refuses the second."""
    one = OneRelay(slots=2)
    source = MemoryTransport(one.net, 2)
    source.register(one.image)

    def question() -> ChunkRequest:
        one.relay.poll(0.0)
        one.deliver()
        asked = [message for rank, message in one.to_others if rank == 2 and isinstance(message, ChunkRequest)]
        return [message for message in asked if message.chunk == 0][-1]

    one.relay.start(one.broadcast(3, [2, 1]), now=0.0)
    first = question()
    one.net.stall_link(0, 1)
    one.relay.start(one.broadcast(3, [1]), now=0.0)
    one.relay.start(one.broadcast(3, [2, 1]), now=0.0)
    assert question().ticket != first.ticket
    source.send(1, first.ticket, one.image[:100])
    one.net.stall_link(1, 2)
    for chunk in (0, 1):
        one.relay.refused(ChunkGone(2, 3, chunk))
    one.relay.poll(0.0)
    one.write(4)
    one.net.resume_link(0, 1)
    one.relay.start(one.broadcast(4, [1]), now=0.0)
    assert one.run() == [4]
    one.net.resume_link(1, 2)
    one.net.move_one()
    one.relay.poll(200.0)
    assert pins(one) == 0
    assert np.array_equal(one.relay.image.bytes_of(4), image_of(one.layout.manifest, 4))


def test_a_source_gets_its_lease_back_though_another_one_hangs() -> None:
    one = OneRelay(slots=2)
    break_off(one, 3)
    one.relay.start(one.broadcast(3, [1]), now=0.0)
    assert one.run() == [3]
    assert pins(one) == 1
    assert not one.publisher._image.has_lent(1, 3)


def test_a_relay_goes_on_with_another_source_from_what_it_has() -> None:
    """Relay 1 gets chunk 0 from relay 2, which dies; the trainer gives the rest, and nothing is sent twice."""
    one = OneRelay()
    source = MemoryTransport(one.net, 2)
    source.register(one.image)
    one.relay.start(one.broadcast(3, [2, 1]), now=0.0)
    one.relay.poll(0.0)
    one.deliver()
    asked = {message.chunk: message for rank, message in one.to_others if rank == 2}
    assert sorted(asked) == [0, 1]
    source.send(1, asked[0].ticket, one.image[:100])
    one.net.move_one()
    digest = one.shares[3][0].digests[:8]
    one.relay.sent(ChunkSent(2, 3, 0, digest))
    one.relay.poll(1.0)
    one.net.kill(2)
    one.lose(2, 1)
    assert one.relay.poll(2.0) == []
    one.relay.start(one.broadcast(3, [1]), now=3.0)
    assert one.run() == [3]
    assert np.array_equal(one.relay.image.bytes_of(3), one.image)
    assert one.net.moved_bytes[0, 1] == 150


def test_a_source_that_sends_nothing_is_named_once_in_the_time_allowed() -> None:
    one = OneRelay()
    one.relay.start(one.broadcast(3, [2, 1]), now=0.0)
    one.relay.poll(1.0)
    assert one.relay.stalled_on(5.9, 5.0) is None
    assert one.relay.stalled_on(6.0, 5.0) == (3, 2)
    assert one.relay.stalled_on(7.0, 5.0) is None
    assert one.relay.stalled_on(11.0, 5.0) == (3, 2)


def test_a_source_that_the_transport_alone_has_lost_is_named_too() -> None:
    """A broken connection to a relay that lives: nobody else knows of it."""
    one = OneRelay()
    one.relay.start(one.broadcast(3, [2, 1]), now=0.0)
    one.relay.poll(1.0)
    one.transport.forget(2)
    one.relay.poll(2.0)
    assert one.relay.waiting_for == "a source for version 3 in place of rank 2"
    assert one.relay.stalled_on(6.0, 5.0) is None
    assert one.relay.stalled_on(7.0, 5.0) == (3, 2)
    assert one.relay.stalled_on(8.0, 5.0) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: Broadcast("test", 3, [2], b.shares), r"has the chain \[2\]"),
        (lambda b: Broadcast("test", 3, [1, 2, 1], b.shares), r"has the chain \[1, 2, 1\]"),
        (
            lambda b: Broadcast("test", 3, b.chain, [Share(0, b"short")]),
            "5 bytes of digests, 24 are right for 3 chunks",
        ),
        (lambda b: Broadcast("test", 3, b.chain, []), "no digests of rank 0's shard"),
    ],
)
def test_broadcasts_that_cannot_be_carried_out(change, message: str) -> None:
    one = OneRelay()

    def carry_out() -> None:
        one.relay.start(change(one.broadcast(3, [1])), now=0.0)
        one.relay.poll(0.0)

    with pytest.raises(ProtocolError, match=message):
        carry_out()


def test_requests_that_cannot_be_answered() -> None:
    one = OneRelay()
    with pytest.raises(ProtocolError, match="rank 5 asks for chunk 3 of version 3, of which there is nothing here"):
        one.publisher.serve(ChunkRequest(rank=5, version=3, chunk=3, ticket=b""))
    one.publisher.serve(ChunkRequest(rank=5, version=2, chunk=0, ticket=b""))
    one.publisher.poll()
    one.deliver()
    assert one.to_others == [(5, ChunkGone(0, 2, 0))]


def test_trainers_memory_is_reused_after_release_only() -> None:
    one = OneRelay()
    one.write(4)
    one.write(5)
    assert one.publisher.begin(6, 0.0) is None
    one.publisher.release(3)
    assert one.publisher.begin(6, 0.0) is not None
    with pytest.raises(ProtocolError, match=r"trainer rank 0: version 3 is released, held are \[4, 5\]"):
        one.publisher.release(3)


def test_a_trainer_without_a_share_publishes_nothing() -> None:
    manifest = make_manifest([("t", (2,), "uint8")], 1)
    layout = Layout(manifest, [Shard(0, [one_run(0, 2)]), Shard(1, [])])
    net = MemoryNet(Random(1))
    publisher = Publisher(MemoryTransport(net, 1), layout, net.sender(1))
    assert publisher.begin(0, 0.0) is not None
    publisher.written(WeightsWritten(0, 0.0))
    assert [(ready.version, ready.digests) for ready in publisher.poll()] == [(0, b"")]
    publisher.release(0)
