"""Bytes into the runs of an image that they belong to."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from laminar_hpc.weights.reshard import Rectangle


def contiguous(image: NDArray[np.uint8], spots: list[Rectangle]) -> NDArray[np.uint8] | None:
    """The bytes of `image` (uint8, flat) that `spots` name, where they are one run; None where they are not."""
    if len(spots) != 1 or spots[0].runs != 1:
        return None
    return image[spots[0].offset : spots[0].offset + spots[0].run_bytes]


def scatter(data: NDArray[np.uint8], spots: list[Rectangle], image: NDArray[np.uint8]) -> None:
    """Copy `data` (uint8, flat) to the runs of `image` that `spots` name, one after the other."""
    done = 0
    for spot in spots:
        nbytes = spot.runs * spot.run_bytes
        view = as_strided(image[spot.offset :], (spot.runs, spot.run_bytes), (spot.stride, 1), writeable=True)
        view[:] = data[done : done + nbytes].reshape(spot.runs, spot.run_bytes)
        done += nbytes
