"""Whole jobs that lose a rollout's rank, or its engine."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest
from laminar_command import Laminar, wait_until, writers_of
from test_job_repack import responses
from test_lost_relay import pid_of_rank
from test_run import replayed

from laminar_hpc.errors import RecordError
from laminar_hpc.protocol.events import RolloutReady
from laminar_hpc.protocol.wire import decode
from laminar_hpc.record.reader import open_run

pytestmark = pytest.mark.job


@pytest.mark.parametrize("mode", ["laminar", "sync"])
def test_a_job_goes_on_without_a_rollout_that_has_never_reported(laminar: Laminar, mode: str) -> None:
    command = laminar.start("run", laminar.config(job={"rollouts": 2}, control={"mode": mode, "steps": 2}))
    found: list[int] = []

    def begun() -> bool:
        assert command.poll() is None, command.communicate()
        with contextlib.suppress(AssertionError, OSError):
            found.append(pid_of_rank(laminar, 4))
        return bool(found)

    wait_until(begun, 120.0, "the record of the last rollout")
    os.kill(found[0], signal.SIGKILL)
    printed, complaints = command.communicate(timeout=400)
    assert command.returncode == 0, printed + complaints
    run = open_run(str(laminar.run_dir))
    reported = {event.rank for one in run.events() if isinstance(event := decode(one.data), RolloutReady)}
    assert reported == {3}
    assert list(run.table("steps")["step"]) == [1, 2]
    assert [line for line in printed.splitlines() if "its process is gone" in line] == [
        line for line in printed.splitlines() if line.startswith("rank 4 (rollout 1 on ")
    ]
    assert "rank 4 (rollout 1 on " in printed


@pytest.mark.slow
def test_a_lost_engine_loads_its_version_again_and_every_trajectory_has_the_same_tokens(laminar: Laminar) -> None:
    """One rollout is given all 16 groups under version 0; its engine is killed when two steps are trained on what is done."""
    config = laminar.config(
        job={"rollouts": 1},
        rollout={"concurrency": 64, "slots": 8, "max_response_tokens": 160, "stream_interval_s": 0.02},
        weights={"slots": 12},  # nothing has to be retired
        control={"steps": 8, "ahead": 7.0},
        batch={"prompts": 2},
        evaluation={"every": 0},
        record={"tokens": True, "flush_s": 0.1},
    )
    found = []
    for kill in (False, True):
        command = laminar.start("run", config)
        if kill:
            wait_until(lambda: _published(laminar, 2), 120.0, "version 2")
            os.kill(
                writers_of(laminar.run_dir, laminar.run_dir / "logs" / "rank-00003.rollout.engine.log")[0],
                signal.SIGKILL,
            )
        printed, complaints = command.communicate(timeout=400)
        assert command.returncode == 0, printed + complaints
        run = open_run(str(laminar.run_dir))
        assert len(run.table("failures")) == kill
        assert list(run.table("pulls")["version"][: 1 + kill]) == [0] * (1 + kill)
        assert set(run.table("trajectories")["version"]) == {0}
        assert set(run.values("trajectories", "state")) == {"consumed"}
        replayed(run)
        found.append(responses(run))
        laminar.run_dir.rename(laminar.directory / f"killed {kill}")
    without, with_a_loss = found
    assert len(without) == 64
    assert with_a_loss == without


def _published(laminar: Laminar, version: int) -> bool:
    if not (laminar.run_dir / "status.json").exists():
        return False
    with contextlib.suppress(OSError, RecordError):
        return bool((open_run(str(laminar.run_dir)).table("publications")["version"] >= version).any())
    return False
