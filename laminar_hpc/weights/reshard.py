"""Who publishes which bytes of the image, and where they lie in it.

Each trainer publishes a shard: the bytes of its tiles, in the image's order. Since the tiles do not interleave, what of a
shard lies between two places of the image is one run of the shard's own bytes, however many runs of the image it is.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import msgspec

from laminar_hpc.errors import ProtocolError
from laminar_hpc.protocol.peer import Manifest, Shard, TensorEntry, Tile

CUT_BYTES = 64
"""A shard is cut among replicas at multiples of this, so that copies start on cache lines."""


class Rectangle(NamedTuple):
    """Bytes of the image: `runs` runs of `run_bytes` bytes, the first at `offset`, each `stride` bytes after the last."""

    offset: int
    run_bytes: int
    runs: int
    stride: int


def tile_of(entry: TensorEntry, dim: int, start: int, stop: int) -> Tile:
    """Places `start` to `stop` along dimension `dim` of a tensor that has elements."""
    runs = prod(entry.shape[:dim])
    inner = entry.nbytes // (runs * entry.shape[dim])
    run_bytes, stride = (stop - start) * inner, entry.shape[dim] * inner
    if run_bytes == stride:
        run_bytes, runs = run_bytes * runs, 1
    return Tile(entry.offset + start * inner, run_bytes, runs, stride if runs > 1 else run_bytes, 0, run_bytes * runs)


def whole_tensor(entry: TensorEntry) -> Tile:
    """All bytes of a tensor."""
    return Tile(entry.offset, entry.nbytes, 1, entry.nbytes, 0, entry.nbytes)


def join(tiles: Iterable[Tile]) -> list[Tile]:
    """The same bytes in fewer tiles: runs that touch in the image become one."""
    joined: list[Tile] = []
    for tile in tiles:
        last = joined[-1] if joined else None
        if last is not None and last.runs == tile.runs == 1 and _end(last) == _begin(tile):
            nbytes = last.nbytes + tile.nbytes
            joined[-1] = Tile(_begin(last), nbytes, 1, nbytes, 0, nbytes)
        else:
            joined.append(tile)
    return joined


def cut_range(nbytes: int, parts: int, index: int) -> tuple[int, int]:
    """First byte of part `index` (0 first) of `nbytes` bytes, and the byte after its last one; the parts are about equal."""
    if not 0 <= index < parts:
        raise ValueError(f"index must be in 0 to {parts - 1}, got {index}")
    start = nbytes * index // parts // CUT_BYTES * CUT_BYTES
    stop = nbytes * (index + 1) // parts // CUT_BYTES * CUT_BYTES
    return start, nbytes if index + 1 == parts else stop


def cut(tiles: Sequence[Tile], parts: int, index: int) -> list[Tile]:
    """Part `index` of a shard of which `parts` trainers have a copy each: the bytes of `cut_range`."""
    low, high = cut_range(sum(tile.nbytes for tile in tiles), parts, index)
    kept: list[Tile] = []
    done = 0
    for tile in tiles:
        start, stop = max(0, low - done), min(tile.nbytes, high - done)
        if start < stop:
            kept.append(msgspec.structs.replace(tile, first=tile.first + start, nbytes=stop - start))
        done += tile.nbytes
    return kept


class ShardMap:
    """Where the bytes of a shard lie in the image. `nbytes` is their number."""

    def __init__(self, tiles: Sequence[Tile]) -> None:
        self._tiles = tiles
        self._begins = [_begin(tile) for tile in tiles]
        self._starts = list(accumulate((tile.nbytes for tile in tiles), initial=0))
        self.nbytes = self._starts[-1]

    def part_of_chunk(self, low: int, high: int) -> tuple[int, int]:
        """The shard's bytes that lie in the image's bytes `low` to `high`: the first one, and the one after the last."""
        return self._before(low), self._before(high)

    def chunks(self, manifest: Manifest) -> list[int]:
        """The chunks of which the shard has a part, ascending."""
        ends = [self._before(manifest.chunk_range(chunk)[1]) for chunk in range(manifest.chunks)]
        return [chunk for chunk, (start, stop) in enumerate(zip([0, *ends], ends, strict=False)) if start < stop]

    def parts(self, manifest: Manifest) -> list[tuple[int, int]]:
        """The part of each of `chunks`, as `part_of_chunk` gives it."""
        return [self.part_of_chunk(*manifest.chunk_range(chunk)) for chunk in self.chunks(manifest)]

    def rectangles(self, start: int, stop: int) -> list[Rectangle]:
        """Where the shard's bytes `start` to `stop` lie in the image, in their order; three rectangles a tile at most."""
        found: list[Rectangle] = []
        index = max(0, bisect_right(self._starts, start) - 1)
        while start < stop:
            tile, begin = self._tiles[index], self._starts[index]
            end = min(stop, self._starts[index + 1])
            if start < end:
                found += _rectangles(tile, tile.first + start - begin, tile.first + end - begin)
            start, index = end, index + 1
        return found

    def _before(self, place: int) -> int:
        """How many of the shard's bytes lie before byte `place` of the image."""
        index = bisect_left(self._begins, place) - 1
        if index < 0:
            return 0
        tile = self._tiles[index]
        run, rest = divmod(place - tile.offset, tile.stride)
        number = run * tile.run_bytes + min(rest, tile.run_bytes)
        return self._starts[index] + min(max(0, number - tile.first), tile.nbytes)


def _place(tile: Tile, number: int) -> int:
    """Where in the image the byte lies that has this number in the tile's order."""
    run, rest = divmod(number, tile.run_bytes)
    return tile.offset + run * tile.stride + rest


def _begin(tile: Tile) -> int:
    return _place(tile, tile.first)


def _end(tile: Tile) -> int:
    return _place(tile, tile.first + tile.nbytes - 1) + 1


def _rectangles(tile: Tile, start: int, stop: int) -> list[Rectangle]:
    """The bytes numbered `start` to `stop` in the tile's order: the rest of a run, whole runs, the beginning of one."""
    size = tile.run_bytes
    first_whole, after_whole = -(-start // size), stop // size
    if first_whole > after_whole:  # within one run
        return [Rectangle(_place(tile, start), stop - start, 1, stop - start)]
    found: list[Rectangle] = []
    if start < first_whole * size:
        nbytes = first_whole * size - start
        found.append(Rectangle(_place(tile, start), nbytes, 1, nbytes))
    if first_whole < after_whole:
        runs = after_whole - first_whole
        found.append(Rectangle(_place(tile, first_whole * size), size, runs, tile.stride if runs > 1 else size))
    if after_whole * size < stop:
        nbytes = stop - after_whole * size
        found.append(Rectangle(_place(tile, after_whole * size), nbytes, 1, nbytes))
    return found


# --- which chunk when -----------------------------------------------------------------------------------------------


def chunk_order(manifest: Manifest, shards: Sequence[Shard]) -> list[int]:
    """The order in which all relays take the chunks: those of different trainers in turn, so that all trainers send at once.

    A chunk counts as the trainer's that has most of it (where several have as much, that with fewest bytes so far). Each
    trainer's chunks are spread evenly over the whole order, so that they all end together, too.
    """
    holders: list[list[tuple[int, int]]] = [[] for _ in range(manifest.chunks)]
    for place, shard in enumerate(shards):
        owned = ShardMap(shard.tiles)
        for chunk, (start, stop) in zip(owned.chunks(manifest), owned.parts(manifest), strict=True):
            holders[chunk].append((stop - start, place))
    loads = [0] * len(shards)
    queues: list[list[int]] = [[] for _ in range(len(shards) + 1)]  # the last one: chunks with nothing but gaps
    for chunk, parts in enumerate(holders):
        nbytes, place = min(parts, key=lambda part: (-part[0], loads[part[1]], part[1]), default=(0, len(shards)))
        queues[place].append(chunk)
        if parts:
            loads[place] += nbytes
    turns = [
        ((2 * turn + 1) / len(queue), place, chunk)
        for place, queue in enumerate(queues)
        for turn, chunk in enumerate(queue)
    ]
    return [chunk for _, _, chunk in sorted(turns)]


# --- whether the shards are the image -------------------------------------------------------------------------------


class _Patch(NamedTuple):
    """Columns `low` to `high` of rows `first` to `last` (not included) of a tensor seen as a table, held by `rank`."""

    first: int
    last: int
    low: int
    high: int
    rank: int


def check_cover(manifest: Manifest, shards: Sequence[Shard]) -> None:
    """ProtocolError where the shards do not hold each byte of every tensor exactly once, and none besides.

    It names the tensor, its byte, and the rank or ranks. A tensor with columns for several ranks is a table whose rows are
    as long as their stride, everything else one of a single row, and a tile is at most three patches of it.
    """
    tensors = [entry for entry in manifest.tensors if entry.nbytes]
    held: list[list[tuple[int, Tile]]] = [[] for _ in tensors]
    ranks = [shard.rank for shard in shards]
    if len(set(ranks)) != len(ranks):
        raise ProtocolError(f"each trainer has one shard, got shards of ranks {ranks}")
    offsets = [entry.offset for entry in tensors]
    for shard in shards:
        end = 0
        for tile in shard.tiles:
            _check_tile(shard.rank, tile, end)
            end = _end(tile)
            for index, piece in _by_tensor(shard.rank, tile, tensors, offsets):
                held[index].append((shard.rank, piece))
    for entry, pieces in zip(tensors, held, strict=True):
        _check_tensor(entry, pieces)


def _check_tile(rank: int, tile: Tile, end: int) -> None:
    """Whether a tile makes sense, and begins after `end`, where the one before it has ended."""
    whole = tile.run_bytes * tile.runs
    if min(tile.run_bytes, tile.runs, tile.nbytes) < 1 or tile.stride < tile.run_bytes or tile.offset < 0:
        raise ProtocolError(f"the shard of rank {rank}: {tile} is no tile")
    if tile.first < 0 or tile.first + tile.nbytes > whole:
        raise ProtocolError(f"the shard of rank {rank}: {tile} has {whole} bytes")
    if _begin(tile) < end:
        raise ProtocolError(
            f"the shard of rank {rank}: the tile at byte {_begin(tile)} of the image begins before the last one has ended, "
            f"at byte {end}"
        )


def _by_tensor(
    rank: int, tile: Tile, tensors: Sequence[TensorEntry], offsets: Sequence[int]
) -> Iterable[tuple[int, Tile]]:
    """The tile in pieces of one tensor each, with the tensors' indices."""
    begin, end = _begin(tile), _end(tile)
    index = max(0, bisect_right(offsets, begin) - 1)
    while begin < end:
        entry = tensors[index] if index < len(tensors) else None
        stop = 0 if entry is None else min(end, entry.offset + entry.nbytes)
        if entry is None or not entry.offset <= begin < stop:
            raise ProtocolError(f"the shard of rank {rank} has byte {begin} of the image, which is in no tensor")
        if tile.runs > 1:
            if stop < end:
                raise ProtocolError(
                    f"the shard of rank {rank}: the tile at byte {begin} of the image ends at byte {end}, outside the "
                    f"tensor {entry.name!r}"
                )
            yield index, tile
        else:
            yield index, Tile(begin, stop - begin, 1, stop - begin, 0, stop - begin)
        begin, index = stop, index + 1


def _check_tensor(entry: TensorEntry, pieces: Sequence[tuple[int, Tile]]) -> None:
    """Go down the rows with the patches that each row meets, ordered by column: they must not overlap, nor leave a gap."""
    width = next((tile.stride for _, tile in pieces if tile.runs > 1), entry.nbytes)
    begins: dict[int, list[_Patch]] = {0: []}
    ends: dict[int, list[_Patch]] = {}
    for rank, tile in pieces:
        for patch in _patches(entry, width, rank, tile):
            begins.setdefault(patch.first, []).append(patch)
            ends.setdefault(patch.last, []).append(patch)
    active: list[tuple[int, int, int]] = []
    filled = 0
    for row in sorted(begins.keys() | ends.keys()):
        for patch in ends.get(row, []):
            active.remove((patch.low, patch.high, patch.rank))
            filled -= patch.high - patch.low
        for patch in begins.get(row, []):
            _check_free(entry, row * width, active, patch)
            insort(active, (patch.low, patch.high, patch.rank))
            filled += patch.high - patch.low
        if filled < width and row * width < entry.nbytes:
            low = _first_gap(active)
            raise ProtocolError(f"tensor {entry.name!r}: byte {row * width + low} of it is in the shard of no rank")


def _patches(entry: TensorEntry, width: int, rank: int, tile: Tile) -> Iterable[_Patch]:
    if tile.runs > 1 and (tile.stride != width or entry.nbytes % width):
        raise ProtocolError(
            f"tensor {entry.name!r} of {entry.nbytes} bytes: the shard of rank {rank} has runs of it at a stride of "
            f"{tile.stride} bytes, where the rows are {width} bytes long"
        )
    for offset, run_bytes, runs, _ in _rectangles(tile, tile.first, tile.first + tile.nbytes):
        row, low = divmod(offset - entry.offset, width)
        if runs > 1 and low + run_bytes > width:
            raise ProtocolError(
                f"tensor {entry.name!r}: byte {row * width + low} of it begins a run of rank {rank} that does not end in "
                f"its row of {width} bytes"
            )
        if low + run_bytes <= width:
            yield _Patch(row, row + runs, low, low + run_bytes, rank)
            continue
        after_row, high = divmod(low + run_bytes, width)  # a run over several rows
        if low > 0:
            yield _Patch(row, row + 1, low, width, rank)
        if row + (low > 0) < row + after_row:
            yield _Patch(row + (low > 0), row + after_row, 0, width, rank)
        if high > 0:
            yield _Patch(row + after_row, row + after_row + 1, 0, high, rank)


def _check_free(entry: TensorEntry, row_byte: int, active: Sequence[tuple[int, int, int]], patch: _Patch) -> None:
    """Whether no patch of the row that begins at `row_byte` has columns of `patch`."""
    index = bisect_left(active, (patch.low, patch.high, patch.rank))
    for low, high, rank in active[max(0, index - 1) : index + 1]:
        if low < patch.high and patch.low < high:
            raise ProtocolError(
                f"tensor {entry.name!r}: byte {row_byte + max(low, patch.low)} of it is in the shard of rank {rank} and in "
                f"that of rank {patch.rank}"
            )


def _first_gap(active: Sequence[tuple[int, int, int]]) -> int:
    """The first column that none of these has."""
    column = 0
    for low, high, _ in active:
        if low > column:
            return column
        column = high
    return column
