"""Ranks in one process: mail and transfers that move one at a time, when a test says so, and ranks that die or stop."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from random import Random

import numpy as np
from numpy.typing import NDArray

from laminar_hpc.errors import PeerLost
from laminar_hpc.protocol.wire import AnyRecord, decode, encode


class MemoryTransfer:
    """One end of a transfer."""

    def __init__(self, net: MemoryNet, own: int, peer: int, buffer: NDArray[np.uint8]) -> None:
        self.net, self.own, self.peer, self.buffer = net, own, peer, buffer
        self.moved = False
        self.cancelled = False
        self.lost = False
        self.given_up = False

    @property
    def open(self) -> bool:
        """Whether it may still move."""
        return not (self.moved or self.cancelled or self.lost)

    def done(self) -> bool:
        if self.lost and not self.moved:
            raise PeerLost(self.peer, f"rank {self.own}: rank {self.peer} is gone")
        return not self.open


class MemoryReceive(MemoryTransfer):
    """The receiver's end."""

    def __init__(self, net: MemoryNet, own: int, peer: int, buffer: NDArray[np.uint8], ticket: bytes) -> None:
        super().__init__(net, own, peer, buffer)
        self.ticket = ticket

    def cancel(self) -> bool:
        """What is being sent already cannot be taken back, and will move or be lost."""
        if self.open and not self.net.is_sending(self.ticket):
            self.cancelled = True
            self.net.receives.pop(self.ticket, None)
        return not self.open


class MemorySend(MemoryTransfer):
    """The sender's end."""

    def __init__(self, net: MemoryNet, own: int, peer: int, buffer: NDArray[np.uint8], ticket: bytes) -> None:
        super().__init__(net, own, peer, buffer)
        self.ticket = ticket
        self.begun_with = buffer.copy()


class MemoryTransport:
    """A rank's `Transport` on a `MemoryNet`."""

    def __init__(self, net: MemoryNet, rank: int) -> None:
        self.rank = rank
        self._net = net
        self._registered: list[NDArray[np.uint8]] = []
        self._closed = False

    def register(self, memory: NDArray[np.uint8]) -> None:
        self._registered.append(memory)

    def receive(self, source: int, buffer: NDArray[np.uint8]) -> MemoryReceive:
        self._check(buffer)
        return self._net.post(MemoryReceive(self._net, self.rank, source, buffer, self._net.new_ticket()))

    def send(self, dest: int, ticket: bytes, buffer: NDArray[np.uint8]) -> MemorySend:
        self._check(buffer)
        return self._net.begin(MemorySend(self._net, self.rank, dest, buffer, ticket))

    def poll(self) -> None:
        """Nothing is due here."""

    def forget(self, rank: int) -> None:
        self._net.end_transfers(self.rank, rank)

    def close(self) -> None:
        self._closed = True
        self._registered.clear()

    def _check(self, buffer: NDArray[np.uint8]) -> None:
        assert not self._closed, "used after it was closed"
        assert buffer.flags.c_contiguous
        low = buffer.__array_interface__["data"][0]
        ranges = [(m.__array_interface__["data"][0], m.nbytes) for m in self._registered]
        inside = any(begin <= low and low + buffer.nbytes <= begin + nbytes for begin, nbytes in ranges)
        assert inside or buffer.nbytes == 0, "a buffer outside the registered memory"


class MemoryNet:
    """Mail in order from each sender to each receiver, and transfers in any order.

    The receiver learns of a transfer when it moves, the sender later, with `settle`: up to then it must not have touched
    the buffer, as with MPI. `spoil` counts, for each (source, nbytes), how many transfers more arrive with one bit wrong.
    Nothing moves to or from a stalled rank, or over a stalled link, until it is resumed; nor, ever, to or from a dead one.
    """

    def __init__(self, random: Random) -> None:
        self.random = random
        self.receives: dict[bytes, MemoryReceive] = {}
        self.sends: list[MemorySend] = []
        self.unsettled: list[MemorySend] = []
        self.mail: defaultdict[tuple[int, int], deque[bytes]] = defaultdict(deque)
        self.spoil: defaultdict[tuple[int, int], int] = defaultdict(int)
        self.dead: set[int] = set()
        self.stalled: set[int] = set()
        self.stalled_links: set[frozenset[int]] = set()
        self.moved_bytes: defaultdict[tuple[int, int], int] = defaultdict(int)
        """Bytes that have come from source to dest."""
        self._tickets = 0

    # --- mail ---------------------------------------------------------------------------------------------------

    def sender(self, source: int) -> Callable[[int, AnyRecord], None]:
        """`send_mail` for rank `source`."""

        def send(dest: int, message: AnyRecord) -> None:
            if not {source, dest} & self.dead:
                self.mail[source, dest].append(encode(message))

        return send

    def deliver_one(self) -> tuple[int, AnyRecord] | None:
        """The receiver and the message of one piece of mail; None where there is none that can be delivered."""
        waiting = [key for key, messages in self.mail.items() if messages and self._connected(*key)]
        if not waiting:
            return None
        source, dest = self.random.choice(waiting)
        return dest, decode(self.mail[source, dest].popleft())

    # --- transfers ----------------------------------------------------------------------------------------------

    def outstanding(self, rank: int) -> int:
        """Receives posted by `rank` that nothing has come for."""
        return sum(receive.own == rank for receive in self.receives.values())

    def move_one(self) -> None:
        """Move one transfer that both sides have agreed on."""
        movable = [send for send in self.sends if self._connected(send.own, send.peer)]
        if not movable:
            return
        send = self.random.choice(movable)
        self.sends.remove(send)
        self.unsettled.append(send)
        receive = self.receives.pop(send.ticket, None)
        if receive is None:  # taken back before the send began, or forgotten
            return
        assert (receive.own, receive.peer) == (send.peer, send.own), "a ticket is used by a rank that it was not for"
        assert receive.buffer.nbytes == send.buffer.nbytes
        receive.buffer[:] = send.buffer
        self.moved_bytes[send.own, send.peer] += send.buffer.nbytes
        place = (send.own, send.buffer.nbytes)
        if self.spoil[place] > 0:
            self.spoil[place] -= 1
            receive.buffer[-1] ^= 1
        receive.moved = True

    def settle(self) -> None:
        """Let one sender know that its transfer is done."""
        if self.unsettled:
            send = self.unsettled.pop(self.random.randrange(len(self.unsettled)))
            assert np.array_equal(send.buffer, send.begun_with), "a buffer was reused under its send"
            send.moved = True

    # --- failures -----------------------------------------------------------------------------------------------

    def kill(self, rank: int) -> None:
        """`rank` is gone: some of the last mail from it still comes, some transfers with it end, others when it is forgotten."""
        self.dead.add(rank)
        for (source, dest), messages in self.mail.items():
            if dest == rank:
                messages.clear()
            elif source == rank:
                kept = self.random.randint(0, len(messages))
                self.mail[source, dest] = deque(list(messages)[:kept])
        self.sends = [send for send in self.sends if send.own != rank]
        for transfer in self._with(rank):
            if transfer.given_up or self.random.random() < 0.5:
                self._lose(transfer)

    def stall(self, rank: int) -> None:
        """`rank` is stopped: nothing comes from it or goes to it."""
        self.stalled.add(rank)

    def resume(self, rank: int) -> None:
        """A stopped rank goes on."""
        self.stalled.discard(rank)

    def stall_link(self, one: int, other: int) -> None:
        """Nothing moves between the two, either way."""
        self.stalled_links.add(frozenset({one, other}))

    def resume_link(self, one: int, other: int) -> None:
        """The link between the two works again."""
        self.stalled_links.discard(frozenset({one, other}))

    @property
    def quiet(self) -> bool:
        """Nothing is on its way that can move."""
        moving = any(self._connected(send.own, send.peer) for send in self.sends)
        mail = any(messages and self._connected(*key) for key, messages in self.mail.items())
        return not (moving or mail or self.unsettled)

    # --- the transports' side -----------------------------------------------------------------------------------

    def new_ticket(self) -> bytes:
        """One that no other receive has."""
        self._tickets += 1
        return b"%d" % self._tickets

    def post(self, receive: MemoryReceive) -> MemoryReceive:
        """A receive is there."""
        self.receives[receive.ticket] = receive
        return receive

    def begin(self, send: MemorySend) -> MemorySend:
        """A send has begun."""
        assert 1 <= int(send.ticket) <= self._tickets, "sent before the receive was posted"
        if {send.own, send.peer} & self.dead and self.random.random() < 0.5:
            send.lost = True
        else:
            self.sends.append(send)  # to a dead rank it moves never, and ends when that one is forgotten
        return send

    def is_sending(self, ticket: bytes) -> bool:
        """Whether bytes for this receive are on their way."""
        return any(send.ticket == ticket for send in self.sends)

    def end_transfers(self, own: int, peer: int) -> None:
        """All transfers of `own` with `peer` end, but what broke off in the middle: the rest may come when `peer` is back."""
        for transfer in self._with(peer):
            if transfer.own == own:
                transfer.given_up = True
                if not self._broke_off(transfer):
                    self._lose(transfer)

    def _broke_off(self, transfer: MemoryTransfer) -> bool:
        """As with MPI over TCP: a send to a rank that lives, or a receive that has begun from one that cannot be reached."""
        if transfer.peer in self.dead:
            return False
        if isinstance(transfer, MemorySend):
            return True
        return self.is_sending(transfer.ticket) and not self._connected(transfer.peer, transfer.own)

    def _with(self, rank: int) -> list[MemoryTransfer]:
        """Open transfers of others with `rank`."""
        transfers: list[MemoryTransfer] = [*self.receives.values(), *self.sends]
        return [transfer for transfer in transfers if transfer.peer == rank]

    def _lose(self, transfer: MemoryTransfer) -> None:
        transfer.lost = True
        if isinstance(transfer, MemoryReceive):
            self.receives.pop(transfer.ticket, None)
        else:
            self.sends = [send for send in self.sends if send is not transfer]

    def _connected(self, source: int, dest: int) -> bool:
        """Whether anything moves from `source` to `dest` now; mail that a dead rank has sent off still comes."""
        if dest in self.dead or {source, dest} & self.stalled:
            return False
        return frozenset({source, dest}) not in self.stalled_links
