"""Mail between ranks: protocol messages, never waiting, in order from each sender.

A mailbox belongs to one thread. Nothing moves between calls: a sender's loop has to come back to `poll` (or `flush`) for
its larger messages to leave, as MPI makes progress only when it is called.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from laminar_hpc.errors import ProtocolError
from laminar_hpc.mpi.world import World
from laminar_hpc.protocol.wire import AnyRecord, decode, encode

if TYPE_CHECKING:
    from mpi4py import MPI

MAIL_TAG = 1
MAX_MESSAGE_BYTES = (1 << 31) - 1
"""MPI counts bytes of a message in 32 bits, with a sign."""

_PAUSE_S = 0.0005


class _Outgoing(NamedTuple):
    rank: int
    data: bytes  # must stay alive until the request is done
    request: MPI.Request


class _Arriving(NamedTuple):
    rank: int
    data: bytearray
    request: MPI.Request


class Mail:
    """One rank's mailbox."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._outgoing: list[_Outgoing] = []
        self._arriving: list[_Arriving] = []
        self._to_self: deque[AnyRecord] = deque()

    @property
    def pending(self) -> int:
        """Messages sent whose memory MPI still needs."""
        return len(self._outgoing)

    def send(self, rank: int, message: AnyRecord) -> None:
        """Send `message` to `rank` (this one included) without waiting; ProtocolError where it is 2 GiB long or more."""
        if rank == self._world.rank:
            self._to_self.append(message)
            return
        data = encode(message)
        if len(data) > MAX_MESSAGE_BYTES:
            raise ProtocolError(
                f"rank {self._world.rank}: {type(message).__name__} for rank {rank} has {len(data)} bytes; "
                f"mail carries at most {MAX_MESSAGE_BYTES}"
            )
        mpi = self._world.mpi
        try:
            request = self._world.comm.Isend([data, mpi.BYTE], dest=rank, tag=MAIL_TAG)
        except mpi.Exception as error:
            raise self._failure("sending to", rank, error) from error
        self._outgoing.append(_Outgoing(rank, data, request))

    def poll(self, limit: int = 256) -> list[tuple[int, AnyRecord]]:
        """At most `limit` messages that have arrived, each with its sender's rank; those of one sender in its order."""
        self._reap()
        messages: list[tuple[int, AnyRecord]] = []
        while self._to_self and len(messages) < limit:
            messages.append((self._world.rank, self._to_self.popleft()))
        while len(self._arriving) + len(messages) < limit and self._match_one():
            pass
        for mail in self._take_arrived(limit - len(messages)):
            try:
                messages.append((mail.rank, decode(memoryview(mail.data))))
            except ProtocolError as error:
                raise ProtocolError(f"rank {self._world.rank}: mail from rank {mail.rank}: {error}") from error
        return messages

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was sent has left, at most `timeout_s`; False where something has not.

        Meanwhile it takes in what arrives (for a later `poll`), so that two ranks can flush towards each other.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._reap()
            if not self._outgoing:
                return True
            if time.monotonic() > deadline_s:
                return False
            if not self._match_one():
                time.sleep(_PAUSE_S)

    def _reap(self) -> None:
        still: list[_Outgoing] = []
        for mail in self._outgoing:
            if not self._test("sending to", mail):
                still.append(mail)
        self._outgoing = still

    def _match_one(self) -> bool:
        """Begin to receive the next message there is; False where there is none.

        Matched receive: the message looked at is the one received, and a large one is waited for by testing, not inside MPI.
        """
        mpi, comm = self._world.mpi, self._world.comm
        status = mpi.Status()
        message = comm.Improbe(source=mpi.ANY_SOURCE, tag=MAIL_TAG, status=status)
        if message is None:
            return False
        data = bytearray(status.Get_count(mpi.BYTE))
        self._arriving.append(_Arriving(status.Get_source(), data, message.Irecv([data, mpi.BYTE])))
        return True

    def _take_arrived(self, limit: int) -> list[_Arriving]:
        """The first complete messages; of a sender none whose earlier one is not complete yet."""
        arrived: list[_Arriving] = []
        still: list[_Arriving] = []
        waiting_for: set[int] = set()
        for mail in self._arriving:
            if len(arrived) < limit and mail.rank not in waiting_for and self._test("receiving from", mail):
                arrived.append(mail)
            else:
                still.append(mail)
                waiting_for.add(mail.rank)
        self._arriving = still
        return arrived

    def _test(self, doing: str, mail: _Outgoing | _Arriving) -> bool:
        try:
            return mail.request.Test()
        except self._world.mpi.Exception as error:
            raise self._failure(doing, mail.rank, error) from error

    def _failure(self, doing: str, rank: int, error: Exception) -> ProtocolError:
        return ProtocolError(f"rank {self._world.rank}: {doing} rank {rank} failed: {error}")
