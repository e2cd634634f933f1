"""Transfers of bytes between ranks, for weights: no copies, no waiting, the receiver's memory named before anything is sent.

A transfer's tag is a number from 0 to `tags - 1` that its receiver chooses, and does not use for two transfers at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from laminar_hpc.errors import ProtocolError
from laminar_hpc.mpi.mail import MAX_MESSAGE_BYTES
from laminar_hpc.mpi.world import World

if TYPE_CHECKING:
    from mpi4py import MPI


class Transfer(Protocol):
    """Bytes on their way. The buffer belongs to the transfer until `done`."""

    def done(self) -> bool:
        """Whether the buffer is the caller's again: sent from, or received into and full. ProtocolError where it failed."""

    def cancel(self) -> bool:
        """Give the transfer up. True: nothing will touch the buffer any more; False: ask `done` until it is so."""


class Transport(Protocol):
    """How chunks of weights travel; one object a rank, used by one thread. Buffers are contiguous and may be empty."""

    rank: int
    tags: int

    def receive(self, source: int, tag: int, buffer: NDArray[np.uint8]) -> Transfer:
        """Receive exactly `buffer.nbytes` bytes from `source` into `buffer`."""

    def send(self, dest: int, tag: int, buffer: NDArray[np.uint8]) -> Transfer:
        """Send `buffer` to `dest`, which has posted the receive for it."""


class MpiTransport:
    """Point-to-point MPI."""

    tags = 16_384
    _first_tag = 1024  # the tags end below 32767, the bound that every MPI has, and lie apart from the mail's

    def __init__(self, world: World) -> None:
        self.rank = world.rank
        self._world = world

    def receive(self, source: int, tag: int, buffer: NDArray[np.uint8]) -> Transfer:
        """Post a receive."""
        return self._begin(_Receive, self._world.comm.Irecv, source, tag, buffer)

    def send(self, dest: int, tag: int, buffer: NDArray[np.uint8]) -> Transfer:
        """Begin to send."""
        return self._begin(_Send, self._world.comm.Isend, dest, tag, buffer)

    def _begin(
        self, kind: type[_MpiTransfer], call: Callable[..., MPI.Request], peer: int, tag: int, buffer: NDArray[np.uint8]
    ) -> Transfer:
        if not 0 <= tag < self.tags:
            raise ProtocolError(f"rank {self.rank}: transfer tag must be in 0 to {self.tags - 1}, got {tag}")
        if buffer.nbytes > MAX_MESSAGE_BYTES:
            raise ProtocolError(
                f"rank {self.rank}: a transfer has at most {MAX_MESSAGE_BYTES} bytes, got {buffer.nbytes}"
            )
        mpi = self._world.mpi
        try:
            request = call((buffer, mpi.BYTE), peer, self._first_tag + tag)
        except mpi.Exception as error:
            raise ProtocolError(f"rank {self.rank}: {kind.doing} rank {peer} failed: {error}") from error
        return kind(self._world, request, peer, buffer)


class _MpiTransfer:
    doing = ""

    def __init__(self, world: World, request: MPI.Request, peer: int, buffer: NDArray[np.uint8]) -> None:
        self._world = world
        self._request = request
        self._peer = peer
        self._buffer: NDArray[np.uint8] | None = buffer  # keeps the memory alive until MPI is done with it

    def done(self) -> bool:
        if self._buffer is None:
            return True
        mpi = self._world.mpi
        status = mpi.Status()
        try:
            if not self._request.Test(status):
                return False
        except mpi.Exception as error:
            raise self._failure(str(error)) from error
        buffer, self._buffer = self._buffer, None
        self._check(status, buffer)
        return True

    def cancel(self) -> bool:
        return self.done()  # MPI cannot take back what was sent

    def _check(self, status: MPI.Status, buffer: NDArray[np.uint8]) -> None:
        """Look at what came."""

    def _failure(self, reason: str) -> ProtocolError:
        return ProtocolError(f"rank {self._world.rank}: {self.doing} rank {self._peer} failed: {reason}")


class _Send(_MpiTransfer):
    doing = "sending weights to"


class _Receive(_MpiTransfer):
    doing = "receiving weights from"

    def cancel(self) -> bool:
        if self._buffer is not None:
            self._request.Cancel()
        return self.done()

    def _check(self, status: MPI.Status, buffer: NDArray[np.uint8]) -> None:
        received = status.Get_count(self._world.mpi.BYTE)
        if not status.Is_cancelled() and received != buffer.nbytes:
            raise self._failure(f"{received} bytes came, {buffer.nbytes} were expected")


def build_transport(name: str, world: World) -> Transport:
    """The transport of that name (config key weights.transport)."""
    return {"mpi": MpiTransport}[name](world)
