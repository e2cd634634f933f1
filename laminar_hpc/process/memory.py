"""Reading memory that another process lends."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


@contextlib.contextmanager
def map_readonly(path: str, offset: int, nbytes: int) -> Iterator[NDArray[np.uint8]]:
    """The `nbytes` (1 or more) from `offset` on of the file at `path`, as a read-only array in which nothing is copied.

    The bytes may change when the lease on them is given back: no view of the array may be used after the context ends.
    The mapping itself goes with the last view. OSError where there is no such file, ValueError where it is too short.
    """
    before = offset % mmap.ALLOCATIONGRANULARITY
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        mapped = mmap.mmap(fd, before + nbytes, access=mmap.ACCESS_READ, offset=offset - before)
    finally:
        os.close(fd)
    yield np.frombuffer(mapped, dtype=np.uint8, count=nbytes, offset=before)
