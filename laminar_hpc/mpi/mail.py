"""Mail between ranks: protocol messages, never waiting, in order from each sender.

A mailbox belongs to one thread. Nothing moves between calls: a sender's loop has to come back to `poll` (or `flush`) for
its larger messages to leave, as MPI makes progress only when it is called.

Two ways for a rank to be lost. A **dead** one is found by MPI itself, where it survives failures (mpi/world.py): `lost`
names it, what is under way to it or sent to it later vanishes, and of what it had sent the whole messages before the first
torn one still come. A rank that is **forgotten** is taken for lost by others, but may live and speak again: nobody waits
any more for what is under way to it, and all else goes on as if nothing had been. No call ever raises because of either.
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
    request: MPI.Request | None  # None: its rank died before it could be received


class Mail:
    """One rank's mailbox."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._outgoing: list[_Outgoing] = []
        self._arriving: list[_Arriving] = []
        self._to_self: deque[AnyRecord] = deque()
        self._dead: set[int] = set()
        self._untold: list[int] = []  # dead ranks that `lost` has not named yet
        self._torn: set[int] = set()  # dead ranks of which a message is missing, so that what came after it is void
        self._forgotten: set[int] = set()

    @property
    def pending(self) -> int:
        """Messages sent whose memory MPI still needs, but for those to ranks that are dead or forgotten."""
        return sum(self._is_awaited(mail) for mail in self._outgoing)

    def lost(self) -> list[int]:
        """The ranks found dead since the last call, each named once. Messages of theirs that are whole may still come."""
        self._bury(self._world.dead())
        untold, self._untold = self._untold, []
        return untold

    def forget(self, rank: int) -> None:
        """`rank` counts as lost, dead or not: what is under way to it is not waited for, until it is heard again."""
        self._forgotten.add(rank)

    def send(self, rank: int, message: AnyRecord) -> None:
        """Send `message` to `rank` (this one included) without waiting; ProtocolError where it is 2 GiB long or more.

        Nothing happens where the rank is dead.
        """
        if rank == self._world.rank:
            self._to_self.append(message)
            return
        if rank in self._dead:
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
            self._excuse("sending to", rank, error)
            return
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
            if not self.pending:
                return True
            if time.monotonic() > deadline_s:
                return False
            if not self._match_one():
                time.sleep(_PAUSE_S)

    def _is_awaited(self, mail: _Outgoing) -> bool:
        return mail.rank not in self._dead and mail.rank not in self._forgotten

    def _reap(self) -> None:
        self._bury(self._world.dead())
        self._outgoing = [mail for mail in self._outgoing if self._test("sending to", mail) is None]

    def _match_one(self) -> bool:
        """Begin to receive the next message there is; False where there is none.

        Matched receive: the message looked at is the one received, and a large one is waited for by testing, not inside MPI.
        """
        mpi, comm = self._world.mpi, self._world.comm
        status = mpi.Status()
        try:
            message = comm.Improbe(source=mpi.ANY_SOURCE, tag=MAIL_TAG, status=status)
        except mpi.Exception as error:
            self._excuse(
                "receiving from", None, error
            )  # and with that the death is acknowledged: the next call goes on
            return False
        if message is None:
            return False
        rank = status.Get_source()
        data = bytearray(status.Get_count(mpi.BYTE))
        request = None
        try:
            request = message.Irecv([data, mpi.BYTE])
        except mpi.Exception as error:
            self._excuse("receiving from", rank, error)
        self._arriving.append(_Arriving(rank, data, request))
        self._forgotten.discard(rank)
        return True

    def _take_arrived(self, limit: int) -> list[_Arriving]:
        """The first complete messages; of a sender none whose earlier one is not complete yet, or never will be."""
        arrived: list[_Arriving] = []
        still: list[_Arriving] = []
        waiting_for: set[int] = set()
        for mail in self._arriving:
            ended = None
            if len(arrived) < limit and mail.rank not in waiting_for:
                ended = self._test("receiving from", mail)
            if ended is None:
                still.append(mail)
                waiting_for.add(mail.rank)
            elif not ended:
                self._torn.add(mail.rank)
            elif mail.rank not in self._torn:
                arrived.append(mail)
        self._arriving = still
        return arrived

    def _test(self, doing: str, mail: _Outgoing | _Arriving) -> bool | None:
        """None while MPI needs the message's memory, then whether it went well: False where its rank's death ended it."""
        if mail.request is None:
            return False
        try:
            return True if mail.request.Test() else None
        except self._world.mpi.Exception as error:
            self._excuse(doing, mail.rank, error)
            return False

    def _excuse(self, doing: str, rank: int | None, error: MPI.Exception) -> None:
        """ProtocolError unless the reason for `error` is that a rank (`rank`, where it is known) is dead."""
        world = self._world
        dead = world.dead(now=True)
        if not world.tells_of_death(error) and rank not in dead:
            whom = "any rank" if rank is None else f"rank {rank}"
            raise ProtocolError(f"rank {world.rank}: {doing} {whom} failed: {error}") from error
        self._bury(dead if rank is None else dead | {rank})

    def _bury(self, dead: frozenset[int]) -> None:
        if len(dead | self._dead) > len(self._dead):
            self._untold += sorted(dead - self._dead)
            self._dead |= dead
