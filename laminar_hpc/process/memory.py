"""Memory that another process lends, to read from or to fill."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray


@contextlib.contextmanager
def map_readonly(path: str, offset: int, nbytes: int) -> Iterator[NDArray[np.uint8]]:
    """The `nbytes` from `offset` on of the file at `path`, as a read-only array in which nothing is copied.

    The bytes may change when the lease on them is given back: no view of the array may be used after the context ends.
    The mapping itself goes with the last view. OSError where there is no such file, ValueError where it is too short.
    """
    yield _map(path, offset, nbytes, os.O_RDONLY, mmap.PROT_READ)


@contextlib.contextmanager
def map_writable(path: str, offset: int, nbytes: int) -> Iterator[NDArray[np.uint8]]:
    """The same as an array that is written through to the memory."""
    yield _map(path, offset, nbytes, os.O_RDWR, mmap.PROT_READ | mmap.PROT_WRITE)


class KeptMappings:
    """Read-only mappings of memory that is lent again and again: mapped once, with every page there from then on.

    The bytes may change when the lease on them is given back. Only the mappings of the last file are kept: when another relay
    lends, those of the one before it go with their last view. A file is known by its inode, since a path of /proc names
    whatever is open there at the time.
    """

    def __init__(self, prepare: Callable[[NDArray[np.uint8]], object] = lambda _memory: None) -> None:
        """`prepare` is called once for each new mapping, to pin it for instance."""
        self._prepare = prepare
        self._file = (0, 0)
        self._mapped: dict[tuple[int, int], NDArray[np.uint8]] = {}

    def view(self, path: str, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """The `nbytes` from `offset` on of the file at `path`. OSError where there is no such file, ValueError if it is short."""
        status = os.stat(path)
        file = (status.st_dev, status.st_ino)
        if file != self._file:
            self._file, self._mapped = file, {}
        if (offset, nbytes) not in self._mapped:
            memory = _map(path, offset, nbytes, os.O_RDONLY, mmap.PROT_READ, mmap.MAP_POPULATE)
            self._prepare(memory)
            self._mapped[offset, nbytes] = memory
        return self._mapped[offset, nbytes]


class WritableMappings:
    """Writable mappings of memory that is filled again and again, and may grow: what a trainer's worker fills for its driver."""

    def __init__(self, prepare: Callable[[NDArray[np.uint8]], object] = lambda _memory: None) -> None:
        """`prepare` is called once for each new mapping, to pin it for instance."""
        self._prepare = prepare
        self._mapped: dict[str, list[NDArray[np.uint8]]] = {}

    def view(self, path: str, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """The `nbytes` from `offset` on of the file at `path`; where it has grown, what was added lies in none but new bytes.

        OSError where there is no such file, ValueError where it is too short.
        """
        mapped = self._mapped.setdefault(path, [])
        end = sum(memory.nbytes for memory in mapped)
        if not mapped or offset + nbytes > end:
            mapped.append(map_for_good(path, end))
            self._prepare(mapped[-1])
        for memory in mapped:
            if offset < memory.nbytes:
                break
            offset -= memory.nbytes
        if offset + nbytes > memory.nbytes:
            raise ValueError(f"{path} has no {nbytes} bytes there")
        return memory[offset : offset + nbytes]


def still_lent(path: str, stamp_offset: int, stamp: int) -> bool:
    """Whether what was read under a lease was not written over meanwhile: its stamp (weights/image.py) is what it was.

    A lender takes a lease back from a reader that counts as gone, and cannot know whether it still reads. OSError where the
    file is gone.
    """
    if not stamp_offset:
        return True
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int.from_bytes(os.pread(fd, 8, stamp_offset), sys.byteorder) == stamp
    finally:
        os.close(fd)


def map_for_good(path: str, begin: int = 0) -> NDArray[np.uint8]:
    """All of the file at `path` from byte `begin` on (of a page), writable, with every page there already.

    It is what a trainer's worker fills for its driver.

    The mapping goes with the last view. A page that is first touched when weights are written would cost more than its
    bytes do.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size - begin
        if size <= 0:
            return np.empty(0, dtype=np.uint8)
        flags, protection = mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ | mmap.PROT_WRITE
        mapped = mmap.mmap(fd, size, flags=flags, prot=protection, offset=begin)
    finally:
        os.close(fd)
    return np.frombuffer(mapped, dtype=np.uint8)


def _map(path: str, offset: int, nbytes: int, mode: int, protection: int, flags: int = 0) -> NDArray[np.uint8]:
    before = offset % mmap.ALLOCATIONGRANULARITY
    fd = os.open(path, mode | os.O_CLOEXEC)
    try:
        if nbytes == 0:  # to mmap, 0 means: all there is
            return np.empty(0, dtype=np.uint8)
        mapped = mmap.mmap(fd, before + nbytes, mmap.MAP_SHARED | flags, protection, offset=offset - before)
    finally:
        os.close(fd)
    return np.frombuffer(mapped, dtype=np.uint8, count=nbytes, offset=before)
