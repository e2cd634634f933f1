"""Where the chunks of a version come from: the relay before this one, or the trainers' shards."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from laminar_hpc.errors import ProtocolError
from laminar_hpc.protocol.commands import Share
from laminar_hpc.protocol.peer import DIGEST_BYTES, Layout, Manifest, Shard
from laminar_hpc.weights.reshard import Rectangle, ShardMap


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

    def __init__(self, layout: Layout, shares: list[Share]) -> None:
        """`shares` are the version's digests; ProtocolError where they do not fit the layout."""
        self.ranks = frozenset(shard.rank for shard in layout.shards)
        self._manifest = layout.manifest
        digests = {share.rank: share.digests for share in shares}
        self._shards = [_Shard(shard, layout.manifest, digests.get(shard.rank)) for shard in layout.shards]

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

    def __init__(self, shard: Shard, manifest: Manifest, digests: bytes | None) -> None:
        self._rank = shard.rank
        self._map = ShardMap(shard.tiles)
        self._digests: dict[int, bytes] = {}
        if digests is None:
            raise ProtocolError(f"the broadcast has no digests of rank {shard.rank}'s shard")
        if not digests:
            return
        chunks = self._map.chunks(manifest)
        if len(digests) != len(chunks) * DIGEST_BYTES:
            raise ProtocolError(
                f"rank {shard.rank}'s shard came with {len(digests)} bytes of digests, "
                f"{len(chunks) * DIGEST_BYTES} are right for {len(chunks)} chunks"
            )
        for place, chunk in enumerate(chunks):
            self._digests[chunk] = digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES]

    def part(self, chunk: int, manifest: Manifest) -> Part | None:
        start, stop = self._map.part_of_chunk(*manifest.chunk_range(chunk))
        if start == stop:
            return None
        return Part(self._rank, stop - start, self._map.rectangles(start, stop), self._digests.get(chunk, b""))
