"""Checkpoints: when they are made, what counts, and what the next attempt does with each group."""

from __future__ import annotations

import msgspec
import pytest
from scripted_job import RELAY, TRAINER, A, B, ScriptedJob, kinds, only

from laminar_hpc.control.snapshot import Snapshot, kept_trajectories
from laminar_hpc.errors import ProtocolError
from laminar_hpc.protocol.commands import Abandon, Checkpoint, Commit, EndJob, Generate, Pull, ReportEvaluation, Settle
from laminar_hpc.protocol.events import (
    Committed,
    Event,
    JobFailed,
    RelayReady,
    Resumed,
    SnapshotWritten,
    StateWritten,
    StopRequested,
    TrainerReady,
)
from laminar_hpc.protocol.trajectory import Purpose, State, TrajectorySpec

FULL = "No space left on device"


class SavedJob(ScriptedJob):
    """Its trainer and manager write what is asked for: parts of the checkpoint begun last, where no `serial` is named."""

    begun = 0

    def tell(self, event: Event) -> list:
        commands = super().tell(event)
        self.begun += len(only(commands, Checkpoint))
        return commands

    def state(self, step: int, error: str = "", serial: int | None = None) -> list:
        return self.tell(StateWritten(TRAINER, 0, step, self._serial(serial), 1.0, 100, error))

    def books(self, step: int, error: str = "", serial: int | None = None) -> list:
        return self.tell(SnapshotWritten(step, self._serial(serial), 1.0, 100, error))

    def committed(self, step: int, error: str = "") -> list:
        return self.tell(Committed(step, self._serial(None), error))

    def _serial(self, serial: int | None) -> int:
        return max(0, self.begun - 1) if serial is None else serial

    def commit(self, step: int) -> list:
        self.state(step)
        self.books(step)
        return self.committed(step)

    def begin(self) -> dict[int, Generate]:
        """All ranks report and load version 0; what each rollout was given then, two groups at least."""
        return {rank: commands[0] for rank, commands in self.start().items() if commands}

    def given(self, *ranks: int) -> list[TrajectorySpec]:
        """What these rollouts are given when they have loaded the first version of attempt 1."""
        commands = [command for rank in ranks for command in only(self.loaded(rank, 1_000_000), Generate)]
        return [spec for command in commands for spec in command.trajectories]

    def step(self, given: dict[int, Generate], number: int) -> list:
        """The two groups of the first rollout finish, and a step is trained; what that led to."""
        self.finish_all(A, given[A])
        return self.trained(number)

    def snapshot(self) -> Snapshot:
        return msgspec.msgpack.decode(self.controller.snapshot()[0], type=Snapshot)


def stop(job: ScriptedJob) -> list:
    return job.tell(StopRequested("time limit", save=True))


def next_attempt(job: ScriptedJob, shift_s: float = 0.0, **changes: object) -> tuple[SavedJob, list]:
    """The attempt after `job`, which goes on from its books as they are now; what it does first."""
    settings = msgspec.structs.asdict(job.settings) | {"attempt": job.settings.attempt + 1, **changes}
    later = SavedJob(**settings)
    return later, later.tell(Resumed(job.controller.snapshot()[0], shift_s))


# --- making one -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "steps", "due"),
    [(2, 5, [2, 4, 5]), (1, 3, [1, 2, 3]), (7, 3, [3]), (0, 3, []), (None, 3, [])],
)
def test_one_is_due_every_so_many_steps_and_after_the_last(every, steps, due):
    settings = SavedJob(steps=steps, checkpoint_every=every).settings
    assert [step for step in range(1, steps + 1) if settings.saves(step)] == due


def test_it_counts_when_all_parts_are_written_and_in_place():
    job = SavedJob(checkpoint_every=1)
    commands = job.step(job.begin(), 1)
    (checkpoint,) = only(commands, Checkpoint)
    assert (checkpoint.step, checkpoint.reason) == (1, "step 1 is done")
    assert job.controller.waits()[0] == "the checkpoint of step 1 waits for trainer rank 1, the manager's own part"
    assert job.state(1) == job.state(1) == []
    assert job.controller.waits()[0] == "the checkpoint of step 1 waits for the manager's own part"
    assert job.books(1) == [Commit("all 1 trainers and the manager have written their parts", 1, 0)]
    assert job.controller.waits()[0] == "the checkpoint of step 1 waits for the manager to move it into place"
    assert job.state(1) == job.books(1) == []
    assert job.committed(1) == job.committed(1) == []
    assert not any("checkpoint" in line for line in job.controller.waits())


def test_the_job_goes_on_while_it_is_written():
    job = SavedJob(checkpoint_every=1, ahead=2.0)
    given = job.begin()
    assert only(job.step(given, 1), Checkpoint)
    job.spread(1)
    job.finish_all(B, given[B])
    report, *others = job.trained(2)
    assert report.step == 2
    assert only(others, Checkpoint) == []  # its turn came while the first one was being written: it is left out


@pytest.mark.parametrize("part", ["state", "books", "committed"])
def test_a_part_that_cannot_be_written_costs_the_checkpoint_and_not_the_job(part):
    job = SavedJob(checkpoint_every=1)
    job.step(job.begin(), 1)
    if part == "committed":
        job.state(1)
        job.books(1)
    (abandon,) = getattr(job, part)(1, FULL)
    assert isinstance(abandon, Abandon)
    assert abandon.step == 1
    assert abandon.reason.endswith(FULL)
    assert job.controller.outcome is None
    assert job.state(1) == job.books(1) == job.committed(1) == []


def test_a_finished_job_ends_when_its_last_checkpoint_is_made():
    job = SavedJob(steps=1, checkpoint_every=5)
    job.step(job.begin(), 1)
    job.published(1)
    assert job.controller.outcome is None
    (end,) = job.commit(1)
    assert (end.outcome, job.controller.outcome) == ("finished", "finished")


# --- being asked to stop --------------------------------------------------------------------------------------------


def test_a_job_that_is_to_stop_ends_its_step_saves_and_ends():
    job = SavedJob(checkpoint_every=0)
    given = job.begin()
    job.finish_all(A, given[A])
    assert stop(job) == []
    commands = job.trained(1)
    assert kinds(commands) == ["ReportStep", "Settle", "Checkpoint"]
    job.spread(1)
    assert only(job.loaded(A, 1), Generate) == []  # nothing new begins
    assert job.commit(1) == [EndJob("time limit; the checkpoint of step 1 is complete", "requeue")]


def test_between_steps_it_saves_at_once_and_what_is_saved_is_not_saved_again():
    job = SavedJob(checkpoint_every=1)
    given = job.begin()
    job.step(given, 1)
    job.commit(1)
    (end,) = stop(job)
    assert end.outcome == "requeue"
    job = SavedJob(checkpoint_every=1)
    job.begin()
    (checkpoint,) = stop(job)
    assert (checkpoint.step, checkpoint.reason) == (0, "time limit")


@pytest.mark.parametrize("cause", ["unasked", "off", "nothing published", "asked twice", "full disk"])
def test_it_ends_without_one_where_there_is_none_to_be_had(cause):
    job = SavedJob(checkpoint_every=None if cause == "off" else 0)
    if cause != "nothing published":
        job.begin()
    if cause == "unasked":
        commands = job.tell(StopRequested("Ctrl-C"))
    elif cause == "asked twice":
        stop(job)
        commands = stop(job)
    elif cause == "full disk":
        stop(job)
        commands = job.state(0, FULL)
    else:
        commands = stop(job)
    assert isinstance(commands[-1], EndJob)
    assert commands[-1].outcome == "stopped"
    if cause == "full disk":
        assert commands[-1].reason.endswith(FULL)


def test_a_job_that_fails_while_it_stops_has_failed():
    job = SavedJob(checkpoint_every=0)
    job.begin()
    stop(job)
    assert job.tell(JobFailed("failed", "the checkpoint takes too long"))[-1].outcome == "failed"


# --- going on -------------------------------------------------------------------------------------------------------


def test_the_weights_are_published_again_under_a_new_id_and_no_prompt_is_drawn_twice():
    job = SavedJob(checkpoint_every=1, steps=5)
    job.step(job.begin(), 1)
    later, _ = next_attempt(job)
    (publish,) = later.tell(TrainerReady(TRAINER, 0, 0))
    assert (publish.version, publish.step) == (1_000_000, 1)
    later.tell(RelayReady(RELAY, 0, "x"))
    later.spread(1_000_000)
    later.ready(A)
    (generate,) = later.loaded(A, 1_000_000)
    assert {spec.group for spec in generate.trajectories} == {2, 3}  # two of four that start over
    assert [spec.id for spec in generate.trajectories] == [10**9 + number for number in range(4)]
    later.ready(B)
    later.loaded(B, 1_000_000)
    later.finish_all(A, generate)
    later.trained(2)
    draws = {group.draw: group.id for group in later.snapshot().groups}
    assert draws == {4: 4, 5: 5, 6: 10**9, 7: 10**9 + 1}  # 0 and 1 were consumed before, 2 and 3 are now


def test_a_group_in_the_buffer_keeps_its_age_though_its_weights_are_published_again():
    job = SavedJob(checkpoint_every=1, ahead=3.0)
    given = job.begin()
    for spec in given[B].trajectories[:2]:
        job.finish(B, spec.id, 0)
    job.step(given, 1)  # the first group to finish, and one of the other rollout; the third stays in the buffer
    later, _ = next_attempt(job, shift_s=-100.0)
    (candidate,) = later.snapshot().buffer
    assert (candidate.step, candidate.finished_s) == (0, -100.0)
    later.ranks_report()
    later.spread(1_000_000)
    given = {rank: only(later.loaded(rank, 1_000_000), Generate)[0] for rank in (A, B)}
    commands = [one for spec in given[A].trajectories[:2] for one in later.finish(A, spec.id, 1_000_000)]
    assert kinds(commands)[:2] == ["Train", "Publish"]
    report, *_ = later.trained(2)
    assert (report.step, report.staleness_consumption_max, report.staleness_consumption_mean) == (2, 1, 0.5)


def test_what_older_weights_had_begun_starts_over_and_its_tokens_are_listed():
    job = SavedJob(checkpoint_every=1)
    given = job.begin()
    rest = given[B].trajectories
    job.streamed(B, (rest[0].id, 7))
    job.finish(B, rest[2].id, 0)
    job.step(given, 1)
    later, (settle,) = next_attempt(job)
    assert isinstance(settle, Settle)
    assert {one.group for one in settle.trajectories} == {2, 3, 4, 5}  # B's, and what A was given after its first two
    assert [one.response_tokens for one in settle.trajectories if one.trajectory == rest[0].id] == [7]
    assert {one.state for one in settle.trajectories} == {State.DISCARDED}
    assert settle.groups == []  # they are still handed out
    assert kept_trajectories(job.snapshot()) == set()
    later.ranks_report()
    later.spread(1_000_000)
    again = later.given(A, B)
    assert {spec.group for spec in rest} <= {spec.group for spec in again}
    seeds = {(spec.group, spec.sample): spec.seed for spec in again}
    assert all(seeds[spec.group, spec.sample] == spec.seed for spec in rest)  # the same noise


def test_what_the_same_weights_had_begun_goes_on_where_it_was():
    job = SavedJob(checkpoint_every=0, mode="sync")
    job.ranks_report()
    job.spread(0)
    job.loaded(A, 0)
    (to_a, to_b) = only(job.loaded(B, 0), Generate)
    one, other = to_a.trajectories
    job.finish(A, one.id, 0)
    job.streamed(A, (other.id, 6))
    stop(job)
    assert kept_trajectories(job.snapshot()) == {spec.id for spec in (*to_a.trajectories, *to_b.trajectories)}
    later, commands = next_attempt(job)
    assert commands == []
    later.ranks_report()
    later.spread(1_000_000)
    given = only(later.loaded(A, 1_000_000), Generate) + only(later.loaded(B, 1_000_000), Generate)
    resumed = {spec.id: spec.resume_tokens for command in given for spec in command.trajectories}
    assert resumed == {other.id: 6, **{spec.id: 0 for spec in to_b.trajectories}}
    assert all(command.version == 1_000_000 for command in given)


def test_an_evaluation_that_was_not_reported_is_answered_again():
    job = SavedJob(checkpoint_every=0, evaluation_every=1, evaluation_prompts=2, held_out_prompts=5)
    given = job.begin()
    asked = [spec for command in given.values() for spec in command.trajectories if spec.purpose is Purpose.EVALUATION]
    assert len(asked) == 2
    stop(job)
    later, (settle,) = next_attempt(job)
    assert {one.trajectory for one in settle.trajectories if one.purpose is Purpose.EVALUATION} == {
        spec.id for spec in asked
    }
    later.ranks_report()
    later.spread(1_000_000)
    later.concurrency = 6
    again = [spec for spec in later.given(A, B) if spec.purpose is Purpose.EVALUATION]
    assert [spec.prompt for spec in again] == [0, 1]
    (report,) = [
        one
        for spec in again
        for rank in (A, B)  # whoever has it
        for one in later.finish(rank, spec.id, 1_000_000)
        if isinstance(one, ReportEvaluation)
    ]
    assert report.step == 0


def test_a_reported_evaluation_is_not_made_again():
    job = SavedJob(checkpoint_every=0, evaluation_every=1, evaluation_prompts=1, held_out_prompts=5)
    given = job.begin()
    for rank, command in given.items():
        for spec in command.trajectories:
            if spec.purpose is Purpose.EVALUATION:
                job.finish(rank, spec.id, 0)
    later, _ = next_attempt(job)
    later.ranks_report()
    later.spread(1_000_000)
    assert {spec.purpose for spec in later.given(A, B)} == {Purpose.TRAIN}


def test_counters_of_fruitless_groups_go_on():
    job = SavedJob(checkpoint_every=0)
    job.begin()
    job.controller._experience.fruitless_groups = 7
    later, _ = next_attempt(job)
    assert later.snapshot().fruitless == 7


def test_books_that_cannot_be_gone_on_from_are_refused():
    job = SavedJob(checkpoint_every=0)
    books = job.controller.snapshot()[0]
    with pytest.raises(ProtocolError, match="attempt 0 cannot go on from a checkpoint of attempt 0"):
        SavedJob().tell(Resumed(books, 0.0))
    with pytest.raises(ProtocolError, match="cannot be read"):
        SavedJob(attempt=1).tell(Resumed(b"\x93", 0.0))
    later = SavedJob(attempt=1)
    later.tell(TrainerReady(TRAINER, 0, 0))
    with pytest.raises(ProtocolError, match="only before anything has happened"):
        later.tell(Resumed(books, 0.0))


def test_pulls_of_a_resumed_job_are_of_its_own_versions():
    job = SavedJob(checkpoint_every=0)
    later, _ = next_attempt(job)
    later.ranks_report()
    (pull, *_) = only(later.spread(1_000_000), Pull)
    assert pull.version == 1_000_000
