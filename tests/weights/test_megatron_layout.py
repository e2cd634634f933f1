"""Megatron shards as NumPy arrays: what is cut comes together again, bit for bit, and lies where Megatron looks for it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from laminar_hpc.errors import ConfigError
from laminar_hpc.weights.manifest import make_manifest
from laminar_hpc.weights.megatron_layout import (
    Grid,
    ModelShape,
    Placement,
    padded_vocabulary,
    placements,
    shard_slices,
)

CUTS = list(itertools.product((1, 2, 4), (1, 2, 4)))
SHAPES = {
    "plain": ModelShape(vocabulary=37, hidden=8, intermediate=12, layers=4, heads=4, query_groups=4, head_size=2),
    "grouped": ModelShape(vocabulary=40, hidden=8, intermediate=12, layers=8, heads=8, query_groups=4, head_size=4),
    "bias, tied": ModelShape(
        vocabulary=37,
        hidden=8,
        intermediate=12,
        layers=4,
        heads=8,
        query_groups=4,
        head_size=2,
        qkv_bias=True,
        tied=True,
    ),
    "head norms": ModelShape(
        vocabulary=5, hidden=8, intermediate=4, layers=4, heads=4, query_groups=4, head_size=6, qk_norm=True
    ),
}
DTYPES = {"float32": np.uint32, "bfloat16": np.uint16}
"""Bits of any kind, not-a-numbers included, have to survive."""

Shards = dict[tuple[int, int, str], NDArray[np.generic]]


def parameter_shapes(shape: ModelShape, tensor: int, stages: int, stage: int) -> dict[str, tuple[int, ...]]:
    """What Megatron allocates on a stage, by its own names; from megatron-core's layers, not from the layout."""
    hidden, rows = shape.hidden, padded_vocabulary(shape.vocabulary, tensor) // tensor
    qkv = (shape.heads + 2 * shape.query_groups) * shape.head_size // tensor
    shapes: dict[str, tuple[int, ...]] = {}
    if stage == 0:
        shapes["embedding.word_embeddings.weight"] = (rows, hidden)
    for layer in range(shape.layers // stages):
        name = f"decoder.layers.{layer}"
        shapes[f"{name}.input_layernorm.weight"] = shapes[f"{name}.pre_mlp_layernorm.weight"] = (hidden,)
        shapes[f"{name}.self_attention.linear_qkv.weight"] = (qkv, hidden)
        shapes[f"{name}.self_attention.linear_proj.weight"] = (hidden, shape.heads * shape.head_size // tensor)
        shapes[f"{name}.mlp.linear_fc1.weight"] = (2 * shape.intermediate // tensor, hidden)
        shapes[f"{name}.mlp.linear_fc2.weight"] = (hidden, shape.intermediate // tensor)
        if shape.qkv_bias:
            shapes[f"{name}.self_attention.linear_qkv.bias"] = (qkv,)
        if shape.qk_norm:
            for norm in ("q_layernorm", "k_layernorm"):
                shapes[f"{name}.self_attention.{norm}.weight"] = (shape.head_size,)
    if stage == stages - 1:
        shapes["decoder.final_layernorm.weight"] = (hidden,)
        if not shape.tied or stages > 1:
            shapes["output_layer.weight"] = (rows, hidden)
    return shapes


def cut(
    layout: list[Placement], tensors: dict[str, NDArray[np.generic]], shards: Shards
) -> dict[tuple[int, int, str], int]:
    """Copy tensors into shards; how many elements of each shard were written."""
    written = dict.fromkeys(shards, 0)
    for placement in layout:
        for (stage, name), piece in itertools.product(placement.homes, placement.pieces):
            key = (piece.rank, stage, name)
            source = np.moveaxis(tensors[placement.name], piece.dim, 0)[piece.start : piece.stop]
            target = np.moveaxis(shards[key], piece.dim, 0)
            target[piece.shard_start : piece.shard_start + piece.length] = source
            written[key] += source.size
    return written


def joined(placement: Placement, shards: Shards, home: tuple[int, str], dtype: type[np.generic]) -> NDArray[np.generic]:
    """The tensor from the shards of one of its homes."""
    whole = np.zeros(placement.shape, dtype=dtype)
    for piece in placement.pieces:
        source = np.moveaxis(shards[(piece.rank, *home)], piece.dim, 0)
        target = np.moveaxis(whole, piece.dim, 0)
        target[piece.start : piece.stop] = source[piece.shard_start : piece.shard_start + piece.length]
    return whole


@pytest.mark.parametrize(("tensor", "stages"), CUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", SHAPES)
def test_a_round_trip_keeps_every_bit(kind: str, dtype: str, tensor: int, stages: int) -> None:
    shape, bits, rng = SHAPES[kind], DTYPES[dtype], np.random.default_rng(5)
    layout = placements(shape, tensor, stages)
    tensors = {p.name: rng.integers(0, np.iinfo(bits).max, p.shape, dtype=bits, endpoint=True) for p in layout}
    shards: Shards = {
        (rank, stage, name): np.zeros(size, dtype=bits)
        for rank in range(tensor)
        for stage in range(stages)
        for name, size in parameter_shapes(shape, tensor, stages, stage).items()
    }
    written = cut(layout, tensors, shards)
    padding = (padded_vocabulary(shape.vocabulary, tensor) - shape.vocabulary) * shape.hidden
    tables = {name for _, _, name in shards if "embedding" in name or "output" in name}
    for name in {name for _, _, name in shards}:
        for stage in range(stages):
            here = [key for key in shards if key[1:] == (stage, name)]
            missing = sum(shards[key].size - written[key] for key in here)
            assert missing == (padding if name in tables and here else 0)
    for placement in layout:
        for home in placement.homes:
            assert np.array_equal(joined(placement, shards, home, bits), tensors[placement.name])


def test_queries_keys_and_values_lie_by_groups() -> None:
    # 4 heads of 1 in 2 groups: Megatron's order is q0 q1 k0 v0 | q2 q3 k1 v1, one group for each of 2 tensor ranks
    shape = ModelShape(vocabulary=4, hidden=2, intermediate=2, layers=1, heads=4, query_groups=2, head_size=1)
    order = {name: [None] * 4 for name in range(2)}
    for placement in placements(shape, 2, 1):
        if placement.homes[0][1].endswith("linear_qkv.weight"):
            letter = placement.name.split("self_attn.")[1][0]
            for piece in placement.pieces:
                for place in range(piece.length):
                    order[piece.rank][piece.shard_start + place] = f"{letter}{piece.start + place}"
    assert order == {0: ["q0", "q1", "k0", "v0"], 1: ["q2", "q3", "k1", "v1"]}


def test_each_tensor_rank_has_its_gate_rows_before_its_up_rows() -> None:
    shape = SHAPES["plain"]
    by_name = {placement.name: placement for placement in placements(shape, 2, 1)}
    gate, up = (by_name[f"model.layers.0.mlp.{name}.weight"].pieces for name in ("gate_proj", "up_proj"))
    assert [(piece.rank, piece.start, piece.stop, piece.shard_start) for piece in gate] == [(0, 0, 6, 0), (1, 6, 12, 0)]
    assert [(piece.rank, piece.start, piece.stop, piece.shard_start) for piece in up] == [(0, 0, 6, 6), (1, 6, 12, 6)]


def test_a_tied_table_lies_on_the_first_and_the_last_stage() -> None:
    layout = {placement.name: placement for placement in placements(SHAPES["bias, tied"], 1, 4)}
    assert "lm_head.weight" not in layout
    table = layout["model.embed_tokens.weight"]
    assert table.homes == ((0, "embedding.word_embeddings.weight"), (3, "output_layer.weight"))
    assert layout["model.layers.3.mlp.down_proj.weight"].homes == ((3, "decoder.layers.0.mlp.linear_fc2.weight"),)


def test_norms_go_to_the_linear_layers_where_these_have_them() -> None:
    names = {placement.name: placement.homes[0][1] for placement in placements(SHAPES["plain"], 1, 1, fused_norms=True)}
    assert names["model.layers.1.input_layernorm.weight"] == (
        "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"
    )
    assert (
        names["model.layers.1.post_attention_layernorm.weight"] == "decoder.layers.1.mlp.linear_fc1.layer_norm_weight"
    )
    assert names["model.norm.weight"] == "decoder.final_layernorm.weight"


@pytest.mark.parametrize(
    ("tensor", "stages", "text"),
    [
        (3, 1, "trainer.tensor_parallel must divide the model's num_attention_heads, 8, got 3"),
        (8, 1, "trainer.tensor_parallel must divide the model's num_key_value_heads, 4, got 8"),
        (1, 3, "trainer.pipeline_parallel must divide the model's num_hidden_layers, 8, got 3"),
    ],
)
def test_a_cut_that_leaves_a_rest_is_refused(tensor: int, stages: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        placements(SHAPES["grouped"], tensor, stages)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4))
def test_trainers_have_one_place_each(tensor: int, replicas: int, stages: int) -> None:
    grid = Grid(tensor, replicas, stages)
    places = [grid.place(trainer) for trainer in range(grid.trainers)]
    assert sorted(places) == sorted(itertools.product(range(tensor), range(replicas), range(stages)))
    assert [grid.trainer(*place) for place in places] == list(range(grid.trainers))


def test_tensor_ranks_come_first_then_replicas_then_stages() -> None:
    # Megatron's default order "tp-cp-ep-dp-pp" for 2 x 2 x 2: trainer 5 is tensor rank 1, replica 0, stage 1
    assert Grid(2, 2, 2).place(5) == (1, 0, 1)


def test_what_several_trainers_have_comes_from_one_of_them() -> None:
    shape = SHAPES["bias, tied"]
    layout, grid = placements(shape, 2, 4), Grid(2, 1, 4)
    manifest = make_manifest([(p.name, p.shape, "bfloat16") for p in layout])
    slices = {trainer: shard_slices(layout, manifest, grid, trainer) for trainer in range(grid.trainers)}
    tables = {trainer for trainer, parts in slices.items() if any("embedding" in part.parameter for part in parts)}
    assert tables == {0, 1}  # the first stage's, though the last one's output layer has the same rows
    assert not any(part.parameter == "output_layer.weight" for parts in slices.values() for part in parts)
    norms = {
        t: [s.parameter.split("decoder.")[1] for s in parts if "norm" in s.parameter] for t, parts in slices.items()
    }
    # the norms of the layers 0 to 3 and the last one, in turn from tensor rank 0 and 1 of their stage
    assert norms == {
        0: ["layers.0.input_layernorm.weight"], 1: ["layers.0.pre_mlp_layernorm.weight"],
        2: ["layers.0.input_layernorm.weight"], 3: ["layers.0.pre_mlp_layernorm.weight"],
        4: ["layers.0.input_layernorm.weight"], 5: ["layers.0.pre_mlp_layernorm.weight"],
        6: ["layers.0.input_layernorm.weight", "final_layernorm.weight"], 7: ["layers.0.pre_mlp_layernorm.weight"],
    }  # fmt: skip


def test_a_slice_is_where_megatron_has_it() -> None:
    # 4 heads of 1 in 2 groups, hidden 2, bfloat16: the shard of tensor rank 1 is q2 q3 k1 v1, a row of 4 bytes each
    shape = ModelShape(vocabulary=4, hidden=2, intermediate=2, layers=1, heads=4, query_groups=2, head_size=1)
    layout = placements(shape, 2, 1)
    manifest = make_manifest([(p.name, p.shape, "bfloat16") for p in layout])
    starts = {entry.offset: entry.name.split(".")[-2] for entry in manifest.tensors}
    found = [
        (starts[part.tile.offset // 64 * 64], part.tile.offset % 64, part.tile.nbytes, part.start)
        for part in shard_slices(layout, manifest, Grid(2, 1, 1), 1)
        if "linear_qkv" in part.parameter
    ]
    assert found == [("k_proj", 4, 4, 8), ("q_proj", 8, 8, 0), ("v_proj", 4, 4, 12)]
