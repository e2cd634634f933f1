"""Mapping a part of a file that another process owns."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from laminar_hpc.process.memory import KeptMappings, map_readonly


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Three pages whose bytes tell their place."""
    path = tmp_path / "memory"
    path.write_bytes((np.arange(3 * mmap.PAGESIZE) % 251).astype(np.uint8).tobytes())
    return path


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, 10), (7, 1), (mmap.PAGESIZE, 5), (mmap.PAGESIZE + 3, 2 * mmap.PAGESIZE - 3)]
)
def test_the_bytes_asked_for_are_seen(file: Path, offset: int, nbytes: int) -> None:
    with map_readonly(str(file), offset, nbytes) as data:
        assert data.tobytes() == file.read_bytes()[offset : offset + nbytes]


def test_the_bytes_are_those_of_the_file_as_it_is_now_and_cannot_be_written(file: Path) -> None:
    with map_readonly(str(file), 5, 3) as data:
        with file.open("r+b") as stream:
            stream.seek(5)
            stream.write(b"xyz")
        assert data.tobytes() == b"xyz"
        with pytest.raises(ValueError, match="read-only"):
            data[0] = 1


def test_a_file_that_is_too_short_or_not_there_is_an_error(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="length"), map_readonly(str(file), 0, 4 * mmap.PAGESIZE):
        pass
    with pytest.raises(FileNotFoundError), map_readonly(str(tmp_path / "none"), 0, 1):
        pass


def test_a_kept_mapping_is_made_once_and_shows_what_is_there_now(file: Path) -> None:
    prepared = []
    kept = KeptMappings(lambda memory: prepared.append(memory.nbytes))
    first = kept.view(str(file), 5000, 1000)
    before = bytes(first)
    with open(file, "r+b") as changed:
        changed.seek(5000)
        changed.write(bytes(255 - byte for byte in before))
    again = kept.view(str(file), 5000, 1000)
    assert again is first
    assert bytes(again) == bytes(255 - byte for byte in before)
    assert not again.flags.writeable
    kept.view(str(file), 4096, 10)
    assert prepared == [1000, 10]


def test_mappings_of_another_file_go(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"abc")
    kept = KeptMappings()
    first = kept.view(str(file), 0, 10)
    assert bytes(kept.view(str(other), 0, 3)) == b"abc"
    assert kept.view(str(file), 0, 10) is not first
    with pytest.raises(FileNotFoundError):
        kept.view(str(tmp_path / "none"), 0, 3)
    assert len(kept.view(str(file), 0, 0)) == 0


def test_another_file_under_the_same_path_is_mapped_anew(file: Path, tmp_path: Path) -> None:
    kept = KeptMappings()
    before = kept.view(str(file), 0, 3)
    other = tmp_path / "other"
    other.write_bytes(b"abcdef")
    other.rename(file)
    assert bytes(kept.view(str(file), 0, 3)) == b"abc"
    assert bytes(before) == bytes([0, 1, 2])
