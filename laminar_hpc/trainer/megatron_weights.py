"""Weights in and out of Megatron shards: from a safetensors checkpoint, and to the image.

No rank ever has the whole model. Each reads its own slices of the checkpoint, and publishes what it has itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor, nn

from laminar_hpc.errors import EngineError
from laminar_hpc.protocol.peer import Manifest
from laminar_hpc.trainer.hf import tensor_files
from laminar_hpc.trainer.shard import ShardWriter, Source
from laminar_hpc.weights.megatron_layout import Grid, Piece, Placement, shard_slices


class Seat(msgspec.Struct, frozen=True):
    """Whose place this is: trainer `trainer` of `grid`."""

    grid: Grid
    trainer: int

    @property
    def rank(self) -> int:
        """Among the tensor ranks."""
        return self.grid.place(self.trainer)[0]

    @property
    def replica(self) -> int:
        """Which copy of the model it holds a part of."""
        return self.grid.place(self.trainer)[1]

    @property
    def stage(self) -> int:
        """Which run of layers."""
        return self.grid.place(self.trainer)[2]


@torch.no_grad()
def fill(module: nn.Module, layout: Iterable[Placement], seat: Seat, path: str) -> None:
    """Set all parameters of `module` from the checkpoint in `path`, whose tensors are known to fit; padding becomes 0."""
    parameters = dict(module.named_parameters())
    untouched = set(parameters)
    files = tensor_files(path)
    handles: dict[str, Any] = {}
    for placement in layout:
        for stage, name in placement.homes:
            if stage != seat.stage:
                continue
            if name in untouched:
                parameters[name].zero_()
                untouched.remove(name)
            if not placement.replicated:
                _mark_as_cut(parameters[name], placement.pieces[0].dim)
            file = files[placement.name].file
            if file not in handles:
                handles[file] = safe_open(file, framework="pt")
            stored = handles[file].get_slice(placement.name)
            for piece in placement.of_rank(seat.rank):
                _part(parameters[name], piece).copy_(_read(stored, piece))
    if untouched:
        raise EngineError(f"megatron trainer: no tensor of the checkpoint fills {', '.join(sorted(untouched))}")


def _mark_as_cut(parameter: nn.Parameter, dim: int) -> None:
    """Megatron marks what it initialises itself; a shard without the mark counts once for all tensor ranks in the norm."""
    for name, value in (("tensor_model_parallel", True), ("partition_dim", dim), ("partition_stride", 1)):
        setattr(parameter, name, value)


def _read(stored: Any, piece: Piece) -> Tensor:
    rows: Tensor = stored[piece.start : piece.stop] if piece.dim == 0 else stored[:, piece.start : piece.stop]
    return rows


def _part(parameter: Tensor, piece: Piece) -> Tensor:
    """The view of a shard that is this piece of a tensor."""
    return parameter.narrow(piece.dim, piece.shard_start, piece.length)


def shard_writer(module: nn.Module, layout: list[Placement], seat: Seat, manifest: Manifest) -> ShardWriter:
    """What copies this trainer's part of the image out of `module`; Megatron's norms are float32, whatever the image is."""
    parameters = dict(module.named_parameters())
    dtype = getattr(torch, manifest.tensors[0].dtype)  # all tensors have the same
    sources = [
        Source(part.tile, part.parameter, parameters[part.parameter], part.start, dtype)
        for part in shard_slices(layout, manifest, seat.grid, seat.trainer)
    ]
    return ShardWriter(sources, seat.grid.replicas, seat.replica)
