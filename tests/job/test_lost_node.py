"""Whole jobs in an allocation of a real Slurm, that lose a node: they go on where there are nodes enough, or ask to be queued."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from laminar_command import LAMINAR, Laminar, processes_of, shared_memory, wait_until
from slurm_cluster import SlurmCluster, missing
from test_interrupt import status_of

from laminar_hpc.analysis.checks import Result, run_checks
from laminar_hpc.record.reader import Run, open_run

pytestmark = [
    pytest.mark.job,
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
]

STEPS = 40
NEEDED = 3
"""Nodes: one for manager and trainer, and one for each relay and its rollout."""

OVER_S = 500.0
NODE_DOWN_S = 90.0

SCRIPT = """#!/bin/bash
#SBATCH --ntasks-per-node=2 --cpus-per-task=2 --no-kill --requeue --open-mode=append --signal=B:TERM@60
start=(run {config})
if [[ -d {run_dir} ]]; then start=(resume {run_dir}); fi
{laminar} "${{start[@]}}" &
job=$!
trap 'kill -TERM $job' TERM
wait $job
wait $job
code=$?
echo "exit code $code"
if ((code == 75)); then scontrol requeue "$SLURM_JOB_ID"; fi
"""


class Batch:
    """A job in the queue of a cluster, and what it prints."""

    def __init__(self, cluster: SlurmCluster, laminar: Laminar, nodes: int) -> None:
        self.cluster = cluster
        self.laminar = laminar
        self._output = laminar.directory / "batch.out"
        config = laminar.config(
            job={"relays": 2, "rollouts": 2},
            control={"steps": STEPS},
            checkpoint={"every": 2},
            evaluation={"every": 0},
        )
        script = laminar.directory / "batch.sh"
        script.write_text(SCRIPT.format(config=config, run_dir=laminar.run_dir, laminar=LAMINAR))
        cluster.login("sbatch", f"--nodes={nodes}", f"--output={self._output}", str(script))

    @property
    def output(self) -> str:
        return self._output.read_text() if self._output.exists() else ""

    def after_step(self, step: int, attempt: int = 0) -> None:
        """Wait until an attempt has done a step, and a checkpoint is there."""

        def done() -> bool:
            assert "exit code" not in self.output, self.output
            status = status_of(self.laminar)
            return (
                status is not None
                and (status.attempt, status.step) >= (attempt, step)
                and any(self.laminar.run_dir.glob("checkpoints/step-*"))
            )

        wait_until(done, OVER_S, f"step {step} of attempt {attempt}")

    def said(self, text: str) -> None:
        """Wait until it has printed `text`."""
        wait_until(lambda: text in self.output, OVER_S, f"{text!r} in the output of the job")

    def finished(self, attempts: list[int]) -> Run:
        """It ends with exit code 0, all steps are there, nothing is at odds in its record, and no process is left."""
        self.said("exit code 0")
        run = open_run(str(self.laminar.run_dir))
        assert run.attempts == attempts
        assert set(run.table("steps")["step"]) == set(range(1, STEPS + 1))
        for check in run_checks(run):
            assert check.result is not Result.VIOLATED, check
        wait_until(lambda: not processes_of(self.laminar.run_dir), 30.0, "all processes gone")
        return run


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SlurmCluster]:
    """A Slurm of as many nodes as the test asks for."""
    with SlurmCluster(tmp_path / "slurm", nodes=request.param, cpus=4) as cluster:
        yield cluster


def nodes_of(run: Run, attempt: int) -> list[str]:
    """The hosts that the ranks of an attempt were on, in rank order."""
    files = sorted((file for file in run.files if file.attempt == attempt), key=lambda file: file.rank)
    return list(dict.fromkeys(file.metadata["host"] for file in files))


@pytest.mark.parametrize("cluster", [NEEDED + 1], indirect=True)
def test_a_job_that_loses_a_node_goes_on_with_another_one_of_its_allocation(
    cluster: SlurmCluster, laminar: Laminar
) -> None:
    before = shared_memory()
    job = Batch(cluster, laminar, NEEDED + 1)
    job.after_step(3)
    lost, kept = cluster.nodes[1], [cluster.nodes[0], *cluster.nodes[2:]]
    cluster.kill_node(lost)
    run = job.finished([0, 1])
    assert f"no answer from {lost}\n" in job.output
    assert "starting again, 1 of at most 3 times: it has failed" in job.output
    assert nodes_of(run, 0) == cluster.nodes[:NEEDED]
    assert nodes_of(run, 1) == kept
    assert shared_memory() <= before


@pytest.mark.parametrize("cluster", [NEEDED], indirect=True)
def test_a_job_with_too_few_nodes_left_is_queued_again_and_goes_on_when_there_are_enough(
    cluster: SlurmCluster, laminar: Laminar
) -> None:
    job = Batch(cluster, laminar, NEEDED)
    job.after_step(3)
    lost = cluster.nodes[-1]
    cluster.kill_node(lost)
    job.said("exit code 75")
    status = status_of(laminar)
    assert status is not None
    assert status.state == "requeue"
    assert status.reason == f"2 of 3 nodes answer, the job needs 3; no answer from {lost}"
    assert processes_of(laminar.run_dir) == []
    wait_until(lambda: "down" in cluster.state(lost), NODE_DOWN_S, f"{lost} down")
    cluster.start_node(lost)
    run = job.finished([0, 1])
    assert nodes_of(run, 1) == cluster.nodes
