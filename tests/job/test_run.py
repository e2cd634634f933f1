"""Whole runs: they finish, their record is complete, and what it says holds."""

from __future__ import annotations

import re

import msgspec
import numpy as np
import pytest
from laminar_command import Laminar, processes_of, shared_memory

from laminar_hpc.analysis.checks import Result, run_checks
from laminar_hpc.control.controller import Controller
from laminar_hpc.control.settings import Settings
from laminar_hpc.protocol.wire import decode
from laminar_hpc.record.reader import Run, open_run
from laminar_hpc.record.schema import TABLES
from laminar_hpc.record.status import read_status

pytestmark = pytest.mark.job


def finished(laminar: Laminar, **sections: dict[str, object]) -> Run:
    """Run a job to its end and open its record."""
    before = shared_memory()
    done = laminar("run", laminar.config(**sections))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    status = read_status(str(laminar.run_dir))
    assert status is not None
    assert status.state == "finished"
    assert processes_of(laminar.run_dir) == []
    assert shared_memory() <= before
    run = open_run(str(laminar.run_dir))
    assert run.unreadable == []
    for check in run_checks(run):
        assert check.result is Result.HOLDS, check
    stays = not len(run.table("moves")) and run.table("trajectories")["spans"].max() == 1
    if stays:  # one that was moved counts for the rollout that it ended at, one that was interrupted also meanwhile
        busy_as_recorded(done.stdout, run)
    return run


def busy_as_recorded(printed: str, run: Run) -> None:
    """ "rollouts busy" of each line is what the trajectories' own times say of the ten seconds before it."""
    said = [float(word) for word in re.findall(r"^step .*rollouts busy (\S+) of ", printed, re.MULTILINE)]
    steps, trajectories = run.table("steps"), run.table("trajectories")
    assert len(said) == len(steps)
    for figure, end in zip(said, steps["finished_s"], strict=True):
        begin = max(end - 10.0, trajectories["begun_s"].min())
        busy_s = 0.0
        for rank in set(trajectories["rank"]):
            mine = trajectories[trajectories["rank"] == rank]
            reached = begin
            for one in np.sort(mine, order="begun_s"):
                finished_s = end if np.isnan(one["finished_s"]) else min(end, one["finished_s"])
                busy_s += max(0.0, finished_s - max(reached, one["begun_s"]))
                reached = max(reached, finished_s)
        assert figure == pytest.approx(busy_s / (end - begin), abs=0.06), (figure, end)


def replayed(run: Run) -> None:
    """Feed the recorded events to a fresh controller: it has to give the recorded commands."""
    settings = msgspec.convert(run.setting("controller_settings"), Settings)
    controller = Controller(settings)
    commands = iter(run.commands())
    events = 0
    for event in run.events():
        for command in controller.handle(decode(event.data), event.time_s):
            recorded = next(commands)
            assert decode(recorded.data) == command
            assert recorded.time_s == event.time_s
        events += 1
    assert next(commands, None) is None
    assert events > 20


def loaded_what_was_published(run: Run, versions: int, all_of_them: bool = False) -> None:
    """Each pull's digest, taken inside the engine, is the one that the trainers published.

    The first and the last version reached the relays, or all of them; one that a newer one overtook may not have.
    """
    publications, pulls = run.table("publications"), run.table("pulls")
    published = dict(zip(publications["version"], publications["digest"], strict=True))
    assert {0, versions - 1} <= set(published) <= set(range(versions))
    assert len(published) == versions or not all_of_them
    assert len(set(published.values())) == len(published)
    assert len(pulls) > 0
    for pull in pulls:
        assert pull["digest"] == published[pull["version"]]
        assert pull["digest"] != 0


@pytest.mark.parametrize(
    ("mode", "trainers", "relays"),
    [
        ("laminar", 2, 2),
        ("sync", 1, 1),
        pytest.param("laminar", 1, 1, marks=pytest.mark.slow),
        pytest.param("sync", 2, 3, marks=pytest.mark.slow),
        pytest.param("one_step", 1, 2, marks=pytest.mark.slow),
        pytest.param("stream", 2, 1, marks=pytest.mark.slow),
    ],
)
def test_a_run_finishes_and_its_record_holds(laminar: Laminar, mode: str, trainers: int, relays: int) -> None:
    rollouts = 3 if relays == 3 else 2
    run = finished(
        laminar,
        job={"trainers": trainers, "relays": relays, "rollouts": rollouts},
        control={"mode": mode, "steps": 4},
        trainer={"learning_rate": 1e-3, "weight_decay": 0.1},  # changes weights, whatever the rewards are
        batch={"prompts": 4, "group_size": 4, "minibatches": 2},
    )
    assert len(run.files) == 1 + trainers + relays + rollouts
    assert list(run.table("steps")["step"]) == [1, 2, 3, 4]
    assert list(run.table("evaluations")["step"]) == [0, 2, 4]
    assert np.all(run.table("evaluations")["prompts"] == 8)
    held = run.table("relay_versions")
    held = held[held["what"] == TABLES["relay_versions"].code("what", "complete")]
    complete = [set(held["version"][held["rank"] == rank]) for rank in set(held["rank"])]
    assert len(complete) == relays
    assert np.all(held["memory_bytes"] >= 3 * held["nbytes"])  # weights.slots of them
    assert all({0, 4} <= versions <= set(range(5)) for versions in complete)
    if mode == "sync":  # nobody is ahead of a version, so none is passed over
        assert all(versions == set(range(5)) for versions in complete)
    loaded_what_was_published(run, versions=5, all_of_them=mode == "sync")
    replayed(run)
    steps = run.table("steps")
    assert np.all(steps["samples"] == 16)
    if mode == "sync":
        assert np.all(steps["staleness_consumption_max"] == 0)
        assert np.allclose(steps["kl_behaviour"][:1], 0, atol=0.05)
    for column in ("loss", "entropy", "clip_fraction_low", "clip_fraction_high", "kl_behaviour", "grad_norm"):
        assert np.all(np.isfinite(steps[column])), column


def test_sync_trains_on_what_the_very_policy_has_generated(laminar: Laminar) -> None:
    """Steps of one mini-batch: no weights change between generating and training, so that all ratios are 1."""
    run = finished(
        laminar,
        control={"mode": "sync", "steps": 3},
        trainer={"learning_rate": 1e-3, "weight_decay": 0.1},
        batch={"prompts": 4, "group_size": 4, "minibatches": 1},
        evaluation={"every": 0},
    )
    steps, metrics = run.table("steps"), run.table("step_metrics")
    differences = metrics["value"][metrics["name"] == b"mismatch_max"]
    assert len(steps) == len(differences) == 3
    assert steps["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert differences == pytest.approx(0.0, abs=1e-5)
    assert np.all(run.table("trajectories")["staleness_consumption"] <= 0)


def test_interrupted_trajectories_go_on_under_newer_weights_within_the_bound(laminar: Laminar) -> None:
    """Mode partial: long responses, and steps of few of them."""
    run = finished(
        laminar,
        job={"rollouts": 2},
        control={"mode": "partial", "steps": 8, "max_staleness": 2},
        rollout={"concurrency": 8, "slots": 8, "max_response_tokens": 160, "stream_interval_s": 0.05},
        trainer={"correction": "decoupled"},
        batch={"prompts": 2, "group_size": 4, "minibatches": 2},
        evaluation={"every": 4},
        record={"tokens": True},
    )
    replayed(run)
    rows = run.table("trajectories")
    train = rows[rows["purpose"] == TABLES["trajectories"].code("purpose", "train")]
    mixed = train[train["spans"] > 1]
    assert len(mixed) > 0
    assert np.all(mixed["newest_version"] > mixed["version"])
    assert np.all(mixed["prefilled_tokens"] > mixed["prompt_tokens"])
    assert np.all(train["staleness_consumption"] <= 2)
    versions: dict[int, list[int]] = {}
    tokens: dict[int, int] = {}
    for block in run.tokens():
        tokens[block.trajectory] = tokens.get(block.trajectory, 0) + len(block.tokens)
        if block.version is not None:
            versions.setdefault(block.trajectory, []).append(block.version)
    for row in train:
        mine = versions[int(row["trajectory"])]
        assert mine == sorted(mine)
        assert (mine[-1], len(set(mine))) == (row["newest_version"], row["spans"])
        assert mine[0] >= row["version"]  # newer where it was interrupted before its first token
        assert tokens[int(row["trajectory"])] == row["prompt_tokens"] + row["response_tokens"]


def test_a_jsonl_task_with_a_verifier_and_the_report(laminar: Laminar) -> None:
    prompts = laminar.directory / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{n} + 1 =", "answer": "{n + 1}"}}\n' for n in range(40)))
    run = finished(
        laminar,
        task={"name": "jsonl", "path": str(prompts), "verifier": "number"},
        control={"steps": 2},
        record={"tokens": True},
    )
    trained = run.table("trajectories")
    train = TABLES["trajectories"].code("purpose", "train")
    consumed = {int(row["trajectory"]) for row in trained if row["purpose"] == train}
    blocks: dict[int, int] = {}
    for block in run.tokens():
        blocks[block.trajectory] = blocks.get(block.trajectory, 0) + len(block.tokens)
    assert len(consumed) == 32
    assert consumed <= set(blocks)
    for row in trained:
        assert blocks[int(row["trajectory"])] == row["prompt_tokens"] + row["response_tokens"]
    done = laminar("report", laminar.run_dir)
    assert done.returncode == 0, done.stderr
    page = laminar.run_dir / "report" / "report.html"
    assert f"report: {page}" in done.stdout
    assert "every group comes from one weight version" in page.read_text()
