"""Runs that end before their time: everything is gone soon, and what was recorded can be read."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from laminar_command import Laminar, pid_of, processes_of, shared_memory, wait_until, writers_of

from laminar_hpc.analysis.checks import Result, run_checks
from laminar_hpc.record.reader import open_run
from laminar_hpc.record.status import Status, read_status

pytestmark = pytest.mark.job

GONE_S = 30.0
"""Three times what it may take on a machine with nothing else to do."""


def training(laminar: Laminar, **sections: dict[str, object]) -> subprocess.Popen[str]:
    """A job that would train for ever, some steps after its start, with both rollouts at work."""
    sections.setdefault("control", {"steps": 100_000})
    command = laminar.start("run", laminar.config(**sections))

    def has_trained() -> bool:
        assert command.poll() is None, command.communicate()
        status = status_of(laminar)
        if status is None or status.step < 3:
            return False
        return len(set(open_run(str(laminar.run_dir)).table("pulls")["rank"])) == 2

    wait_until(has_trained, 200.0, "three steps, and a pull of each rollout")
    return command


def status_of(laminar: Laminar) -> Status | None:
    """The status file, None where there is none yet."""
    return read_status(str(laminar.run_dir)) if laminar.run_dir.exists() else None


def descendants(pid: int) -> set[int]:
    """All processes that descend from `pid`, found by the kernel's list of children."""
    found: set[int] = set()
    todo = [pid]
    while todo:
        try:
            children = Path(f"/proc/{todo[0]}/task/{todo[0]}/children").read_text().split()
        except OSError:
            children = []
        todo = todo[1:] + [int(child) for child in children]
        found.update(int(child) for child in children)
    return found


def mpiexec_of(command: subprocess.Popen[str]) -> int:
    """The mpiexec that the command has started."""
    (child,) = (int(pid) for pid in Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split())
    assert b"laminar_hpc.jobs.train" in Path(f"/proc/{child}/cmdline").read_bytes()
    return child


def all_gone(pids: set[int], run_dir: Path) -> bool:
    """Whether none of the processes is left, nor any other that works for the run."""
    return not any(Path(f"/proc/{pid}").exists() for pid in pids) and not processes_of(run_dir)


def readable_record(laminar: Laminar, files: int = 5) -> None:
    """Every file opens, and no check of the report is violated."""
    run = open_run(str(laminar.run_dir))
    assert run.unreadable == []
    assert len(run.files) == files
    assert len(run.table("steps")) >= 2
    for check in run_checks(run):
        assert check.result is not Result.VIOLATED, check


def reported(laminar: Laminar) -> None:
    """The report works on what is there."""
    done = laminar("report", laminar.run_dir)
    assert done.returncode == 0, done.stderr
    assert (laminar.run_dir / "report" / "report.html").exists()


def accounted_for(laminar: Laminar) -> None:
    """Every prompt that was handed out has a row that says how it ended."""
    run = open_run(str(laminar.run_dir))
    handed_out = set(run.table("hand_outs")["group"])
    assert handed_out
    assert handed_out == set(run.table("groups")["group"])


def ended(laminar: Laminar, command: subprocess.Popen[str], pids: set[int], code: int, state: str) -> Status:
    """All of it goes away in time, with this exit code, and says so."""
    wait_until(lambda: all_gone(pids, laminar.run_dir), GONE_S, "all processes gone")
    output, errors = command.communicate(timeout=GONE_S)
    assert command.returncode == code, output + errors
    status = status_of(laminar)
    assert status is not None
    assert status.state == state
    return status


def ended_in_order(laminar: Laminar, command: subprocess.Popen[str], pids: set[int], files: int = 5) -> None:
    """After a signal to the command, all of it goes away in time, and says how it ended."""
    ended(laminar, command, pids, 130, "stopped")
    readable_record(laminar, files)
    accounted_for(laminar)


def test_a_termination_ends_everything_in_order(laminar: Laminar) -> None:
    before = shared_memory()
    command = training(laminar)
    pids = descendants(command.pid)
    assert len(pids) >= 11  # mpiexec, 5 ranks and the workers of 3
    os.kill(command.pid, signal.SIGTERM)
    status = ended(laminar, command, pids, 75, "requeue")
    assert status.reason == f"signal SIGTERM; the checkpoint of step {status.step} is complete"
    readable_record(laminar)
    assert shared_memory() <= before


def test_a_killed_launcher_takes_everything_with_it(laminar: Laminar) -> None:
    before = shared_memory()
    command = training(laminar)
    pids = descendants(command.pid)
    os.kill(mpiexec_of(command), signal.SIGKILL)
    ended(laminar, command, pids, 1, "failed")
    assert shared_memory() <= before
    readable_record(laminar)
    reported(laminar)


def test_a_killed_command_takes_everything_with_it(laminar: Laminar) -> None:
    before = shared_memory()
    command = training(laminar)
    pids = descendants(command.pid)
    os.kill(command.pid, signal.SIGKILL)
    command.wait(timeout=GONE_S)
    wait_until(lambda: all_gone(pids, laminar.run_dir), GONE_S, "all processes gone")
    assert shared_memory() <= before
    readable_record(laminar)


def test_a_killed_manager_ends_the_job(laminar: Laminar) -> None:
    command = training(laminar)
    pids = descendants(command.pid)
    status = status_of(laminar)
    assert status is not None
    os.kill(status.pid, signal.SIGKILL)
    ended(laminar, command, pids, 1, "failed")
    readable_record(laminar)


def worker_pid(laminar: Laminar, worker: str) -> int:
    """A worker process, found by the log that it writes to."""
    (log, *_) = sorted(laminar.run_dir.glob(f"logs/*.{worker}.log"))
    return writers_of(laminar.run_dir, log)[0]


def test_a_killed_engine_comes_back_and_an_interrupt_ends_everything_in_order(laminar: Laminar) -> None:
    before = shared_memory()
    command = training(laminar)
    os.kill(worker_pid(laminar, "engine"), signal.SIGKILL)

    def went_on() -> bool:
        assert command.poll() is None, command.communicate()
        run = open_run(str(laminar.run_dir))
        lost = run.table("failures")
        pulls = run.table("pulls")
        return len(lost) > 0 and bool(
            (pulls[pulls["rank"] == lost[0]["rank"]]["time_s"] > lost[0]["time_s"] + 0.5).any()
        )

    wait_until(went_on, 200.0, "a pull of the rollout whose engine was killed")
    pids = descendants(command.pid)
    os.kill(command.pid, signal.SIGINT)
    ended_in_order(laminar, command, pids)
    assert shared_memory() <= before
    reported(laminar)


def test_a_killed_trainer_worker_ends_the_job(laminar: Laminar) -> None:
    command = training(laminar)
    pids = descendants(command.pid)
    os.kill(worker_pid(laminar, "worker"), signal.SIGKILL)
    status = ended(laminar, command, pids, 1, "failed")
    assert status.reason.startswith("trainer rank 2 lost its worker: the trainer's worker has ended; see ")
    assert status.reason.endswith("; it cannot be replaced, since checkpoint.every is 0")
    readable_record(laminar)
    accounted_for(laminar)


def test_a_stall_names_who_waits_for_whom(laminar: Laminar) -> None:
    command = training(laminar, job={"rollouts": 2, "stall_timeout_s": 4, "heartbeat_s": 0.5})
    stopped = worker_pid(laminar, "worker")
    os.kill(stopped, signal.SIGSTOP)
    output, errors = command.communicate(timeout=60)
    assert command.returncode == 1, output + errors
    assert "who waits for whom" in errors.lower()
    assert "(rollout 0 on" in errors
    assert "waits for prompts from the manager" in errors
    status = status_of(laminar)
    assert status is not None
    assert status.state == "stalled"
    assert processes_of(laminar.run_dir) == []
    readable_record(laminar)
    accounted_for(laminar)
    assert len(open_run(str(laminar.run_dir)).table("waits")) == 4


def test_a_rollout_that_says_nothing_is_gone_around_until_it_speaks_again(laminar: Laminar) -> None:
    before = shared_memory()
    command = training(laminar, job={"heartbeat_s": 0.5, "silence_timeout_s": 3})
    rollout = pid_of(laminar.run_dir, rank=4)
    os.kill(rollout, signal.SIGSTOP)

    def lost() -> bool:
        assert command.poll() is None, command.communicate()
        return len(open_run(str(laminar.run_dir)).table("failures")) > 0

    def came_back() -> bool:
        assert command.poll() is None, command.communicate()
        run = open_run(str(laminar.run_dir))
        pulls = run.table("pulls")
        return bool((pulls[pulls["rank"] == 4]["time_s"] > run.table("failures")[0]["time_s"]).any())

    wait_until(lost, 60.0, "the loss of a rollout that is stopped")
    os.kill(rollout, signal.SIGCONT)
    wait_until(came_back, 200.0, "a pull of the rollout that was stopped")
    pids = descendants(command.pid)
    os.kill(command.pid, signal.SIGINT)
    ended_in_order(laminar, command, pids)
    assert shared_memory() <= before


def test_the_last_relay_may_be_held_up_for_longer_than_one_that_can_be_gone_around(laminar: Laminar) -> None:
    command = training(laminar, job={"heartbeat_s": 0.5}, weights={"relay_timeout_s": 1})

    def recorded_s() -> float:
        assert command.poll() is None, command.communicate()
        phases = open_run(str(laminar.run_dir)).table("phases")
        return float(phases[phases["rank"] == 0]["time_s"].max(initial=0.0))

    relay, stopped_s = pid_of(laminar.run_dir, rank=1), recorded_s()
    os.kill(relay, signal.SIGSTOP)
    wait_until(lambda: recorded_s() > stopped_s + 5.0, 60.0, "five times the bound, by the clock of the manager")
    os.kill(relay, signal.SIGCONT)
    status = status_of(laminar)
    assert status is not None
    stopped_at = status.step

    def went_on() -> bool:
        assert command.poll() is None, command.communicate()
        status = status_of(laminar)
        return status is not None and status.step >= stopped_at + 3

    wait_until(went_on, 60.0, "three steps more")
    pids = descendants(command.pid)
    os.kill(command.pid, signal.SIGINT)
    ended_in_order(laminar, command, pids)
    assert list(open_run(str(laminar.run_dir)).table("failures")["rank"]) == [-1]  # the stop, and nobody's loss
