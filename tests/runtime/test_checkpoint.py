"""The manager's part of checkpoints, on a real disk."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_hpc.control.snapshot import Snapshot
from laminar_hpc.errors import ConfigError
from laminar_hpc.protocol.events import Committed, SnapshotWritten
from laminar_hpc.protocol.trajectory import Block, Purpose, Source, State
from laminar_hpc.runtime.checkpoint import (
    CheckpointKeeper,
    newest_checkpoint,
    open_checkpoint,
    read_books,
    read_payload,
    relabelled,
)


def books(step: int) -> bytes:
    closed = {purpose: {State.CONSUMED: step} for purpose in Purpose}
    fields = {"versions": [], "groups": [], "trajectories": [], "buffer": [], "evaluating": False}
    snapshot = Snapshot(
        step=step, attempt=0, draws=2 * step, closed=closed, evaluated_step=-1, uniform=0, fruitless=0, **fields
    )
    return msgspec.msgpack.encode(snapshot)


def block(trajectory: int, tokens: int, version: int | None = 3) -> Block:
    return Block(trajectory, 0, Source.MODEL, version, bytes(4 * tokens), bytes(4 * tokens))


class Kept:
    """A keeper, and trainers that write a file each."""

    def __init__(self, root: Path, attempt: int = 0, keep: int = 2) -> None:
        self.keeper = CheckpointKeeper(str(root), attempt, keep, clock_zero_unix_s=1000.0, trainers=1)

    def events(self, count: int) -> list[SnapshotWritten | Committed]:
        found: list[SnapshotWritten | Committed] = []
        while len(found) < count:
            found += self.keeper.poll()
        return found

    def write(self, step: int, payload: list[list[Block]] | None = None) -> None:
        self.keeper.write(step, 0, books(step), payload or [])
        Path(self.keeper.directory(step, 0), "trainer-0.safetensors").write_bytes(b"state")

    def save(self, step: int, payload: list[list[Block]] | None = None) -> list[SnapshotWritten | Committed]:
        self.keeper.write(step, 0, books(step), payload or [])
        (written,) = self.events(1)
        Path(self.keeper.directory(step, 0), "trainer-0.safetensors").write_bytes(b"state")
        self.keeper.commit(step, 0)
        return [written, *self.events(1)]


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), max_size=4))
def test_what_is_kept_is_what_was_written(tmp_path_factory, lengths) -> None:
    root = tmp_path_factory.mktemp("checkpoints")
    payload = [[block(number, count) for count in counts] for number, counts in enumerate(lengths)]
    kept = Kept(root)
    written, committed = kept.save(4, payload)
    assert isinstance(written, SnapshotWritten)
    files = [root / "step-00000004.attempt-0" / name for name in ("books.msgpack", "payload.msgpack")]
    assert (written.step, written.error, written.nbytes) == (4, "", sum(file.stat().st_size for file in files))
    assert committed == Committed(4, 0)
    saved, wrong = newest_checkpoint(str(root))
    assert saved is not None
    assert wrong == []
    assert saved.directory == str(root / "step-00000004.attempt-0")
    assert saved == open_checkpoint(saved.directory)
    assert (saved.manifest.step, saved.manifest.attempt, saved.manifest.clock_zero_unix_s) == (4, 0, 1000.0)
    data, snapshot = read_books(saved)
    assert data == books(4)
    assert snapshot.draws == 8
    assert list(read_payload(saved)) == payload
    kept.keeper.close()


def test_the_newest_ones_are_kept_whatever_attempt_wrote_them(tmp_path: Path) -> None:
    first = Kept(tmp_path)
    for step in (2, 4, 6):
        first.save(step)
    first.keeper.close()
    second = Kept(tmp_path, attempt=1)
    second.keeper.write(9, 0, books(9), [])  # killed before it was complete
    second.events(1)
    second.save(8)
    assert sorted(os.listdir(tmp_path)) == ["step-00000006.attempt-0", "step-00000008.attempt-1"]
    second.keeper.close()


def test_one_that_was_passed_over_never_outlives_those_of_the_attempt_that_goes_on(tmp_path: Path) -> None:
    """The first attempt's last one is damaged; the second goes on from the one before it, and has not come as far yet."""
    first = Kept(tmp_path)
    for step in (8, 12):
        first.save(step)
    first.keeper.close()
    (tmp_path / "step-00000012.attempt-0" / "books.msgpack").write_bytes(b"")
    saved, (wrong,) = newest_checkpoint(str(tmp_path))
    assert (saved.manifest.step, "books.msgpack" in wrong) == (8, True)
    second = Kept(tmp_path, attempt=1)
    second.save(9)
    second.save(10)
    assert sorted(os.listdir(tmp_path)) == ["step-00000009.attempt-1", "step-00000010.attempt-1"]
    saved, wrong = newest_checkpoint(str(tmp_path))
    assert (saved.manifest.step, wrong) == (10, [])
    second.keeper.close()


def test_one_that_lacks_a_part_is_not_put_into_place(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.keeper.write(1, 0, books(1), [])
    kept.keeper.commit(1, 0)  # and no trainer has written its part
    _, committed = kept.events(2)
    assert committed == Committed(1, 0, f"{tmp_path}/step-00000001.attempt-0.0.part: a part is missing")
    assert newest_checkpoint(str(tmp_path)) == (None, [])
    kept.keeper.close()


def test_what_is_not_complete_is_none(tmp_path: Path) -> None:
    assert newest_checkpoint(str(tmp_path / "nowhere")) == (None, [])
    kept = Kept(tmp_path)
    kept.keeper.write(1, 0, books(1), [])
    kept.events(1)
    assert newest_checkpoint(str(tmp_path)) == (None, [])
    kept.keeper.abandon(1, 0)
    kept.keeper.close()
    assert os.listdir(tmp_path) == []


def test_one_begun_again_has_its_parts_to_itself(tmp_path: Path) -> None:
    """The first one of the step was given up while its payload was being written; a trainer writes its part of the second."""
    may_go_on = threading.Event()

    class Payload(list[list[Block]]):
        def __iter__(self) -> Iterator[list[Block]]:
            assert may_go_on.wait(60)
            return super().__iter__()

    kept = Kept(tmp_path)
    kept.keeper.write(1, 0, books(1), Payload())
    kept.keeper.abandon(1, 0)
    kept.keeper.write(1, 1, books(1), [])
    directory = Path(kept.keeper.directory(1, 1))
    directory.mkdir(exist_ok=True)
    (directory / "trainer-0.safetensors").write_bytes(b"state")
    may_go_on.set()
    kept.keeper.commit(1, 1)
    first, second, committed = kept.events(3)
    assert isinstance(first, SnapshotWritten)
    assert isinstance(second, SnapshotWritten)
    assert (first.serial, second.serial, committed) == (0, 1, Committed(1, 1))
    assert os.listdir(tmp_path) == ["step-00000001.attempt-0"]
    kept.keeper.close()


@pytest.mark.parametrize(
    ("file", "change", "text"),
    [
        ("trainer-0.safetensors", "cut", "must have 5 bytes, has 4"),
        ("trainer-0.safetensors", "gone", "is missing"),
        ("manifest.json", "gone", "cannot be read: No such file"),
        ("manifest.json", "cut", "is no checkpoint's manifest"),
    ],
)
def test_a_damaged_one_is_passed_over_and_named(tmp_path: Path, file: str, change: str, text: str) -> None:
    kept = Kept(tmp_path)
    kept.save(1)
    kept.save(2)
    kept.keeper.close()
    path = tmp_path / "step-00000002.attempt-0" / file
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] if file.startswith("trainer") else b"{")
    saved, (line,) = newest_checkpoint(str(tmp_path))
    assert saved is not None
    assert saved.manifest.step == 1
    assert text in line
    assert str(path) in line
    (tmp_path / "step-00000001.attempt-0" / "manifest.json").unlink()
    with pytest.raises(ConfigError, match="no checkpoint can be used: "):
        newest_checkpoint(str(tmp_path))


def test_files_that_are_not_ours_are_refused(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.save(1, [[block(0, 3)]])
    kept.keeper.close()
    saved, _ = newest_checkpoint(str(tmp_path))
    assert saved is not None
    payload, own = Path(saved.directory, "payload.msgpack"), Path(saved.directory, "books.msgpack")
    payload.write_bytes(payload.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="ends in the middle of a trajectory"):
        list(read_payload(saved))
    payload.write_bytes((1).to_bytes(8, "little") + b"\x01")
    with pytest.raises(ConfigError, match="does not have the blocks of trajectories"):
        list(read_payload(saved))
    own.write_bytes(b"\x01")
    with pytest.raises(ConfigError, match="does not have a controller's books"):
        read_books(saved)


def test_a_part_that_cannot_be_written_is_an_event(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = Kept(tmp_path / "file")
    kept.keeper.write(1, 0, books(1), [])
    (written,) = kept.events(1)
    assert isinstance(written, SnapshotWritten)
    assert written.error.endswith(": Not a directory")
    kept.keeper.commit(1, 0)
    (committed,) = kept.events(1)
    assert isinstance(committed, Committed)
    assert "No" in committed.error
    kept.keeper.close()


def test_a_kill_in_the_middle_leaves_no_checkpoint(tmp_path: Path) -> None:
    source = (
        "import os, sys, threading\n"
        "from laminar_hpc.runtime import checkpoint\n"
        "write = checkpoint._write_file\n"
        "def once(path, parts):\n"
        "    if path.endswith('manifest.json'):\n"
        "        os.kill(os.getpid(), 9)\n"
        "    return write(path, parts)\n"
        "checkpoint._write_file = once\n"
        f"keeper = checkpoint.CheckpointKeeper({str(tmp_path)!r}, 0, 2, 0.0, 0)\n"
        "keeper.write(1, 0, b'books', [])\n"
        "keeper.commit(1, 0)\n"
        "keeper.close()\n"
    )
    ended = subprocess.run([sys.executable, "-c", source], timeout=60, check=False)
    assert ended.returncode == -9
    assert newest_checkpoint(str(tmp_path)) == (None, [])


def test_blocks_of_the_same_weights_get_the_new_id() -> None:
    assert relabelled(block(1, 2, version=3), {3, 4}, 1_000_000).version == 1_000_000
    assert relabelled(block(1, 2, version=2), {3, 4}, 1_000_000).version == 2
    assert relabelled(block(1, 2, version=None), {3, 4}, 1_000_000).version is None
