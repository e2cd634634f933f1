"""Where each tensor of a checkpoint lies in a vLLM model: in fused layers, and in one of several tensor-parallel shards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


@dataclass(frozen=True)
class Piece:
    """The part of one checkpoint tensor that this shard has.

    `part` is a view of the parameter that the forward pass reads. It holds the rows (`dim` 0) or columns (1) from `start`
    on of a tensor of shape `shape`.
    """

    shape: tuple[int, ...]
    dim: int
    start: int
    part: torch.Tensor


def pieces_of(model: Any) -> dict[str, Piece]:
    """The pieces of all checkpoint tensors in `model`, by the checkpoint's names. A tied output layer is there once."""
    pieces: dict[str, Piece] = {}
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                pieces.update(_pieces_of(module, module_name, name, parameter.data))
    return pieces


def _pieces_of(module: Any, module_name: str, name: str, data: torch.Tensor) -> Iterator[tuple[str, Piece]]:
    parent, _, last = module_name.rpartition(".")
    rank, shards = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    if isinstance(module, QKVParallelLinear):
        kv_rank = rank // module.num_kv_head_replicas
        query, key_value = module.num_heads * module.head_size, module.num_kv_heads * module.head_size
        total = module.total_num_heads * module.head_size, module.total_num_kv_heads * module.head_size
        yield f"{parent}.q_proj.{name}", _rows(data[:query], total[0], rank * query)
        yield f"{parent}.k_proj.{name}", _rows(data[query : query + key_value], total[1], kv_rank * key_value)
        yield f"{parent}.v_proj.{name}", _rows(data[query + key_value :], total[1], kv_rank * key_value)
    elif isinstance(module, MergedColumnParallelLinear):
        begin = 0
        for output, rows in zip(_unfused(last), module.output_sizes, strict=True):
            own = rows // shards
            yield f"{parent}.{output}.{name}", _rows(data[begin : begin + own], rows, rank * own)
            begin += own
    elif isinstance(module, VocabParallelEmbedding):
        own = module.shard_indices
        rows = own.org_vocab_end_index - own.org_vocab_start_index
        piece = _rows(data[:rows], module.org_vocab_size, own.org_vocab_start_index)
        yield f"{module_name}.{name}", piece
    elif isinstance(module, RowParallelLinear) and data.dim() == 2:
        columns = data.shape[1]
        shape = (data.shape[0], columns * shards)
        yield f"{module_name}.{name}", Piece(shape, 1, rank * columns, data)
    elif isinstance(module, ColumnParallelLinear):
        yield f"{module_name}.{name}", _rows(data, data.shape[0] * shards, rank * data.shape[0])
    else:  # every shard has all of it
        yield f"{module_name}.{name}", _rows(data, data.shape[0], 0)


def _rows(part: torch.Tensor, rows: int, start: int) -> Piece:
    return Piece((rows, *part.shape[1:]), 0, start, part)


def _unfused(name: str) -> list[str]:
    """The checkpoint's names of the layers that vLLM has fused under `name`: gate_up_proj is gate_proj and up_proj."""
    *parts, last = name.split("_")
    return [f"{part}_{last}" for part in parts]
