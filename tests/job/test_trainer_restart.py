"""Whole jobs that lose a trainer's worker: it is replaced on the spot, and the run is the same as one that lost nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from laminar_command import Laminar, processes_of, shared_memory, writers_of
from safetensors.numpy import load_file
from test_resume import after_step, consumed, replayed

from laminar_hpc.analysis.checks import Result, run_checks
from laminar_hpc.record.reader import Run, open_run
from laminar_hpc.record.schema import ALL_PHASES

pytestmark = pytest.mark.job


def sections(mode: str, steps: int, every: int = 3) -> dict[str, dict[str, object]]:
    """Two trainers, a checkpoint after every so many steps."""
    return {
        "job": {"rollouts": 2, "trainers": 2, "relaunches": 0},
        "rollout": {"temperature": 1.0},
        "batch": {"prompts": 4, "group_size": 2, "minibatches": 2},
        "control": {"mode": mode, "steps": steps},
        "trainer": {"learning_rate": 1e-3, "weight_decay": 0.1, "timeout_s": 5},
        "checkpoint": {"every": every},
        "record": {"tokens": True},
        "evaluation": {"every": 0},
    }


def worker_of(laminar: Laminar, trainer: int) -> int:
    """The process of a trainer's worker, found by the log that it writes to."""
    log = sorted(laminar.run_dir.glob("logs/*.trainer.worker.log"))[trainer]
    return writers_of(laminar.run_dir, log)[0]


def complete(laminar: Laminar, steps: int, losses: int) -> Run:
    """The run has all its steps, once each, and nothing in it is at odds."""
    run = open_run(str(laminar.run_dir))
    assert run.attempts == [0]
    assert run.table("steps")["step"].tolist() == list(range(1, steps + 1))
    assert set(run.table("hand_outs")["group"]) == set(run.table("groups")["group"])
    assert len(run.table("failures")) >= losses
    assert processes_of(laminar.run_dir) == []
    for check in run_checks(run):
        assert check.result is not Result.VIOLATED, check
    return run


def test_training_goes_on_where_it_was(laminar: Laminar) -> None:
    before = shared_memory()
    command = laminar.start("run", laminar.config(**sections("laminar", steps=24, every=12)))
    after_step(laminar, command, 13)  # told once a second, so that a few more may be done, but not the next checkpoint
    os.kill(worker_of(laminar, 1), signal.SIGKILL)
    output, errors = command.communicate(timeout=400.0)
    assert command.returncode == 0, output + errors
    assert "has lost its worker, all begin again with step" in output
    run = complete(laminar, 24, losses=1)
    assert ALL_PHASES.index("repeat") in run.table("phases")["phase"]
    replayed(run, 0)
    assert shared_memory() <= before


@pytest.mark.slow
def test_it_comes_to_the_same_weights(laminar: Laminar, tmp_path_factory: pytest.TempPathFactory) -> None:
    """One worker is killed and, later, one is stopped, so that both trainers wait for ever."""
    steps = 16
    command = laminar.start("run", laminar.config(**sections("sync", steps)))
    for step, trainer, number in ((2, 1, signal.SIGKILL), (5, 0, signal.SIGKILL), (8, 1, signal.SIGSTOP)):
        after_step(laminar, command, step)
        os.kill(worker_of(laminar, trainer), number)
        after_step(laminar, command, step + 2)
    output, errors = command.communicate(timeout=400.0)
    assert command.returncode == 0, output + errors
    run = complete(laminar, steps, losses=3)
    other = Laminar(tmp_path_factory.mktemp("whole"), laminar.model)
    done = other("run", other.config(**sections("sync", steps)))
    assert done.returncode == 0, done.stdout + done.stderr
    whole = open_run(str(other.run_dir))
    assert consumed(run) == consumed(whole)
    for trainer in range(2):
        states = [load_file(last_state(one, trainer)) for one in (laminar, other)]
        assert states[0].keys() == states[1].keys()
        for name, tensor in states[0].items():  # not to the last bit: two trainers' sums are not always in one order
            np.testing.assert_allclose(tensor, states[1][name], rtol=0, atol=1e-5, err_msg=name)


def last_state(laminar: Laminar, trainer: int) -> Path:
    """The state of a trainer after the last step."""
    return max(laminar.run_dir.glob(f"checkpoints/step-*/trainer-{trainer}.safetensors"))
