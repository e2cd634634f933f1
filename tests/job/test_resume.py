"""Runs that are stopped, or killed, and go on: together they do what one run in one go does."""

from __future__ import annotations

import os
import signal
import subprocess

import msgspec
import numpy as np
import pytest
from laminar_command import Laminar, pid_of, processes_of, shared_memory, wait_until
from test_interrupt import GONE_S, all_gone, descendants, mpiexec_of, status_of, worker_pid

from laminar_hpc.analysis.checks import Result, run_checks
from laminar_hpc.control.controller import Controller
from laminar_hpc.control.settings import Settings
from laminar_hpc.protocol.wire import decode
from laminar_hpc.record.reader import Run, open_run

pytestmark = pytest.mark.job

STEPS = 24


def sections(mode: str, relaunches: int = 3) -> dict[str, dict[str, object]]:
    """Temperature 1, a checkpoint after each step, all tokens in the record."""
    return {
        "job": {"rollouts": 2, "relaunches": relaunches},
        "rollout": {"temperature": 1.0},
        "batch": {"prompts": 4, "group_size": 2, "minibatches": 2},
        "control": {"mode": mode, "steps": STEPS},
        "trainer": {"learning_rate": 1e-3, "weight_decay": 0.1},  # changes weights, whatever the rewards are
        "checkpoint": {"every": 1},
        "record": {"tokens": True},
        "evaluation": {"every": 4, "prompts": 4},
    }


def after_step(laminar: Laminar, command: subprocess.Popen[str], step: int) -> None:
    """Wait for a step."""

    def done() -> bool:
        assert command.poll() is None, command.communicate()
        status = status_of(laminar)
        return status is not None and status.step >= step

    wait_until(done, 400.0, f"step {step}")


def interrupted_run(laminar: Laminar, mode: str, **control: object) -> Run:
    """A run that is asked to stop, resumed, killed, resumed, killed and resumed to its end."""
    before = shared_memory()
    own = sections(mode, relaunches=0)
    command = laminar.start("run", laminar.config(**own | {"control": own["control"] | control}))
    after_step(laminar, command, 2)
    os.kill(command.pid, signal.SIGTERM)
    output, errors = command.communicate(timeout=120)
    assert command.returncode == 75, output + errors
    status = status_of(laminar)
    assert status is not None
    assert status.state == "requeue"
    for _ in range(2):
        status = status_of(laminar)  # it may have gone on for some steps before it was killed
        assert status is not None
        command = laminar.start("resume", laminar.run_dir)
        after_step(laminar, command, status.step + 2)
        pids = descendants(command.pid)
        os.kill(mpiexec_of(command), signal.SIGKILL)
        wait_until(lambda pids=pids: all_gone(pids, laminar.run_dir), GONE_S, "all processes gone")
        command.communicate(timeout=GONE_S)
    done = laminar("resume", laminar.run_dir)
    assert done.returncode == 0, done.stdout + done.stderr
    assert processes_of(laminar.run_dir) == []
    assert shared_memory() <= before
    run = open_run(str(laminar.run_dir))
    assert run.attempts == [0, 1, 2, 3]
    return run


def test_a_job_that_fails_is_started_again_from_its_checkpoint(laminar: Laminar) -> None:
    """Its manager is killed, and later its trainer; no timer writes the record, so what the checkpoints bring must do."""
    seldom = sections("laminar") | {"record": {"tokens": True, "flush_s": 3600.0}}
    command = laminar.start("run", laminar.config(**seldom))
    after_step(laminar, command, 2)
    saved = laminar.run_dir / "checkpoints"
    wait_until(lambda: any(path.suffix == ".attempt-0" for path in saved.glob("*")), 60.0, "a checkpoint")
    status = status_of(laminar)
    assert status is not None
    os.kill(status.pid, signal.SIGKILL)

    def goes_on() -> bool:
        assert command.poll() is None, command.communicate()
        status = status_of(laminar)
        return status is not None and status.attempt == 1 and status.step >= 3

    wait_until(goes_on, 400.0, "a step of the second attempt")
    os.kill(pid_of(laminar.run_dir, rank=2), signal.SIGKILL)
    output, errors = command.communicate(timeout=400.0)
    assert command.returncode == 0, output + errors
    assert "starting again, 1 of at most 3 times: it has failed" in output
    assert "starting again, 2 of at most 3 times: it has failed: trainer rank 2 was lost: " in output
    run = open_run(str(laminar.run_dir))
    assert run.attempts == [0, 1, 2]
    assert processes_of(laminar.run_dir) == []
    for check in run_checks(run):
        assert check.result is not Result.VIOLATED, check


@pytest.mark.slow
def test_a_job_that_makes_no_checkpoint_is_not_started_again(laminar: Laminar) -> None:
    command = laminar.start("run", laminar.config(**sections("laminar") | {"checkpoint": {"every": 0}}))
    after_step(laminar, command, 2)
    os.kill(worker_pid(laminar, "worker"), signal.SIGKILL)
    output, errors = command.communicate(timeout=60.0)
    assert command.returncode == 1, output + errors
    assert "again" not in output


def test_what_cannot_be_resumed_is_refused(laminar: Laminar) -> None:
    refused = laminar("resume", laminar.directory / "nowhere")
    assert refused.returncode == 2
    assert refused.stderr.endswith("nowhere/config.json: cannot be read: No such file or directory\n")
    done = laminar("run", laminar.config(**sections("sync") | {"control": {"mode": "sync", "steps": 1}}))
    assert done.returncode == 0, done.stdout + done.stderr
    refused = laminar("resume", laminar.run_dir)
    assert refused.returncode == 2
    assert refused.stderr == f"laminar: control.steps: all 1 steps of {laminar.run_dir} are done\n"


def committed(run: Run, table: str) -> np.ndarray:
    """The rows of a table that has a step, those of the latest attempt for each step."""
    rows = run.table(table)
    latest = {int(row["step"]): int(row["attempt"]) for row in np.sort(run.table("steps"), order="attempt")}
    return np.array([row for row in rows if latest.get(int(row["step"])) == row["attempt"]], dtype=rows.dtype)


def consumed(run: Run) -> dict[int, list[tuple]]:
    """For each step what it was trained on: prompt, sample, and tokens."""
    tokens: dict[tuple[int, int], list[int]] = {}
    for block in run.tokens():
        tokens.setdefault((block.attempt, block.trajectory), []).extend(block.tokens.tolist())
    found: dict[int, list[tuple]] = {}
    for row in committed(run, "trajectories"):
        if row["purpose"] == 0 and row["step"] > 0:
            key = (int(row["attempt"]), int(row["trajectory"]))
            found.setdefault(int(row["step"]), []).append((int(row["prompt"]), int(row["sample"]), tokens[key]))
    return {step: sorted(rows) for step, rows in found.items()}


@pytest.mark.slow
def test_in_sync_mode_it_is_the_same_to_the_last_bit(
    laminar: Laminar, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = interrupted_run(laminar, "sync")
    other = Laminar(tmp_path_factory.mktemp("whole"), laminar.model)
    done = other("run", other.config(**sections("sync")))
    assert done.returncode == 0, done.stdout + done.stderr
    whole = open_run(str(other.run_dir))
    assert sorted(consumed(run)) == sorted(consumed(whole)) == list(range(1, STEPS + 1))
    assert consumed(run) == consumed(whole)
    digests = [{int(row["step"]): int(row["digest"]) for row in one.table("publications")} for one in (run, whole)]
    assert digests[0][STEPS] == digests[1][STEPS]
    for check in run_checks(run):
        assert check.result is not Result.VIOLATED, check
    for attempt in run.attempts:
        replayed(run, attempt)


@pytest.mark.slow
def test_interrupted_trajectories_keep_their_bound_through_resumes(laminar: Laminar) -> None:
    """Mode partial counts what was handed out since the beginning of the run, not since that of the attempt."""
    last = 100  # its steps are short: with fewer, the run may be over before it is killed
    run = interrupted_run(laminar, "partial", max_staleness=2, steps=last)
    steps = committed(run, "steps")
    assert sorted(steps["step"]) == list(range(1, last + 1))
    assert np.all(run.table("steps")["staleness_consumption_max"] <= 2)
    assert np.any(steps["staleness_consumption_max"] > 0)
    for check in run_checks(run):
        assert check.result is not Result.VIOLATED, check
    for attempt in run.attempts:
        replayed(run, attempt)


def replayed(run: Run, attempt: int) -> None:
    """The recorded events of an attempt give its recorded commands."""
    (file,) = [file for file in run.files if file.attempt == attempt and file.role == "manager"]
    controller = Controller(msgspec.json.decode(file.metadata["controller_settings"], type=Settings))
    commands = iter(run.commands(attempt))
    for event in run.events(attempt):
        for command in controller.handle(decode(event.data), event.time_s):
            logged = next(commands, None)
            assert logged is None or decode(logged.data) == command
