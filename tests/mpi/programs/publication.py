"""Publishes versions from trainers through relays to rollouts; rank 0 is the controller and the last to be satisfied.

Arguments: transport, trainers, relays, versions, bytes of the largest tensor, chunk bytes, slow rollouts. Ranks: controller,
trainers, relays, one rollout for each relay, then the slow ones. Every rollout pulls again and again until it has the last
version; the digest of what it has mapped goes to the controller, which knows what was published. A slow one reads from the
first relay, and keeps the first version that it is lent until all others are through. The last line says which version each
has.
"""

import os
import sys
import time

import numpy as np

from laminar_hpc.control.distribution import Distribution
from laminar_hpc.control.relays import Relays
from laminar_hpc.mpi.mail import Mail
from laminar_hpc.mpi.transport import build_transport
from laminar_hpc.mpi.world import open_world
from laminar_hpc.process.memory import map_readonly, map_writable
from laminar_hpc.protocol.commands import Broadcast, Command, Drop, Publish, Release, Share
from laminar_hpc.protocol.events import Loaded, Published, RelayHolds, RelayReady
from laminar_hpc.protocol.peer import (
    ChunkGone,
    ChunkRequest,
    ChunkSent,
    Layout,
    Lease,
    LeaseRequest,
    LeaseReturn,
    Shard,
    Shutdown,
    WeightsWritten,
)
from laminar_hpc.weights.digest import digests_of, image_digest
from laminar_hpc.weights.epochs import Epochs
from laminar_hpc.weights.forward import Forwarder
from laminar_hpc.weights.manifest import make_manifest
from laminar_hpc.weights.publish import Publisher
from laminar_hpc.weights.pull import Lender, Puller
from laminar_hpc.weights.reshard import cut, whole_tensor

transport_name = sys.argv[1]
trainers, relays, versions, tensor_bytes, chunk_bytes, slow = map(int, sys.argv[2:])
world = open_world()
mail = Mail(world)
transport = build_transport(transport_name, world)
assert world.size == 1 + trainers + 2 * relays + slow
trainer_ranks = range(1, 1 + trainers)
relay_ranks = range(1 + trainers, 1 + trainers + relays)
rollout_ranks = range(1 + trainers + relays, world.size - slow)
slow_ranks = range(world.size - slow, world.size)
manifest = make_manifest(
    [("big", (tensor_bytes,), "uint8"), ("none", (0, 3), "float32"), ("odd", (3,), "bfloat16")], chunk_bytes
)
tiles = [whole_tensor(entry) for entry in manifest.tensors if entry.nbytes]
layout = Layout(manifest, [Shard(rank, cut(tiles, trainers, index)) for index, rank in enumerate(trainer_ranks)])
deadline_s = (
    time.monotonic() + 45.0 + tensor_bytes / 20e6
)  # a busy machine makes and hashes so many bytes a second at least


def tensors(version: int) -> list[np.ndarray]:
    generator = np.random.default_rng(version)
    return [generator.integers(0, 256, entry.nbytes, dtype=np.uint8) for entry in manifest.tensors]


def image(version: int) -> np.ndarray:
    whole = np.zeros(manifest.nbytes, dtype=np.uint8)
    for entry, tensor in zip(manifest.tensors, tensors(version), strict=True):
        whole[entry.offset : entry.offset + entry.nbytes] = tensor
    return whole


class Controller:
    """Has a version published when the one before it has reached all relays, and hears of every load."""

    def __init__(self) -> None:
        self.distribution = Distribution(Relays(relays))
        self.expected = {version: image_digest(digests_of(tensors(version), manifest)) for version in range(versions)}
        self.shares: dict[int, Share] = {}
        self.holds: dict[int, set[int]] = {version: set() for version in range(versions)}
        self.loads: dict[int, list[int]] = {rank: [] for rank in rollout_ranks}
        for rank in relay_ranks:
            self.obey(self.distribution.relay_ready(RelayReady(rank, 0, f"node{rank}"), time.monotonic()))
        self.publish(0)

    def publish(self, version: int) -> None:
        self.shares = {}
        for rank in trainer_ranks:
            mail.send(rank, Publish("test", version, version))

    def obey(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Broadcast():
                    for rank in command.chain:
                        mail.send(rank, command)
                case Drop():
                    for rank in relay_ranks:
                        mail.send(rank, command)
                case Release():
                    for rank in trainer_ranks:
                        mail.send(rank, command)
                case _:
                    raise AssertionError(command)

    def take(self, _source: int, message: object) -> None:
        now = time.monotonic()
        match message:
            case Published():
                self.shares[message.rank] = Share(message.rank, message.digests)
                if len(self.shares) == trainers:
                    self.obey(self.distribution.published(message.version, [*self.shares.values()], now))
            case RelayHolds():
                assert message.digest == self.expected[message.version], "a relay holds something else"
                self.holds[message.version].add(message.rank)
                self.obey(self.distribution.relay_holds(message, now))
                if len(self.holds[message.version]) == relays and message.version < versions - 1:
                    self.publish(message.version + 1)
            case Loaded():
                assert message.digest == self.expected[message.version], (
                    f"version {message.version} is not what was published"
                )
                if message.rank in self.loads:
                    self.loads[message.rank].append(message.version)

    def poll(self) -> None:
        everywhere = all(len(ranks) == relays for ranks in self.holds.values())
        if everywhere and all(loads[-1:] == [versions - 1] for loads in self.loads.values()):
            for rank in range(world.size):
                mail.send(rank, Shutdown())


class Trainer:
    """Driver and worker in one."""

    def __init__(self) -> None:
        self.publisher = Publisher(transport, layout, mail.send)
        self.todo: list[int] = []
        self.waits = 0
        self.tiles = next(shard.tiles for shard in layout.shards if shard.rank == world.rank)

    def take(self, _source: int, message: object) -> None:
        match message:
            case Publish():
                self.todo.append(message.version)
            case Release():
                self.publisher.release(message.version)
            case ChunkRequest():
                self.publisher.serve(message)
            case LeaseReturn():
                self.publisher.returned(message)

    def poll(self) -> None:
        for version, digests in self.publisher.poll():
            mail.send(0, Published(world.rank, 0, version, digests, 0.0))
        if not self.todo:
            return
        write = self.publisher.begin(self.todo[0], time.monotonic())
        if write is None:
            self.waits += 1
            return
        version = self.todo.pop(0)
        whole = image(version)
        data = [whole[tile.offset + tile.first :][: tile.nbytes] for tile in self.tiles]  # each tile is one run
        nbytes = sum(part.nbytes for part in data)
        with map_writable(write.path, write.offset, nbytes) as slot:
            slot[:] = np.concatenate([np.empty(0, np.uint8), *data])
        self.publisher.written(WeightsWritten(version, 0.0))


SLOTS = 3


class Relay:
    """Fetches, forwards, lends."""

    def __init__(self) -> None:
        self.forwarder = Forwarder(transport, layout, mail.send, window=4, slots=SLOTS, verify=True)
        self.lender = Lender(self.forwarder.image, mail.send, Epochs())

    def take(self, _source: int, message: object) -> None:
        match message:
            case Broadcast():
                self.forwarder.start(message, time.monotonic())
            case Drop():
                self.forwarder.drop(message.version)
            case ChunkRequest():
                self.forwarder.serve(message)
            case ChunkSent():
                self.forwarder.sent(message)
            case ChunkGone():
                self.forwarder.refused(message)
            case LeaseRequest():
                self.lender.asked(message)
            case LeaseReturn():
                self.lender.returned(message)

    def poll(self) -> None:
        for held in self.forwarder.poll(time.monotonic()):
            mail.send(0, RelayHolds(world.rank, 0, held.version, held.seconds, held.digest))
        self.lender.poll()


class Rollout:
    """Maps what it is lent, and tells its digest."""

    def __init__(self) -> None:
        self.puller = Puller(world.rank, world.rank - relays, mail.send)
        self.puller.request(0)

    def take(self, source: int, message: object) -> None:
        if isinstance(message, Lease):
            lease = self.puller.lent(source, message)
            assert lease is not None
            with map_readonly(lease.path, lease.offset, manifest.nbytes) as mapped:
                views = [mapped[entry.offset : entry.offset + entry.nbytes] for entry in manifest.tensors]
                digest = image_digest(digests_of(views, manifest))
            version = self.puller.loaded()
            mail.send(0, Loaded(world.rank, 0, version, digest, 0.0, 0.0))
            if version < versions - 1:
                self.puller.request(version + 1)

    def poll(self) -> None:
        """Nothing to do unasked."""


class SlowRollout(Rollout):
    """Has a version on loan, and does not come to an end with it."""

    def __init__(self) -> None:
        self.puller = Puller(world.rank, relay_ranks[0], mail.send)
        self.puller.request(0)
        self.kept: Lease | None = None

    def take(self, source: int, message: object) -> None:
        if isinstance(message, Lease):
            self.kept = self.puller.lent(source, message)

    def end(self) -> None:
        """What it was lent is still what it was."""
        assert self.kept is not None
        with map_readonly(self.kept.path, self.kept.offset, manifest.nbytes) as mapped:
            assert np.array_equal(mapped, image(self.kept.version)), "a version on loan was written over"
        print("slow one still has", self.kept.version)


role: Controller | Trainer | Relay | Rollout
if world.rank == 0:
    role = Controller()
elif world.rank in trainer_ranks:
    role = Trainer()
elif world.rank in relay_ranks:
    role = Relay()
elif world.rank in slow_ranks:
    role = SlowRollout()
else:
    role = Rollout()

over = False
while not over:
    assert time.monotonic() < deadline_s, f"rank {world.rank}: {vars(role)}"
    messages = mail.poll()
    for source, message in messages:
        over = over or isinstance(message, Shutdown)
        role.take(source, message)
    role.poll()
    transport.poll()
    if not messages:
        os.sched_yield()  # more ranks than cores
if isinstance(role, Controller):
    for rank, loads in role.loads.items():
        assert loads == sorted(set(loads)), f"rollout {rank} went back"
    last = {loads[-1] for loads in role.loads.values()}
    print("published", versions, "loaded by", len(role.loads), "the last one", *last)
if isinstance(role, Trainer):
    assert role.waits == 0, f"trainer {world.rank} waited {role.waits} times"
if isinstance(role, SlowRollout):
    role.end()
if isinstance(role, Relay):
    assert role.forwarder.image.memory.nbytes <= SLOTS * (manifest.nbytes + 4096)
    assert not role.forwarder.waiting_for
    assert np.array_equal(role.forwarder.image.bytes_of(versions - 1), image(versions - 1))
    print("relay has the last one whole")
assert mail.flush(timeout_s=10.0)
assert world.finish(clean=True, timeout_s=20.0)
