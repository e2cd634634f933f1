"""A job's weights in one process: trainers, relays, spares and rollouts on a `MemoryNet`, with the real rules between them."""

from __future__ import annotations

from typing import Any

import numpy as np
from memory_net import MemoryNet, MemoryTransport
from numpy.typing import NDArray

from laminar_hpc.control.distribution import Distribution
from laminar_hpc.control.relays import Relays
from laminar_hpc.process.memory import map_readonly, map_writable
from laminar_hpc.protocol.commands import Broadcast, Command, Drop, EndJob, Forget, Readmit, Release, Sever, Share
from laminar_hpc.protocol.events import LinkStalled, RankHeard, RankLost, RelayHolds, RelayReady
from laminar_hpc.protocol.peer import (
    ChunkGone,
    ChunkRequest,
    ChunkSent,
    Layout,
    Lease,
    LeaseRequest,
    LeaseReturn,
    Lost,
    Manifest,
    Readmitted,
    Shard,
    WeightsWritten,
)
from laminar_hpc.protocol.wire import AnyRecord
from laminar_hpc.weights.epochs import Epochs
from laminar_hpc.weights.forward import Forwarder
from laminar_hpc.weights.publish import Publisher
from laminar_hpc.weights.pull import Lender, Puller

MANAGER = -1


def image_of(manifest: Manifest, version: int) -> NDArray[np.uint8]:
    """The image of a version: no two alike, zero between tensors."""
    generator = np.random.default_rng(version)
    image = np.zeros(manifest.nbytes, dtype=np.uint8)
    for entry in manifest.tensors:
        image[entry.offset : entry.offset + entry.nbytes] = generator.integers(1, 256, entry.nbytes, dtype=np.uint8)
    return image


def shard_bytes(shard: Shard, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """What of `image` belongs to a shard, byte by byte as peer.Tile defines it."""
    picked = []
    for tile in shard.tiles:
        for number in range(tile.first, tile.first + tile.nbytes):
            run, within = divmod(number, tile.run_bytes)
            picked.append(tile.offset + run * tile.stride + within)
    return image[np.array(picked, dtype=np.int64)]


class RelayJob:
    """Trainers are ranks 0 on, then relays, then a rollout for each relay, on its node. The test is the event loop."""

    def __init__(
        self, net: MemoryNet, layout: Layout, relays: int, *, window: int = 2, slots: int = 3, versions: int = 3
    ) -> None:
        self.net, self.layout, self.manifest = net, layout, layout.manifest
        self.versions, self.window, self.slots = versions, window, slots
        trainers = len(layout.shards)
        self.relays = list(range(trainers, trainers + relays))
        self.publishers = {
            shard.rank: Publisher(MemoryTransport(net, shard.rank), layout, net.sender(shard.rank))
            for shard in layout.shards
        }
        self.transports = {rank: MemoryTransport(net, rank) for rank in self.relays}
        self.epochs = {rank: Epochs() for rank in self.relays}
        self.forwarders = {rank: self.forwarder(rank) for rank in self.relays}
        self.lenders = {
            rank: Lender(f.image, net.sender(rank), self.epochs[rank]) for rank, f in self.forwarders.items()
        }
        self.pullers = {rank + relays: Puller(rank + relays, rank, net.sender(rank + relays)) for rank in self.relays}
        self.loading: dict[int, Lease] = {}
        self.loaded: dict[int, int] = dict.fromkeys(self.pullers, -1)
        self.written = dict.fromkeys(self.publishers, -1)
        self.told: dict[int, dict[int, bytes]] = {}
        self.published = -1
        self.epoch = 0
        self.epoch_of: dict[int, int] = {}
        self.incarnation = dict.fromkeys(self.relays, 0)
        self.held: dict[int, list[int]] = {rank: [] for rank in self.relays}
        self.ended: EndJob | None = None
        self.distribution = Distribution(Relays(relays))
        self.now = 0.0
        for rank in self.relays:
            self.obey(self.distribution.relay_ready(RelayReady(rank, 0, f"node{rank}"), self.now))

    def forwarder(self, rank: int) -> Forwarder:
        return Forwarder(
            self.transports[rank],
            self.layout,
            self.net.sender(rank),
            window=self.window,
            slots=self.slots,
            verify=True,
            epochs=self.epochs[rank],
        )

    def close(self) -> None:
        for holder in [*self.publishers.values(), *self.forwarders.values()]:
            holder.close()

    @property
    def live(self) -> list[int]:
        """The relays that are not dead."""
        return [rank for rank in self.relays if rank not in self.net.dead]

    @property
    def finished(self) -> bool:
        """Whether every relay that lives, and every rollout whose relay does, has the last version."""
        last = self.versions - 1
        relays = all(self.forwarders[rank].image.newest == last for rank in self.live)
        rollouts = all(self.loaded[rank] == last for rank, p in self.pullers.items() if p.relay in self.live)
        return self.net.quiet and relays and rollouts and not any(f.busy for f in self.living_forwarders())

    def living_forwarders(self) -> list[Forwarder]:
        return [self.forwarders[rank] for rank in self.live]

    # --- the manager ------------------------------------------------------------------------------------------------

    def obey(self, commands: list[Command]) -> None:
        """Carry the controller's commands out, as mail."""
        send = self.net.sender(MANAGER)
        for command in commands:
            match command:
                case Broadcast():
                    for relay in command.chain:
                        send(relay, command)
                case Drop():
                    for relay in self.live:
                        send(relay, command)
                case Release():
                    for trainer in self.publishers:
                        send(trainer, command)
                case Forget():
                    self.epoch += 1
                    self.epoch_of[command.rank] = self.epoch
                    for rank in [*self.publishers, *self.live]:
                        if rank != command.rank:
                            send(rank, Lost(command.rank, self.epoch))
                case Sever():
                    self.epoch += 1
                    send(command.rank, Lost(command.source, self.epoch))
                    send(command.source, Lost(command.rank, self.epoch))
                case Readmit():
                    send(command.rank, Readmitted(command.incarnation, self.epoch_of[command.rank]))
                case EndJob():
                    self.ended = command

    def lose(self, rank: int) -> None:
        """A relay dies, and the manager hears of it."""
        self.net.kill(rank)
        self.obey(self.distribution.relay_lost(RankLost(rank, 0, "killed"), self.now))

    def hang(self, rank: int) -> None:
        """A relay stops, and the manager gives up on it; its rollout is told to wait for weights no longer."""
        self.net.stall(rank)
        self.obey(self.distribution.relay_lost(RankLost(rank, self.incarnation[rank], "silent"), self.now))
        for rollout, puller in self.pullers.items():
            if puller.relay == rank and rollout not in self.loading:
                puller.drop()

    def wake(self, rank: int) -> None:
        """A relay that was given up goes on, and the manager hears it."""
        self.net.resume(rank)
        self.obey(self.distribution.rank_heard(RankHeard(rank, self.incarnation[rank])))

    # --- turns ------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Let something happen, anywhere."""
        self.now += 1.0
        what = self.net.random.choice(
            [self.publish, self.net.move_one, self.net.move_one, self.net.settle, self.deliver, self.deliver,
             self.poll_trainer, self.poll_relay, self.poll_relay, self.pull, self.load]
        )  # fmt: skip
        what()

    def publish(self) -> None:
        """One trainer writes its next version, if it may."""
        rank = self.net.random.choice(list(self.publishers))
        version = self.written[rank] + 1
        if version == self.versions or version > self.published + 1:
            return
        message = self.publishers[rank].begin(version, self.now)
        if message is None:
            return  # a `Release` is still on its way
        shard = next(shard for shard in self.layout.shards if shard.rank == rank)
        data = shard_bytes(shard, image_of(self.manifest, version))
        with map_writable(message.path, message.offset, data.nbytes) as slot:
            slot[:] = data
        self.publishers[rank].written(WeightsWritten(version, 0.0))
        self.written[rank] = version
        ready = self.publishers[rank].poll()
        while not ready:  # the digests are computed by threads: whatever happens next must not depend on how fast
            ready = self.publishers[rank].poll()
        shares = self.told.setdefault(version, {})
        shares[rank] = ready[0].digests
        if len(shares) == len(self.publishers):
            self.published = version
            share_list = [Share(each, shares[each]) for each in sorted(shares)]
            self.obey(self.distribution.published(version, share_list, self.now))

    def poll_trainer(self) -> None:
        self.publishers[self.net.random.choice(list(self.publishers))].poll()

    def poll_relay(self) -> None:
        running = [rank for rank in self.live if rank not in self.net.stalled]
        if not running:
            return
        rank = self.net.random.choice(running)
        self.lenders[rank].poll()
        for held in self.forwarders[rank].poll(self.now):
            self.held[rank].append(held.version)
            image = self.forwarders[rank].image.bytes_of(held.version)
            assert np.array_equal(image, image_of(self.manifest, held.version)), "a version is torn"
            holds = RelayHolds(rank, self.incarnation[rank], held.version, held.seconds, held.digest)
            self.obey(self.distribution.relay_holds(holds, self.now))

    def deliver(self) -> None:
        piece = self.net.deliver_one()
        if piece is not None:
            self.hand_over(*piece)

    def hand_over(self, dest: int, message: AnyRecord) -> None:
        """Give a message to the part that it is for."""
        if dest in self.publishers:
            self.tell_trainer(self.publishers[dest], message)
        elif dest in self.forwarders:
            self.tell_relay(dest, message)
        else:
            assert isinstance(message, Lease)
            lease = self.pullers[dest].lent(self.pullers[dest].relay, message)
            if lease is not None:  # else one that was asked for before a relay was given up
                self.loading[dest] = lease
                self.check_lease(lease)

    def tell_trainer(self, publisher: Publisher, message: AnyRecord) -> None:
        match message:
            case ChunkRequest():
                publisher.serve(message)
            case LeaseReturn():
                publisher.returned(message)
            case Release():
                publisher.release(message.version)
            case Lost():
                publisher.forget(message.rank, message.epoch)

    def tell_relay(self, rank: int, message: Any) -> None:
        forwarder, lender = self.forwarders[rank], self.lenders[rank]
        match message:
            case Broadcast():
                forwarder.start(message, self.now)
            case Drop():
                forwarder.drop(message.version)
            case Lost():
                self.transports[rank].forget(message.rank)
                self.epochs[rank].lost(message.rank, message.epoch)
                forwarder.forget(message.rank)
                lender.drop(message.rank)
            case Readmitted():
                self.incarnation[rank] = message.incarnation
                for other in [*self.publishers, *self.relays, *self.pullers]:
                    if other != rank:
                        self.transports[rank].forget(other)
                self.epochs[rank].begin_anew(message.epoch)
                forwarder.begin_anew([each for each, p in self.pullers.items() if p.relay == rank])
                lender.begin_anew()
                self.obey(self.distribution.relay_ready(RelayReady(rank, message.incarnation, f"node{rank}"), self.now))
            case ChunkRequest():
                forwarder.serve(message)
            case ChunkSent():
                forwarder.sent(message)
            case ChunkGone():
                forwarder.refused(message)
            case LeaseRequest():
                lender.asked(message)
            case LeaseReturn():
                lender.returned(message)

    def report_stalls(self, timeout_s: float) -> None:
        """Relays that wait in vain say so."""
        for rank in self.live:
            stalled = self.forwarders[rank].stalled_on(self.now, timeout_s)
            if stalled is not None:
                version, source = stalled
                self.obey(
                    self.distribution.link_stalled(LinkStalled(rank, self.incarnation[rank], version, source), self.now)
                )

    # --- rollouts ---------------------------------------------------------------------------------------------------

    def pull(self) -> None:
        rank = self.net.random.choice(list(self.pullers))
        puller, wanted = self.pullers[rank], self.loaded[rank] + 1
        if puller.relay in self.net.dead or puller.waiting_for or rank in self.loading or wanted >= self.versions:
            return
        if not self.distribution.relays.is_ready(puller.relay):
            return  # given up: the manager names it again when it has reported
        puller.request(wanted)

    def load(self) -> None:
        if self.loading:
            rank = self.net.random.choice(list(self.loading))
            lease = self.loading.pop(rank)
            if self.pullers[rank].relay not in self.net.dead:
                self.check_lease(lease)  # the same bytes as when it came, long ago
            assert lease.version > self.loaded[rank]
            self.loaded[rank] = self.pullers[rank].loaded()

    def check_lease(self, lease: Lease) -> None:
        with map_readonly(lease.path, lease.offset, self.manifest.nbytes) as image:
            assert np.array_equal(image, image_of(self.manifest, lease.version))
