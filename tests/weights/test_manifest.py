"""The layout of the image."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_hpc.errors import ConfigError
from laminar_hpc.weights.manifest import ITEM_BYTES, make_manifest

tensor_lists = st.dictionaries(
    st.text("abc.", min_size=1, max_size=6),
    st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(list(ITEM_BYTES))),
    max_size=6,
)


def test_layout_by_hand() -> None:
    # a: 3 * 2 = 6 bytes at 0; b: none, at the next multiple of 64; c: 4 bytes there too, since b has no bytes.
    manifest = make_manifest([("c", [], "float32"), ("a", (3,), "bfloat16"), ("b", (0, 7), "float64")], chunk_bytes=32)
    assert [(t.name, t.shape, t.offset, t.nbytes) for t in manifest.tensors] == [
        ("a", (3,), 0, 6),
        ("b", (0, 7), 64, 0),
        ("c", (), 64, 4),
    ]
    assert manifest.nbytes == 68
    assert manifest.chunks == 3
    assert [manifest.chunk_range(chunk) for chunk in range(3)] == [(0, 32), (32, 64), (64, 68)]


@pytest.mark.parametrize("nbytes", [1, 2, 3])
def test_smallest_images_are_one_chunk(nbytes: int) -> None:
    manifest = make_manifest([("w", (nbytes,), "uint8")], chunk_bytes=1024)
    assert (manifest.nbytes, manifest.chunks, manifest.chunk_range(0)) == (nbytes, 1, (0, nbytes))


def test_no_tensors_are_one_empty_chunk() -> None:
    manifest = make_manifest([], chunk_bytes=8)
    assert (manifest.nbytes, manifest.chunks, manifest.chunk_range(0)) == (0, 1, (0, 0))


@given(tensor_lists, st.integers(1, 200), st.randoms(use_true_random=False))
def test_layout_does_not_depend_on_order_and_never_overlaps(tensors, chunk_bytes, random) -> None:
    listed = [(name, shape, dtype) for name, (shape, dtype) in tensors.items()]
    manifest = make_manifest(listed, chunk_bytes)
    random.shuffle(listed)
    assert make_manifest(listed, chunk_bytes) == manifest
    end = 0
    for entry in manifest.tensors:
        assert end <= entry.offset < end + 64
        assert entry.offset % 64 == 0
        end = entry.offset + entry.nbytes
    assert manifest.nbytes == end
    ranges = [manifest.chunk_range(chunk) for chunk in range(manifest.chunks)]
    assert [low for low, _ in ranges] == [0, *(high for _, high in ranges[:-1])]
    assert ranges[-1][1] == manifest.nbytes


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("w", (1,), "complex64")], r"'w'.*float32.*'complex64'"),
        ([("w", (2, -1), "float32")], r"'w'.*\(2, -1\)"),
        ([("w", (1,), "float32"), ("w", (1,), "float32")], r"'w' occurs twice"),
    ],
)
def test_impossible_tensors_are_named(tensors, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_manifest(tensors, chunk_bytes=1024)


def test_all_is_one_chunk_until_their_length_is_chosen() -> None:
    manifest = make_manifest([("w", (3000,), "uint8")])
    assert (manifest.chunk_bytes, manifest.chunks, manifest.chunk_range(0)) == (0, 1, (0, 3000))
    empty = make_manifest([])
    assert (empty.chunks, empty.chunk_range(0)) == (1, (0, 0))


def test_chunks_have_no_negative_length() -> None:
    with pytest.raises(ConfigError, match="chunk_bytes: must be at least 0, got -1"):
        make_manifest([], chunk_bytes=-1)
