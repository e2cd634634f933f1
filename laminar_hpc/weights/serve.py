"""Answers to chunk requests: what a trainer and a relay have in common as senders."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from laminar_hpc.errors import ProtocolError
from laminar_hpc.mpi.transport import Transfer, Transport, has_ended
from laminar_hpc.protocol.peer import ChunkGone, ChunkRequest, ChunkSent
from laminar_hpc.protocol.wire import AnyRecord
from laminar_hpc.weights.epochs import Epochs
from laminar_hpc.weights.image import Image, Pin, SlotState

SendMail = Callable[[int, AnyRecord], None]
"""Sends a message to a rank, without waiting."""


AT_ONCE = 1
"""Chunks on their way to one rank. Sent together they share the link and arrive together: each hop of the chain would then
take as long as all of them, instead of as long as one."""


class Holdings(NamedTuple):
    """What a sender knows of the versions in its image."""

    place: Callable[[int], tuple[int, int] | None]
    """First byte of a chunk in a slot, and the byte after the last one; None where the slot has nothing of that chunk."""
    written: Callable[[int, int], bool]
    """Whether (version, chunk) is there, asked of a version that is FILLING."""
    will_come: Callable[[int], bool]
    """Whether a version that is not here may still come."""
    digest: Callable[[int, int], bytes] | None
    """The digest of (version, chunk) for the receiver; None where it has it from elsewhere."""


class _Sending(NamedTuple):
    rank: int
    transfer: Transfer
    pin: Pin


class ChunkServer:
    """Sends chunks out of `image`.

    A request waits until its chunk is there, or until it is clear that it never will be; then the answer is `ChunkGone`. A
    send under way pins its slot. The one who asks borrows the version with the first chunk that it is sent, and keeps it
    until its `LeaseReturn`.

    A send to a rank that is gone may go on for as long as the transport likes. It pins its slot, and does not count for the
    rank when that is back.
    """

    def __init__(
        self, transport: Transport, image: Image, send_mail: SendMail, holdings: Holdings, epochs: Epochs
    ) -> None:
        """`epochs` are this rank's: their owner tells them of losses before it calls `forget` or `begin_anew`."""
        self._transport = transport
        self._image = image
        self._send_mail = send_mail
        self._holdings = holdings
        self._waiting: list[ChunkRequest] = []
        self._sending: list[_Sending] = []
        self._given_up: list[_Sending] = []
        self._epochs = epochs

    @property
    def sending(self) -> bool:
        """Whether a send is under way, to a rank that is not gone."""
        return bool(self._sending)

    def ask(self, request: ChunkRequest) -> None:
        """Take a request in; ProtocolError where its chunk can never come from here."""
        if request.epoch < self._epochs[request.rank]:
            return
        if self._holdings.place(request.chunk) is None:
            raise ProtocolError(
                f"rank {self._transport.rank}: rank {request.rank} asks for chunk {request.chunk} of version "
                f"{request.version}, of which there is nothing here"
            )
        self._waiting.append(request)

    def forget(self, rank: int) -> None:
        """`rank` is gone: its requests and what it borrowed are void. Sends to it end by themselves."""
        epoch = self._epochs[rank]
        self._given_up += [sending for sending in self._sending if sending.rank == rank]
        self._sending = [sending for sending in self._sending if sending.rank != rank]
        self._waiting = [request for request in self._waiting if request.rank != rank or request.epoch >= epoch]
        self._image.drop_borrower(rank)

    def begin_anew(self) -> None:
        """This rank was lost itself: whoever has asked it by then asks another one."""
        self._waiting.clear()
        self._given_up += self._sending
        self._sending = []

    def poll(self) -> bool:
        """Take note of sends that are done, and begin those that can be; whether there were any."""
        self._transport.poll()
        moved = _end(self._sending)
        _end(self._given_up)
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for request in waiting:
                if sum(sending.rank == request.rank for sending in self._sending) < AT_ONCE:
                    moved |= self._answer(request)
                else:
                    self._waiting.append(request)
        return moved

    def _answer(self, request: ChunkRequest) -> bool:
        version, chunk = request.version, request.chunk
        state = self._image.state(version)
        if state is SlotState.READY or (state is SlotState.FILLING and self._holdings.written(version, chunk)):
            self._send(request)
        elif state in (SlotState.DROPPED, SlotState.EMPTY) and not self._holdings.will_come(version):
            self._send_mail(request.rank, ChunkGone(self._transport.rank, version, chunk))
        else:
            self._waiting.append(request)
            return False
        return True

    def _send(self, request: ChunkRequest) -> None:
        version, chunk, me = request.version, request.chunk, self._transport.rank
        place = self._holdings.place(chunk)
        assert place is not None, "checked when it was asked for"
        data = self._image.bytes_of(version)[place[0] : place[1]]
        transfer = self._transport.send(request.rank, request.ticket, data)
        if not self._image.has_lent(request.rank, version):
            self._image.hold(request.rank, version)
        self._sending.append(_Sending(request.rank, transfer, self._image.pin(version)))
        if self._holdings.digest is not None:
            self._send_mail(request.rank, ChunkSent(me, version, chunk, self._holdings.digest(version, chunk)))


def _end(sends: list[_Sending]) -> bool:
    """Take those that have ended out of `sends`; whether there were any."""
    ended = [sending for sending in sends if has_ended(sending.transfer)]
    for sending in ended:
        sends.remove(sending)
        sending.pin.release()
    return bool(ended)
