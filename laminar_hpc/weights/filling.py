"""Slots to fill, also where transfers with ranks that are gone keep some of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from laminar_hpc.mpi.transport import Transport
from laminar_hpc.weights.image import Image

SLOT_PATIENCE_S = 2.0
"""How long a version waits for a slot that a transfer with a rank that is gone still reads or writes. A rank that has died is
found dead by then; one that is cut off, or stopped, in the middle of a chunk may be so for ever."""


class Filling:
    """Takes slots of `image` for new versions, and gives the image another one where none comes free by itself.

    That is where none was free for `SLOT_PATIENCE_S`, and more are kept by transfers alone than have been added.
    """

    def __init__(self, transport: Transport, image: Image, has_room: Callable[[int], bool]) -> None:
        """`has_room` says whether the node can spare so many bytes. The image's memory is registered here."""
        self._transport = transport
        self._image = image
        self._has_room = has_room
        self._made_with = image.slots
        self._short_since_s: float | None = None
        self._refused = ""
        transport.register(image.memory)

    def begin(self, version: int, now: float) -> NDArray[np.uint8] | None:
        """As `Image.begin_fill`; None while there is no slot: ask again."""
        buffer = self._image.begin_fill(version)
        if buffer is not None:
            self.stop_waiting()
        elif self._short_since_s is None:
            self._short_since_s, self._refused = now, ""
        elif now - self._short_since_s >= SLOT_PATIENCE_S and self._image.only_pinned > self._added:
            self._short_since_s = now
            self._add_slot()
        return buffer

    def stop_waiting(self) -> None:
        """Nobody asks again for the version that had no slot."""
        self._short_since_s = None

    def waiting_for(self, version: int) -> str:
        """What `version` waits for before it can begin, for people."""
        return f"a slot for version {version}: {self._image.describe()}{self._refused}"

    @property
    def _added(self) -> int:
        return self._image.slots - self._made_with

    def _add_slot(self) -> None:
        memory = self._image.add_slot() if self._has_room(self._image.slot_bytes) else None
        if memory is None:
            self._refused = "; there is no memory for another one"
        else:
            self._transport.register(memory)
