"""Answers to chunk requests: what a trainer and a relay have in common as senders."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from laminar_hpc.errors import ProtocolError
from laminar_hpc.mpi.transport import Transfer, Transport
from laminar_hpc.protocol.peer import ChunkRequest, Manifest
from laminar_hpc.weights.image import Image, SlotState


class _Sending(NamedTuple):
    version: int
    transfer: Transfer


class ChunkServer:
    """Sends chunks out of `image`, whose slots hold `chunks` chunks from `first_chunk` on.

    A request stays until its chunk is there: until its version is READY or, while that is FILLING, until `written(version,
    chunk)` says so. A send under way holds its version, in the name of this rank, so that the slot is not reused under it.
    """

    def __init__(self, transport: Transport, image: Image, manifest: Manifest, first_chunk: int, chunks: int) -> None:
        self._transport = transport
        self._image = image
        self._manifest = manifest
        self._chunks = range(first_chunk, first_chunk + chunks)
        self._waiting: list[ChunkRequest] = []
        self._sending: list[_Sending] = []

    @property
    def sending(self) -> bool:
        """Whether a send is under way."""
        return bool(self._sending)

    def ask(self, request: ChunkRequest) -> None:
        """Take a request in; ProtocolError where its chunk can never come from here."""
        if request.chunk not in self._chunks:
            raise self._refusal(request, f"it has chunks {self._chunks.start} to {self._chunks.stop - 1}")
        self._waiting.append(request)

    def poll(self, written: Callable[[int, int], bool]) -> bool:
        """Take note of sends that are done, and begin those that can be; whether there were any."""
        moved = False
        for sending in self._sending[:]:
            if sending.transfer.done():
                self._sending.remove(sending)
                self._image.give_back(self._transport.rank, sending.version)
                moved = True
        still: list[ChunkRequest] = []
        for request in self._waiting:
            if self._there(request, written):
                self._send(request)
                moved = True
            else:
                still.append(request)
        self._waiting = still
        return moved

    def _there(self, request: ChunkRequest, written: Callable[[int, int], bool]) -> bool:
        state = self._image.state(request.version)
        if state is SlotState.EMPTY:
            newest = self._image.newest
            if newest is not None and request.version < newest:
                raise self._refusal(request, f"that version is retired, the newest is {newest}")
            return False
        return state is SlotState.READY or written(request.version, request.chunk)

    def _send(self, request: ChunkRequest) -> None:
        start = self._manifest.chunk_range(self._chunks.start)[0]
        low, high = self._manifest.chunk_range(request.chunk)
        data = self._image.bytes_of(request.version)[low - start : high - start]
        self._image.hold(self._transport.rank, request.version)
        self._sending.append(_Sending(request.version, self._transport.send(request.rank, request.tag, data)))

    def _refusal(self, request: ChunkRequest, why: str) -> ProtocolError:
        return ProtocolError(
            f"rank {self._transport.rank}: rank {request.rank} asks for chunk {request.chunk} of version {request.version}, "
            f"but {why}"
        )
