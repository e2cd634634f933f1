"""Transfers of bytes between ranks, for weights: no copies, no waiting, the receiver's memory named before anything is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from laminar_hpc.errors import PeerLost

if TYPE_CHECKING:
    from laminar_hpc.mpi.world import World


class Transfer(Protocol):
    """Bytes on their way. The buffer belongs to the transfer until `done`."""

    def done(self) -> bool:
        """Whether the buffer is the caller's again: sent from, or received into and full.

        PeerLost where the other rank is gone: the buffer is the caller's again too, with whatever is in it. ProtocolError
        where the transfer failed in any other way. What it has answered or raised once, it answers or raises again.
        """


def has_ended(transfer: Transfer) -> bool:
    """Whether the buffer is the caller's again, be it that the other rank is gone. ProtocolError as by `done`."""
    try:
        return transfer.done()
    except PeerLost:
        return True


class Receive(Transfer, Protocol):
    """Bytes that are to come."""

    ticket: bytes
    """What the sender needs to know; the receiver gives it to it in a message."""

    def cancel(self) -> bool:
        """Give the transfer up. True: nothing will touch the buffer any more; False: ask again until it is so.

        Never PeerLost: who has given a transfer up does not mind. What the sender sends for the ticket afterwards, or has
        sent already, is thrown away, and is done for the sender. Where all bytes have come already, they stay.
        """


class Transport(Protocol):
    """How chunks of weights travel; one object a rank, used by one thread. Buffers are contiguous and may be empty.

    The receiver names its memory first and hands the ticket to the sender, who sends when the bytes are there. So there is
    never a transfer without a place to go, and a rank that nobody asks is never written to. Things move only while both
    ends call: each has to come back to `done` of what it has under way, or to `poll`.
    """

    rank: int

    def register(self, memory: NDArray[np.uint8]) -> None:
        """Buffers of later transfers lie in `memory`; some transports have to pin it, and do so once. Valid until `close`."""

    def receive(self, source: int, buffer: NDArray[np.uint8]) -> Receive:
        """Receive exactly `buffer.nbytes` bytes from `source` into `buffer`. Never PeerLost; that is for `done`."""

    def send(self, dest: int, ticket: bytes, buffer: NDArray[np.uint8]) -> Transfer:
        """Send `buffer` to `dest`, which has given this ticket, and once only. Never PeerLost; that is for `done`.

        ProtocolError where the ticket is for another number of bytes, or is none.
        """

    def forget(self, rank: int) -> None:
        """`rank` counts as gone: all transfers with it that are not done end in PeerLost. Later ones are as any other.

        It may be alive, stopped or cut off, and wake up. So a receive ends when nothing writes to its buffer any more, and a
        send when nothing reads from it, which may be never; or at once, where what the other rank still reads goes to a
        receive that it has not given up either, and that it checks.
        """

    def poll(self) -> None:
        """Do what is due between transfers: throw away what comes for cancelled receives, so that its sender is done.

        To be called again and again by a rank that has nothing under way; `receive`, `send` and `done` do it too.
        """

    def close(self) -> None:
        """Give up what was registered."""


def build_transport(name: str, world: World) -> Transport:
    """The transport of that name (config key weights.transport). ConfigError where what it needs is not installed."""
    if name == "nixl":
        from laminar_hpc.mpi.nixl_transport import NixlTransport

        return NixlTransport(world)
    from laminar_hpc.mpi.point_to_point import MpiTransport

    return {"mpi": MpiTransport}[name](world)
