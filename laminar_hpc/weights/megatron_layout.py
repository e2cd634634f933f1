"""Which part of each Hugging Face tensor lies where in Megatron's shards, for a model cut over tensor ranks and stages.

A tensor is cut along one dimension at most, and a piece of it is a run of places along that dimension: of rows where a
layer's outputs are spread over tensor ranks, of columns where its inputs are. Megatron joins what one multiplication can
do: a query group's queries, keys and values lie together, group after group, and a rank's gate rows before its up rows.
Stages take equal runs of layers; the first one has the embedding, the last one the final norm and the output layer. Where
that is tied to the embedding, both have it.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from laminar_hpc.errors import ConfigError
from laminar_hpc.protocol.peer import Manifest, Tile
from laminar_hpc.weights.reshard import tile_of

EMBEDDING = "model.embed_tokens.weight"


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a decoder: `query_groups` are its key and value heads, `head_size` the length of each head's vectors."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    query_groups: int
    head_size: int
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False


class Grid(msgspec.Struct, frozen=True):
    """How trainers share a model: Megatron's order, tensor ranks fastest, then replicas, then stages."""

    tensor: int
    replicas: int
    stages: int

    @property
    def trainers(self) -> int:
        """All of them."""
        return self.tensor * self.replicas * self.stages

    def trainer(self, tensor_rank: int, replica: int, stage: int) -> int:
        """The trainer at this place."""
        return tensor_rank + self.tensor * (replica + self.replicas * stage)

    def place(self, trainer: int) -> tuple[int, int, int]:
        """Tensor rank, replica and stage of a trainer."""
        rest, tensor_rank = divmod(trainer, self.tensor)
        stage, replica = divmod(rest, self.replicas)
        return tensor_rank, replica, stage


class Piece(msgspec.Struct, frozen=True):
    """Places `start` to `stop` of a tensor along `dim`: those from `shard_start` on of what tensor rank `rank` holds."""

    rank: int
    dim: int
    start: int
    stop: int
    shard_start: int

    @property
    def length(self) -> int:
        """Places along `dim`."""
        return self.stop - self.start


class Placement(msgspec.Struct, frozen=True):
    """Where one Hugging Face tensor lies.

    `homes` are stage and parameter name: one, or two where the output layer is tied to the embedding. `pieces` cover the
    tensor once; where it is `replicated`, every rank has all of it, and the pieces cover it once for each rank.
    """

    name: str
    shape: tuple[int, ...]
    homes: tuple[tuple[int, str], ...]
    pieces: tuple[Piece, ...]
    replicated: bool = False

    def of_rank(self, rank: int) -> list[Piece]:
        """What tensor rank `rank` holds."""
        return [piece for piece in self.pieces if piece.rank == rank]


class Slice(msgspec.Struct, frozen=True):
    """A tile of the image and where its bytes are: in the memory of `parameter`, one run from byte `start` on."""

    tile: Tile
    parameter: str
    start: int


def shard_slices(layout: list[Placement], manifest: Manifest, grid: Grid, trainer: int) -> list[Slice]:
    """What `trainer` publishes, in the image's order, before it is cut among the replicas.

    A tensor comes from its first home alone. One that all tensor ranks have whole comes from one of them, from each in
    turn.
    """
    rank, _, stage = grid.place(trainer)
    placements = {placement.name: placement for placement in layout}
    replicated = [placement.name for placement in layout if placement.replicated]
    turns = {name: turn % grid.tensor for turn, name in enumerate(replicated)}
    slices: list[Slice] = []
    for entry in manifest.tensors:
        placement = placements[entry.name]
        home, parameter = placement.homes[0]
        if home != stage or turns.get(entry.name, rank) != rank:
            continue
        for piece in placement.of_rank(rank):
            tile = tile_of(entry, piece.dim, piece.start, piece.stop)
            row_bytes = tile.nbytes // piece.length  # a piece of columns is all of its parameter, and begins at byte 0
            slices.append(Slice(tile, parameter, piece.shard_start * row_bytes))
    return slices


def check_cut(shape: ModelShape, tensor: int, stages: int) -> None:
    """ConfigError where the model cannot be cut over so many tensor ranks and stages."""
    for key, size, what in (
        ("trainer.tensor_parallel", shape.heads, "num_attention_heads"),
        ("trainer.tensor_parallel", shape.query_groups, "num_key_value_heads"),
        ("trainer.tensor_parallel", shape.intermediate, "intermediate_size"),
        ("trainer.pipeline_parallel", shape.layers, "num_hidden_layers"),
    ):
        parts = tensor if key == "trainer.tensor_parallel" else stages
        if size % parts:
            raise ConfigError(f"{key} must divide the model's {what}, {size}, got {parts}")


def padded_vocabulary(vocabulary: int, tensor: int) -> int:
    """Rows that the embedding needs so that all tensor ranks have the same number."""
    return -(-vocabulary // tensor) * tensor


def placements(shape: ModelShape, tensor: int, stages: int, fused_norms: bool = False) -> list[Placement]:
    """All tensors of the model. `fused_norms`: a norm's weight is kept by the linear layer after it, as in Transformer Engine.

    ConfigError where the model cannot be cut so.
    """
    check_cut(shape, tensor, stages)
    return list(_Cut(shape, tensor, stages, fused_norms).all())


class _Cut:
    def __init__(self, shape: ModelShape, tensor: int, stages: int, fused_norms: bool) -> None:
        self._shape = shape
        self._tensor = tensor
        self._stages = stages
        self._fused_norms = fused_norms

    def all(self) -> Iterator[Placement]:
        shape, last = self._shape, self._stages - 1
        table = (shape.vocabulary, shape.hidden)
        embedding, output = "embedding.word_embeddings.weight", "output_layer.weight"
        homes = [(0, embedding)] + ([(last, output)] if shape.tied and last else [])
        yield Placement(EMBEDDING, table, tuple(homes), self._vocabulary())
        for layer in range(shape.layers):
            yield from self._layer(layer)
        yield self._replicated("model.norm.weight", shape.hidden, last, "decoder.final_layernorm.weight")
        if not shape.tied:
            yield Placement("lm_head.weight", table, ((last, output),), self._vocabulary())

    def _layer(self, layer: int) -> Iterator[Placement]:
        shape = self._shape
        stage, local = divmod(layer, shape.layers // self._stages)
        theirs, ours = f"model.layers.{layer}", f"decoder.layers.{local}"
        first, second = f"{ours}.input_layernorm.weight", f"{ours}.pre_mlp_layernorm.weight"
        if self._fused_norms:
            first = f"{ours}.self_attention.linear_qkv.layer_norm_weight"
            second = f"{ours}.mlp.linear_fc1.layer_norm_weight"
        yield self._replicated(f"{theirs}.input_layernorm.weight", shape.hidden, stage, first)
        yield from self._attention(f"{theirs}.self_attn", stage, f"{ours}.self_attention")
        yield self._replicated(f"{theirs}.post_attention_layernorm.weight", shape.hidden, stage, second)
        for order, name in enumerate(("gate_proj", "up_proj")):
            pieces = self._even(shape.intermediate, 0, order)
            home = (stage, f"{ours}.mlp.linear_fc1.weight")
            yield Placement(f"{theirs}.mlp.{name}.weight", (shape.intermediate, shape.hidden), (home,), pieces)
        home = (stage, f"{ours}.mlp.linear_fc2.weight")
        pieces = self._even(shape.intermediate, 1)
        yield Placement(f"{theirs}.mlp.down_proj.weight", (shape.hidden, shape.intermediate), (home,), pieces)

    def _attention(self, theirs: str, stage: int, ours: str) -> Iterator[Placement]:
        shape = self._shape
        queries = shape.heads // shape.query_groups
        for name, before, heads in (("q_proj", 0, queries), ("k_proj", queries, 1), ("v_proj", queries + 1, 1)):
            pieces = self._grouped(before, heads)
            rows = shape.query_groups * heads * shape.head_size
            home = (stage, f"{ours}.linear_qkv.weight")
            yield Placement(f"{theirs}.{name}.weight", (rows, shape.hidden), (home,), pieces)
            if shape.qkv_bias:
                yield Placement(f"{theirs}.{name}.bias", (rows,), ((stage, f"{ours}.linear_qkv.bias"),), pieces)
        if shape.qk_norm:
            for name, norm in (("q_norm", "q_layernorm"), ("k_norm", "k_layernorm")):
                yield self._replicated(f"{theirs}.{name}.weight", shape.head_size, stage, f"{ours}.{norm}.weight")
        columns = shape.heads * shape.head_size
        home = (stage, f"{ours}.linear_proj.weight")
        yield Placement(f"{theirs}.o_proj.weight", (shape.hidden, columns), (home,), self._even(columns, 1))

    def _replicated(self, name: str, length: int, stage: int, parameter: str) -> Placement:
        pieces = tuple(Piece(rank, 0, 0, length, 0) for rank in range(self._tensor))
        return Placement(name, (length,), ((stage, parameter),), pieces, replicated=True)

    def _even(self, length: int, dim: int, order: int = 0) -> tuple[Piece, ...]:
        """Equal runs; `order`: how many runs of the same length lie before it in a shard."""
        size = length // self._tensor
        return tuple(Piece(rank, dim, rank * size, (rank + 1) * size, order * size) for rank in range(self._tensor))

    def _vocabulary(self) -> tuple[Piece, ...]:
        """Equal runs of the padded rows, without the padding, which ends the last ranks' shards."""
        total = self._shape.vocabulary
        size = padded_vocabulary(total, self._tensor) // self._tensor
        starts = [(rank, rank * size) for rank in range(self._tensor) if rank * size < total]
        return tuple(Piece(rank, 0, start, min(total, start + size), 0) for rank, start in starts)

    def _grouped(self, before: int, heads: int) -> tuple[Piece, ...]:
        """A query group's `heads` heads, with `before` heads of the group before them in a shard."""
        shape = self._shape
        local_groups = shape.query_groups // self._tensor
        in_group = (shape.heads // shape.query_groups + 2) * shape.head_size
        rows = heads * shape.head_size
        pieces = []
        for group in range(shape.query_groups):
            rank, local = divmod(group, local_groups)
            shard_start = local * in_group + before * shape.head_size
            pieces.append(Piece(rank, 0, group * rows, (group + 1) * rows, shard_start))
        return tuple(pieces)
