"""How a job starts and ends, and what the controller refuses."""

from __future__ import annotations

import pytest
from scripted_job import DIGESTS, RELAY, TRAINER, A, B, ScriptedJob, kinds, only

from laminar_hpc.control.controller import FRUITLESS_GROUPS, UNIFORM_GROUPS, Controller, Settings
from laminar_hpc.errors import ConfigError, ProtocolError
from laminar_hpc.protocol.commands import Broadcast, Command, EndJob, Generate, Publish, Settle, Share
from laminar_hpc.protocol.events import (
    Finished,
    JobFailed,
    Loaded,
    Published,
    RankLost,
    RelayHolds,
    RelayReady,
    RolloutReady,
    StopRequested,
    TrainerReady,
    WentToTool,
)
from laminar_hpc.protocol.trajectory import State, Stop, Verdict


def test_version_0_is_published_when_all_trainers_are_there():
    job = ScriptedJob(trainers=2)
    assert job.tell(TrainerReady(7, 0, 1)) == []
    (publish,) = job.tell(TrainerReady(1, 0, 0))
    assert (publish.version, publish.step) == (0, 0)
    assert job.tell(TrainerReady(1, 0, 0)) == []


def test_version_0_goes_the_way_of_every_version():
    job = ScriptedJob()
    assert kinds(job.ranks_report()) == ["Publish"]
    (broadcast,) = job.published(0)
    assert (broadcast.version, broadcast.chain) == (0, [RELAY])
    assert broadcast.shares == [Share(TRAINER, DIGESTS)]
    pulls = job.relay_holds(0)
    assert kinds(pulls) == ["Pull", "Pull"]  # and no Release: it is the newest
    assert [(pull.rank, pull.version) for pull in pulls] == [(A, 0), (B, 0)]
    assert job.controller.started


def test_a_broadcast_waits_for_all_relays():
    job = ScriptedJob(relays=2)
    job.tell(TrainerReady(TRAINER, 0, 0))
    job.tell(RelayReady(9, 0, "y"))
    assert job.published(0) == []
    (broadcast,) = job.tell(RelayReady(2, 0, "x"))
    assert isinstance(broadcast, Broadcast)
    assert broadcast.chain == [2, 9]


def test_a_rollout_pulls_what_its_own_relay_holds():
    job = ScriptedJob(relays=2)
    job.tell(TrainerReady(TRAINER, 0, 0))
    job.tell(RelayReady(2, 0, "x"))
    job.tell(RelayReady(9, 0, "y"))
    job.published(0)
    job.tell(RelayHolds(2, 0, 0, 0.1, b""))
    assert job.tell(RolloutReady(11, 0, "y", 9, 4)) == []
    (pull,) = job.tell(RelayHolds(9, 0, 0, 0.1, b""))
    assert (pull.rank, pull.version) == (11, 0)
    (pull,) = job.tell(RolloutReady(10, 0, "x", 2, 4))
    assert (pull.rank, pull.version) == (10, 0)


def test_ids_of_a_later_attempt_go_on_from_its_first_version():
    job = ScriptedJob(attempt=2)
    (publish,) = only(job.ranks_report(), Publish)
    assert (publish.version, publish.step) == (2_000_000, 0)


def test_the_job_ends_when_its_last_version_is_published():
    job = ScriptedJob(steps=1)
    given = job.start()
    job.finish_all(A, given[A][0])
    assert kinds(job.trained(1)) == ["ReportStep", "Settle"]
    assert job.controller.outcome is None
    *_, end = job.published(1)
    assert end == EndJob("all 1 steps are trained, published and evaluated", "finished")
    assert job.controller.outcome == "finished"
    assert job.tell(JobFailed("stalled", "late")) == job.tell(StopRequested("late")) == job.lose(A) == []


@pytest.mark.parametrize(
    ("event", "outcome"),
    [
        (StopRequested("SIGTERM"), "stopped"),
        (JobFailed("failed", "rank 4 says nothing"), "failed"),
        (JobFailed("stalled", "nothing has moved for 60 s"), "stalled"),
    ],
)
def test_an_end_from_outside_returns_all_that_is_open(event, outcome):
    job = ScriptedJob()
    given = job.start()
    job.now = 8.0
    job.streamed(A, (0, 6))
    job.finish(A, 1, 0)
    settle, end = job.tell(event)
    assert end == EndJob(event.reason, outcome)
    assert (job.controller.outcome, job.controller.waits()) == (outcome, [])
    assert isinstance(settle, Settle)
    assert [outcome.trajectory for outcome in settle.trajectories] == list(range(8))
    assert {outcome.state for outcome in settle.trajectories} == {State.RETURNED}
    assert {outcome.reason for outcome in settle.trajectories} == {f"the job has {outcome}: {event.reason}"}
    assert settle.trajectories[0].response_tokens == 6
    assert (settle.trajectories[1].finished_s, settle.trajectories[1].staleness_finish) == (8.0, 0)
    groups = {spec.group for generates in given.values() for spec in generates[0].trajectories}
    assert {outcome.group for outcome in settle.groups} == groups
    assert {(outcome.state, outcome.trajectories) for outcome in settle.groups} == {(State.RETURNED, 2)}


def test_the_job_fails_with_its_trainer():
    job = ScriptedJob()
    job.start()
    settle, end = job.tell(RankLost(TRAINER, 0, "signal 9", "trainer"))
    assert end == EndJob("trainer rank 1 was lost: signal 9", "failed")
    assert len(settle.groups) == 4


def test_the_job_fails_with_its_last_relay_and_says_what_is_saved():
    job = ScriptedJob()
    job.start()
    forget, settle, end = job.tell(RankLost(RELAY, 0, "signal 9"))
    assert (forget.rank, len(settle.groups)) == (RELAY, 4)
    assert end.outcome == job.controller.outcome == "failed"
    assert end.reason == (
        "relay rank 2 was lost, and no other relay or spare is left: signal 9; relays were told of version 0, "
        "the trainers hold version 0, unsaved; the record up to here is complete"
    )


@pytest.mark.parametrize("role", ["trainer", "relay", "spare"])
def test_a_rank_that_is_lost_before_it_has_reported_ends_the_job(role):
    (end,) = ScriptedJob().tell(RankLost(5, 0, "no memory", role))
    assert end == EndJob("rank 5 was lost before it was ready: no memory", "failed")


def test_an_engine_that_is_lost_before_it_has_reported_is_waited_for():
    """Its rank starts another one, as the next incarnation; also where one is lost that was to replace another."""
    job = ScriptedJob()
    assert job.tell(RankLost(A, 0, "its engine's process has ended")) == []
    job.incarnation[A] = 1
    job.start()
    job.lose(A)
    assert job.tell(RankLost(A, 2, "its engine's process has ended")) == []
    job.incarnation[A] = 3
    job.ready(A)
    assert only(job.loaded(A, 0), Generate)
    assert job.controller.outcome is None


@pytest.mark.parametrize("mode", ["laminar", "sync"])
@pytest.mark.parametrize("early", [True, False])
def test_the_job_goes_on_without_a_rollout_that_is_lost_before_it_has_reported(mode, early):
    """The other one gets the first step's two groups of two, at once or, in mode sync, when nobody is waited for."""
    job = ScriptedJob(mode=mode, steps=1)
    lost = RankLost(B, 0, "rank 4 (rollout 1 on x): its process is gone", "rollout")
    if early:
        assert job.tell(lost) == []
    job.tell(TrainerReady(TRAINER, 0, 0))
    job.tell(RelayReady(RELAY, 0, "x"))
    job.ready(A)
    job.spread(0)
    work = job.loaded(A, 0)
    if not early:
        assert not job.controller.started
        assert len(work) == (1 if mode == "laminar" else 0)
        work += job.tell(lost)
    assert job.controller.started
    assert job.tell(RolloutReady(B, 0, "x", RELAY, 4)) == []  # was on its way when its sender died
    (generate,) = work
    assert (generate.rank, len(generate.trajectories)) == (A, 4)
    job.finish_all(A, generate)
    job.train_and_spread(1)
    assert job.controller.outcome == "finished"
    assert job.tell(lost) == []


def test_a_trainer_that_was_started_again_ends_the_job():
    job = ScriptedJob()
    job.start()
    *_, end = job.tell(TrainerReady(TRAINER, 1, 0))
    assert end == EndJob("trainer rank 1 was started again, its state is lost", "failed")


REFUSED = [
    (WentToTool(77, 0, 5), "WentToTool 5 from rank 77, incarnation 0, came from a rank that has never reported"),
    (WentToTool(TRAINER, 0, 5), "WentToTool 5 from rank 1, .* came from a trainer, only a rollout sends it"),
    (RolloutReady(RELAY, 1, "x", 2, 4), "RolloutReady from rank 2, incarnation 1, came from a relay"),
    (Published(TRAINER, 0, 3, b"", 0.0), r"rank 1 \(trainer\) published version 3, which was never announced"),
    (RelayHolds(RELAY, 0, 1, 0.0, b""), "RelayHolds 1 from rank 2, .* names version 1, which was never broadcast"),
    (
        Finished(A, 0, 0, 4, 5, 9, Stop.LENGTH, Verdict.GRADED, 1.0),
        "Finished 0 from rank 3, .* for trajectory 0 names version 4, it is generated under 0",
    ),
]


@pytest.mark.parametrize(("event", "message"), REFUSED)
def test_what_contradicts_the_protocol_is_refused(event, message):
    job = ScriptedJob()
    job.start()
    with pytest.raises(ProtocolError, match=message):
        job.tell(event)


def test_weights_other_than_those_asked_for_are_refused():
    job = ScriptedJob()
    job.ranks_report()
    job.spread(0)
    with pytest.raises(
        ProtocolError, match=r"Loaded 1 from rank 3, .* names version 1, where 0 or a newer one was due"
    ):
        job.tell(Loaded(A, 0, 1, b"", 0.0, 0.0))


def test_an_unknown_mode_sampler_or_eviction_is_refused_at_the_door():
    fields = {"steps": 1, "prompts": 1, "group_size": 2, "train_prompts": 1, "trainers": 1, "relays": 1, "rollouts": 1}
    with pytest.raises(
        ConfigError, match=r"control\.mode: must be one of sync, one_step, stream, partial, laminar, got 'turbo'"
    ):
        Controller(Settings(mode="turbo", **fields))
    with pytest.raises(ConfigError, match=r"control\.sampler"):
        Controller(Settings(mode="sync", sampler="lifo", **fields))
    with pytest.raises(ConfigError, match=r"control\.eviction"):
        Controller(Settings(mode="sync", eviction="all", **fields))


def test_every_so_many_steps_and_the_first_and_last_are_evaluated():
    job = ScriptedJob(steps=7, evaluation_every=3, evaluation_prompts=9, held_out_prompts=5).settings
    assert [step for step in range(8) if job.evaluates(step)] == [0, 3, 6, 7]
    assert job.evaluated_prompts == 5
    never = ScriptedJob(steps=7, evaluation_every=0, evaluation_prompts=9, held_out_prompts=5).settings
    assert not any(never.evaluates(step) for step in range(8))


def test_waits_name_who_waits_for_whom():
    job = ScriptedJob(steps=2)
    assert job.controller.waits() == [
        "the job waits for 1 more trainer ranks to report",
        "the job waits for 1 more relay ranks to report",
        "the job waits for 2 more rollout ranks to report",
    ]
    job.ranks_report()
    assert job.controller.waits() == [
        "version 0 waits for trainer ranks 1 to publish it",
        "rollout 3 waits for the first version at relay 2",
        "rollout 4 waits for the first version at relay 2",
    ]
    job.published(0)
    assert "version 0 is on its way to relay ranks 2 (chain 2)" in job.controller.waits()
    job.relay_holds(0)
    (generate,) = only(job.loaded(A, 0), Generate)
    job.tell(WentToTool(A, 0, 1))
    assert job.controller.waits() == [
        "step 1 waits for 2 groups (0 of 2 in the buffer, 2 in flight)",
        "rollout 3 generates 4 trajectories, 1 of them at a tool, under version 0",
        "rollout 4 loads version 0 from relay 2",
    ]
    job.finish_all(A, generate)
    assert job.controller.waits()[0] == "step 1 waits for trainer ranks 1 to train mini-batch 0"
    job.lose(B)
    assert job.controller.waits()[-1] == "rollout 4 is lost and waited for"


def fail_groups(job: ScriptedJob, waiting: list[Generate], groups: int) -> list[Command]:
    """Grading fails for all members of so many groups, one after the other; what followed from the last failure."""
    commands: list[Command] = []
    for _ in range(groups):
        given = waiting.pop(0)
        for spec in given.trajectories:
            commands = job.finish(given.rank, spec.id, 0, Verdict.RAISED)
            waiting += only(commands, Generate)
    return commands


def test_a_task_whose_grading_always_fails_ends_the_job():
    job = ScriptedJob(prompts=1, concurrency=2, steps=1, ahead=0.0)
    waiting = [generate for given in job.start().values() for generate in given]
    assert only(fail_groups(job, waiting, FRUITLESS_GROUPS - 1), EndJob) == []
    (end,) = only(fail_groups(job, waiting, 1), EndJob)
    assert (end.outcome, end.reason) == ("failed", "100 groups in a row had no two responses that could be graded")


def test_one_group_that_can_be_graded_starts_the_count_again():
    job = ScriptedJob(prompts=1, concurrency=2, steps=2, ahead=0.0)
    waiting = [generate for given in job.start().values() for generate in given]
    fail_groups(job, waiting, FRUITLESS_GROUPS - 1)
    given = waiting.pop(0)
    waiting += only(job.finish_all(given.rank, given), Generate)
    assert only(fail_groups(job, waiting, FRUITLESS_GROUPS - 1), EndJob) == []


def finish_groups(
    job: ScriptedJob, waiting: list[Generate], groups: int, rewards: tuple[float, float]
) -> list[Command]:
    """So many groups of two finish with these rewards, one after the other; what followed from the last response."""
    commands: list[Command] = []
    for _ in range(groups):
        given = waiting.pop(0)
        for spec, reward in zip(given.trajectories, rewards, strict=True):
            commands = job.finish(given.rank, spec.id, 0, reward=reward)
            waiting += only(commands, Generate)
    return commands


def test_a_task_whose_rewards_are_always_the_same_ends_a_job_that_samples_dynamically():
    job = ScriptedJob(prompts=1, concurrency=2, steps=1, ahead=0.0, dynamic_sampling=True)
    waiting = [generate for given in job.start().values() for generate in given]
    assert only(finish_groups(job, waiting, UNIFORM_GROUPS - 1, (0.0, 0.0)), EndJob) == []
    (end,) = only(finish_groups(job, waiting, 1, (1.0, 1.0)), EndJob)
    assert end.outcome == "failed"
    assert end.reason == (
        "1000 groups in a row had the same reward for all responses, and batch.dynamic_sampling is on"
    )


def test_a_group_that_teaches_starts_that_count_again_and_one_that_cannot_be_graded_does_not():
    job = ScriptedJob(prompts=1, concurrency=2, steps=2, ahead=0.0, dynamic_sampling=True)
    waiting = [generate for given in job.start().values() for generate in given]
    finish_groups(job, waiting, UNIFORM_GROUPS - 1, (0.0, 0.0))
    finish_groups(job, waiting, 1, (0.0, 1.0))
    for _ in range(2):
        assert only(finish_groups(job, waiting, UNIFORM_GROUPS // 2 - 1, (0.0, 0.0)), EndJob) == []
        assert only(fail_groups(job, waiting, 1), EndJob) == []
    (end,) = only(finish_groups(job, waiting, 2, (0.0, 0.0)), EndJob)
    assert end.outcome == "failed"
