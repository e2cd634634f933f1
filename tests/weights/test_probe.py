"""The measurement of a link, on one whose costs are known."""

from __future__ import annotations

from random import Random

import pytest
from memory_net import MemoryNet, MemoryTransport

from laminar_hpc.errors import PeerLost
from laminar_hpc.protocol.peer import ProbeRequest
from laminar_hpc.weights.probe import Link, LinkProbe, ProbeServer


class KnownLink:
    """Rank 1 measures the link from rank 0, on which transfers go one after the other, each for `startup + nbytes * byte`."""

    def __init__(self, startup_s: float, byte_s: float) -> None:
        self.net = MemoryNet(Random(0))
        self.startup_s, self.byte_s = startup_s, byte_s
        self.now = 100.0
        self.server = ProbeServer(MemoryTransport(self.net, 0))
        self.probe = LinkProbe(MemoryTransport(self.net, 1), self.net.sender(1), 0, self.now)

    def turn(self) -> Link | None:
        link = self.probe.poll(self.now)
        while (piece := self.net.deliver_one()) is not None:
            assert isinstance(piece[1], ProbeRequest)
            self.server.serve(piece[1])
        self.server.poll()
        if self.net.sends:
            before = self.net.moved_bytes[0, 1]
            self.net.move_one()
            self.now += self.startup_s + (self.net.moved_bytes[0, 1] - before) * self.byte_s
        self.net.settle()
        return link

    def measure(self) -> Link:
        for _ in range(1000):
            link = self.turn()
            if link is not None:
                return link
        raise AssertionError("no result")


@pytest.mark.parametrize(
    ("startup_s", "byte_s"),
    [(1e-3, 4e-8), (5e-5, 8e-11), (2e-4, 1e-9)],  # 25 MB/s, 12.5 GB/s, 1 GB/s
)
def test_startup_and_byte_time_are_found(startup_s: float, byte_s: float) -> None:
    link = KnownLink(startup_s, byte_s).measure()
    assert link.startup_s == pytest.approx(startup_s, rel=1e-6)
    assert link.byte_s == pytest.approx(byte_s, rel=1e-6)


def test_a_fast_link_is_measured_with_more_bytes() -> None:
    slow, fast = KnownLink(1e-3, 4e-8), KnownLink(5e-5, 8e-11)
    slow.measure()
    fast.measure()
    assert slow.net.moved_bytes[0, 1] == 72 * 1024 + 4 * (1 << 20)
    assert fast.net.moved_bytes[0, 1] == slow.net.moved_bytes[0, 1] + 8 * (16 << 20)


def test_a_source_that_is_gone_ends_it() -> None:
    link = KnownLink(1e-3, 4e-8)
    link.turn()
    link.net.kill(0)
    link.probe._transport.forget(0)
    with pytest.raises(PeerLost):
        link.probe.poll(link.now)
