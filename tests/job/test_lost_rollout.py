"""Whole jobs that lose a rollout's rank."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest
from laminar_command import Laminar, wait_until
from test_lost_relay import pid_of_rank

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
