"""Modes one_step and stream, step by step: cohorts of four groups of two, one cohort ahead of the weights."""

from __future__ import annotations

import pytest
from scripted_job import A, B, ScriptedJob, ids, kinds, only

from laminar_hpc.protocol.commands import Command, Generate, Publish, Train
from laminar_hpc.protocol.events import StopRequested
from laminar_hpc.protocol.trajectory import Verdict


def job_of(mode: str, **changes: int) -> ScriptedJob:
    return ScriptedJob(**{"mode": mode, "prompts": 4, "concurrency": 8, **changes})


def finish(job: ScriptedJob, generates: list[Generate]) -> list[Command]:
    return [command for one in generates for command in job.finish_all(one.rank, one)]


def groups(train: Train) -> list[int]:
    return list(dict.fromkeys(sample.group for sample in train.samples))


@pytest.mark.parametrize("mode", ["one_step", "stream"])
def test_the_next_cohort_is_generated_under_the_old_weights_while_the_first_is_trained_on(mode: str) -> None:
    job = job_of(mode)
    first = job.start()[B]
    commands = finish(job, first)
    second = only(commands, Generate)
    assert {spec.group for one in second for spec in one.trajectories} == {4, 5, 6, 7}
    assert {one.version for one in second} == {0}
    assert kinds(job.trained(1)) == ["ReportStep", "Settle"]
    job.spread(1)
    commands = finish(job, second)
    assert [command.version for command in commands if isinstance(command, Publish)] == [2]
    assert only(commands, Generate) == []  # the third one waits until all hold version 1
    assert job.loaded(A, 1) == []
    third = only(job.loaded(B, 1), Generate)
    assert {one.version for one in third} == {1}
    assert {spec.group for one in third for spec in one.trajectories} == {8, 9, 10, 11}
    report = job.trained(2)[0]
    assert (report.staleness_consumption_max, report.staleness_finish_max) == (1, 1)


def test_a_rollout_that_is_empty_while_its_cohort_is_not_all_handed_out_keeps_its_weights() -> None:
    """With room for one group each: the second cohort is handed out group by group, beside the publication of version 1."""
    job = job_of("one_step", concurrency=2)
    generates = list(job.start()[B])
    for _ in range(2):
        generates = only(finish(job, generates), Generate)
    assert {spec.group for one in generates for spec in one.trajectories} == {4, 5}
    job.trained(1)
    job.spread(1)
    (generate,) = only(job.finish_all(A, generates[0]), Generate)
    assert (generate.rank, generate.version) == (A, 0)


def test_one_step_begins_with_its_whole_cohort() -> None:
    job = job_of("one_step", minibatches=2)
    trajectories = [(one.rank, spec) for one in job.start()[B] for spec in one.trajectories]
    for rank, spec in trajectories[:-1]:
        assert only(job.finish(rank, spec.id, 0), Train) == []
    assert [train.minibatch for train in only(job.finish(*_last(trajectories)), Train)] == [0, 1]


def test_stream_trains_on_mini_batches_as_they_are_generated_and_publishes_after_the_last() -> None:
    job = job_of("stream", minibatches=2)
    by_group = _by_group(job.start()[B])
    assert only(_finish_group(job, by_group, 2), Train) == []
    (train,) = _finish_group(job, by_group, 0)
    assert isinstance(train, Train)
    assert (train.step, train.minibatch, train.minibatches, groups(train)) == (1, 0, 2, [0, 2])
    assert job.trained(1, minibatch=0) == []
    assert job.controller.waits()[0] == "step 1 waits for 2 groups (0 of 2 in the buffer, 2 in flight)"
    _finish_group(job, by_group, 3)
    commands = _finish_group(job, by_group, 1)
    assert kinds(commands)[:2] == ["Train", "Publish"]
    assert groups(only(commands, Train)[0]) == [1, 3]
    assert kinds(job.trained(1, minibatch=1)) == ["ReportStep", "Settle"]


def test_a_step_that_has_begun_in_mode_stream_is_finished_before_the_job_stops() -> None:
    """Also where a group has to be replaced for it; and no other step begins."""
    job = job_of("stream", minibatches=2, checkpoint_every=9)
    by_group = _by_group(job.start()[B])
    _finish_group(job, by_group, 0)
    _finish_group(job, by_group, 1)
    assert job.tell(StopRequested("time limit", save=True)) == []
    rank, first, second = by_group[2]
    job.finish(rank, first, 0, Verdict.RAISED)
    (replacement,) = only(job.finish(rank, second, 0), Generate)
    _finish_group(job, by_group, 3)
    commands = job.finish_all(replacement.rank, replacement)
    assert kinds(commands) == ["Train", "Publish"]
    job.trained(1, minibatch=0)
    assert kinds(job.trained(1, minibatch=1)) == ["ReportStep", "Settle", "Checkpoint"]
    assert ids(replacement) == [8, 9]


def _by_group(generates: list[Generate]) -> dict[int, tuple[int, int, int]]:
    """Rank and both trajectories of each group."""
    found: dict[int, list[int]] = {}
    for one in generates:
        for spec in one.trajectories:
            found.setdefault(spec.group, [one.rank]).append(spec.id)
    return {group: (rank, first, second) for group, (rank, first, second) in found.items()}


def _finish_group(job: ScriptedJob, by_group: dict[int, tuple[int, int, int]], group: int) -> list[Command]:
    rank, first, second = by_group[group]
    return job.finish(rank, first, 0) + job.finish(rank, second, 0)


def _last(trajectories: list) -> tuple[int, int, int]:
    rank, spec = trajectories[-1]
    return rank, spec.id, 0
