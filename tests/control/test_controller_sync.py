"""Mode sync, step by step: cohorts of four groups of two."""

from __future__ import annotations

from scripted_job import A, B, ScriptedJob, kinds, only

from laminar_hpc.protocol.commands import Generate, Pull, Train
from laminar_hpc.protocol.trajectory import Purpose, State, Verdict


def sync(**changes: int) -> ScriptedJob:
    return ScriptedJob(**{"mode": "sync", "prompts": 4, "concurrency": 6, **changes})


def held_by(generates: list[Generate]) -> dict[int, list[int]]:
    """The groups that each rollout was given."""
    return {one.rank: list(dict.fromkeys(spec.group for spec in one.trajectories)) for one in generates}


def test_a_cohort_waits_for_all_rollouts_and_is_split_evenly():
    job = sync()
    job.ranks_report()
    job.spread(0)
    assert job.loaded(A, 0) == []
    assert held_by(only(job.loaded(B, 0), Generate)) == {A: [0, 2], B: [1, 3]}


def test_a_cohort_larger_than_the_rollouts_is_handed_out_as_they_get_room():
    job = sync(concurrency=2)
    given = job.start()
    assert held_by(given[B]) == {A: [0], B: [1]}
    assert job.finish(A, 0, 0) == []
    (generate,) = job.finish(A, 1, 0)
    assert held_by([generate]) == {A: [2]}


def test_the_trainer_starts_on_the_whole_cohort_and_the_next_waits_for_its_weights_everywhere():
    job = sync()
    first, second = job.start()[B]
    assert only(job.finish_all(A, first), Train) == []
    (train, publish) = job.finish_all(B, second)
    assert len({sample.group for sample in train.samples}) == 4
    assert publish.version == 1
    assert kinds(job.trained(1)) == ["ReportStep", "Settle"]
    assert kinds(job.published(1)) == ["Release", "Broadcast"]
    assert kinds(job.relay_holds(1)) == ["Pull", "Pull"]
    assert job.loaded(B, 1) == []
    generates = only(job.loaded(A, 1), Generate)
    assert {one.version for one in generates} == {1}
    assert held_by(generates) == {A: [4, 6], B: [5, 7]}


def test_a_discarded_group_is_replaced_within_the_cohort():
    job = sync(prompts=2, concurrency=2)
    job.start()
    job.finish(A, 0, 0, Verdict.RAISED)
    settle, generate = job.finish(A, 1, 0)
    assert [(one.group, one.state) for one in settle.groups] == [(0, State.DISCARDED)]
    assert (generate.version, held_by([generate])) == (0, {A: [2]})
    assert job.controller.waits()[0] == "step 1 waits for 2 groups (0 of 2 in the buffer, 2 in flight)"


def test_the_cohort_goes_on_without_a_lost_rollout():
    job = sync(concurrency=4)
    job.start()
    assert job.lose(A) == []  # B is full
    resumed = []
    for trajectory in (2, 3, 6, 7):
        resumed += job.finish(B, trajectory, 0)
    assert [spec.id for one in only(resumed, Generate) for spec in one.trajectories] == [0, 1, 4, 5]
    assert {one.rank for one in only(resumed, Generate)} == {B}


def test_the_next_cohort_starts_with_the_rollouts_that_are_alive():
    job = sync(prompts=1)
    (generate,) = job.start()[B]
    job.finish_all(A, generate)
    job.train_and_spread(1)
    assert job.loaded(B, 1) == []
    (generate,) = job.lose(A)
    assert (generate.rank, generate.version) == (B, 1)


def test_a_rollout_that_comes_back_helps_with_the_cohort():
    job = sync(concurrency=2)
    job.start()
    job.lose(A)
    (pull,) = job.ready(A)
    assert isinstance(pull, Pull)
    (generate,) = job.loaded(A, 0)
    assert [(spec.id, spec.group) for spec in generate.trajectories] == [(0, 0), (1, 0)]


def test_evaluation_prompts_are_handed_out_before_the_cohort():
    job = sync(evaluation_every=1, evaluation_prompts=3, held_out_prompts=3)
    generates = job.start()[B]
    purposes = {one.rank: [spec.purpose for spec in one.trajectories] for one in generates}
    assert purposes[A] == [Purpose.EVALUATION] * 2 + [Purpose.TRAIN] * 4
    assert purposes[B] == [Purpose.EVALUATION] + [Purpose.TRAIN] * 4


def test_a_group_without_a_difference_is_replaced_within_the_cohort():
    job = sync(prompts=2, concurrency=2, dynamic_sampling=True)
    job.start()
    job.finish(A, 0, 0, reward=0.5)
    settle, generate = job.finish(A, 1, 0, reward=0.5)
    assert [(one.trajectory, one.state) for one in settle.trajectories] == [(0, State.DISCARDED), (1, State.DISCARDED)]
    assert [(one.group, one.state) for one in settle.groups] == [(0, State.DISCARDED)]
    assert settle.groups[0].reason == "all 2 graded responses have the reward 0.5"
    assert (generate.version, held_by([generate])) == (0, {A: [2]})
    assert job.finish(B, 2, 0, reward=1.0) + job.finish(B, 3, 0, reward=0.0) == []
    job.finish(A, 4, 0, reward=0.0)
    train, _ = job.finish(A, 5, 0, reward=1.0)
    assert isinstance(train, Train)
    assert [(sample.group, sample.reward) for sample in train.samples] == [(1, 1.0), (1, 0.0), (2, 0.0), (2, 1.0)]


def test_whether_a_group_differs_is_told_before_the_penalty_for_length():
    job = sync(prompts=2, concurrency=2, dynamic_sampling=True)
    job.start()
    job.finish(A, 0, 0, reward=0.25, score=1.0)  # both are right, and one is long
    settle, *_ = job.finish(A, 1, 0, reward=1.0)
    assert [(one.group, one.state) for one in settle.groups] == [(0, State.DISCARDED)]
    assert settle.groups[0].reason == "all 2 graded responses have the reward 1"
    # one is right, however long
    assert job.finish(B, 2, 0, reward=0.0, score=1.0) + job.finish(B, 3, 0, reward=0.0) == []
    job.finish(A, 4, 0, reward=0.0)
    train, _ = job.finish(A, 5, 0, reward=1.0)
    assert [(sample.group, sample.reward) for sample in train.samples] == [(1, 0.0), (1, 0.0), (2, 0.0), (2, 1.0)]


def test_gpus_that_still_evaluate_do_not_train():
    job = sync(prompts=2, colocated=True, evaluation_every=1, evaluation_prompts=1, held_out_prompts=3)
    given = [one for generates in job.start().values() for one in generates]
    specs = [(one.rank, spec) for one in given for spec in one.trajectories]
    (answer,) = [(rank, spec) for rank, spec in specs if spec.purpose is Purpose.EVALUATION]
    for rank, spec in specs:
        if spec.purpose is Purpose.TRAIN:
            assert only(job.finish(rank, spec.id, 0), Train) == []
    assert "step 1 waits for the GPUs, which evaluate version 0" in job.controller.waits()
    assert len(only(job.finish(answer[0], answer[1].id, 0), Train)) == 1
