"""Mode partial, step by step: rollouts are interrupted by newer weights, and go on under them."""

from __future__ import annotations

from scripted_job import A, B, ScriptedJob, ids, only

from laminar_hpc.protocol.commands import Command, Generate, Interrupt, Pull, Train
from laminar_hpc.protocol.events import Interrupted, Progress
from laminar_hpc.protocol.trajectory import State


class PartialJob(ScriptedJob):
    """Steps of two groups of two, at most one version stale; each rollout has room for two groups."""

    def __init__(self, **changes: object) -> None:
        super().__init__(**{"mode": "partial", "max_staleness": 1, "concurrency": 4, "steps": 9, **changes})

    def interrupted(self, rank: int, *progress: tuple[int, int]) -> list[Command]:
        items = [Progress(trajectory, tokens) for trajectory, tokens in progress]
        return self.tell(Interrupted(rank, self.incarnation[rank], items))

    def begun(self) -> list[int]:
        """What A was given; B has finished its own, a step is trained, version 1 at the relay."""
        given = self.start()
        self.finish_all(B, next(one for one in given[B] if one.rank == B))
        self.trained(1)
        self.published(1)
        return ids(given[A][0])


def test_prompts_are_handed_out_as_far_as_the_bound_allows() -> None:
    """AReaL's rule: with i = 0 and at most one version stale, two steps' worth; four groups of two are eight trajectories."""
    job = PartialJob()
    given = job.start()
    assert sum(len(one.trajectories) for generates in given.values() for one in generates) == 8


def test_a_rollout_lets_go_takes_newer_weights_and_goes_on() -> None:
    job = PartialJob()
    mine = job.begun()
    commands = job.relay_holds(1)
    (interrupt,) = [one for one in commands if isinstance(one, Interrupt) and one.rank == A]
    assert interrupt.reason == "its relay holds version 1"
    assert job.relay_holds(1) == []
    progress = [(id, 5 + id) for id in mine]
    (pull,) = job.interrupted(A, *progress)
    assert (type(pull), pull.rank, pull.version) == (Pull, A, 1)
    assert job.interrupted(A, *progress) == []
    (generate, *_) = only(job.loaded(A, 1), Generate)
    assert (generate.rank, generate.version) == (A, 1)
    assert [(spec.id, spec.resume_tokens) for spec in generate.trajectories][: len(mine)] == progress
    assert generate.reason.startswith(f"{len(mine)} taken up again") or "taken up again" in generate.reason


def test_what_has_ended_is_finished_under_the_old_weights_and_waited_for() -> None:
    job = PartialJob()
    first, *others = job.begun()
    job.relay_holds(1)
    assert job.interrupted(A, *((id, 5) for id in others)) == []  # the first one is being graded
    commands = job.finish(A, first, 0)
    assert only(commands, Pull)[0].version == 1


def test_what_had_not_begun_when_it_was_asked_is_let_go_of_later() -> None:
    job = PartialJob()
    first, *others = job.begun()
    job.relay_holds(1)
    job.interrupted(A, *((id, 5) for id in others))
    (again,) = job.streamed(A, (first, 1))
    assert isinstance(again, Interrupt)
    assert job.streamed(A, (first, 2)) == []
    (pull,) = job.interrupted(A, (first, 2))
    assert isinstance(pull, Pull)


def test_the_outcome_names_its_versions_and_what_was_prefilled_again() -> None:
    job = PartialJob()
    mine = job.begun()
    job.relay_holds(1)
    job.interrupted(A, *((id, 5) for id in mine))
    job.loaded(A, 1)
    commands: list[Command] = []
    for id in mine:
        commands += job.finish(A, id, 1, tokens=12)
    assert only(commands, Train)
    settle = job.trained(2)[1]
    outcomes = [one for one in settle.trajectories if one.trajectory in mine]
    assert {one.state for one in outcomes} == {State.CONSUMED}
    for one in outcomes:
        assert (one.version, one.newest_version, one.spans) == (0, 1, 2)
        assert one.prefilled_tokens == 5 + 5  # the prompt's, and those that it had
        assert (one.staleness_finish, one.staleness_consumption) == (1, 1)


def test_a_lost_rollouts_work_goes_on_under_any_version() -> None:
    job = PartialJob()
    mine = job.begun()
    job.relay_holds(1)
    job.interrupted(A, *((id, 5) for id in mine))
    assert job.lose(A) == []
    (generate,) = only(job.loaded(B, 1), Generate)
    assert (generate.version, ids(generate), generate.reason) == (1, mine, "4 taken over")


def test_a_step_waits_for_what_would_become_too_stale() -> None:
    """Four groups begin under version 0; two are trained on as step 1, the others have to be in step 2, whatever else is done."""
    job = PartialJob()
    mine = job.begun()
    job.relay_holds(1)
    (generate, *_) = only(job.loaded(B, 1), Generate)
    assert only(job.finish_all(B, generate), Train) == []
    assert "step 2 waits for groups in flight that would become too stale" in job.controller.waits()
    job.interrupted(A, *((id, 5) for id in mine))
    job.loaded(A, 1)
    commands = [command for id in mine for command in job.finish(A, id, 1)]
    (train,) = only(commands, Train)
    assert {sample.trajectory for sample in train.samples} == set(mine)


def test_a_step_takes_no_newer_groups_for_which_older_ones_would_be_late() -> None:
    """At most two versions stale: six groups begin under version 0 and fit into steps 1 to 3, if these take nothing else."""
    job = PartialJob(max_staleness=2, concurrency=6, ahead=9.0)
    given = job.start()
    mine = ids(given[A][0])
    job.finish_all(B, given[B][0])  # three groups: step 1 has two
    job.trained(1)
    job.published(1)
    job.relay_holds(1)
    (generate, *_) = only(job.loaded(B, 1), Generate)
    newer = ids(generate)
    assert len(newer) == 4
    assert only(job.finish_all(B, generate), Train) == []
    assert "step 2 waits for groups in flight that would become too stale" in job.controller.waits()
    assert only(job.finish(A, mine[0], 0), Train) == []
    (train,) = only(job.finish(A, mine[1], 0), Train)
    taken = {sample.trajectory for sample in train.samples}
    assert taken == {*ids(given[B][0])[4:], *mine[:2]}
