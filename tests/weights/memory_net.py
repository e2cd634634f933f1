"""Ranks in one process: mail and transfers that move one at a time, when a test says so."""

from __future__ import annotations

from collections import defaultdict, deque
from random import Random

import numpy as np
from numpy.typing import NDArray

from laminar_hpc.mpi.transport import Transfer
from laminar_hpc.protocol.wire import AnyRecord, decode, encode


class MemoryTransfer:
    """One end of a transfer."""

    def __init__(self, buffer: NDArray[np.uint8]) -> None:
        self.buffer = buffer
        self.begun_with = buffer.copy()
        self.moved = False
        self.cancelled = False

    def done(self) -> bool:
        return self.moved or self.cancelled

    def cancel(self) -> bool:
        self.cancelled = not self.moved
        return True


class MemoryTransport:
    """A rank's `Transport` on a `MemoryNet`. Few tags, so that they come round."""

    tags = 70

    def __init__(self, net: MemoryNet, rank: int) -> None:
        self.rank = rank
        self._net = net

    def receive(self, source: int, tag: int, buffer: NDArray[np.uint8]) -> Transfer:
        assert 0 <= tag < self.tags
        assert (source, self.rank, tag) not in self._net.receives, "a tag is in use twice"
        transfer = self._net.receives[source, self.rank, tag] = MemoryTransfer(buffer)
        return transfer

    def send(self, dest: int, tag: int, buffer: NDArray[np.uint8]) -> Transfer:
        assert (self.rank, dest, tag) in self._net.receives, "sent before the receive was posted"
        transfer = MemoryTransfer(buffer)
        self._net.sends.append(((self.rank, dest, tag), transfer))
        return transfer


class MemoryNet:
    """Mail in order from each sender to each receiver, and transfers in any order.

    The receiver learns of a transfer when it moves, the sender later, with `settle`: up to then it must not have touched
    the buffer, as with MPI. `spoil` counts, for each (source, nbytes), how many transfers more arrive with one bit wrong.
    """

    def __init__(self, random: Random) -> None:
        self.random = random
        self.receives: dict[tuple[int, int, int], MemoryTransfer] = {}
        self.sends: list[tuple[tuple[int, int, int], MemoryTransfer]] = []
        self.unsettled: list[MemoryTransfer] = []
        self.mail: defaultdict[tuple[int, int], deque[bytes]] = defaultdict(deque)
        self.spoil: defaultdict[tuple[int, int], int] = defaultdict(int)

    def sender(self, source: int):
        """`send_mail` for rank `source`."""
        return lambda dest, message: self.mail[source, dest].append(encode(message))

    def outstanding(self, rank: int) -> int:
        """Receives posted by `rank` that nothing has come for."""
        return sum(dest == rank for _, dest, _ in self.receives)

    def move_one(self) -> None:
        """Move one transfer that both sides have agreed on."""
        if not self.sends:
            return
        key, send = self.sends.pop(self.random.randrange(len(self.sends)))
        receive = self.receives.pop(key)
        if receive.cancelled:
            return
        assert receive.buffer.nbytes == send.buffer.nbytes
        receive.buffer[:] = send.buffer
        place = (key[0], send.buffer.nbytes)
        if self.spoil[place] > 0:
            self.spoil[place] -= 1
            receive.buffer[-1] ^= 1
        receive.moved = True
        self.unsettled.append(send)

    def settle(self) -> None:
        """Let one sender know that its transfer is done."""
        if self.unsettled:
            send = self.unsettled.pop(self.random.randrange(len(self.unsettled)))
            assert np.array_equal(send.buffer, send.begun_with), "a buffer was reused under its send"
            send.moved = True

    def deliver_one(self) -> tuple[int, AnyRecord] | None:
        """The receiver and the message of one piece of mail; None where there is none."""
        waiting = [key for key, messages in self.mail.items() if messages]
        if not waiting:
            return None
        source, dest = self.random.choice(waiting)
        return dest, decode(self.mail[source, dest].popleft())

    @property
    def quiet(self) -> bool:
        """Nothing is on its way."""
        return not (self.sends or self.unsettled or any(self.mail.values()))
