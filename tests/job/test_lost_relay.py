"""Whole jobs that lose a relay: training goes on, rollouts read elsewhere, and a spare takes its place."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from laminar_command import Laminar, processes_of, wait_until
from test_interrupt import descendants, ended_in_order, training

from laminar_hpc.record.reader import Run, open_run
from laminar_hpc.record.schema import RELAY_EVENTS

pytestmark = pytest.mark.job


def pid_of_rank(laminar: Laminar, rank: int) -> int:
    """The process that writes a rank's record."""
    for pid in processes_of(laminar.run_dir):
        links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        if any(f"rank-{rank:05d}" in link and link.endswith(".h5") for link in links):
            return pid
    raise AssertionError(f"no process writes the record of rank {rank}")


def happened(run: Run) -> list[str]:
    """What became of relays and versions, in order."""
    return [RELAY_EVENTS[int(code)] for code in run.table("relay_events")["what"]]


@pytest.mark.parametrize("spares", [0, 1])
def test_a_job_goes_on_without_a_relay(laminar: Laminar, spares: int) -> None:
    command = training(laminar, job={"relays": 2, "rollouts": 2, "spares": spares})
    run = open_run(str(laminar.run_dir))
    relay = max(file.rank for file in run.files if file.role == "relay")  # the other one is on the trainer's node
    reader = max(file.rank for file in run.files if file.role == "rollout")
    os.kill(pid_of_rank(laminar, relay), signal.SIGKILL)
    steps = len(run.table("steps"))

    def went_on() -> bool:
        assert command.poll() is None, command.communicate()
        run = open_run(str(laminar.run_dir))
        lost = run.table("failures")
        pulls = run.table("pulls")
        mine = pulls[pulls["rank"] == reader]
        trained = len(run.table("steps")) >= steps + 4
        return trained and len(lost) == 1 and (mine["time_s"] > lost[0]["time_s"]).sum() >= 4

    wait_until(went_on, 200.0, "pulls of the rollout whose relay was killed")
    pids = descendants(command.pid)
    os.kill(command.pid, signal.SIGINT)
    ended_in_order(laminar, command, pids, files=6 + 2 * spares)

    run = open_run(str(laminar.run_dir))
    assert list(run.table("steps")["step"]) == list(range(1, len(run.table("steps")) + 1))
    pulls = run.table("pulls")
    afar = pulls[(pulls["rank"] == reader) & (pulls["copy_s"] > 0)]
    what = happened(run)
    assert "lost" in what
    assert "attached" in what
    assert ("taken_over" in what) == bool(spares)
    if spares:
        assert len(afar) < np.sum(pulls["rank"] == reader)
    else:
        assert len(afar) >= 3
