"""Memory that another process lends, to read from or to fill."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


@contextlib.contextmanager
def map_readonly(path: str, offset: int, nbytes: int) -> Iterator[NDArray[np.uint8]]:
    """The `nbytes` from `offset` on of the file at `path`, as a read-only array in which nothing is copied.

    The bytes may change when the lease on them is given back: no view of the array may be used after the context ends.
    The mapping itself goes with the last view. OSError where there is no such file, ValueError where it is too short.
    """
    yield _map(path, offset, nbytes, os.O_RDONLY, mmap.ACCESS_READ)


@contextlib.contextmanager
def map_writable(path: str, offset: int, nbytes: int) -> Iterator[NDArray[np.uint8]]:
    """The same as an array that is written through to the memory: what a trainer's worker fills for its driver."""
    yield _map(path, offset, nbytes, os.O_RDWR, mmap.ACCESS_WRITE)


def _map(path: str, offset: int, nbytes: int, mode: int, access: int) -> NDArray[np.uint8]:
    before = offset % mmap.ALLOCATIONGRANULARITY
    fd = os.open(path, mode | os.O_CLOEXEC)
    try:
        if nbytes == 0:  # to mmap, 0 means: all there is
            return np.empty(0, dtype=np.uint8)
        mapped = mmap.mmap(fd, before + nbytes, access=access, offset=offset - before)
    finally:
        os.close(fd)
    return np.frombuffer(mapped, dtype=np.uint8, count=nbytes, offset=before)
