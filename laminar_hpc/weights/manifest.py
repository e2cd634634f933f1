"""The layout of a weight image, worked out from names, shapes and dtypes alone, so that every rank gets the same one.

Tensors lie in the order of their names. Each begins at a multiple of `ALIGNMENT` bytes, so that any dtype can be viewed
in place and a copy starts on a cache line; the gaps are zero bytes and belong to the image (and to its digests). The
image ends with its last tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from laminar_hpc.errors import ConfigError
from laminar_hpc.protocol.peer import Manifest, TensorEntry

ALIGNMENT = 64
"""Bytes."""

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}
"""Bytes of one element, by torch's name of the dtype."""


def make_manifest(tensors: Iterable[tuple[str, Iterable[int], str]], chunk_bytes: int = 0) -> Manifest:
    """The manifest of these (name, shape, dtype), whatever order they come in.

    A tensor without elements has an offset and no bytes. `chunk_bytes` is 0 where it is not chosen yet. ConfigError names
    the tensor that cannot be laid out.
    """
    if chunk_bytes < 0:
        raise ConfigError(f"weights.chunk_bytes: must be at least 0, got {chunk_bytes}")
    entries: list[TensorEntry] = []
    end = 0
    for name, shape, dtype in sorted(((name, tuple(shape), dtype) for name, shape, dtype in tensors)):
        if entries and entries[-1].name == name:
            raise ConfigError(f"tensor {name!r} occurs twice; each name must be there once")
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        entry = TensorEntry(name, shape, dtype, offset, tensor_bytes(name, shape, dtype))
        entries.append(entry)
        end = entry.offset + entry.nbytes
    return Manifest(tensors=entries, nbytes=end, chunk_bytes=chunk_bytes)


def tensor_bytes(name: str, shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a tensor without padding; ConfigError names it where its dtype or shape is impossible."""
    if dtype not in ITEM_BYTES:
        raise ConfigError(f"tensor {name!r}: dtype must be one of {', '.join(ITEM_BYTES)}, got {dtype!r}")
    if any(length < 0 for length in shape):
        raise ConfigError(f"tensor {name!r}: no dimension may be negative, got shape {shape}")
    return prod(shape) * ITEM_BYTES[dtype]
