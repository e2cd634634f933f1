"""Digests of chunks and of whole images: XXH3 (64 bits), which tells corruption from data but is no cryptography.

A chunk's digest is 8 bytes, little-endian; the digests of several chunks are their concatenation in order. The digest of
an image is that of the concatenated digests of all its chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import xxhash
from numpy.typing import NDArray

from laminar_hpc.errors import EngineError
from laminar_hpc.protocol.peer import DIGEST_BYTES, Manifest

_ZEROS = np.zeros(4096, dtype=np.uint8)

THREADS = 4
"""XXH3 is about as fast as a copy, and leaves the interpreter to others meanwhile; a few threads are as fast as the memory."""

AT_ONCE_BYTES = 1 << 20
"""What is hashed before a thread would have been woken: 0.1 ms."""


class Hasher:
    """Digests beside the caller, who goes on moving bytes."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None

    def submit(self, data: NDArray[np.uint8], parts: list[tuple[int, int]]) -> Future[bytes]:
        """The digests of these parts of `data`, as by `part_digests`; done already where they are small."""
        if sum(high - low for low, high in parts) > AT_ONCE_BYTES:
            self._threads = self._threads or ThreadPoolExecutor(THREADS, thread_name_prefix="digest")
            return self._threads.submit(part_digests, data, parts)
        done: Future[bytes] = Future()
        done.set_result(part_digests(data, parts))
        return done

    def digest(self, data: NDArray[np.uint8]) -> Future[bytes]:
        """The digest of `data`, as by `chunk_digest`."""
        return self.submit(data, [(0, data.nbytes)])

    def close(self) -> None:
        """Forget what has not begun; what has is waited for."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)


def chunk_digest(data: NDArray[np.uint8]) -> bytes:
    """The digest of these bytes."""
    return xxhash.xxh3_64_intdigest(data.data).to_bytes(DIGEST_BYTES, "little")


def part_digests(data: NDArray[np.uint8], parts: Iterable[tuple[int, int]]) -> bytes:
    """The digests of these parts of `data`, each its first byte and the byte after its last one."""
    return b"".join(chunk_digest(data[low:high]) for low, high in parts)


def chunk_digests(image: NDArray[np.uint8], manifest: Manifest) -> bytes:
    """The digests of all chunks of an image."""
    return part_digests(image, map(manifest.chunk_range, range(manifest.chunks)))


def image_digest(digests: bytes) -> bytes:
    """The digest of the image whose chunks have these digests."""
    return xxhash.xxh3_64_intdigest(digests).to_bytes(DIGEST_BYTES, "little")


def digests_of(tensors: Iterable[NDArray[np.uint8]], manifest: Manifest) -> bytes:
    """The digests that an image of these tensors has, without building the image.

    `tensors` are the bytes of every tensor, flat and in the manifest's order. EngineError names the one that does not fit.
    """
    digests: list[bytes] = []
    hasher = xxhash.xxh3_64()
    room = size = manifest.chunk_bytes or max(1, manifest.nbytes)
    for piece in _image_pieces(tensors, manifest):
        while piece.size:
            hasher.update(piece[:room].data)
            taken = min(room, piece.size)
            piece = piece[taken:]
            room -= taken
            if room == 0:
                digests.append(hasher.intdigest().to_bytes(DIGEST_BYTES, "little"))
                hasher.reset()
                room = size
    if len(digests) < manifest.chunks:
        digests.append(hasher.intdigest().to_bytes(DIGEST_BYTES, "little"))
    return b"".join(digests)


def _image_pieces(tensors: Iterable[NDArray[np.uint8]], manifest: Manifest) -> Iterator[NDArray[np.uint8]]:
    """The bytes of the image from its first to its last one, padding included, in pieces."""
    end = 0
    given = iter(tensors)
    for entry in manifest.tensors:
        data = next(given, None)
        if data is None or data.nbytes != entry.nbytes:
            found = "none is left" if data is None else f"got {data.nbytes}"
            raise EngineError(f"weights: tensor {entry.name!r} must have {entry.nbytes} bytes, {found}")
        yield from _padding(entry.offset - end)
        yield np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        end = entry.offset + entry.nbytes
    if next(given, None) is not None:
        raise EngineError(f"weights: more than the manifest's {len(manifest.tensors)} tensors")
    yield from _padding(manifest.nbytes - end)


def _padding(nbytes: int) -> Iterator[NDArray[np.uint8]]:
    for start in range(0, nbytes, _ZEROS.size):
        yield _ZEROS[: nbytes - start]
