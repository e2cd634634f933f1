"""Weights in and out of Megatron shards: from a safetensors checkpoint, and to the chunks of the image.

No rank ever has the whole model. Each reads its own slices of the checkpoint. For the image, the members of a replica give
each other what the chunks need that each of them publishes, one tensor after the other; every member works out the same
plan from the layout and the shares alone, so nothing has to be asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor, nn

from laminar_hpc.errors import EngineError
from laminar_hpc.protocol.peer import Manifest, TensorEntry
from laminar_hpc.trainer.hf import tensor_files
from laminar_hpc.weights.megatron_layout import Grid, Piece, Placement
from laminar_hpc.weights.reshard import overlap, share_bytes


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


class ImageWriter:
    """Writes a trainer's share of the image; all members of a replica call it together."""

    def __init__(self, module: nn.Module, layout: list[Placement], seat: Seat, manifest: Manifest, group: Any) -> None:
        """`group` has the members of this replica, in ascending order (None: there is one)."""
        self._parameters = dict(module.named_parameters())
        self._placements = {placement.name: placement for placement in layout}
        self._seat = seat
        self._manifest = manifest
        self._group = group
        members = seat.grid.replica_members(seat.replica)
        self._ranges = {member: share_bytes(manifest, seat.grid.trainers, member) for member in members}

    @torch.no_grad()
    def write(self, first_chunk: int, chunks: int, image: NDArray[np.uint8]) -> None:
        """Fill `image` with these chunks; EngineError where they are not this trainer's share."""
        low, high = self._ranges[self._seat.trainer]
        if chunks and (first_chunk * self._manifest.chunk_bytes, len(image)) != (low, high - low):
            raise EngineError(
                f"megatron trainer {self._seat.trainer}: asked for {len(image)} bytes of the image from chunk "
                f"{first_chunk} on, its share are the bytes {low} to {high}"
            )
        image[:] = 0  # the gaps between tensors
        for entry in self._manifest.tensors:
            writers = [member for member, place in self._ranges.items() if _needs(entry, place)]
            if not writers:
                continue
            tensor = self._exchange(entry, writers)
            if tensor is not None:
                start, stop = overlap(entry, low, high)
                data = tensor.reshape(-1).view(torch.uint8)[start:stop].numpy()
                begin = entry.offset + start - low
                image[begin : begin + stop - start] = data

    def _exchange(self, entry: TensorEntry, writers: list[int]) -> Tensor | None:
        """Give the writers what they lack of this tensor; the whole tensor, on the CPU, if this trainer is one of them."""
        me, placement = self._seat.trainer, self._placements[entry.name]
        transfers: list[dist.P2POp] = []
        received: dict[int, Tensor] = {}
        mine: Tensor | None = None
        for writer in writers:
            for source, rank in self._sources(placement, writer).items():
                if me == source and mine is None:
                    mine = self._flat(placement, rank)
                if me == writer and me == source:
                    assert mine is not None
                    received[rank] = mine
                elif me == writer:
                    received[rank] = self._room(placement, rank, entry.dtype)
                    transfers.append(dist.P2POp(dist.irecv, received[rank], source, self._group))
                elif me == source:
                    assert mine is not None
                    transfers.append(dist.P2POp(dist.isend, mine, writer, self._group))
        if transfers:
            for request in dist.batch_isend_irecv(transfers):
                request.wait()
        return _assemble(placement, received, entry.dtype) if me in writers else None

    def _sources(self, placement: Placement, writer: int) -> dict[int, int]:
        """The trainers that give `writer` this tensor, with their tensor ranks: of its own stage where that has it."""
        grid, stages = self._seat.grid, [stage for stage, _ in placement.homes]
        own_rank, replica, own_stage = grid.place(writer)
        stage = own_stage if own_stage in stages else stages[0]
        ranks = [own_rank] if placement.replicated else sorted({piece.rank for piece in placement.pieces})
        return {grid.trainer(rank, replica, stage): rank for rank in ranks}

    def _flat(self, placement: Placement, rank: int) -> Tensor:
        """This rank's pieces of a tensor, one after the other."""
        name = next(name for stage, name in placement.homes if stage == self._seat.stage)
        pieces = [_part(self._parameters[name], piece).reshape(-1) for piece in placement.of_rank(rank)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _room(self, placement: Placement, rank: int, dtype: str) -> Tensor:
        count = sum(_piece_size(placement, piece) for piece in placement.of_rank(rank))
        device = next(iter(self._parameters.values())).device
        return torch.empty(count, dtype=getattr(torch, dtype), device=device)


def _needs(entry: TensorEntry, place: tuple[int, int]) -> bool:
    start, stop = overlap(entry, *place)
    return start < stop


def _piece_size(placement: Placement, piece: Piece) -> int:
    count = piece.length
    for dim, length in enumerate(placement.shape):
        count *= 1 if dim == piece.dim else length
    return count


def _assemble(placement: Placement, received: dict[int, Tensor], dtype: str) -> Tensor:
    """The whole tensor from each rank's pieces."""
    whole = torch.empty(placement.shape, dtype=getattr(torch, dtype))
    for rank, flat in received.items():
        done, data = 0, flat.cpu()
        for piece in placement.of_rank(rank):
            part = whole.narrow(piece.dim, piece.start, piece.length)
            part.copy_(data[done : done + part.numel()].view(part.shape))
            done += part.numel()
    return whole
