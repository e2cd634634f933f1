"""Memory that a GPU copies from without a stop on the way."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from numpy.typing import NDArray

READ_ONLY = 8
"""cudaHostRegisterReadOnly of the CUDA runtime: the memory is mapped without the right to write."""


def pin(memory: NDArray[np.uint8]) -> None:
    """Pin `memory`, to the end of this process; nothing to do where there is no GPU. What cannot be pinned is only slower."""
    if not torch.cuda.is_available() or memory.nbytes == 0:
        return
    error = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, READ_ONLY)  # type: ignore[no-untyped-call]
    if int(error) != 0:
        warnings.warn(f"weights are read from memory that cannot be pinned (CUDA error {error})", stacklevel=2)
