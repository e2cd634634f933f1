"""Which trainer publishes which part of the image.

Each trainer takes a contiguous run of chunks; the runs differ in length by one at most and cover every chunk once. Where
there are more trainers than chunks, some take none.
"""

from __future__ import annotations

from collections.abc import Iterable

from laminar_hpc.errors import ProtocolError
from laminar_hpc.protocol.commands import Share
from laminar_hpc.protocol.peer import Manifest, TensorEntry


def share(chunks: int, trainers: int, trainer: int) -> tuple[int, int]:
    """First chunk, and number of chunks, of `trainer` (0 first) among `trainers`."""
    if not 0 <= trainer < trainers:
        raise ValueError(f"trainer must be in 0 to {trainers - 1}, got {trainer}")
    first = chunks * trainer // trainers
    return first, chunks * (trainer + 1) // trainers - first


def check_shares(shares: Iterable[Share], chunks: int) -> None:
    """ProtocolError where these shares do not hold each of `chunks` chunks exactly once."""
    expected = 0
    for part in sorted(shares, key=lambda part: (part.first_chunk, part.chunks)):
        if part.chunks == 0:
            continue
        if part.chunks < 0 or part.first_chunk != expected:
            raise ProtocolError(
                f"the share of rank {part.rank} (trainer) has {part.chunks} chunks from chunk {part.first_chunk} on, "
                f"where chunk {expected} was due"
            )
        expected += part.chunks
    if expected != chunks:
        raise ProtocolError(f"the shares hold {expected} chunks, the image has {chunks}")


def share_bytes(manifest: Manifest, trainers: int, trainer: int) -> tuple[int, int]:
    """First byte of the image that `trainer` publishes, and the byte after the last one."""
    first, chunks = share(manifest.chunks, trainers, trainer)
    if chunks == 0:
        return 0, 0
    return manifest.chunk_range(first)[0], manifest.chunk_range(first + chunks - 1)[1]


def overlap(entry: TensorEntry, low: int, high: int) -> tuple[int, int]:
    """First byte of the tensor that lies between the image's bytes `low` and `high`, and the byte after the last one.

    Both count from the tensor's own first byte; they are equal where nothing of it lies there.
    """
    start = min(max(0, low - entry.offset), entry.nbytes)
    return start, max(start, min(entry.nbytes, high - entry.offset))
