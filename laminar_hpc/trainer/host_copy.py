"""A trainer's state as a copy in memory of the host, for another thread to write while training goes on."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laminar_hpc.trainer.api import TrainerState
from laminar_hpc.trainer.shard import SideStream, pin


class StateCopy:
    """A trainer's state, float32, copied when asked to memory that is kept for the next time.

    Fresh memory would cost more than the bytes that are copied to it, since each page is filled with zeros when it is first
    touched. On a GPU what changes the tensors has to come after `protect`.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """These tensors, which stay where they are and contiguous from now on."""
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self._kept: dict[str, NDArray[np.float32]] = {}
        self._side = SideStream(any(tensor.is_cuda for tensor in self._tensors.values()))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the tensors, by name."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def take(self, steps: int) -> TrainerState:
        """The state as it is now, after `steps` steps of the optimizer, over what the last call gave."""
        if not self._kept:
            self._kept = _allocate(self.shapes)
        targets = self._kept.items()
        if self._side.on_gpu:
            wait = self._side.copy((torch.from_numpy(array), self._tensors[name]) for name, array in targets)
            return TrainerState(steps, self._kept, wait)
        for name, array in targets:
            array[...] = self._tensors[name].numpy()  # NumPy calls memcpy, which large copies go faster through
        return TrainerState(steps, self._kept)

    @torch.no_grad()
    def put(self, tensors: Mapping[str, NDArray[np.float32]]) -> None:
        """Set the trainer's tensors to these, of the same names and shapes."""
        for name, tensor in self._tensors.items():
            tensor.copy_(torch.from_numpy(tensors[name]))

    def protect(self) -> None:
        """What the current stream is given from now on, it does after the last copy has read the state."""
        self._side.protect()


def _allocate(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[np.float32]]:
    """One array for each shape, in one piece of memory that a GPU can copy to by itself."""
    counts = {name: int(np.prod(shape)) for name, shape in shapes.items()}
    memory = np.empty(sum(counts.values()), dtype=np.float32)
    pin(memory.view(np.uint8))
    arrays, done = {}, 0
    for name, count in counts.items():
        arrays[name] = memory[done : done + count].reshape(shapes[name])
        done += count
    return arrays
