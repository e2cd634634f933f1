"""Mode laminar, step by step: two rollouts with room for two groups of two, steps of two groups."""

from __future__ import annotations

import pytest
from scripted_job import A, B, ScriptedJob, ids, kinds, only

from laminar_hpc.protocol.commands import Generate, Pull, ReportEvaluation, ReportStep, Settle, Train
from laminar_hpc.protocol.events import (
    CameFromTool,
    Finished,
    Loaded,
    RolloutReady,
    StopRequested,
    Trained,
    TrainerReady,
    WentToTool,
)
from laminar_hpc.protocol.trajectory import Purpose, State, Stop, TrajectorySpec, Verdict


def groups(generate: Generate) -> list[int]:
    return [spec.group for spec in generate.trajectories]


def test_a_rollout_draws_whole_groups_up_to_its_concurrency():
    given = ScriptedJob(concurrency=5).start()
    (first,), (second,) = given[A], given[B]
    assert (first.rank, first.version, ids(first), groups(first)) == (A, 0, [0, 1, 2, 3], [0, 0, 1, 1])
    assert [spec.sample for spec in first.trajectories] == [0, 1, 0, 1]
    assert {spec.purpose for spec in first.trajectories} == {Purpose.TRAIN}
    assert len({spec.seed for spec in first.trajectories}) == 4
    assert groups(second) == [2, 2, 3, 3]
    assert first.reason == "2 groups"


def test_a_rollout_smaller_than_a_group_takes_one():
    given = ScriptedJob(concurrency=1).start()
    assert groups(given[A][0]) == [0, 0]


def test_admission_bounds_what_is_open_and_a_batch_makes_room():
    job = ScriptedJob(ahead=0.5)
    given = job.start()
    assert groups(given[A][0]) == [0, 0, 1, 1]
    assert groups(given[B][0]) == [2, 2]  # 1.5 * 2 groups are open
    commands = job.finish_all(A, given[A][0])
    # the step takes both groups, so two more may be open, and A is at its boundary
    assert kinds(commands) == ["Train", "Publish", "Generate"]
    assert groups(only(commands, Generate)[0]) == [3, 3, 4, 4]
    job.trained(1)
    job.published(1)
    assert job.controller.waits()[0] == "step 2 waits for 2 groups (0 of 2 in the buffer, 3 in flight)"


def test_an_idle_rollout_gets_work_as_soon_as_there_is_room():
    job = ScriptedJob(ahead=0.0)
    given = job.start()
    assert given[B] == []
    assert job.controller.rollouts_busy == 1
    commands = job.finish_all(A, given[A][0])
    # B has been idle for longer
    assert [(command.rank, groups(command)) for command in only(commands, Generate)] == [(B, [2, 2, 3, 3])]


def test_nothing_is_handed_out_beyond_the_last_step():
    job = ScriptedJob(steps=1, ahead=9.0)
    given = job.start()
    assert groups(given[A][0]) == [0, 0, 1, 1]
    assert given[B] == []


def test_a_step_trains_finished_groups_in_the_order_of_their_draws_and_reports_them():
    job = ScriptedJob(minibatches=2)
    given = job.start()
    job.now = 5.0
    job.finish(B, 5, 0)
    job.finish(B, 4, 0, reward=0.0, tokens=30)
    assert job.controller.waits()[0] == "step 1 waits for 1 groups (1 of 2 in the buffer, 3 in flight)"
    job.finish(A, 1, 0)
    first, second, publish = job.finish(A, 0, 0)
    assert isinstance(first, Train)
    assert [sample.trajectory for sample in first.samples] == [0, 1]
    assert [(sample.trajectory, sample.group, sample.tokens) for sample in second.samples] == [(4, 2, 35), (5, 2, 15)]
    assert (first.step, first.minibatch, second.minibatch, first.minibatches) == (1, 0, 1, 2)
    assert (publish.version, publish.step) == (1, 1)
    job.now = 9.0
    assert job.trained(1, 0) == []
    report, settle = job.trained(1, 1)
    assert isinstance(report, ReportStep)
    assert (report.step, report.version, report.started_s, report.finished_s, report.train_s) == (1, 1, 5.0, 9.0, 4.0)
    assert (report.samples, report.reward_mean) == (4, 0.75)
    assert isinstance(settle, Settle)
    assert [(one.trajectory, one.state, one.step) for one in settle.trajectories] == [
        (0, State.CONSUMED, 1),
        (1, State.CONSUMED, 1),
        (4, State.CONSUMED, 1),
        (5, State.CONSUMED, 1),
    ]
    assert [(one.group, one.state, one.trajectories) for one in settle.groups] == [
        (0, State.CONSUMED, 2),
        (2, State.CONSUMED, 2),
    ]
    assert given[B][0].version == 0


def test_the_next_step_waits_for_publication_but_not_for_relays():
    job = ScriptedJob()
    given = job.start()
    job.finish_all(A, given[A][0])
    job.finish_all(B, given[B][0])
    assert only(job.trained(1), Train) == []
    commands = job.published(1)
    assert [train.step for train in only(commands, Train)] == [2]


def test_newer_weights_are_taken_at_the_boundary_and_never_before():
    job = ScriptedJob(ahead=2.0, steps=9)
    given = job.start()
    job.finish_all(A, given[A][0])
    assert only(job.train_and_spread(1), Pull) == []  # A has drawn again, B is in its batch
    for trajectory in ids(given[B][0])[:-1]:
        assert job.finish(B, trajectory, 0) == []
    (pull,) = only(job.finish(B, ids(given[B][0])[-1], 0), Pull)
    assert (pull.rank, pull.version) == (B, 1)
    (generate,) = only(job.loaded(B, 1), Generate)
    assert generate.version == 1


def test_staleness_counts_publications_after_the_trajectorys_version():
    job = ScriptedJob(ahead=2.0, steps=9)
    given = job.start()
    job.finish(B, 4, 0)
    job.finish_all(A, given[A][0])
    job.train_and_spread(1)
    job.finish(B, 5, 0)  # finished one publication after its version, consumed at the same age
    (train,) = only(job.finish_all(B, only_after(given[B][0], 2)), Train)
    assert {sample.group for sample in train.samples} == {2, 3}
    report, settle = job.trained(2)
    ages = {one.trajectory: (one.staleness_finish, one.staleness_consumption) for one in settle.trajectories}
    assert ages == {4: (0, 1), 5: (1, 1), 6: (1, 1), 7: (1, 1)}
    assert (report.staleness_finish_mean, report.staleness_consumption_max) == (0.75, 1)


def only_after(generate: Generate, count: int) -> Generate:
    """The command without its first `count` trajectories."""
    return Generate(generate.reason, generate.rank, 0, generate.version, generate.trajectories[count:])


# --- groups that lose members ---------------------------------------------------------------------------------------


def test_a_member_whose_grading_failed_is_dropped_and_the_others_train():
    job = ScriptedJob(group_size=3, prompts=1, concurrency=3)
    job.start()
    (settle,) = job.finish(A, 1, 0, Verdict.DEADLINE)
    (outcome,) = settle.trajectories
    assert (outcome.trajectory, outcome.state, outcome.reason) == (1, State.DISCARDED, "grading exceeded its deadline")
    assert (outcome.reward, outcome.verdict, settle.groups) == (0.0, Verdict.DEADLINE, [])
    job.finish(A, 0, 0)
    (train,) = only(job.finish(A, 2, 0), Train)
    assert [sample.trajectory for sample in train.samples] == [0, 2]


def test_a_group_with_one_graded_member_is_discarded_and_its_place_given_to_another_prompt():
    job = ScriptedJob(prompts=1, concurrency=2, steps=1)
    job.start()
    job.finish(A, 0, 0, Verdict.RAISED)
    settle, generate = job.finish(A, 1, 0)
    assert [(one.trajectory, one.state) for one in settle.trajectories] == [(1, State.DISCARDED)]
    (group,) = settle.groups
    assert (group.group, group.state, group.trajectories) == (0, State.DISCARDED, 1)
    assert group.reason == "1 of 2 responses graded, at least 2 needed"
    assert (generate.rank, groups(generate)) == (B, [1, 1])  # B had nothing to do from the start


def test_groups_that_have_become_too_old_are_evicted_and_replaced():
    job = ScriptedJob(eviction="stale", max_staleness=1, ahead=9.0, steps=4, concurrency=8)
    given = job.start()  # all 8 groups that the run needs: 0 to 3 at A, 4 to 7 at B
    job.finish_all(A, given[A][0])  # step 1 takes 0 and 1
    job.finish(B, 8, 0)
    job.finish(B, 9, 0)  # the buffer has 2, 3 and 4
    assert only(job.train_and_spread(1), Settle)[-1].groups[0].state is State.CONSUMED  # step 2 takes 2 and 3
    job.loaded(A, 1)
    job.trained(2)
    (settle,) = only(commands := job.published(2), Settle)
    reason = "2 versions old in the buffer, at most 1"
    assert [(one.group, one.state, one.reason) for one in settle.groups] == [(4, State.DISCARDED, reason)]
    assert [(one.trajectory, one.staleness_finish, one.staleness_consumption) for one in settle.trajectories] == [
        (8, 0, 2),
        (9, 0, 2),
    ]
    assert [(one.rank, one.version, groups(one)) for one in only(commands, Generate)] == [(A, 1, [8, 8])]
    job.finish(B, 10, 0)
    (settle,) = job.finish(B, 11, 0)  # too old when it arrives
    assert [(one.group, one.state) for one in settle.groups] == [(5, State.DISCARDED)]


# --- losses ---------------------------------------------------------------------------------------------------------


def test_a_lost_rollouts_trajectories_go_on_at_one_of_the_same_version_that_has_room():
    job = ScriptedJob(concurrency=4)
    given = job.start()
    job.streamed(A, (0, 7), (2, 3))
    job.streamed(A, (2, 1))
    job.finish(A, 1, 0)
    job.finish(B, 4, 0)
    job.finish(B, 5, 0)
    (generate,) = job.lose(A)
    assert (generate.rank, generate.version, generate.reason) == (B, 0, "2 taken over")
    assert [(spec.id, spec.group, spec.resume_tokens) for spec in generate.trajectories] == [(0, 0, 7), (2, 1, 3)]
    # B was full with these two; the third comes when there is room
    (generate,) = job.finish(B, 6, 0)
    assert [(spec.id, spec.resume_tokens) for spec in generate.trajectories] == [(3, 0)]
    assert generate.trajectories[0] == given[A][0].trajectories[3]


def test_trajectories_that_wait_for_room_come_before_newer_weights():
    job = ScriptedJob(concurrency=1, prompts=1, ahead=9.0)
    given = job.start()
    (again,) = only(job.finish_all(A, given[A][0]), Generate)
    job.train_and_spread(1)
    assert job.lose(A) == []  # B is full
    assert job.finish(B, 2, 0) == []
    (generate,) = only(job.finish(B, 3, 0), Generate)
    assert (generate.rank, ids(generate)) == (B, ids(again)[:1])
    (generate,) = only(job.finish(B, ids(again)[0], 0), Generate)
    assert (generate.version, ids(generate)) == (0, ids(again)[1:])
    (pull,) = only(job.finish(B, ids(again)[1], 0), Pull)
    assert pull.version == 1


def test_with_nobody_left_of_its_version_a_group_starts_over_with_its_finished_members():
    job = ScriptedJob(ahead=0.0)
    given = job.start()
    job.streamed(A, (2, 9))
    job.finish(A, 0, 0)
    job.lose(B)
    (settle,) = job.lose(A, "rollout")
    assert [(one.trajectory, one.state) for one in settle.trajectories] == [
        (0, State.DISCARDED),
        (1, State.DISCARDED),
        (2, State.DISCARDED),
        (3, State.DISCARDED),
    ]
    assert {one.reason for one in settle.trajectories} == {"rollout 3 was the last that held version 0"}
    assert settle.groups == []
    (pull,) = job.ready(A)
    assert (pull.rank, pull.incarnation, pull.version) == (A, 1, 0)
    (generate,) = job.loaded(A, 0)
    assert (ids(generate), groups(generate)) == ([4, 5, 6, 7], [0, 0, 1, 1])
    # the same prompts with the same noise
    again = [TrajectorySpec(spec.id + 4, *rest(spec)) for spec in given[A][0].trajectories]
    assert generate.trajectories == again


def rest(spec: TrajectorySpec) -> tuple:
    return spec.group, spec.prompt, spec.sample, spec.purpose, spec.seed


def test_a_loss_without_a_message_shows_when_the_rank_reports_again():
    job = ScriptedJob()
    job.start()
    job.finish(B, 4, 0)
    generate, pull = job.tell(RolloutReady(A, 1, "x", 2, 4))
    assert (generate.rank, ids(generate)) == (B, [0])
    assert (pull.rank, pull.incarnation) == (A, 1)


def test_earlier_incarnations_are_not_heard():
    job = ScriptedJob()
    job.start()
    job.finish(B, 4, 0)
    job.lose(A)
    dead = Finished(A, 0, 0, 0, 5, 9, Stop.LENGTH, Verdict.GRADED, 1.0)
    assert job.tell(dead) == []
    job.ready(A)
    assert job.tell(dead) == job.tell(Loaded(A, 0, 0, b"", 0.0, 0.1)) == []
    assert "rollout 3 loads version 0 from relay 2" in job.controller.waits()
    assert job.tell(RolloutReady(A, 0, "x", 2, 4)) == []
    settle, _ = job.tell(StopRequested("enough"))
    assert [one.trajectory for one in settle.trajectories if one.finished_s is not None] == [4]


# --- repeats and tools ----------------------------------------------------------------------------------------------


def test_what_repeats_or_comes_late_changes_nothing():
    job = ScriptedJob(ahead=2.0)
    given = job.start()
    job.finish(A, 0, 0)
    before = job.controller.waits()
    assert job.finish(A, 0, 0) == job.finish(B, 1, 0) == job.finish(A, 999, 0) == []
    assert job.published(0) == job.relay_holds(0) == job.loaded(A, 0) == []
    assert job.tell(TrainerReady(1, 0, 0)) == job.ready(A) == []
    assert job.controller.waits() == before
    job.finish_all(A, given[A][0])
    job.trained(1)
    assert job.trained(1) == []
    assert job.tell(Trained(1, 0, 1, 0, 1, 1.0, {})) == []


def test_a_trajectory_at_a_tool_stays_its_rollouts_own():
    job = ScriptedJob(concurrency=2)
    job.start()
    assert job.tell(WentToTool(A, 0, 0)) == []
    job.streamed(A, (0, 4))
    job.finish(A, 1, 0)
    assert job.controller.rollouts_busy == 2
    assert job.tell(CameFromTool(A, 0, 0)) == []
    job.finish(A, 0, 0)
    assert job.controller.waits()[0].startswith("step 1 waits for 1 groups (1 of 2 in the buffer, ")


# --- evaluation -----------------------------------------------------------------------------------------------------


def evaluated(**changes: int) -> ScriptedJob:
    fields = {"evaluation_every": 2, "evaluation_prompts": 6, "held_out_prompts": 6, "steps": 2, "rollouts": 1}
    return ScriptedJob(**{**fields, **changes})


def test_evaluation_prompts_come_first_and_hold_a_rollout_to_its_version():
    job = evaluated(ahead=9.0)
    (first,) = job.start()[A]
    assert [(spec.prompt, spec.purpose, spec.sample) for spec in first.trajectories] == [
        (prompt, Purpose.EVALUATION, 0) for prompt in range(4)
    ]
    (second,) = only(job.finish_all(A, first), Generate)
    assert [spec.purpose for spec in second.trajectories] == [Purpose.EVALUATION] * 2 + [Purpose.TRAIN] * 2
    assert second.reason == "1 groups, 2 evaluation prompts"


def test_a_round_once_begun_comes_before_newer_weights():
    job = evaluated(rollouts=2, concurrency=2, prompts=1, steps=5, ahead=9.0, evaluation_prompts=3)
    given = job.start()
    (under_0,) = only(job.finish_all(A, given[A][0]), Generate)
    (other,) = only(job.finish_all(B, given[B][0]), Generate)
    (late,) = only(job.finish_all(A, under_0), Generate)  # step 1
    job.train_and_spread(1)
    job.finish_all(B, other)  # step 2
    (under_1,) = only(job.loaded(B, 1), Generate)
    job.train_and_spread(2)  # opens a round
    job.finish_all(A, late)  # step 3
    (answers,) = only(job.loaded(A, 2), Generate)
    assert [spec.prompt for spec in answers.trajectories] == [0, 1]
    job.train_and_spread(3)
    (rest_of_round,) = job.finish_all(A, answers)
    assert (rest_of_round.version, [spec.prompt for spec in rest_of_round.trajectories]) == (2, [2])
    job.finish_all(B, under_1)
    job.loaded(B, 3)
    (report, *_) = job.finish_all(A, rest_of_round)
    assert (report.version, report.step) == (2, 2)


def test_an_evaluation_is_reported_with_the_share_of_full_rewards_among_the_graded():
    job = evaluated(rollouts=2, concurrency=3)
    given = job.start()
    rewards = [1.0, 0.5, 1.0, 0.0, 1.0]
    specs = [*given[A][0].trajectories, *given[B][0].trajectories]
    for spec, reward in zip(specs[:5], rewards, strict=True):
        assert only(job.finish(A if spec.id < 3 else B, spec.id, 0, reward=reward), ReportEvaluation) == []
    report, settle = job.finish(B, 5, 0, Verdict.RAISED)[:2]
    assert isinstance(report, ReportEvaluation)
    assert (report.version, report.step, report.prompts, report.graded) == (0, 0, 6, 5)
    assert (report.accuracy, report.reward_mean, report.response_tokens) == (0.6, pytest.approx(0.7), 60)
    assert [one.state for one in settle.trajectories] == [State.CONSUMED] * 5 + [State.DISCARDED]
    assert [one.state for one in settle.groups] == [State.CONSUMED] * 5 + [State.DISCARDED]
    assert {one.purpose for one in settle.groups} == {Purpose.EVALUATION}


def test_the_job_waits_for_its_last_evaluation():
    job = evaluated(rollouts=1, evaluation_prompts=1, steps=1, concurrency=5)
    (generate,) = job.start()[A]
    job.finish_all(A, generate)
    job.trained(1)
    job.published(1)
    assert job.controller.outcome is None
    job.relay_holds(1)
    (last,) = job.loaded(A, 1)
    assert [spec.purpose for spec in last.trajectories] == [Purpose.EVALUATION]
    report, _, end = job.finish_all(A, last)
    assert (report.version, report.step, end.outcome) == (1, 1, "finished")


def test_a_round_starts_over_when_its_version_is_gone():
    job = evaluated(concurrency=4)
    (first,) = job.start()[A]
    job.finish(A, 0, 0)
    (settle,) = job.lose(A)
    assert [(one.trajectory, one.state) for one in settle.trajectories] == [(id, State.DISCARDED) for id in range(4)]
    assert settle.groups == []
    job.ready(A)
    (again,) = job.loaded(A, 0)
    assert [spec.prompt for spec in again.trajectories] == [0, 1, 2, 3]
    assert groups(again) == groups(first)
    assert ids(again) == [4, 5, 6, 7]


def test_rounds_that_nobody_has_begun_are_all_answered_by_the_version_that_comes():
    job = evaluated(evaluation_every=1, evaluation_prompts=1, steps=3, ahead=9.0, concurrency=5)
    (first,) = job.start()[A]
    assert [spec.purpose for spec in first.trajectories] == [Purpose.EVALUATION] + [Purpose.TRAIN] * 4
    (second,) = only(job.finish_all(A, first), Generate)
    assert only(job.train_and_spread(1), Generate) == []  # A is in its batch
    (pull,) = only(job.finish_all(A, second), Pull)
    assert pull.version == 1
    job.train_and_spread(2)
    (third,) = job.loaded(A, 2)
    assert [(spec.prompt, spec.purpose) for spec in third.trajectories[:2]] == [(0, Purpose.EVALUATION)] * 2
    assert [spec.purpose for spec in third.trajectories[2:]] == [Purpose.TRAIN] * 2
    reports = only(job.finish_all(A, third), ReportEvaluation)
    assert [(report.version, report.step) for report in reports] == [(2, 2), (2, 2)]
    assert "opened for version 1" in reports[0].reason
    assert "opened for version 2" in reports[1].reason
