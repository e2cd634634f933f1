"""A file is read while it is written, opens after its writer was killed, and survives a disk that is full."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from laminar_hpc.errors import RecordError
from laminar_hpc.record.reader import Run, open_run

StartWriter = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "records").mkdir()
    return tmp_path / "records" / "attempt-0.rank-00000.x.h5"


def said(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def check_rows(run: Run, role: str) -> int:
    """That the rows are the first ones of those that endless_writer.py writes; how many there are."""
    if role == "manager":
        logged = list(run.events())
        assert [event.time_s for event in logged] == list(range(len(logged)))
        assert all(event.data == b"<%d>" % i * (i % 50) for i, event in enumerate(logged))
        return len(logged)
    pulls = run.table("pulls")
    for name in ("version", "time_s", "digest"):
        assert pulls[name].tolist() == list(range(len(pulls)))
    return len(pulls)


@pytest.mark.parametrize("role", ["manager", "rollout"])
def test_read_while_written(path: Path, tmp_path: Path, start_writer: StartWriter, role: str) -> None:
    child = start_writer(path, role)
    seen = 0
    for _ in range(6):
        flushed = int(said(child))
        run = open_run(str(tmp_path))
        rows = check_rows(run, role)
        assert rows >= max(flushed, seen)
        assert not run.unreadable
        assert not run.closed
        seen = rows
    assert child.poll() is None


@pytest.mark.parametrize("role", ["manager", "rollout"])
@pytest.mark.parametrize("flushes", [1, 2, 5, 30, 200])
def test_killed_at_any_moment(path: Path, tmp_path: Path, start_writer: StartWriter, role: str, flushes: int) -> None:
    child = start_writer(path, role)
    for _ in range(flushes):
        flushed = int(said(child))
    os.kill(child.pid, signal.SIGKILL)
    rest = child.communicate()[0].split()
    flushed = int(rest[-1]) if rest else flushed
    run = open_run(str(tmp_path))
    assert check_rows(run, role) >= flushed
    assert not run.closed


@pytest.mark.parametrize("role", ["manager", "rollout"])
@pytest.mark.parametrize("limit", [140_000, 200_001, 333_333, 600_000])
def test_a_full_disk_loses_only_what_was_not_flushed(
    path: Path, tmp_path: Path, start_writer: StartWriter, role: str, limit: int
) -> None:
    child = start_writer(path, role, str(limit))
    lines = child.communicate()[0].splitlines()
    assert child.returncode == 0
    *flushed, refusal, again = lines
    assert refusal == again
    assert refusal == f"refused {path}: cannot be written: File too large"
    assert check_rows(open_run(str(tmp_path)), role) >= int(flushed[-1])


def test_a_disk_that_is_full_at_the_start_leaves_no_file(path: Path, tmp_path: Path, start_writer: StartWriter) -> None:
    child = start_writer(path, "manager", "1000")
    assert child.communicate()[0] == f"refused {path}: cannot be created: File too large\n"
    assert child.returncode == 0
    assert list((tmp_path / "records").iterdir()) == []


def test_a_file_that_was_being_created_is_named(path: Path, tmp_path: Path) -> None:
    (tmp_path / "records" / f".{path.name}.part").write_bytes(b"half")
    with pytest.raises(RecordError, match=r"no readable record file: was being created$"):
        open_run(str(tmp_path))
