"""The transport `mpi`: a receive and a send of point-to-point MPI for each transfer.

A ticket holds a tag that its receiver has used for no other transfer (MPI has 2**31 of them, some implementations 2**15,
and then begins anew) and the number of bytes. The receive is posted before the ticket exists. So a message that finds none
is one whose receive was cancelled: it is taken in and thrown away, or else its sender would never be done with it.

A receive that has begun to fill its buffer cannot be cancelled: MPI owns the buffer until the sender has sent the rest or
is found dead. Over shared memory the rest is there at once; over TCP, where a sender stops in the middle of a message, the
receive is not done, and its buffer not to be used, for as long as that rank is stopped. A send cannot be cancelled at all: what
was begun before a link broke may be read from the buffer when the link is there again.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from laminar_hpc.errors import PeerLost, ProtocolError
from laminar_hpc.mpi.mail import MAX_MESSAGE_BYTES
from laminar_hpc.mpi.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

_SWEEP_S = 0.01
_EVERY_MPIS_LAST_TAG = 32_767


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """What a sender needs to know: the tag that the receiver waits for, and for how many bytes."""

    tag: int
    nbytes: int


class MpiTransport:
    """Point-to-point MPI."""

    def __init__(self, world: World) -> None:
        self.rank = world.rank
        self._world = world
        self._comm = world.transfers
        self._tags = itertools.cycle(range(int(self._comm.Get_attr(world.mpi.TAG_UB) or _EVERY_MPIS_LAST_TAG) + 1))
        self._under_way: set[_MpiTransfer] = set()
        self._strays: list[tuple[MPI.Request, NDArray[np.uint8]]] = []
        self._next_sweep_s = 0.0

    def register(self, memory: NDArray[np.uint8]) -> None:
        """MPI pins what it has to by itself."""

    def receive(self, source: int, buffer: NDArray[np.uint8]) -> _Receive:
        """Post a receive."""
        self.poll()
        ticket = Ticket(next(self._tags), buffer.nbytes)
        receive = _Receive(self, source, buffer, msgspec.msgpack.encode(ticket))
        receive.begin(self._comm.Irecv, ticket.tag)
        return receive

    def send(self, dest: int, ticket: bytes, buffer: NDArray[np.uint8]) -> _Send:
        """Begin to send."""
        self.poll()
        try:
            wanted = msgspec.msgpack.decode(ticket, type=Ticket)
        except msgspec.DecodeError as error:
            raise ProtocolError(
                f"rank {self.rank}: rank {dest} gave a ticket that is none of MPI's: {error}"
            ) from error
        send = _Send(self, dest, buffer)
        if wanted.nbytes != buffer.nbytes:
            raise send.failure(f"it waits for {wanted.nbytes} bytes, not {buffer.nbytes}")
        send.begin(self._comm.Isend, wanted.tag)
        return send

    def forget(self, rank: int) -> None:
        """End all transfers with `rank`."""
        for transfer in [transfer for transfer in self._under_way if transfer.peer == rank]:
            transfer.give_up()

    def poll(self) -> None:
        """Take in and throw away what nobody waits for, and let go of memory that MPI needs no more; every 10 ms at most."""
        now_s = time.monotonic()
        if now_s < self._next_sweep_s:
            return
        self._next_sweep_s = now_s + _SWEEP_S
        try:
            while self._take_stray():
                pass
        except self._world.mpi.Exception as error:
            self._world.dead(now=True)
            if not self._world.tells_of_death(error):
                raise ProtocolError(f"rank {self.rank}: receiving weights from any rank failed: {error}") from error
        self._strays = [stray for stray in self._strays if not self._is_over(stray[0])]

    def close(self) -> None:
        """MPI keeps the memory of what is under way until it ends itself."""
        self._world.keep(transfer._buffer for transfer in self._under_way)
        self._world.keep(memory for _, memory in self._strays)

    def _take_stray(self) -> bool:
        mpi = self._world.mpi
        status = mpi.Status()
        message = self._comm.Improbe(source=mpi.ANY_SOURCE, tag=mpi.ANY_TAG, status=status)
        if message is None:
            return False
        scratch = np.empty(status.Get_count(mpi.BYTE), dtype=np.uint8)
        self._strays.append((message.Irecv((scratch, mpi.BYTE)), scratch))
        return True

    def _is_over(self, request: MPI.Request) -> bool:
        try:
            return request.Test()
        except self._world.mpi.Exception:
            return True  # with the death of its rank, and of no interest


class _MpiTransfer:
    doing = ""

    def __init__(self, transport: MpiTransport, peer: int, buffer: NDArray[np.uint8]) -> None:
        self.peer = peer
        self._transport = transport
        self._world = transport._world
        self._buffer = buffer  # keeps the memory alive until MPI is done with it
        self._request: MPI.Request | None = None  # None once MPI is
        self._error: PeerLost | ProtocolError | None = None
        self._given_up = False

    def begin(self, call: Callable[..., MPI.Request], tag: int) -> None:
        """Hand the buffer to MPI."""
        if self._buffer.nbytes > MAX_MESSAGE_BYTES:
            raise self.failure(f"a transfer has at most {MAX_MESSAGE_BYTES} bytes, got {self._buffer.nbytes}")
        try:
            self._request = call((self._buffer, self._world.mpi.BYTE), self.peer, tag)
        except self._world.mpi.Exception as error:
            if not self._is_death(error):
                raise self.failure(str(error)) from error
            self._error = self._loss()
        else:
            self._transport._under_way.add(self)

    def done(self) -> bool:
        """See Transfer."""
        self._transport.poll()
        if self._request is not None and not self._is_finished(self._request):
            return False
        if self._error is not None:
            raise self._error
        return True

    def give_up(self) -> None:
        """The other rank counts as gone; nothing changes where MPI is done by now."""
        raise NotImplementedError

    def failure(self, reason: str) -> ProtocolError:
        """The error to raise for anything but a lost rank."""
        return ProtocolError(f"rank {self._transport.rank}: {self.doing} rank {self.peer} failed: {reason}")

    def _is_finished(self, request: MPI.Request) -> bool:
        """Whether MPI is done with the buffer; if so, notes how it ended."""
        status = self._world.mpi.Status()
        try:
            ended = request.Test(status)
        except self._world.mpi.Exception as error:
            self._end(self._loss() if self._is_death(error) else self.failure(str(error)))
            return True
        if ended:
            self._end(self._loss() if self._given_up else self._check(status))
        return ended

    def _check(self, status: MPI.Status) -> ProtocolError | None:
        """What is wrong with a transfer that MPI has ended."""

    def _end(self, error: PeerLost | ProtocolError | None) -> None:
        self._request = None
        self._error = error
        self._transport._under_way.discard(self)

    def _is_death(self, error: MPI.Exception) -> bool:
        dead = self._world.dead(now=True)
        return self._world.tells_of_death(error) or self.peer in dead

    def _loss(self) -> PeerLost:
        return PeerLost(self.peer, f"rank {self._transport.rank}: {self.doing} rank {self.peer}, which is gone")


class _Send(_MpiTransfer):
    doing = "sending weights to"

    def give_up(self) -> None:
        """Wait for what MPI says: a send cannot be taken back."""
        self._given_up = self._request is not None


class _Receive(_MpiTransfer):
    doing = "receiving weights from"

    def __init__(self, transport: MpiTransport, peer: int, buffer: NDArray[np.uint8], ticket: bytes) -> None:
        super().__init__(transport, peer, buffer)
        self.ticket = ticket

    def cancel(self) -> bool:
        """See Receive."""
        self._take_back()
        try:
            return self.done()
        except PeerLost:
            return True

    def give_up(self) -> None:
        """Take it back, or, where it has begun, wait for what MPI says."""
        if self._request is not None and not self._is_finished(self._request):
            self._given_up = True
            self._take_back()

    def _take_back(self) -> None:
        if self._request is None:
            return
        try:
            self._request.Cancel()
        except self._world.mpi.Exception as error:
            if not self._is_death(error):
                raise self.failure(str(error)) from error
        else:
            self._is_finished(self._request)

    def _check(self, status: MPI.Status) -> ProtocolError | None:
        received = status.Get_count(self._world.mpi.BYTE)
        if status.Is_cancelled() or received == self._buffer.nbytes:
            return None
        return self.failure(f"{received} bytes came, {self._buffer.nbytes} were expected")
