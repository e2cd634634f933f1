"""The status file is whole at every moment, and what is no status file is said in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from laminar_hpc.errors import RecordError
from laminar_hpc.record.status import STATES, Status, read_status, status_path, was_killed, write_status


def test_round_trip(tmp_path: Path) -> None:
    assert read_status(str(tmp_path)) is None
    status = Status.blank()
    status.step, status.steps, status.reward, status.rollouts_busy, status.rollouts = 3, 10, 0.25, 1, 2
    write_status(str(tmp_path), status)
    assert read_status(str(tmp_path)) == status
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
    assert status.line() == (
        "step 3/10  reward 0.250  generation 0 tok/s  training 0 tok/s  staleness -  rollouts busy 1.0 of 2"
    )


@pytest.mark.parametrize("state", STATES)
def test_over(state: str) -> None:
    status = Status.blank()
    status.state = state
    assert status.over == (state != "running")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no status file"),
        ('{"state": "finished"}', "is no status file: Object missing required field `reason`"),
        (msgspec.json.encode(msgspec.structs.replace(Status.blank(), state="lost")).decode(), "got 'lost'"),
    ],
)
def test_what_is_no_status_file(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "status.json").write_text(text)
    with pytest.raises(RecordError, match=message):
        read_status(str(tmp_path))


@pytest.mark.parametrize(("state", "syncs"), [("running", 0), ("finished", 1)])
def test_only_an_end_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, syncs: int
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    write_status(str(tmp_path), msgspec.structs.replace(Status.blank(), state=state))
    assert len(synced) == syncs


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    with pytest.raises(RecordError, match=f"{status_path(gone)}: cannot be written: No such file or directory"):
        write_status(gone, Status.blank())


def test_never_half_written(tmp_path: Path) -> None:
    """Another process replaces the file again and again; every read finds one of the two that it writes, whole."""
    code = (
        "import sys; from laminar_hpc.record.status import Status, write_status\n"
        "status = Status.blank()\n"
        "while True:\n"
        "    for status.reason in ('short', 'long' * 5000): write_status(sys.argv[1], status)\n"
        "    print(flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            for _ in range(30):
                child.stdout.readline()
                status = read_status(str(tmp_path))
                assert status is not None
                assert status.reason in ("short", "long" * 5000)
        finally:
            child.kill()


def test_whether_its_process_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        status = msgspec.structs.replace(Status.blank(), pid=child.pid)
        assert not was_killed(status)
        child.kill()
        child.wait()
    assert was_killed(status)
    assert not was_killed(msgspec.structs.replace(status, host="another host"))
    assert not was_killed(msgspec.structs.replace(status, state="finished"))
