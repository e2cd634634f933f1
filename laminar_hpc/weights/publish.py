"""What a trainer's driver does for the weights: it lends its worker memory to write to, and serves what was written.

The worker copies its shard once and trains on; the first relay fetches the copy from here meanwhile. What of a chunk lies in
the shard is one run of it, and goes out of that memory without another copy. A version is held from the moment it is
written until `release`, and as long as a relay has borrowed it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from laminar_hpc.errors import ProtocolError
from laminar_hpc.mpi.transport import Transport
from laminar_hpc.protocol.peer import ChunkRequest, Layout, LeaseReturn, WeightsWritten, WriteWeights
from laminar_hpc.weights.digest import Hasher
from laminar_hpc.weights.epochs import Epochs
from laminar_hpc.weights.filling import Filling
from laminar_hpc.weights.image import Image, Pin
from laminar_hpc.weights.reshard import ShardMap
from laminar_hpc.weights.serve import ChunkServer, Holdings, SendMail

DIGEST_BATCH_BYTES = 1 << 24
"""What a thread takes on at once."""


class Ready(NamedTuple):
    """A version that is written, with the digests of the shard's part of each chunk that it has one of ("": not verified)."""

    version: int
    digests: bytes


class _Hashing(NamedTuple):
    version: int
    pin: Pin
    batches: list[Future[bytes]]


class Publisher:
    """One trainer's shard of the image, in `slots` versions: one handed over, the newest one waiting, one being written.

    Called by one thread.
    """

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        send_mail: SendMail,
        *,
        slots: int = 3,
        verify: bool = True,
        has_room: Callable[[int], bool] = lambda _nbytes: True,
    ) -> None:
        """The shard is that of the transport's rank; ProtocolError where the layout has none of it.

        `has_room` says whether the node can spare so many bytes.
        """
        self._rank = transport.rank
        tiles = next((shard.tiles for shard in layout.shards if shard.rank == self._rank), None)
        if tiles is None:
            raise ProtocolError(f"trainer rank {self._rank}: the layout has no shard of it")
        shard = ShardMap(tiles)
        chunks, parts = shard.chunks(layout.manifest), shard.parts(layout.manifest)
        self._batches = _batches(parts) if verify else []
        self._transport = transport
        self._image = Image.create(shard.nbytes, slots)
        self._filling = Filling(transport, self._image, has_room)
        self._parts = dict(zip(chunks, parts, strict=True))
        holdings = Holdings(
            place=self._parts.get,
            written=lambda _version, _chunk: False,
            will_come=lambda version: version > self._begun,
            digest=None,
        )
        self._epochs = Epochs()
        self._server = ChunkServer(transport, self._image, send_mail, holdings, self._epochs)
        self._hasher = Hasher()
        self._begun = -1
        self._held: set[int] = set()
        self._hashing: list[_Hashing] = []
        self.moved = False
        """Whether the last `poll` moved anything; where it did not, a caller may pause before the next one."""

    @property
    def busy(self) -> bool:
        """Whether bytes are on their way, or digests being computed."""
        return self._server.sending or bool(self._hashing)

    def begin(self, version: int, now: float) -> WriteWeights | None:
        """The message that has the worker write `version`; None while there is no slot for it: ask again."""
        if self._filling.begin(version, now) is None:
            return None
        self._begun = version
        return WriteWeights(version=version, path=self._image.path, offset=self._image.offset_of(version))

    def waiting_for(self, version: int) -> str:
        """What `version` waits for before it can be written, for people."""
        return self._filling.waiting_for(version)

    def written(self, message: WeightsWritten) -> None:
        """The worker has written a version: from now on it is served, and `poll` tells when its digests are there."""
        version = message.version
        self._image.complete(version)
        self._image.hold(self._rank, version)
        self._held.add(version)
        data = self._image.bytes_of(version)
        batches = [self._hasher.submit(data, batch) for batch in self._batches]
        self._hashing.append(_Hashing(version, self._image.pin(version), batches))

    def release(self, version: int) -> None:
        """The memory of `version` may be reused when no relay has borrowed it."""
        if version not in self._held:
            raise ProtocolError(
                f"trainer rank {self._rank}: version {version} is released, held are {sorted(self._held)}"
            )
        self._held.remove(version)
        self._image.give_back(self._rank, version)

    def serve(self, request: ChunkRequest) -> None:
        """Answer `request` at the next `poll`, or as soon as its version is written; ChunkGone where it never will be."""
        self._server.ask(request)

    def returned(self, message: LeaseReturn) -> None:
        """A relay has all that it wanted of a version; one that was taken for lost, or got nothing, has no lease to return."""
        if self._image.has_lent(message.rank, message.version):
            self._image.give_back(message.rank, message.version)

    def forget(self, rank: int, epoch: int) -> None:
        """`rank` is gone: what it asked for, was being sent and had borrowed is void."""
        self._transport.forget(rank)
        self._epochs.lost(rank, epoch)
        self._server.forget(rank)

    def poll(self) -> list[Ready]:
        """Move on, without waiting; the versions that can be told now, in the order in which they were written."""
        self.moved = self._server.poll()
        ready: list[Ready] = []
        while self._hashing and all(batch.done() for batch in self._hashing[0].batches):
            hashed = self._hashing.pop(0)
            hashed.pin.release()
            ready.append(Ready(hashed.version, b"".join(batch.result() for batch in hashed.batches)))
            self.moved = True
        return ready

    def close(self) -> None:
        """Give the memory up."""
        self._hasher.close()
        self._image.close()


def _batches(parts: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """These runs of bytes in groups that are worth a thread's while."""
    batches: list[list[tuple[int, int]]] = []
    room = 0
    for low, high in parts:
        if room <= 0:
            batches.append([])
            room = DIGEST_BATCH_BYTES
        batches[-1].append((low, high))
        room -= high - low
    return batches
