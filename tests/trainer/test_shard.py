"""Copying parameters into a shard: which bytes go where, by hand, and what cannot be."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from laminar_hpc.errors import EngineError  # noqa: E402
from laminar_hpc.protocol.peer import Tile  # noqa: E402
from laminar_hpc.trainer.shard import ShardWriter, Source, pin  # noqa: E402


def numbers(first: int, count: int) -> torch.Tensor:
    return torch.arange(first, first + count, dtype=torch.uint8)


def source(tile: Tile, parameter: torch.Tensor, start: int = 0, dtype: torch.dtype | None = None) -> Source:
    return Source(tile, "w", parameter, start, dtype or parameter.dtype)


def sources() -> list[Source]:
    """Rows 1 and 2 of a table that has 3 of 40, and columns of another one that are all of a parameter of 3 x 30."""
    table, columns = numbers(0, 120).view(3, 40), numbers(120, 90).view(3, 30)
    return [source(Tile(0, 80, 1, 80, 0, 80), table, 40), source(Tile(128, 30, 3, 60, 0, 90), columns)]


def test_a_shard_is_the_parameters_bytes_in_the_images_order() -> None:
    writer = ShardWriter(sources(), 1, 0)
    memory = np.zeros(170, dtype=np.uint8)
    assert writer.write(memory) is None
    assert list(memory) == [*range(40, 120), *range(120, 210)]
    assert writer.tiles == [each.tile for each in sources()]


def test_replicas_cut_a_shard_wherever_that_is() -> None:
    # 170 bytes in 2 parts: 85 is rounded down to 64, so the second part begins 16 bytes before the table's rows end
    writers = [ShardWriter(sources(), 2, replica) for replica in range(2)]
    memories = [np.zeros(64, dtype=np.uint8), np.zeros(106, dtype=np.uint8)]
    for writer, memory in zip(writers, memories, strict=True):
        writer.write(memory)
    assert list(memories[0]) == list(range(40, 104))
    assert list(memories[1]) == list(range(104, 210))
    assert writers[0].tiles == [Tile(0, 80, 1, 80, 0, 64)]
    assert writers[1].tiles == [Tile(0, 80, 1, 80, 64, 16), Tile(128, 30, 3, 60, 0, 90)]


def test_the_weights_are_those_of_the_moment() -> None:
    parameter = torch.zeros(4, dtype=torch.bfloat16, requires_grad=True)
    writer = ShardWriter([source(Tile(0, 8, 1, 8, 0, 8), parameter)], 1, 0)
    memory = np.zeros(8, dtype=np.uint8)
    with torch.no_grad():
        parameter.fill_(1.0)  # the upper half of 0x3F800000
    writer.write(memory)
    assert memory.tobytes() == b"\x80\x3f" * 4
    writer.protect()
    with torch.no_grad():
        parameter.fill_(2.0)
    assert memory.tobytes() == b"\x80\x3f" * 4


def test_a_trainer_may_have_nothing_to_publish() -> None:
    writer = ShardWriter([source(Tile(0, 60, 1, 60, 0, 60), numbers(0, 60))], 2, 0)
    assert writer.tiles == []
    assert writer.write(np.zeros(0, dtype=np.uint8)) is None
    pin(np.zeros(0, dtype=np.uint8))


def test_memory_of_another_size_is_refused() -> None:
    with pytest.raises(EngineError, match="the shard has 170 bytes, the memory for it 171"):
        ShardWriter(sources(), 1, 0).write(np.zeros(171, dtype=np.uint8))


def test_a_parameter_in_pieces_is_refused() -> None:
    parameter = numbers(0, 12).view(3, 4).T
    with pytest.raises(EngineError, match="the parameter w is not contiguous"):
        ShardWriter([source(Tile(0, 12, 1, 12, 0, 12), parameter)], 1, 0)


@pytest.mark.parametrize("replica", [0, 1])
def test_a_parameter_of_another_type_is_rounded(replica: int) -> None:
    # norms are float32 where the image is bfloat16: 100 numbers from the second one on, of which a replica has 32 or 68
    parameter = torch.linspace(0.0, 3.0, 101)
    writer = ShardWriter([source(Tile(0, 200, 1, 200, 0, 200), parameter, 2, torch.bfloat16)], 2, replica)
    memory = np.zeros((64, 136)[replica], dtype=np.uint8)
    writer.write(memory)
    expected = parameter[1:].to(torch.bfloat16)[(slice(0, 32), slice(32, 100))[replica]]
    assert torch.equal(torch.from_numpy(memory).view(torch.bfloat16), expected)
