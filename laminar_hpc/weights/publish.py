"""What a trainer's driver does for the weights: it lends its worker memory to write to, and serves what was written.

The worker copies its share once and trains on; the relays fetch the copy from here meanwhile. A version is held from the
moment it is written until `release`, which says that the first relay has all of it.
"""

from __future__ import annotations

from laminar_hpc.errors import ProtocolError
from laminar_hpc.mpi.transport import Transport
from laminar_hpc.protocol.peer import DIGEST_BYTES, ChunkRequest, Manifest, WeightsWritten, WriteWeights
from laminar_hpc.weights.image import Image
from laminar_hpc.weights.manifest import range_bytes
from laminar_hpc.weights.reshard import share
from laminar_hpc.weights.serve import ChunkServer


class Publisher:
    """One trainer's share of the image, in `slots` versions."""

    def __init__(self, transport: Transport, manifest: Manifest, trainer: int, trainers: int, slots: int = 2) -> None:
        """`trainer` is this one's place among the `trainers`, 0 first."""
        self.first_chunk, self.chunks = share(manifest.chunks, trainers, trainer)
        self._rank = transport.rank
        self._image = Image.create(range_bytes(manifest, self.first_chunk, self.chunks), slots)
        self._server = ChunkServer(transport, self._image, manifest, self.first_chunk, self.chunks)
        self._held: set[int] = set()
        self.moved = False
        """Whether the last `poll` moved anything; where it did not, a caller may pause before the next one."""

    @property
    def busy(self) -> bool:
        """Whether chunks are on their way."""
        return self._server.sending

    def begin(self, version: int) -> WriteWeights | None:
        """The message that has the worker write `version`; None while all slots are held: ask again after a release."""
        if self._image.begin_fill(version) is None:
            return None
        return WriteWeights(
            version=version,
            path=self._image.path,
            offset=self._image.offset_of(version),
            first_chunk=self.first_chunk,
            chunks=self.chunks,
        )

    def written(self, message: WeightsWritten) -> None:
        """The worker has written a version: from now on it is served."""
        if len(message.digests) != self.chunks * DIGEST_BYTES:
            raise ProtocolError(
                f"trainer rank {self._rank}: version {message.version} came with {len(message.digests)} bytes of digests, "
                f"{self.chunks * DIGEST_BYTES} are right for {self.chunks} chunks"
            )
        self._image.complete(message.version)
        self._image.hold(self._rank, message.version)
        self._held.add(message.version)

    def release(self, version: int) -> None:
        """The memory of `version` may be reused."""
        if version not in self._held:
            raise ProtocolError(
                f"trainer rank {self._rank}: version {version} is released, held are {sorted(self._held)}"
            )
        self._held.remove(version)
        self._image.give_back(self._rank, version)

    def serve(self, request: ChunkRequest) -> None:
        """Answer `request` now or as soon as its version is written."""
        self._server.ask(request)

    def poll(self) -> None:
        """Move on; never waits."""
        self.moved = self._server.poll(written=lambda _version, _chunk: False)

    def close(self) -> None:
        """Give the memory up."""
        self._image.close()
