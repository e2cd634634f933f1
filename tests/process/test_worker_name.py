"""Workers tell each other apart in ps and top."""

from __future__ import annotations

from pathlib import Path

import pytest

from laminar_hpc.process.channel import Channel, wait_any
from laminar_hpc.process.worker import Worker, start_forkserver
from laminar_hpc.protocol.peer import Shutdown

pytestmark = pytest.mark.process


def answer_once(channel: Channel) -> None:
    """A worker that says that it is there, and ends when it is told anything."""
    channel.send(Shutdown())
    channel.receive()


@pytest.mark.parametrize(("name", "shown"), [("engine", "laminar engine"), ("a-longer-name", "laminar a-longe")])
def test_a_worker_is_shown_under_its_name(tmp_path: Path, name: str, shown: str) -> None:
    start_forkserver()
    worker = Worker(name, answer_once, str(tmp_path / "log"))
    try:
        wait_any([worker.channel], 60.0)
        assert worker.receive_all() == [Shutdown()]
        assert Path(f"/proc/{worker.pid}/comm").read_text() == shown + "\n"
    finally:
        worker.kill()
