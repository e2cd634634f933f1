"""Shards and the image: every byte once, wherever it is cut, for whoever writes and whoever reads."""

from __future__ import annotations

import itertools
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from laminar_hpc.errors import ProtocolError
from laminar_hpc.protocol.peer import Manifest, Shard, TensorEntry, Tile
from laminar_hpc.weights.manifest import make_manifest
from laminar_hpc.weights.megatron_layout import Grid, ModelShape, Placement, placements, shard_slices
from laminar_hpc.weights.reshard import (
    ShardMap,
    check_cover,
    chunk_order,
    cut,
    cut_range,
    join,
    tile_of,
    whole_tensor,
)
from laminar_hpc.weights.scatter import scatter

CUTS = (1, 2, 4, 8)


def places(tiles: list[Tile]) -> NDArray[np.int64]:
    """The place in the image of each byte of a shard, by the definition of a tile."""
    found = [np.zeros(0, dtype=np.int64)]
    for tile in tiles:
        number = np.arange(tile.first, tile.first + tile.nbytes)
        found.append(tile.offset + number // tile.run_bytes * tile.stride + number % tile.run_bytes)
    return np.concatenate(found)


def wanted(manifest: Manifest) -> NDArray[np.int64]:
    """How often each byte of the image has to be there: bytes of tensors once, gaps never."""
    counts = np.zeros(manifest.nbytes, dtype=np.int64)
    for entry in manifest.tensors:
        counts[entry.offset : entry.offset + entry.nbytes] = 1
    return counts


def held(manifest: Manifest, shards: list[Shard]) -> NDArray[np.int64]:
    """How often each byte of the image is in the shards."""
    counts = np.zeros(manifest.nbytes, dtype=np.int64)
    for shard in shards:
        np.add.at(counts, places(shard.tiles), 1)
    return counts


@st.composite
def models(draw: st.DrawFn) -> tuple[ModelShape, int, int]:
    """A model that can be cut over so many tensor ranks and stages, with odd sizes wherever there may be."""
    tensor, stages = draw(st.sampled_from(CUTS)), draw(st.sampled_from(CUTS))
    groups = tensor * draw(st.sampled_from([1, 3]))
    shape = ModelShape(
        vocabulary=draw(st.integers(1, 13)),
        hidden=draw(st.integers(1, 5)),
        intermediate=tensor * draw(st.integers(1, 3)),
        layers=stages * draw(st.integers(1, 2)),
        heads=groups * draw(st.integers(1, 3)),
        query_groups=groups,
        head_size=draw(st.integers(1, 3)),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        tied=draw(st.booleans()),
    )
    return shape, tensor, stages


def tensors_of(manifest: Manifest, seed: int) -> dict[str, NDArray[np.uint16]]:
    generator = np.random.default_rng(seed)
    return {e.name: generator.integers(0, 1 << 16, e.shape, dtype=np.uint16) for e in manifest.tensors}


def image_of(manifest: Manifest, tensors: dict[str, NDArray[np.uint16]]) -> NDArray[np.uint8]:
    image = np.zeros(manifest.nbytes, dtype=np.uint8)
    for entry in manifest.tensors:
        image[entry.offset : entry.offset + entry.nbytes] = tensors[entry.name].reshape(-1).view(np.uint8)
    return image


def megatron_parameters(
    layout: list[Placement], tensors: dict[str, NDArray[np.uint16]], rank: int, stage: int
) -> dict[str, NDArray[np.uint16]]:
    """What a tensor rank of a stage has in memory: pieces of tensors put together, by NumPy's own indexing."""
    pieces: dict[str, list[tuple[int, int, NDArray[np.uint16]]]] = {}
    for placement in layout:
        for (_, name), piece in itertools.product(
            (h for h in placement.homes if h[0] == stage), placement.of_rank(rank)
        ):
            part = np.take(tensors[placement.name], range(piece.start, piece.stop), axis=piece.dim)
            pieces.setdefault(name, []).append((piece.shard_start, piece.dim, part))
    return {
        name: np.concatenate([part for _, _, part in sorted(parts, key=lambda each: each[0])], axis=parts[0][1])
        for name, parts in pieces.items()
    }


def shards_of(layout: list[Placement], manifest: Manifest, grid: Grid) -> list[Shard]:
    """The shards of all trainers, whose ranks begin at 1."""
    shards = []
    for trainer in range(grid.trainers):
        tiles = [part.tile for part in shard_slices(layout, manifest, grid, trainer)]
        shards.append(Shard(1 + trainer, join(cut(tiles, grid.replicas, grid.place(trainer)[1]))))
    return shards


@settings(max_examples=60, deadline=None)
@given(models(), st.integers(1, 3), st.integers(1, 400), st.integers(0, 2**32))
def test_an_image_comes_together_from_the_trainers_parts_of_its_chunks(model, replicas, chunk_bytes, seed) -> None:
    shape, tensor, stages = model
    layout = placements(shape, tensor, stages)
    manifest = make_manifest([(p.name, p.shape, "bfloat16") for p in layout], chunk_bytes)
    tensors, grid = tensors_of(manifest, seed), Grid(tensor, replicas, stages)
    shards = shards_of(layout, manifest, grid)
    check_cover(manifest, shards)
    assert np.array_equal(held(manifest, shards), wanted(manifest))
    image = np.zeros(manifest.nbytes, dtype=np.uint8)
    for trainer, shard in enumerate(shards):
        rank, replica, stage = grid.place(trainer)
        parameters = megatron_parameters(layout, tensors, rank, stage)
        whole = [np.zeros(0, dtype=np.uint8)]
        for part in shard_slices(layout, manifest, grid, trainer):
            memory = parameters[part.parameter].reshape(-1).view(np.uint8)
            whole.append(memory[part.start : part.start + part.tile.nbytes])
        low, high = cut_range(sum(map(len, whole)), replicas, replica)
        own, owned = np.concatenate(whole)[low:high], ShardMap(shard.tiles)
        assert owned.nbytes == len(own)
        for chunk in owned.chunks(manifest):
            start, stop = owned.part_of_chunk(*manifest.chunk_range(chunk))
            scatter(own[start:stop], owned.rectangles(start, stop), image)
    assert np.array_equal(image, image_of(manifest, tensors))


@settings(max_examples=60, deadline=None)
@given(models(), st.integers(0, 2**32))
def test_a_rollout_reads_its_tensor_ranks_parts_from_the_image(model, seed) -> None:
    shape, tensor, _ = model
    layout = placements(shape, tensor, 1)
    manifest = make_manifest([(p.name, p.shape, "bfloat16") for p in layout], 1024)
    entries = {entry.name: entry for entry in manifest.tensors}
    tensors = tensors_of(manifest, seed)
    image = image_of(manifest, tensors)
    for placement, rank in itertools.product(layout, range(tensor)):
        for piece in placement.of_rank(rank):
            tile = tile_of(entries[placement.name], piece.dim, piece.start, piece.stop)
            read = image[places([tile])].view(np.uint16)
            part = np.take(tensors[placement.name], range(piece.start, piece.stop), axis=piece.dim)
            assert np.array_equal(read, part.reshape(-1))
            assert sum(r.runs * r.run_bytes for r in ShardMap([tile]).rectangles(0, tile.nbytes)) == tile.nbytes


@st.composite
def partitions(draw: st.DrawFn) -> tuple[Manifest, list[Shard]]:
    """Tensors of bytes, each cut by columns, by rows or not, some of their parts cut again, for up to five ranks."""
    shapes = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), min_size=1, max_size=4))
    chunk_bytes = draw(st.integers(1, 90))
    manifest = make_manifest([(f"t{i}", shape, "uint8") for i, shape in enumerate(shapes)], chunk_bytes)
    shards: dict[int, list[Tile]] = {rank: [] for rank in range(5)}
    for entry in manifest.tensors:
        if entry.nbytes == 0:
            continue
        dim = draw(st.integers(0, 1))
        bounds = sorted({0, entry.shape[dim], *draw(st.lists(st.integers(0, entry.shape[dim]), max_size=3))})
        ranks = draw(st.permutations(range(5)))
        for rank, (start, stop) in zip(ranks, itertools.pairwise(bounds), strict=False):
            tile = tile_of(entry, dim, start, stop)
            split = draw(st.integers(0, tile.nbytes))
            if 0 < split < tile.nbytes and len(bounds) < 5:
                shards[ranks[4]].append(msgspec.structs.replace(tile, first=split, nbytes=tile.nbytes - split))
                tile = msgspec.structs.replace(tile, nbytes=split)
                bounds = [*bounds, *[0] * 5]  # once for each tensor
            shards[rank].append(tile)
    return manifest, [Shard(rank, tiles) for rank, tiles in shards.items()]


@settings(max_examples=150, deadline=None)
@given(partitions(), st.data())
def test_what_lies_in_a_chunk_is_one_run_of_the_shard(partition, data) -> None:
    manifest, shards = partition
    for shard in shards:
        owned, expected = ShardMap(shard.tiles), places(shard.tiles)
        assert owned.nbytes == len(expected)
        chunks = []
        for chunk in range(manifest.chunks):
            low, high = manifest.chunk_range(chunk)
            inside = np.flatnonzero((expected >= low) & (expected < high))
            start, stop = owned.part_of_chunk(low, high)
            assert list(inside) == list(range(start, stop))
            chunks += [chunk] if len(inside) else []
        assert owned.chunks(manifest) == chunks
        assert owned.parts(manifest) == [owned.part_of_chunk(*manifest.chunk_range(chunk)) for chunk in chunks]
        start = data.draw(st.integers(0, owned.nbytes))
        stop = data.draw(st.integers(start, owned.nbytes))
        found = [
            spot.offset + run * spot.stride + place
            for spot in owned.rectangles(start, stop)
            for run in range(spot.runs)
            for place in range(spot.run_bytes)
        ]
        assert found == list(expected[start:stop])


@settings(max_examples=300, deadline=None)
@given(partitions(), st.data())
def test_a_cover_is_accepted_exactly_where_every_byte_is_there_once(partition, data) -> None:
    manifest, shards = partition
    check_cover(manifest, shards)
    assert np.array_equal(held(manifest, shards), wanted(manifest))
    places_of_tiles = [(i, j) for i, shard in enumerate(shards) for j in range(len(shard.tiles))]
    if not places_of_tiles:
        return
    i, j = data.draw(st.sampled_from(places_of_tiles))
    tiles = list(shards[i].tiles)
    tile = tiles.pop(j)
    how = data.draw(st.sampled_from(["gone", "twice", "shorter", "later", "moved"]))
    broken = list(shards)
    if how == "twice":
        broken.append(Shard(9, [tile]))
    else:
        if how == "shorter":
            tiles.insert(j, msgspec.structs.replace(tile, nbytes=tile.nbytes - 1))
        elif how == "later":
            tiles.insert(j, msgspec.structs.replace(tile, first=tile.first + 1, nbytes=tile.nbytes - 1))
        elif how == "moved":
            tiles.insert(j, msgspec.structs.replace(tile, offset=tile.offset + 1))
        broken[i] = Shard(shards[i].rank, [each for each in tiles if each.nbytes])
    with pytest.raises(ProtocolError, match="rank"):
        check_cover(manifest, broken)


TABLE = make_manifest([("a", (3,), "uint8"), ("t", (4, 6), "uint8")], chunk_bytes=1024)
A, T = TABLE.tensors
"""a is at bytes 0 to 3 of the image, t at 64 to 88: rows of 6."""


def t(dim: int, start: int, stop: int) -> Tile:
    return tile_of(T, dim, start, stop)


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([Shard(1, [whole_tensor(T)])], "tensor 'a': byte 0 of it is in the shard of no rank"),
        ([Shard(1, [whole_tensor(A)]), Shard(2, [t(1, 0, 2)]), Shard(3, [t(1, 3, 6)])],
         "tensor 't': byte 2 of it is in the shard of no rank"),
        ([Shard(1, [whole_tensor(A)]), Shard(2, [t(1, 0, 3)]), Shard(3, [t(1, 2, 6)])],
         "tensor 't': byte 2 of it is in the shard of rank 2 and in that of rank 3"),
        ([Shard(1, [whole_tensor(A), t(0, 0, 2)]), Shard(2, [t(0, 3, 4)])],
         "tensor 't': byte 12 of it is in the shard of no rank"),
        ([Shard(1, [whole_tensor(A), t(0, 0, 2)]), Shard(2, [t(1, 0, 6)])],
         "tensor 't': byte 0 of it is in the shard of rank 1 and in that of rank 2"),
        ([Shard(1, [whole_tensor(A), t(1, 0, 3)]), Shard(2, [t(1, 3, 6), whole_tensor(A)])],
         "the shard of rank 2: the tile at byte 0 of the image begins before the last one has ended, at byte 88"),
        ([Shard(1, [whole_tensor(A), t(1, 0, 3)]), Shard(2, [Tile(67, 6, 2, 12, 0, 12)])],
         "'t' of 24 bytes: the shard of rank 2 has runs of it at a stride of 12 bytes, where the rows are 6 bytes long"),
        ([Shard(1, [whole_tensor(A), t(1, 0, 3)]), Shard(2, [Tile(69, 3, 3, 6, 0, 9)])],
         "byte 5 of it begins a run of rank 2 that does not end in its row of 6 bytes"),
        ([Shard(1, [Tile(0, 5, 1, 5, 0, 5)])], "the shard of rank 1 has byte 3 of the image, which is in no tensor"),
        ([Shard(1, [Tile(64, 3, 5, 6, 0, 15)])],
         "the tile at byte 64 of the image ends at byte 91, outside the tensor 't'"),
        ([Shard(1, [Tile(90, 3, 1, 3, 0, 3)])], "the shard of rank 1 has byte 90 of the image, which is in no tensor"),
        ([Shard(1, [Tile(64, 3, 4, 2, 0, 12)])], "rank 1.*is no tile"),
        ([Shard(1, [Tile(64, 3, 4, 6, 0, 0)])], "rank 1.*is no tile"),
        ([Shard(1, [Tile(64, 3, 4, 6, 1, 12)])], "rank 1.* has 12 bytes"),
        ([Shard(1, []), Shard(1, [])], r"one shard, got shards of ranks \[1, 1\]"),
    ],
)  # fmt: skip
def test_shards_that_are_not_the_image_are_refused(shards: list[Shard], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        check_cover(TABLE, shards)


def test_one_run_may_be_several_tensors() -> None:
    manifest = make_manifest([("a", (64,), "uint8"), ("b", (0,), "uint8"), ("c", (5,), "uint8")], 1024)
    joined = join([whole_tensor(entry) for entry in manifest.tensors if entry.nbytes])
    assert joined == [Tile(0, 69, 1, 69, 0, 69)]
    check_cover(manifest, [Shard(1, cut(joined, 2, 0)), Shard(2, cut(joined, 2, 1))])


def test_tiles_by_hand() -> None:
    entry = TensorEntry("w", (3, 4), "bfloat16", 128, 24)
    assert tile_of(entry, 0, 1, 3) == Tile(136, 16, 1, 16, 0, 16)
    assert tile_of(entry, 1, 1, 3) == Tile(130, 4, 3, 8, 0, 12)
    assert tile_of(entry, 1, 0, 4) == Tile(128, 24, 1, 24, 0, 24)
    # bytes 2 to 11 of the columns 1 and 2: the end of row 0, row 1, the beginning of row 2
    assert ShardMap([tile_of(entry, 1, 1, 3)]).rectangles(2, 11) == [(132, 2, 1, 2), (138, 4, 1, 4), (146, 3, 1, 3)]


@given(st.integers(0, 3000), st.integers(1, 9))
def test_replicas_share_a_shard_evenly(nbytes: int, parts: int) -> None:
    ranges = [cut_range(nbytes, parts, index) for index in range(parts)]
    assert [low for low, _ in ranges] == [0, *(high for _, high in ranges[:-1])]
    assert ranges[-1][1] == nbytes
    assert all(low % 64 == 0 for low, _ in ranges)
    sizes = [high - low for low, high in ranges]
    assert max(sizes) - min(sizes) <= 129
    tile = [Tile(64, nbytes, 1, nbytes, 0, nbytes)] if nbytes else []
    assert [sum(each.nbytes for each in cut(tile, parts, index)) for index in range(parts)] == sizes


@pytest.mark.parametrize("index", [-1, 2])
def test_a_part_of_nobody(index: int) -> None:
    with pytest.raises(ValueError, match=f"0 to 1, got {index}"):
        cut([], 2, index)


def test_chunks_of_all_trainers_come_in_turn() -> None:
    # 8 chunks of 100 bytes: the first four are rank 1's, then 2 of rank 2 and 2 of rank 3
    manifest = make_manifest([("w", (8, 100), "uint8")], chunk_bytes=100)
    (entry,) = manifest.tensors
    shards = [Shard(rank, [tile_of(entry, 0, *rows)]) for rank, rows in ((1, (0, 4)), (2, (4, 6)), (3, (6, 8)))]
    # rank 1's at 1/8 3/8 5/8 7/8 of the time, the others' at 1/4 and 3/4
    assert chunk_order(manifest, shards) == [0, 4, 6, 1, 2, 5, 7, 3]


def test_chunks_that_several_trainers_have_count_as_those_of_each_in_turn() -> None:
    # every chunk is a row of which both ranks have a half; alternately they count as one's or the other's
    manifest = make_manifest([("w", (4, 10), "uint8")], chunk_bytes=10)
    (entry,) = manifest.tensors
    shards = [Shard(1, [tile_of(entry, 1, 0, 5)]), Shard(2, [tile_of(entry, 1, 5, 10)])]
    assert chunk_order(manifest, shards) == [0, 1, 2, 3]


@settings(max_examples=100, deadline=None)
@given(partitions())
def test_every_chunk_has_its_turn(partition) -> None:
    manifest, shards = partition
    order = chunk_order(manifest, shards)
    assert sorted(order) == list(range(manifest.chunks))
    assert chunk_order(manifest, shards) == order


def test_an_image_without_bytes_has_one_chunk_of_nobody() -> None:
    manifest = make_manifest([("none", (0, 3), "float32")], 1024)
    shards = [Shard(1, []), Shard(2, [])]
    check_cover(manifest, shards)
    assert chunk_order(manifest, shards) == [0]
    assert ShardMap([]).chunks(manifest) == []
    assert ShardMap([]).rectangles(0, 0) == []


def test_images_of_many_gigabytes_are_counted_in_whole_numbers() -> None:
    # 3 tensors of 2^20 x 2^13 bfloat16, 16 GiB each, by columns over 8 ranks; NumPy has nothing to do with it
    names = [(f"w{i}", (1 << 20, 1 << 13), "bfloat16") for i in range(3)]
    manifest = make_manifest(names, 1 << 26)
    shards = [
        Shard(rank, [tile_of(entry, 1, rank << 10, (rank + 1) << 10) for entry in manifest.tensors])
        for rank in range(8)
    ]
    check_cover(manifest, shards)
    owned = ShardMap(shards[3].tiles)
    assert owned.nbytes == 3 << 31
    # chunk 300 is rows 11264 and on of the second tensor: 4096 rows, of which each rank has 2 KiB
    assert owned.part_of_chunk(*manifest.chunk_range(300)) == (
        (1 << 31) + (44 * 4096 << 11),
        (1 << 31) + (45 * 4096 << 11),
    )
    assert sorted(chunk_order(manifest, shards)) == list(range(768))
    Random(0).shuffle(shards)
    check_cover(manifest, shards)
