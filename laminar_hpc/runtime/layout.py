"""What the manager gathers before the first version: the image, who publishes what of it, and how fast the links are.

    RelayReady (all) -> MeasureLink to each relay -> LinkMeasured        \\
    Manifest (first trainer), Shard (each trainer)                        > Layout, with the chunks' length, to all
"""

from __future__ import annotations

import statistics

import msgspec

from laminar_hpc.policy.chain import ASSUMED_BYTE_S, ASSUMED_STARTUP_S, best_chunk_bytes
from laminar_hpc.protocol.peer import Layout, LinkMeasured, Manifest, Shard
from laminar_hpc.weights.reshard import check_cover


class LayoutDesk:
    """Knows when the layout is complete, and makes it."""

    def __init__(self, trainers: int, relays: list[int], chunk_bytes: int) -> None:
        """`relays` are ranks, `chunk_bytes` is the config's (0: to be chosen)."""
        self._trainers = trainers
        self._relays = relays
        self._chunk_bytes = chunk_bytes
        self._manifest: Manifest | None = None
        self._shards: dict[int, Shard] = {}
        self._links: dict[int, LinkMeasured] = {}
        self._ready: set[int] = set()
        self.layout: Layout | None = None
        """None until it is made."""

    def relay_ready(self, rank: int) -> list[tuple[int, int]]:
        """A relay has reported. Once all have: for each link, the relay that is to measure it and the one at its other end.

        Neighbours measure at the same time, each from the one before it, as the chain uses the links.
        """
        if rank in self._ready or rank not in self._relays:  # taken back, or a spare that takes over
            return []
        self._ready.add(rank)
        if self._chunk_bytes or len(self._ready) < len(self._relays):
            return []
        return list(zip(self._relays[1:], self._relays[:-1], strict=True))

    def add(self, message: Manifest | Shard | LinkMeasured) -> None:
        """One thing more is known."""
        match message:
            case Manifest():
                self._manifest = message
            case Shard():
                self._shards[message.rank] = message
            case LinkMeasured():
                self._links[message.rank] = message

    @property
    def link(self) -> tuple[float, float] | None:
        """Startup and byte time of the slower half of the links (medians), in seconds; None where none was measured."""
        if not self._links:
            return None
        links = self._links.values()
        return statistics.median(link.startup_s for link in links), statistics.median(link.byte_s for link in links)

    def make(self, patient: bool) -> Layout | None:
        """The layout, once; None while something is missing. Where not `patient`, links that are not measured do not count.

        ProtocolError where the shards do not hold every byte of every tensor exactly once.
        """
        if self.layout is not None or self._manifest is None or len(self._shards) < self._trainers:
            return None
        if patient and not self._chunk_bytes and len(self._links) < len(self._relays) - 1:
            return None
        shards = [self._shards[rank] for rank in sorted(self._shards)]
        check_cover(self._manifest, shards)
        # one relay has no link, and a probe may not end
        startup_s, byte_s = self.link or (ASSUMED_STARTUP_S, ASSUMED_BYTE_S)
        chunk_bytes = self._chunk_bytes or best_chunk_bytes(len(self._relays), self._manifest.nbytes, startup_s, byte_s)
        self.layout = Layout(msgspec.structs.replace(self._manifest, chunk_bytes=chunk_bytes), shards)
        return self.layout
