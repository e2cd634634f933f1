"""Digests of chunks, of images, and of weights that are in no image."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_hpc.errors import EngineError
from laminar_hpc.weights.digest import Hasher, chunk_digest, chunk_digests, digests_of, image_digest, part_digests
from laminar_hpc.weights.manifest import make_manifest


def test_digest_is_xxh3_little_endian() -> None:
    # XXH3_64bits of no bytes, seed 0, from the xxHash library's own test vectors.
    assert chunk_digest(np.empty(0, dtype=np.uint8)) == (0x2D06800538D394C2).to_bytes(8, "little")
    assert image_digest(b"") == (0x2D06800538D394C2).to_bytes(8, "little")


@given(st.lists(st.integers(0, 150), max_size=5), st.integers(0, 100), st.integers(0, 2**32 - 1))
def test_streamed_digests_are_those_of_the_image(sizes, chunk_bytes: int, seed: int) -> None:
    manifest = make_manifest([(f"t{i}", (size,), "uint8") for i, size in enumerate(sizes)], chunk_bytes)
    generator = np.random.default_rng(seed)
    tensors = [generator.integers(0, 256, entry.nbytes, dtype=np.uint8) for entry in manifest.tensors]
    image = np.zeros(manifest.nbytes, dtype=np.uint8)
    for entry, tensor in zip(manifest.tensors, tensors, strict=True):
        image[entry.offset : entry.offset + entry.nbytes] = tensor
    chunks = [image[low:high] for low, high in map(manifest.chunk_range, range(manifest.chunks))]
    expected = b"".join(chunk_digest(chunk) for chunk in chunks)
    assert digests_of(tensors, manifest) == expected
    assert chunk_digests(image, manifest) == expected
    places = [manifest.chunk_range(chunk) for chunk in range(manifest.chunks)]
    assert part_digests(image, places[1:]) == expected[8:]


def test_a_hasher_gives_the_same_with_threads_and_without() -> None:
    data = np.random.default_rng(0).integers(0, 256, 5 << 20, dtype=np.uint8)
    hasher = Hasher()
    small, large = [(0, 100), (200, 1000)], [(0, 3 << 20), (3 << 20, 5 << 20)]
    for parts in (small, large):
        assert hasher.submit(data, parts).result(timeout=30) == part_digests(data, parts)
    assert hasher.digest(data).result(timeout=30) == chunk_digest(data)
    assert hasher.digest(data[:100]).done()
    hasher.close()
    hasher.close()


def test_one_changed_bit_changes_the_image_digest() -> None:
    manifest = make_manifest([("a", (100,), "uint8"), ("b", (3,), "float32")], chunk_bytes=64)
    a, b = np.zeros(100, dtype=np.uint8), np.zeros(12, dtype=np.uint8)
    before = image_digest(digests_of([a, b], manifest))
    b[11] = 1
    assert image_digest(digests_of([a, b], manifest)) != before


@pytest.mark.parametrize(
    ("sizes", "message"),
    [([4], "'b' must have 8 bytes, none is left"), ([4, 7], "'b' must have 8 bytes, got 7"), ([4, 8, 0], "more than")],
)
def test_weights_that_do_not_fit_the_manifest(sizes: list[int], message: str) -> None:
    manifest = make_manifest([("a", (1,), "float32"), ("b", (2,), "float32")], chunk_bytes=64)
    with pytest.raises(EngineError, match=message):
        digests_of([np.zeros(size, dtype=np.uint8) for size in sizes], manifest)
