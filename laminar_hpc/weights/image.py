"""Memory that holds weight versions for the processes of one node.

The memory has no name: it is an anonymous file (`memfd_create`) that other processes of the same user map through
`/proc/<pid>/fd/<n>` of its owner. It is gone with the last process that has it open or mapped, however that one ends; a
file in /dev/shm outlives a killed job, has to be found and removed by the next one, and shares a size limit that
containers set to 64 MB. The file is open to its owner's user alone and cannot shrink, so that no reader can
fault on bytes that are no longer there. Readers map it read-only (process/memory.py).
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections import Counter
from collections.abc import Collection
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from laminar_hpc.errors import ProtocolError
from laminar_hpc.protocol.peer import Lease

STAMP_BYTES = 8
"""Of the numbers before the slots, one for each of them, that count how often the slot was begun to be filled."""

_FIRST_SLOT = mmap.ALLOCATIONGRANULARITY
"""Where the first slot begins in the memory: behind the stamps."""

MOST_SLOTS = _FIRST_SLOT // STAMP_BYTES - 1
"""As many as have room for their stamps in the unit before them, whose first eight bytes are nobody's."""


class SlotState(str, Enum):
    """What a slot's bytes are: nobody's, partly written, a complete version, or a version that was given up half-way."""

    EMPTY = "empty"
    FILLING = "filling"
    READY = "ready"
    DROPPED = "dropped"


class _Slot:
    def __init__(self, index: int, offset: int, memory: NDArray[np.uint8]) -> None:
        self.index = index
        self.offset = offset
        self.memory = memory
        self.pins = 0
        self.clear()

    def clear(self) -> None:
        self.state = SlotState.EMPTY
        self.version: int | None = None
        self.leases: Counter[int] = Counter()

    @property
    def used(self) -> bool:
        """Whether somebody may touch its bytes, or may want to."""
        return bool(self.leases) or self.pins > 0


class Pin:
    """Keeps a slot's bytes from being used for another version, whatever becomes of the one that is in it."""

    def __init__(self, slot: _Slot) -> None:
        self._slot: _Slot | None = slot
        slot.pins += 1

    def release(self) -> None:
        """Nobody touches the bytes for this pin's sake any more. Calling it again does nothing."""
        if self._slot is not None:
            self._slot.pins -= 1
            self._slot = None


class Image:
    """Slots for versions of one weight image (or of a part of one): EMPTY > FILLING > READY > EMPTY.

    A version may also be given up: FILLING > DROPPED > EMPTY.

    One process owns the image and calls its methods; others only read (or, for a trainer's worker, fill) bytes.

    * The filler: `begin_fill`, write the bytes, `complete`.
    * A reader of the newest version: `lease`, read, `give_back`. A borrower is a rank and may hold several leases.
    * A reader of one version, complete or not: `hold`, read those bytes that it knows are written, `give_back`.
    * The owner's own transfers, out of a slot or into it: `pin`, and `Pin.release` when nothing touches the bytes any more.

    Invariants:

    1. No two slots hold the same version, and a version that begins to fill is newer than every READY one.
    2. Bytes of a slot change only while it is FILLING, or when what was FILLING is given up or complete and somebody may still
       write, who then has pinned it. A READY slot becomes EMPTY only in `begin_fill`, for want of an empty one, and only with
       neither leases nor pins and when a newer version is READY; a DROPPED one there too. One that is DROPPED and only pinned
       loses its version where that begins to fill again, in another slot.
    3. So whoever leased a version sees that version's bytes alone until it gives the lease back, and `newest` never sinks.
       But a lease may be taken back from a borrower that counts as gone (`drop_borrower`, `void`) and may be reading all the
       same. Before the slots each of them has a stamp, which changes before its bytes do: a reader that finds the stamp of
       its lease afterwards has read that version (`process.memory.still_lent`).

    For example with 2 slots: version 1 is READY and leased, 2 becomes READY. Now `begin_fill(3)` gives None until the lease
    of 1 is back, then takes 1's slot; 2 stays until 3 is READY.
    """

    def __init__(self, fd: int, slot_bytes: int, slots: int) -> None:
        """Take over `fd`; callers use `create`."""
        stride = _page_aligned(slot_bytes)
        self.slot_bytes = slot_bytes
        self.path = f"/proc/{os.getpid()}/fd/{fd}"
        self._fd: int | None = fd
        self._stride = stride
        whole = np.frombuffer(mmap.mmap(fd, _FIRST_SLOT + stride * slots), dtype=np.uint8)
        self._stamps = whole[:_FIRST_SLOT].view(np.uint64)
        self._memory = whole[_FIRST_SLOT:]
        self._slots = [
            _Slot(index, _FIRST_SLOT + stride * index, self._memory[stride * index : stride * index + slot_bytes])
            for index in range(slots)
        ]

    @classmethod
    def create(cls, slot_bytes: int, slots: int) -> Image:
        """An image with all slots EMPTY and zeroed; at least 2 of them, since the newest version is never overwritten."""
        if not 2 <= slots <= MOST_SLOTS or slot_bytes < 0:
            raise ValueError(
                f"an image needs at least 2 slots of 0 bytes or more, got {slots} slots of {slot_bytes} bytes"
            )
        fd = os.memfd_create("laminar-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, _FIRST_SLOT + _page_aligned(slot_bytes) * slots)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        return cls(fd, slot_bytes, slots)

    # --- the filler ---------------------------------------------------------------------------------------------

    def begin_fill(self, version: int) -> NDArray[np.uint8] | None:
        """A slot's bytes (uint8, `slot_bytes` long) to write `version` to; None while no slot can be had.

        The bytes are those of the version that was there before.
        """
        newest, known = self.newest, self._find(version)
        dropped = known is not None and known.state is SlotState.DROPPED
        if (known is not None and not dropped) or (newest is not None and version <= newest):
            raise ProtocolError(f"image: version {version} cannot be filled; held are {self.describe()}")
        if known is not None and known.leases:
            return None  # what is lent is given back by its version's name
        slot = self._free_slot(newest) if known is None or known.pins else known
        if slot is None:
            return None
        if known is not None:
            known.version = None
        slot.clear()
        self._stamps[1 + slot.index] += 1
        slot.state, slot.version = SlotState.FILLING, version
        return self._view(slot)

    def add_slot(self) -> NDArray[np.uint8] | None:
        """One slot more, EMPTY and zeroed: its bytes, for a transport to register; None where there can be no more.

        For whoever has a slot in which somebody may write for a long time yet, and cannot wait for it.
        """
        index = len(self._slots)
        if index == MOST_SLOTS or self._fd is None:
            return None
        offset = _FIRST_SLOT + self._stride * index
        try:
            os.ftruncate(self._fd, offset + self._stride)
            mapped = mmap.mmap(self._fd, self._stride, offset=offset)
        except OSError:
            return None  # no address space, or no memory, is left
        self._slots.append(_Slot(index, offset, np.frombuffer(mapped, dtype=np.uint8)[: self.slot_bytes]))
        return self._slots[-1].memory

    def complete(self, version: int) -> None:
        """All bytes of `version` are written; it becomes READY and keeps its holds."""
        slot = self._slot(version)
        if slot.state is not SlotState.FILLING:
            raise ProtocolError(f"image: version {version} is complete already; held are {self.describe()}")
        slot.state = SlotState.READY

    def drop(self, version: int) -> None:
        """Give up `version`, which is FILLING. Its slot is used again when neither a lease nor a pin on it is left."""
        slot = self._slot(version)
        if slot.state is not SlotState.FILLING:
            raise ProtocolError(f"image: version {version} is not being filled; held are {self.describe()}")
        slot.state = SlotState.DROPPED

    # --- readers ------------------------------------------------------------------------------------------------

    @property
    def newest(self) -> int | None:
        """The newest READY version."""
        return max(
            (s.version for s in self._slots if s.state is SlotState.READY and s.version is not None), default=None
        )

    def lease(self, borrower: int, at_least: int) -> int | None:
        """Lend the newest READY version to `borrower` and name it; None where it is older than `at_least`."""
        newest = self.newest
        if newest is None or newest < at_least:
            return None
        self.hold(borrower, newest)
        return newest

    def hold(self, borrower: int, version: int) -> None:
        """Lend `version` to `borrower`, also while it is FILLING."""
        self._slot(version).leases[borrower] += 1

    def pin(self, version: int) -> Pin:
        """Keep the slot that `version` is in now, also when the version is given up."""
        return Pin(self._slot(version))

    def give_back(self, borrower: int, version: int) -> None:
        """`borrower` gives one lease of `version` back."""
        slot = self._slot(version)
        if slot.leases[borrower] < 1:
            raise ProtocolError(
                f"image: rank {borrower} gives back version {version} without a lease; {self.describe()}"
            )
        slot.leases[borrower] -= 1
        slot.leases += Counter()  # drops the zeros

    def has_lent(self, borrower: int, version: int) -> bool:
        """Whether `borrower` has a lease of `version`."""
        slot = self._find(version)
        return slot is not None and slot.leases[borrower] > 0

    def drop_borrower(self, borrower: int) -> None:
        """Take back all that `borrower`, which is gone, had leased."""
        for slot in self._slots:
            slot.leases.pop(borrower, None)

    def void(self, readers: Collection[int]) -> None:
        """Give up all versions, and take back all leases but those of `readers`; what they read stays until they give it back."""
        for slot in self._slots:
            if slot.version is not None:
                slot.state = SlotState.DROPPED
                slot.leases = Counter({rank: count for rank, count in slot.leases.items() if rank in readers})

    def leases(self, version: int) -> int:
        """How many leases of `version` are out, pins not counted."""
        return self._slot(version).leases.total()

    @property
    def slots(self) -> int:
        """How many there are."""
        return len(self._slots)

    @property
    def only_pinned(self) -> int:
        """How many are kept by transfers alone: nobody has leased what is in them."""
        return sum(slot.pins > 0 and not slot.leases for slot in self._slots)

    @property
    def memory_bytes(self) -> int:
        """How much memory all slots take."""
        return self._stride * len(self._slots)

    # --- what a version is --------------------------------------------------------------------------------------

    def state(self, version: int) -> SlotState:
        """FILLING, READY or DROPPED; EMPTY where no slot holds `version`."""
        slot = self._find(version)
        return SlotState.EMPTY if slot is None else slot.state

    @property
    def memory(self) -> NDArray[np.uint8]:
        """The bytes (uint8) of all slots that it was made with, for a transport to register."""
        return self._memory

    @property
    def versions(self) -> list[int]:
        """The versions that are FILLING or READY."""
        kept = (SlotState.FILLING, SlotState.READY)
        return [slot.version for slot in self._slots if slot.state in kept and slot.version is not None]

    def bytes_of(self, version: int) -> NDArray[np.uint8]:
        """The bytes of `version`, complete or not (uint8, `slot_bytes` long)."""
        return self._view(self._slot(version))

    def lent(self, version: int, request: int = 0) -> Lease:
        """What a reader of `version` needs to know; `request` is the number of what asked for it."""
        slot = self._slot(version)
        stamp = 1 + slot.index
        return Lease(version, self.path, slot.offset, request, STAMP_BYTES * stamp, int(self._stamps[stamp]))

    def offset_of(self, version: int) -> int:
        """Where the bytes of `version` begin in the memory at `path`."""
        return self._slot(version).offset

    def close(self) -> None:
        """Give the memory up; it is freed when nobody has it mapped any more. Calling it again does nothing."""
        self._stamps = np.empty(0, dtype=np.uint64)
        self._memory = np.empty(0, dtype=np.uint8)
        for slot in self._slots:
            slot.memory = self._memory
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Image:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find(self, version: int) -> _Slot | None:
        return next((slot for slot in self._slots if slot.version == version), None)

    def _slot(self, version: int) -> _Slot:
        slot = self._find(version)
        if slot is None:
            raise ProtocolError(f"image: version {version} is not held; held are {self.describe()}")
        return slot

    def _free_slot(self, newest: int | None) -> _Slot | None:
        unused = (SlotState.EMPTY, SlotState.DROPPED)
        empty = next((slot for slot in self._slots if slot.state in unused and not slot.used), None)
        if empty is not None:
            return empty
        retirable = [s for s in self._slots if s.state is SlotState.READY and s.version != newest and not s.used]
        return min(retirable, key=lambda slot: slot.version or 0, default=None)

    def _view(self, slot: _Slot) -> NDArray[np.uint8]:
        if self._fd is None:
            raise ProtocolError("image: used after it was closed")
        return slot.memory

    def describe(self) -> str:
        """What the slots hold and who has leased it, for people."""
        held = [
            f"{'one more' if s.version is None else s.version} ({s.state.value}, lent to {sorted(s.leases) or 'nobody'}"
            f"{', in a transfer' if s.pins else ''})"
            for s in self._slots
            if s.used or s.version is not None
        ]
        return ", ".join(held) or "none"


def _page_aligned(nbytes: int) -> int:
    """`nbytes` rounded up to whole units of mapping, at least one."""
    unit = mmap.ALLOCATIONGRANULARITY
    return max(1, -(-nbytes // unit)) * unit
