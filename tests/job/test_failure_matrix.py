"""Every kind of loss, on whole jobs, at random moments: the job goes on, by itself, and nothing is lost or left behind.

Two trainers, four rollouts on two nodes, a spare on each. What each loss cost is printed (`pytest -s`).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from failures import Fault, Outcome, noticed, opened, outcomes, replaced, spread, strike, table
from laminar_command import Laminar, pid_of, processes_of, shared_memory, wait_until
from test_interrupt import all_gone, descendants, mpiexec_of, status_of

from laminar_hpc.analysis.checks import Result, run_checks
from laminar_hpc.record.reader import Run

pytestmark = [pytest.mark.job, pytest.mark.slow]

RECOVERY_S = 300.0
ELSEWHERE_S = 1.0
REPETITIONS = 5
KILL, STOP = signal.SIGKILL, signal.SIGSTOP


def sections(**job: object) -> dict[str, dict[str, object]]:
    """Short patience, and checkpoints so often that each loss has one before it."""
    return {
        "job": {
            "trainers": 2,
            "relays": 2,
            "rollouts": 4,
            "spares": 1,
            "heartbeat_s": 0.5,
            "silence_timeout_s": 15,
            "start_timeout_s": 300,
            "stall_timeout_s": 120,
            **job,
        },
        "rollout": {"max_response_tokens": 48, "timeout_s": 10, "stream_interval_s": 0.1},
        "batch": {"prompts": 8, "group_size": 4},
        "control": {"steps": 100_000},
        "trainer": {"timeout_s": 15},
        "task": {"deadline_s": 5, "prompt_deadline_s": 5},
        "checkpoint": {"every": 5},
        "evaluation": {"every": 0},
    }


class Job:
    """A job that is struck."""

    def __init__(self, laminar: Laminar, **job: object) -> None:
        self.laminar = laminar
        self.before = shared_memory()
        self.command = laminar.start("run", laminar.config(**sections(**job)))
        self.faults: list[Fault] = []
        self.random = random.Random(str(laminar.directory))

    def ranks(self, role: str) -> list[int]:
        """Those that the job began with."""
        return sorted({file.rank for file in opened(self.laminar).files if file.role == role and file.attempt == 0})

    def attempt(self) -> int:
        status = status_of(self.laminar)
        return 0 if status is None else status.attempt

    def wait(self, condition: Callable[[], bool], what: str) -> float:
        """Seconds until it holds."""

        def holds() -> bool:
            assert self.command.poll() is None, self.command.communicate()
            return condition()

        return wait_until(holds, RECOVERY_S, what, every_s=0.25)

    def at_work(self, rollouts: int, attempt: int = 0) -> None:
        """So many rollouts have pulled in this attempt, and it has made a checkpoint."""

        def holds() -> bool:
            status = status_of(self.laminar)
            if status is None or status.attempt != attempt or status.step < 3:
                return False
            run = opened(self.laminar)
            pulls, saved = run.table("pulls"), run.table("checkpoints")
            pulled = len(set(pulls["rank"][pulls["attempt"] == attempt]))
            return pulled >= rollouts and bool((saved["attempt"] == attempt).any())

        self.wait(holds, f"{rollouts} rollouts at work in attempt {attempt}")

    def steps(self, more: int) -> None:
        """So many more steps are made."""
        status = status_of(self.laminar)
        assert status is not None
        self.wait(lambda: status_of(self.laminar).step >= status.step + more, f"{more} steps more")  # type: ignore[union-attr]

    def strike(self, kind: str, rank: int, worker: str | None, number: signal.Signals) -> None:
        """At a random moment of the next steps; and wait until the loss is known and training goes on.

        A worker that was lost before is struck again as soon as another one has been started, ready or not.
        """
        self.steps(self.random.randint(1, 6))
        faults: list[Fault] = []

        def struck() -> bool:
            fault = strike(self.laminar, kind, rank, worker, self.attempt(), number)
            faults.extend([] if fault is None else [fault])
            return fault is not None

        self.wait(struck, f"{kind}: a worker to strike")
        (fault,) = faults
        if worker == "task":
            replaced_s = self.wait(lambda: replaced(self.laminar, fault), f"{kind}: replaced")
            fault = fault._replace(replaced_s=replaced_s)
        else:
            self.wait(lambda: noticed(opened(self.laminar), fault), f"{kind}: noticed")
        self.faults.append(fault)
        self.steps(4)

    def end(self) -> Run:
        """Ask it to stop; all of it goes away, every prompt is accounted for, and nothing is at odds in the record.

        Every relay that was lost has had a spare in its place.
        """
        pids = descendants(self.command.pid)
        os.kill(self.command.pid, signal.SIGTERM)
        output, errors = self.command.communicate(timeout=RECOVERY_S)
        assert self.command.returncode == 75, output + errors
        wait_until(lambda: all_gone(pids, self.laminar.run_dir), 60.0, "all processes gone")
        assert shared_memory() <= self.before
        run = opened(self.laminar)
        assert run.unreadable == []
        for check in run_checks(run):
            assert check.result is not Result.VIOLATED, check
        relays = sum(fault.kind.startswith("relay") for fault in self.faults)
        assert run.values("relay_events", "what").count("taken_over") == relays
        return run


@pytest.fixture(scope="module")
def results() -> Iterator[list[tuple[Fault, Outcome]]]:
    """Of the losses inside jobs: as a table at the end."""
    found: list[tuple[Fault, Outcome]] = []
    yield found
    if found:
        print("\n" + table(found))


@pytest.fixture(scope="module")
def first_steps() -> Iterator[dict[str, list[float]]]:
    """Of the losses that begin another attempt: seconds until its first step, as a table at the end."""
    found: dict[str, list[float]] = {}
    yield found
    for kind, took_s in found.items():
        print(f"\n{kind:40} {len(took_s):3} first step after {spread(took_s)} s", end="")


@pytest.mark.parametrize("repetition", range(REPETITIONS))
def test_losses_inside_a_job(laminar: Laminar, results: list[tuple[Fault, Outcome]], repetition: int) -> None:
    job = Job(laminar)
    job.at_work(rollouts=4)
    trainers, relays, rollouts = job.ranks("trainer"), job.ranks("relay"), job.ranks("rollout")
    faults = [
        ("engine, SIGKILL", rollouts[0], "engine", KILL),
        ("engine, SIGSTOP", rollouts[1], "engine", STOP),
        ("grading, SIGSTOP", rollouts[0], "task", STOP),
        ("trainer's worker, SIGKILL", trainers[repetition % 2], "worker", KILL),
        ("trainer's worker, SIGSTOP", trainers[(repetition + 1) % 2], "worker", STOP),
        ("relay, SIGKILL", relays[0], None, KILL),
        ("relay, SIGSTOP", relays[1], None, STOP),
        ("rollout, SIGKILL", rollouts[2], None, KILL),
        ("rollout, SIGSTOP", rollouts[3], None, STOP),
    ]
    job.random.shuffle(faults)
    for fault in faults:
        job.strike(*fault)
    run = job.end()
    found = outcomes(run, job.faults)
    results += found
    print("\n" + "\n".join(f"{fault.kind:28} {result}" for fault, result in found))
    assert run.attempts == [0]
    lost = [result for fault, result in found if fault.kind.startswith("rollout") and result.trajectories]
    assert all(result.goes_on_s is not None and result.goes_on_s < ELSEWHERE_S for result in lost), lost


@pytest.mark.parametrize("repetition", range(REPETITIONS))
def test_losses_that_begin_another_attempt(
    laminar: Laminar, first_steps: dict[str, list[float]], repetition: int
) -> None:
    job = Job(laminar, relaunches=20)

    def struck(kind: str, hit: Callable[[], None]) -> None:
        attempt = job.attempt()
        job.at_work(rollouts=4, attempt=attempt)
        job.steps(job.random.randint(1, 6))
        hit()
        took_s = wait_until(
            lambda: (status := status_of(laminar)) is not None and status.attempt > attempt and status.step > 0,
            RECOVERY_S,
            f"{kind}: a step of the next attempt",
        )
        print(f"\n{kind}: {took_s:.1f} s until a step of the next attempt")
        first_steps.setdefault(kind, []).append(took_s)

    def signal_rank(rank: int, number: signal.Signals) -> None:
        os.kill(pid_of(laminar.run_dir, rank), number)

    def kill_node() -> None:
        """Everything that the job has on this machine, its launcher included."""
        mpiexec = mpiexec_of(job.command)
        for pid in [mpiexec, *descendants(mpiexec)]:
            os.kill(pid, KILL)

    job.at_work(rollouts=4)
    (manager,), trainers = job.ranks("manager"), job.ranks("trainer")
    struck("trainer's rank, SIGKILL", lambda: signal_rank(trainers[repetition % 2], KILL))
    struck("trainer's rank, SIGSTOP", lambda: signal_rank(trainers[(repetition + 1) % 2], STOP))
    struck("manager, SIGKILL", lambda: signal_rank(manager, KILL))
    struck("manager, SIGSTOP", lambda: signal_rank(manager, STOP))
    struck("all processes and the launcher, SIGKILL", kill_node)
    job.at_work(rollouts=4, attempt=job.attempt())
    run = job.end()
    assert len(run.attempts) == 6
    assert run.table("steps")["step"].max() == status_of(laminar).step  # type: ignore[union-attr]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MB, in memory."""
    if os.geteuid():
        pytest.skip("only root may mount a file system")
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", path], check=True)
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)


def test_a_full_disk_ends_the_job_in_order(small_disk: Path, model: Path) -> None:
    """It goes on without checkpoints, as long as there is room for the record; that can be read."""
    laminar = Laminar(small_disk, model)
    before = shared_memory()
    done = laminar("run", laminar.config(**sections(relaunches=0)))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "No space left on device" in done.stdout + done.stderr
    assert processes_of(laminar.run_dir) == []
    assert shared_memory() <= before
    run = opened(laminar)
    assert run.unreadable == []
    assert len(run.table("steps")) > 0
    for check in run_checks(run):
        assert check.result is not Result.VIOLATED, check


def test_ten_minutes_of_chaos(laminar: Laminar) -> None:
    """Workers are killed one after the other, as they come back, each spare is used up, and the manager is killed twice."""
    job = Job(laminar, relaunches=4, worker_restarts=100)
    job.at_work(rollouts=4)
    begun_s, spared = time.monotonic(), job.ranks("relay")
    trainers, rollouts, (manager,) = job.ranks("trainer"), job.ranks("rollout"), job.ranks("manager")
    while (passed_s := time.monotonic() - begun_s) < 600.0:
        if passed_s > 200.0 * (job.attempt() + 1):
            attempt = job.attempt()
            os.kill(pid_of(laminar.run_dir, manager), KILL)
            job.at_work(rollouts=4, attempt=attempt + 1)
            spared = job.ranks("relay")
        kind = job.random.choice(["engine", "engine", "task", "worker", "relay"])
        if kind == "relay" and spared:
            job.strike("relay", spared.pop(), None, KILL)
        elif kind in ("engine", "task"):
            job.strike(kind, job.random.choice(rollouts), kind, KILL)
        elif kind == "worker":
            job.strike(kind, job.random.choice(trainers), kind, KILL)
    run = job.end()
    print("\n" + table(outcomes(run, job.faults)))
    assert run.attempts == [0, 1, 2]
