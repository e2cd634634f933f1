"""Publishes versions from trainers through relays to rollouts; rank 0 is the controller and the last to be satisfied.

Arguments: trainers, relays, versions, bytes of the largest tensor, chunk bytes. Ranks: controller, trainers, relays, then
one rollout for each relay. Every rollout pulls again and again until it has the last version; the digest of what it has
mapped goes to the controller, which knows what was published. Prints, for each rollout, the versions it has loaded.
"""

import os
import sys
import time

import numpy as np

from laminar_hpc.mpi.mail import Mail
from laminar_hpc.mpi.transport import MpiTransport
from laminar_hpc.mpi.world import open_world
from laminar_hpc.process.memory import map_readonly, map_writable
from laminar_hpc.protocol.commands import Broadcast, Publish, Release, Share
from laminar_hpc.protocol.events import Loaded, Published, RelayHolds
from laminar_hpc.protocol.peer import ChunkRequest, Lease, LeaseRequest, LeaseReturn, Shutdown, WeightsWritten
from laminar_hpc.weights.digest import digests_of, image_digest, range_digests
from laminar_hpc.weights.forward import Forwarder
from laminar_hpc.weights.manifest import make_manifest, range_bytes
from laminar_hpc.weights.publish import Publisher
from laminar_hpc.weights.pull import Lender, Puller

trainers, relays, versions, tensor_bytes, chunk_bytes = map(int, sys.argv[1:])
world = open_world()
mail = Mail(world)
transport = MpiTransport(world)
assert world.size == 1 + trainers + 2 * relays
trainer_ranks = range(1, 1 + trainers)
relay_ranks = range(1 + trainers, 1 + trainers + relays)
rollout_ranks = range(1 + trainers + relays, world.size)
manifest = make_manifest(
    [("big", (tensor_bytes,), "uint8"), ("none", (0, 3), "float32"), ("odd", (3,), "bfloat16")], chunk_bytes
)
deadline_s = time.monotonic() + 45.0


def tensors(version: int) -> list[np.ndarray]:
    generator = np.random.default_rng(version)
    return [generator.integers(0, 256, entry.nbytes, dtype=np.uint8) for entry in manifest.tensors]


def image(version: int) -> np.ndarray:
    whole = np.zeros(manifest.nbytes, dtype=np.uint8)
    for entry, tensor in zip(manifest.tensors, tensors(version), strict=True):
        whole[entry.offset : entry.offset + entry.nbytes] = tensor
    return whole


class Controller:
    """Has a version published, broadcast and released; hears of every load."""

    def __init__(self) -> None:
        self.expected = {version: image_digest(digests_of(tensors(version), manifest)) for version in range(versions)}
        self.shares: dict[int, dict[int, Published]] = {version: {} for version in range(versions)}
        self.holds: dict[int, set[int]] = {version: set() for version in range(versions)}
        self.loads: dict[int, list[int]] = {rank: [] for rank in rollout_ranks}
        for version in range(versions):
            for rank in trainer_ranks:
                mail.send(rank, Publish("test", version, version))

    def take(self, message: object) -> None:
        match message:
            case Published():
                published = self.shares[message.version]
                published[message.rank] = message
                if len(published) == trainers:
                    self.spread(message.version, [published[rank] for rank in trainer_ranks])
            case RelayHolds():
                self.holds[message.version].add(message.rank)
                if message.rank == relay_ranks[0]:
                    for rank in trainer_ranks:
                        mail.send(rank, Release("test", message.version))
            case Loaded():
                assert message.digest == self.expected[message.version], (
                    f"version {message.version} is not what was published"
                )
                self.loads[message.rank].append(message.version)

    def spread(self, version: int, published: list[Published]) -> None:
        shares = [Share(p.rank, p.first_chunk, len(p.digests) // 8) for p in published]
        digests = b"".join(p.digests for p in published)
        assert image_digest(digests) == self.expected[version]
        for rank in relay_ranks:
            mail.send(rank, Broadcast("test", version, list(relay_ranks), shares, digests))

    def poll(self) -> None:
        everywhere = all(len(ranks) == relays for ranks in self.holds.values())
        if everywhere and all(loads[-1:] == [versions - 1] for loads in self.loads.values()):
            for rank in range(world.size):
                mail.send(rank, Shutdown())


class Trainer:
    """Driver and worker in one."""

    def __init__(self) -> None:
        self.publisher = Publisher(transport, manifest, world.rank - trainer_ranks[0], trainers)
        self.todo: list[int] = []

    def take(self, message: object) -> None:
        match message:
            case Publish():
                self.todo.append(message.version)
            case Release():
                self.publisher.release(message.version)
            case ChunkRequest():
                self.publisher.serve(message)

    def poll(self) -> None:
        self.publisher.poll()
        if not self.todo or (write := self.publisher.begin(self.todo[0])) is None:
            return
        version = self.todo.pop(0)
        first, chunks = write.first_chunk, write.chunks
        nbytes = range_bytes(manifest, first, chunks)
        data = image(version)[first * chunk_bytes :][:nbytes]
        with map_writable(write.path, write.offset, nbytes) as slot:
            slot[:] = data
        digests = range_digests(manifest, first, chunks, data)
        self.publisher.written(WeightsWritten(version, digests, 0.0))
        mail.send(0, Published(world.rank, 0, version, first, digests, 0.0))


class Relay:
    """Fetches, forwards, lends."""

    def __init__(self) -> None:
        self.forwarder = Forwarder(transport, manifest, mail.send, window=4, slots=3, verify=True)
        self.lender = Lender(self.forwarder.image, mail.send)

    def take(self, message: object) -> None:
        match message:
            case Broadcast():
                self.forwarder.start(message, time.monotonic())
            case ChunkRequest():
                self.forwarder.serve(message)
            case LeaseRequest():
                self.lender.asked(message)
            case LeaseReturn():
                self.lender.returned(message)

    def poll(self) -> None:
        for held in self.forwarder.poll(time.monotonic()):
            mail.send(0, RelayHolds(world.rank, 0, held.version, held.seconds))
        self.lender.poll()


class Rollout:
    """Maps what it is lent, and tells its digest."""

    def __init__(self) -> None:
        self.puller = Puller(world.rank, world.rank - relays, mail.send)
        self.puller.request(0)

    def take(self, message: object) -> None:
        if isinstance(message, Lease):
            lease = self.puller.lent(message)
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


role: Controller | Trainer | Relay | Rollout
if world.rank == 0:
    role = Controller()
elif world.rank in trainer_ranks:
    role = Trainer()
elif world.rank in relay_ranks:
    role = Relay()
else:
    role = Rollout()

over = False
while not over:
    assert time.monotonic() < deadline_s, f"rank {world.rank}: {vars(role)}"
    messages = mail.poll()
    for _, message in messages:
        over = over or isinstance(message, Shutdown)
        role.take(message)
    role.poll()
    if not messages:
        os.sched_yield()  # more ranks than cores
if isinstance(role, Controller):
    for rank, loads in role.loads.items():
        assert loads == sorted(set(loads)), f"rollout {rank} went back"
    print(
        "published",
        versions,
        "loaded by",
        len(role.loads),
        "the last one",
        *{loads[-1] for loads in role.loads.values()},
    )
if isinstance(role, Relay):
    assert not role.forwarder.waiting_for
    assert np.array_equal(role.forwarder.image.bytes_of(versions - 1), image(versions - 1))
    print("relay has the last one whole")
assert mail.flush(timeout_s=10.0)
assert world.finish(clean=True, timeout_s=20.0)
