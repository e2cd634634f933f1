"""How fast a link is: what one relay measures of the link from another, before the chunks' length is chosen.

A transfer of n bytes is taken to cost `startup + n * byte` seconds, as in the formula for the chain (policy/chain.py).
Both are measured as the chain uses them, with several transfers asked for at once: so the startup is what each transfer
costs beyond its bytes when others are under way, and not the latency of one alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from laminar_hpc.mpi.transport import Receive, Transfer, Transport, has_ended
from laminar_hpc.protocol.peer import ProbeRequest
from laminar_hpc.weights.serve import SendMail

WINDOW = 4
"""Transfers asked for at once."""

LARGEST_BYTES = 16 << 20


class _Round(NamedTuple):
    transfers: int
    nbytes: int


ROUNDS = (_Round(8, 1024), _Round(64, 1024), _Round(4, 1 << 20))
"""The first opens the connection and is not counted."""

FAST_S = 0.05
"""Where the round of large transfers takes less, one of still larger ones follows."""

LONG = _Round(8, LARGEST_BYTES)


class Link(NamedTuple):
    """A transfer of n bytes takes `startup_s + n * byte_s` seconds."""

    startup_s: float
    byte_s: float


class LinkProbe:
    """Measures the link from `source`; `poll` until it gives a result. Bounded by its caller's patience alone."""

    def __init__(self, transport: Transport, send_mail: SendMail, source: int, now: float) -> None:
        self.source = source
        self._transport = transport
        self._send_mail = send_mail
        self._memory = np.zeros(WINDOW * LARGEST_BYTES, dtype=np.uint8)
        transport.register(self._memory)
        self._rounds = list(ROUNDS)
        self._seconds: list[tuple[_Round, float]] = []
        self._asked: dict[int, Receive] = {}  # by the place in `_memory`
        self._to_ask = self._rounds[0].transfers
        self._began_s = now

    def poll(self, now: float) -> Link | None:
        """Move on; the result when all rounds are done. PeerLost where the source is gone."""
        round_ = self._rounds[0]
        for place, transfer in list(self._asked.items()):
            if transfer.done():
                del self._asked[place]
        while self._to_ask and len(self._asked) < WINDOW:
            self._ask(round_.nbytes)
        if self._asked or self._to_ask:
            return None
        self._seconds.append((self._rounds.pop(0), now - self._began_s))
        if not self._rounds and self._seconds[-1][1] < FAST_S and round_.nbytes < LARGEST_BYTES:
            self._rounds.append(LONG)
        if not self._rounds:
            return self._link()
        self._began_s = now
        self._to_ask = self._rounds[0].transfers
        return None

    def _ask(self, nbytes: int) -> None:
        place = next(place for place in range(WINDOW) if place not in self._asked)
        start = place * LARGEST_BYTES
        transfer = self._transport.receive(self.source, self._memory[start : start + nbytes])
        self._asked[place] = transfer
        self._to_ask -= 1
        self._send_mail(self.source, ProbeRequest(self._transport.rank, nbytes, transfer.ticket))

    def _link(self) -> Link:
        small, small_s = self._seconds[1]
        large, large_s = self._seconds[-1]
        small_each, large_each = small_s / small.transfers, large_s / large.transfers
        byte_s = max((large_each - small_each) / (large.nbytes - small.nbytes), 1e-13)
        return Link(max(small_each - small.nbytes * byte_s, 1e-7), byte_s)


class ProbeServer:
    """Answers another relay's probes, with bytes of no meaning."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._memory: NDArray[np.uint8] | None = None
        self._sending: list[tuple[int, Transfer]] = []

    def serve(self, request: ProbeRequest) -> None:
        """Begin to send."""
        if self._memory is None:
            self._memory = np.zeros(LARGEST_BYTES, dtype=np.uint8)
            self._transport.register(self._memory)
        nbytes = min(request.nbytes, LARGEST_BYTES)
        transfer = self._transport.send(request.rank, request.ticket, self._memory[:nbytes])
        self._sending.append((request.rank, transfer))

    def forget(self, rank: int) -> None:
        """`rank` is gone: what is sent to it, whose bytes never change, is not waited for."""
        self._sending = [sending for sending in self._sending if sending[0] != rank]

    def poll(self) -> bool:
        """Take note of what has been sent; whether sends are still under way."""
        self._sending = [sending for sending in self._sending if not has_ended(sending[1])]
        return bool(self._sending)
