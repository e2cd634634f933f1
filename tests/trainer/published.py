"""What trainers publish, put together byte by byte as the definition of a tile says, for whatever wrote it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from laminar_hpc.protocol.peer import Tile
from laminar_hpc.trainer.api import TrainingEngine

Published = tuple[list[Tile], NDArray[np.uint8]]
"""A trainer's tiles and their bytes."""


def publish(engine: TrainingEngine) -> Published:
    """What a trainer writes, to memory that held something else."""
    memory = np.full(sum(tile.nbytes for tile in engine.tiles), 0xAB, dtype=np.uint8)
    wait = engine.write_weights(memory)
    if wait is not None:
        wait()
    return engine.tiles, memory


def assemble(nbytes: int, published: list[Published]) -> NDArray[np.uint8]:
    """The image of so many bytes; no byte may come twice, and where none comes there is 0."""
    image, counts = np.zeros(nbytes, dtype=np.uint8), np.zeros(nbytes, dtype=np.int64)
    for tiles, data in published:
        done = 0
        for tile in tiles:
            number = np.arange(tile.first, tile.first + tile.nbytes)
            place = tile.offset + number // tile.run_bytes * tile.stride + number % tile.run_bytes
            image[place] = data[done : done + tile.nbytes]
            np.add.at(counts, place, 1)
            done += tile.nbytes
        assert done == len(data)
    assert counts.max(initial=0) <= 1
    return image


def image_of(engine: TrainingEngine) -> NDArray[np.uint8]:
    """The image of a trainer that is alone."""
    return assemble(engine.manifest.nbytes, [publish(engine)])
