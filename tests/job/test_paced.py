"""Jobs of emulated GPUs: no model, the real job around them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from laminar_command import LAMINAR, Laminar, processes_of
from test_run import finished, loaded_what_was_published, replayed

from laminar_hpc.analysis.checks import Result, run_checks
from laminar_hpc.record.reader import Run, open_run
from laminar_hpc.record.status import MOST_LAG, read_status

pytestmark = pytest.mark.job

CONFIG = Path(__file__).parents[2] / "jobs" / "configs" / "paced-32b.toml"


def run_of(directory: Path, deadline_s: float, **values: object) -> Run:
    """Run the 32B config with these values over its own ones ("section__key"), to its end."""
    run_dir = directory / "run"
    line = [LAMINAR, "run", str(CONFIG), "--set", f"run_dir={run_dir}"]
    for key, value in values.items():
        line += ["--set", f"{key.replace('__', '.')}={value}"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=deadline_s, cwd=directory, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pace: emulated time lagged by " in done.stdout
    assert processes_of(run_dir) == []
    run = open_run(str(run_dir))
    for check in run_checks(run):
        assert check.result is not Result.VIOLATED, check
    return run


def test_a_job_without_a_model_trains_and_keeps_the_emulated_times(tmp_path: Path) -> None:
    scale = 0.05
    run = run_of(
        tmp_path,
        300.0,
        job__rollouts=2,
        rollout__concurrency=64,
        rollout__stream_interval_s=0.5,
        paced__time_scale=scale,
        paced__train_token_s=1e-4,
        batch__prompts=8,
        batch__minibatches=2,
        control__steps=3,
        record__events="true",
    )
    assert list(run.table("steps")["step"]) == [1, 2, 3]
    loaded_what_was_published(run, versions=4)
    replayed(run)
    assert np.all(run.table("pulls")["pause_s"] >= 0.558 * scale)
    assert np.all(run.table("publications")["stall_s"] >= 0.64 * scale)
    steps = run.table("steps")
    tokens = (steps["prompt_tokens"] + steps["response_tokens"]).astype(float)
    assert np.all(steps["train_s"] >= tokens * 1e-4 * scale)
    ended = run.table("trajectories")
    ended = ended[ended["response_tokens"] > 0]
    # the fastest that a token can come is a step of one trajectory
    assert np.all(ended["finished_s"] - ended["begun_s"] >= ended["response_tokens"] * (0.0106 + 0.023) * scale)
    assert len(np.unique(ended["response_tokens"])) > 40
    assert 1024 < ended["response_tokens"].mean() < 6000
    paces = run.table("pacing")
    roles = {file.rank: file.role for file in run.files}
    assert sorted(roles[rank] for rank in np.unique(paces["rank"])) == ["rollout", "rollout", "trainer"]
    assert np.all(paces["late_s"] >= 0)
    status = read_status(run.run_dir)
    assert status is not None
    assert status.lag is not None


def test_a_models_tokens_come_at_emulated_speed(laminar: Laminar) -> None:
    scale = 0.1
    run = finished(
        laminar,
        rollout={"engine": "paced"},
        paced={"model": "7b", "tokens": "model", "time_scale": scale},
        trainer={"learning_rate": 1e-3, "weight_decay": 0.1},  # changes weights, whatever the rewards are
        control={"steps": 3},
    )
    loaded_what_was_published(run, versions=4)
    ended = run.table("trajectories")
    assert np.all(ended["finished_s"] - ended["begun_s"] >= ended["response_tokens"] * (0.007 + 0.023) * scale)
    paced = set(run.table("pacing")["rank"])
    rollouts = {file.rank for file in run.files if file.role == "rollout"}
    assert paced  # one rollout may have come up too late for any work
    assert paced <= rollouts


PUBLISHED = (110.0, 295.9, 293.9, 639.8)
"""tests/rollout/test_paced_lifecycle.py: a real 32B engine's cache is full from, until; somebody waits until; the last end."""

IN_NO_TIME = (109.5, 290.9, 288.6, 676.1)
"""What the engine of those tests makes, in a time of its own, of the lengths that this job draws with seed 3."""


@pytest.mark.slow
def test_one_emulated_engine_lives_as_published_in_a_real_job(tmp_path: Path) -> None:
    """With real time, processes and messages, in 4 minutes."""
    scale = 0.3
    run = run_of(
        tmp_path,
        900.0,
        job__seed=3,
        job__rollouts=1,
        rollout__concurrency=512,
        rollout__stream_interval_s=1.0,
        paced__time_scale=scale,
        batch__prompts=32,
        batch__minibatches=1,
        control__steps=1,
        control__mode="sync",
        task__parameters="{ min_tokens = 100, max_tokens = 100 }",
    )
    status = read_status(run.run_dir)
    assert status is not None
    assert status.lag is not None
    assert status.lag <= MOST_LAG
    rows, ended = run.table("engine"), run.table("trajectories")
    assert len(ended) == 512
    begin_s = ended["begun_s"].min()
    emulated_s = (rows["time_s"] - begin_s) / scale
    full_s = emulated_s[rows["kv_use"] >= 0.99]
    waiting_s = emulated_s[(rows["waiting"] > 0) & (emulated_s > full_s[0])]
    found = (full_s[0], full_s[-1], waiting_s[-1], (ended["finished_s"].max() - begin_s) / scale)
    assert found == pytest.approx(PUBLISHED, rel=0.1)
    assert found == pytest.approx(IN_NO_TIME, rel=0.03)


class Work(NamedTuple):
    """What the rollouts of a job did while there were prompts to hand out: afterwards all drain, whatever is moved."""

    tokens_per_s: float
    kv_use: float


def work_of(run: Run) -> Work:
    """Seconds are of this machine; a rollout's use of its cache counts for as long as it was so."""
    handed_out_s = run.table("hand_outs")["handed_out_s"]
    since_s, until_s = handed_out_s.min(), handed_out_s.max()
    rows = run.table("engine")
    rows = rows[(rows["time_s"] > since_s) & (rows["time_s"] <= until_s)]
    held = 0.0
    for rank in np.unique(rows["rank"]):
        of_rank = rows[rows["rank"] == rank]
        held += float((of_rank["kv_use"] * np.diff(of_rank["time_s"], prepend=since_s)).sum())
    return Work(
        float(rows["generated_tokens"].sum()) / (until_s - since_s),
        held / (until_s - since_s) / len(np.unique(rows["rank"])),
    )


@pytest.mark.slow
def test_repack_generates_more_on_the_same_rollouts(tmp_path: Path) -> None:
    """Only the direction: README.md has the sizes, from a job of 16."""
    found = []
    for enabled in ("false", "true"):
        run = run_of(
            tmp_path,
            400.0,
            job__seed=1,
            job__rollouts=4,
            rollout__concurrency=64,
            rollout__max_response_tokens=8192,
            rollout__stream_interval_s=0.1,
            paced__time_scale=0.05,
            paced__train_token_s=1e-6,
            batch__prompts=16,
            control__steps=6,
            control__ahead=3,
            repack__enabled=enabled,
            repack__every_s=0.25,
        )
        status = read_status(run.run_dir)
        assert status is not None
        assert status.lag is not None
        assert status.lag <= MOST_LAG
        moved = (run.table("moves")["ending"] == b"moved").sum()
        assert (moved > 0) == (enabled == "true")
        found.append(work_of(run))
        (tmp_path / "run").rename(tmp_path / f"repack {enabled}")
    without, with_moves = found
    assert with_moves.tokens_per_s > without.tokens_per_s
    assert with_moves.kv_use > without.kv_use
