"""Where the chunks of a version come from: the relay before this one, or the trainers' shards."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from laminar_hpc.errors import ProtocolError
from laminar_hpc.protocol.commands import Share
from laminar_hpc.protocol.peer import DIGEST_BYTES, Layout, Manifest
from laminar_hpc.weights.reshard import Rectangle, ShardMap


class Cut(NamedTuple):
    """A trainer's shard, and the chunks that it has some of; the same for all versions."""

    rank: int
    map: ShardMap
    chunks: list[int]


def cut_layout(layout: Layout) -> list[Cut]:
    """All trainers' shards."""
    cuts = []
    for shard in layout.shards:
        shard_map = ShardMap(shard.tiles)
        cuts.append(Cut(shard.rank, shard_map, list(shard_map.chunks(layout.manifest))))
    return cuts


class Part(NamedTuple):
    """What one source gives of a chunk.

    `spots` says where its bytes go, one rectangle after the other, with offsets that count from the first byte of the
    image; `digest` is "" where it is not known beforehand, or not checked.
    """

    source: int
    nbytes: int
    spots: list[Rectangle]
    digest: bytes


class Sources(Protocol):
    """Who gives what of each chunk."""

    ranks: frozenset[int]
    digests_come: bool
    """Whether each part's digest comes in a `ChunkSent`, instead of being known beforehand."""

    def parts(self, chunk: int) -> list[Part]:
        """The parts of a chunk, which together have every byte of it but the gaps between tensors."""


class FromRelay:
    """All of every chunk from one relay."""

    digests_come = True

    def __init__(self, rank: int, manifest: Manifest) -> None:
        self.ranks = frozenset({rank})
        self._rank = rank
        self._manifest = manifest

    def parts(self, chunk: int) -> list[Part]:
        """The chunk, in one part."""
        low, high = self._manifest.chunk_range(chunk)
        return [Part(self._rank, high - low, [Rectangle(low, high - low, 1, high - low)], b"")]


class FromTrainers:
    """Each chunk in parts from the trainers whose shards have some of it."""

    digests_come = False

    def __init__(self, cuts: list[Cut], shares: list[Share], manifest: Manifest) -> None:
        """`shares` are the version's digests; ProtocolError where they do not fit the layout, whose shards `cuts` has."""
        self.ranks = frozenset(cut.rank for cut in cuts)
        self._manifest = manifest
        digests = {share.rank: share.digests for share in shares}
        self._shards = [_Shard(cut, digests.get(cut.rank)) for cut in cuts]

    def parts(self, chunk: int) -> list[Part]:
        """The parts, in the order of the trainers."""
        found = []
        for shard in self._shards:
            part = shard.part(chunk, self._manifest)
            if part is not None:
                found.append(part)
        return found


class _Shard:
    """One trainer's shard of one version."""

    def __init__(self, cut: Cut, digests: bytes | None) -> None:
        self._cut = cut
        self._digests: dict[int, bytes] = {}
        if digests is None:
            raise ProtocolError(f"the broadcast has no digests of rank {cut.rank}'s shard")
        if not digests:
            return
        if len(digests) != len(cut.chunks) * DIGEST_BYTES:
            raise ProtocolError(
                f"rank {cut.rank}'s shard came with {len(digests)} bytes of digests, "
                f"{len(cut.chunks) * DIGEST_BYTES} are right for {len(cut.chunks)} chunks"
            )
        for place, chunk in enumerate(cut.chunks):
            self._digests[chunk] = digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES]

    def part(self, chunk: int, manifest: Manifest) -> Part | None:
        start, stop = self._cut.map.part_of_chunk(*manifest.chunk_range(chunk))
        if start == stop:
            return None
        rectangles = self._cut.map.rectangles(start, stop)
        return Part(self._cut.rank, stop - start, rectangles, self._digests.get(chunk, b""))
