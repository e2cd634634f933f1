"""A trainer's own weights, copied to where its driver serves them from: no communication, and no memory in between."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laminar_hpc.errors import EngineError
from laminar_hpc.protocol.peer import Tile
from laminar_hpc.weights.reshard import cut, cut_range, join


class SideStream:
    """Copies to memory of the host: from a GPU on a stream of their own beside the computation, else at once."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self._stream = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None

    @torch.no_grad()
    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Callable[[], object] | None:
        """To the first of each pair from the second, as it is now; None where that is done, else what waits until it is."""
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(self._stream)
        return self._copied.synchronize

    def protect(self) -> None:
        """What the current stream is given from now on, it does after the last copy has read its sources."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
            self._copied = None


class Source(NamedTuple):
    """Where the bytes of a tile are: one run of the parameter's memory, from byte `start` on.

    Where the parameter is not of the image's `dtype`, `start` counts as if it were, and what is copied is rounded to it.
    """

    tile: Tile
    name: str
    parameter: Tensor
    start: int
    dtype: torch.dtype


class ShardWriter:
    """Copies a trainer's part of a shard that several replicas have, each a copy of it.

    On a GPU the copy runs beside the computation, on a stream of its own. What changes the weights has to come after
    `protect`. On a CPU NumPy copies: it calls memcpy, which large copies go faster through than through torch.
    """

    def __init__(self, sources: Sequence[Source], replicas: int, replica: int) -> None:
        """`sources` are in the image's order, and what the parameters are views of stays where it is from now on."""
        tiles = [source.tile for source in sources]
        self.tiles = join(cut(tiles, replicas, replica))
        """What this trainer publishes."""
        low, high = cut_range(sum(tile.nbytes for tile in tiles), replicas, replica)
        self.nbytes = high - low
        self._pieces: list[_Piece] = []
        done = 0
        for source in sources:
            begin, end = max(low, done), min(high, done + source.tile.nbytes)
            if begin < end:
                start = source.start + begin - done
                self._pieces.append(_piece(source, slice(begin - low, end - low), start, start + end - begin))
            done += source.tile.nbytes
        on_gpu = any(piece.data.is_cuda for piece in self._pieces)
        self._side = SideStream(on_gpu)
        same = [piece for piece in self._pieces if piece.data.dtype == torch.uint8 and not on_gpu]
        self._arrays = [(piece.place, piece.data.numpy()) for piece in same]
        self._tensors = [piece for piece in self._pieces if piece.data.dtype != torch.uint8 or on_gpu]

    @torch.no_grad()
    def write(self, memory: NDArray[np.uint8]) -> Callable[[], object] | None:
        """Copy the weights as they are now to `memory`, which is as long as all tiles together.

        None where that is done, else what waits until it is; weights may be used meanwhile.
        """
        if memory.nbytes != self.nbytes:
            raise EngineError(f"trainer: the shard has {self.nbytes} bytes, the memory for it {memory.nbytes}")
        for place, array in self._arrays:
            memory[place] = array
        target = torch.from_numpy(memory)
        return self._side.copy((target[piece.place].view(piece.dtype), piece.data) for piece in self._tensors)

    def protect(self) -> None:
        """What the current stream is given from now on, it does after the last copy has read the weights."""
        self._side.protect()


class _Piece(NamedTuple):
    """A run of a parameter, as bytes or, where it has to be rounded, as numbers, and its place in the shard."""

    place: slice
    data: Tensor
    dtype: torch.dtype


def _piece(source: Source, place: slice, start: int, stop: int) -> _Piece:
    """Bytes `start` to `stop` of the parameter in the image's type."""
    parameter = source.parameter.detach()
    if not parameter.is_contiguous():
        raise EngineError(f"trainer: the parameter {source.name} is not contiguous in memory")
    flat = parameter.view(-1)
    if parameter.dtype == source.dtype:
        return _Piece(place, flat.view(torch.uint8)[start:stop], torch.uint8)
    return _Piece(place, flat[start // source.dtype.itemsize : stop // source.dtype.itemsize], source.dtype)


def pin(memory: NDArray[np.uint8]) -> None:
    """Let GPUs copy to `memory` without a stop on the way; nothing to do where there is none. It stays so to the end."""
    if not torch.cuda.is_available() or memory.nbytes == 0:
        return
    error = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)  # type: ignore[no-untyped-call]
    if int(error) != 0:
        warnings.warn(f"weights are written to memory that cannot be pinned (CUDA error {error})", stacklevel=2)
