"""A job that loses relays: rank 1 is the trainer, 2 and 9 the relays on x and y, 3 (A) and 4 (B) the rollouts on x."""

from __future__ import annotations

import pytest
from scripted_job import A, B, ScriptedJob, kinds, only

from laminar_hpc.errors import ProtocolError
from laminar_hpc.protocol.commands import Attach, Broadcast, Command, Generate, Pull
from laminar_hpc.protocol.events import (
    LinkStalled,
    RankHeard,
    RankLost,
    RelayHolds,
    RelayReady,
    RolloutReady,
    SpareReady,
    TrainerReady,
)

HERE, THERE, SPARE = 2, 9, 10


class TwoRelays(ScriptedJob):
    """With a second relay, on a node of its own."""

    def __init__(self, **changes: int) -> None:
        super().__init__(relays=2, **{"ahead": 9.0, "steps": 9, **changes})
        self.tell(TrainerReady(1, 0, 0))
        self.tell(RelayReady(HERE, 0, "x"))
        self.tell(RelayReady(THERE, 0, "y"))
        for rank in (A, B):
            self.ready(rank)

    def holds(self, relay: int, version: int) -> list[Command]:
        return self.tell(RelayHolds(relay, 0, version, 0.1, b""))

    def lost(self, relay: int) -> list[Command]:
        return self.tell(RankLost(relay, 0, "killed"))

    def published_up_to(self, version: int) -> None:
        """A trains steps under version 0, one after the other, until `version` is published; both relays hold 0."""
        self.published(0)
        for relay in (HERE, THERE):
            self.holds(relay, 0)
        (given,) = only(self.loaded(A, 0), Generate)
        for step in range(1, version + 1):
            (given,) = only(self.finish_all(A, given), Generate)
            self.trained(step)
            self.published(step)

    def pulls_anew(self, rank: int) -> Pull:
        """The rollout's engine is started again, and has to pull."""
        self.lose(rank)
        (pull,) = only(self.ready(rank), Pull)
        return pull


@pytest.fixture
def job() -> TwoRelays:
    return TwoRelays()


def test_rollouts_that_work_are_attached_and_go_on(job):
    job.published(0)
    job.holds(HERE, 0)
    (given,) = only(job.loaded(A, 0), Generate)
    job.loaded(B, 0)
    job.holds(THERE, 0)
    commands = job.lost(HERE)
    assert kinds(commands) == ["Forget", "Attach", "Attach"]
    assert only(commands, Attach)[0] == Attach("rank 2 is lost, this is the nearest relay", A, THERE, True)
    commands = job.finish_all(A, given)
    assert kinds(commands) == ["Train", "Publish", "Generate"]
    job.trained(1)
    assert only(job.published(1), Broadcast)[0].chain == [THERE]
    assert kinds(job.holds(THERE, 1)) == []  # both are in their batches


def test_a_rollout_that_was_loading_is_told_to_pull_again_from_its_new_relay(job):
    job.published(0)
    job.holds(HERE, 0)
    job.holds(THERE, 0)
    commands = job.lost(HERE)
    assert kinds(commands) == ["Forget", "Attach", "Attach", "Pull", "Pull"]
    assert [(pull.rank, pull.version) for pull in only(commands, Pull)] == [(A, 0), (B, 0)]
    assert only(commands, Pull)[0].reason == "its relay has changed, holds no weights, relay 9 holds 0"
    assert kinds(job.loaded(A, 0)) == ["Generate"]


def test_the_pull_waits_where_the_new_relay_has_nothing_yet(job):
    job.published(0)
    job.holds(HERE, 0)
    assert kinds(job.lost(HERE)) == ["Forget", "Broadcast", "Attach", "Attach"]
    assert "rollout 3 waits for a version that it can load at relay 9" in job.controller.waits()
    assert [(pull.rank, pull.version) for pull in job.holds(THERE, 0)] == [(A, 0), (B, 0)]


def test_the_answer_that_was_on_its_way_counts(job):
    job.published(0)
    job.holds(HERE, 0)
    job.lost(HERE)
    assert kinds(job.loaded(A, 0)) == ["Generate"]
    (pull,) = job.holds(THERE, 0)
    assert pull.rank == B


def test_the_answer_to_a_void_pull_does_not_end_the_one_after_it(job):
    job.published_up_to(2)
    job.holds(HERE, 1)
    assert job.pulls_anew(B).version == 1
    job.holds(THERE, 2)
    assert [(pull.rank, pull.version) for pull in only(job.lost(HERE), Pull)] == [(B, 2)]
    assert job.loaded(B, 1) == []  # it goes on to 2 by itself
    assert "rollout 4 loads version 2 from relay 9" in job.controller.waits()
    assert [one.version for one in only(job.loaded(B, 2), Generate)] == [2]


def test_an_older_version_is_pulled_rather_than_none_and_the_newer_answer_counts(job):
    job.published_up_to(1)
    job.holds(HERE, 1)
    assert job.pulls_anew(B).version == 1
    (pull,) = only(job.lost(HERE), Pull)
    assert (pull.rank, pull.version) == (B, 0)
    assert [one.version for one in only(job.loaded(B, 1), Generate)] == [1]


def test_a_rollout_never_goes_back_to_what_its_new_relay_holds(job):
    job.published_up_to(1)
    job.holds(HERE, 1)
    job.pulls_anew(B)
    (given,) = only(job.loaded(B, 1), Generate)
    assert only(job.lost(HERE), Pull) == []  # THERE holds 0
    commands = job.finish_all(B, given)
    assert only(commands, Pull) == []
    assert [one.version for one in only(commands, Generate)] == [1]


def test_what_answers_no_pull_at_all_is_refused(job):
    job.published_up_to(1)
    job.holds(HERE, 1)
    assert job.pulls_anew(B).version == 1
    with pytest.raises(
        ProtocolError, match=r"Loaded 0 from rank 4, .* names version 0, where 1 or a newer one was due"
    ):
        job.loaded(B, 0)


def test_rollouts_come_home_to_a_spare_that_has_caught_up(job):
    assert job.tell(SpareReady(SPARE, 0, "x")) == []
    job.published(0)
    job.holds(HERE, 0)
    job.holds(THERE, 0)
    assert kinds(job.lost(HERE)) == ["Forget", "TakeOver", "Attach", "Attach", "Pull", "Pull"]
    assert "node x waits for rank 10 to report as its relay, incarnation 0" in job.controller.waits()
    assert only(job.tell(RelayReady(SPARE, 0, "x")), Broadcast)[0].chain == [THERE, SPARE]
    job.loaded(A, 0)
    commands = job.holds(SPARE, 0)
    assert kinds(commands) == ["Attach", "Attach", "Pull"]  # B was still loading
    assert [(one.rank, one.relay, one.remote) for one in only(commands, Attach)] == [
        (A, SPARE, False),
        (B, SPARE, False),
    ]
    assert only(commands, Pull)[0].rank == B


def test_a_relay_that_speaks_again_comes_back(job):
    job.published(0)
    job.holds(HERE, 0)
    job.holds(THERE, 0)
    job.lost(HERE)
    assert job.controller.incarnation_of(HERE) == 0
    (readmit,) = job.tell(RankHeard(HERE, 0))
    assert (readmit.rank, readmit.incarnation, job.controller.incarnation_of(HERE)) == (HERE, 1, 1)
    assert job.holds(HERE, 0) == []  # of the incarnation before
    assert kinds(job.tell(RelayReady(HERE, 1, "x"))) == ["Broadcast"]
    commands = job.tell(RelayHolds(HERE, 1, 0, 0.1, b""))
    assert [(one.rank, one.relay, one.remote) for one in only(commands, Attach)] == [(A, HERE, False), (B, HERE, False)]


def test_a_stalled_link_changes_the_chain(job):
    job.published(0)
    (sever, broadcast) = job.tell(LinkStalled(THERE, 0, 0, HERE))
    assert (sever.source, sever.rank, broadcast.chain) == (HERE, THERE, [THERE, HERE])


def test_a_rollout_that_comes_after_its_relay_was_lost_pulls_from_the_other():
    job = ScriptedJob(relays=2, rollouts=1)
    job.tell(TrainerReady(1, 0, 0))
    job.tell(RelayReady(HERE, 0, "x"))
    job.tell(RelayReady(THERE, 0, "y"))
    job.published(0)
    job.tell(RelayHolds(HERE, 0, 0, 0.1, b""))
    job.tell(RelayHolds(THERE, 0, 0, 0.1, b""))
    job.tell(RankLost(HERE, 0, "killed"))
    attach, pull = job.tell(RolloutReady(A, 0, "x", HERE, 4))
    assert (attach.relay, attach.remote, pull.version) == (THERE, True, 0)


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (LinkStalled(A, 0, 0, HERE), "LinkStalled 0 from rank 3, .* came from a rollout, only a relay sends it"),
        (RankHeard(1, 0), "RankHeard from rank 1, .* came from a trainer, only a relay sends it"),
        (SpareReady(1, 0, "x"), "SpareReady from rank 1, incarnation 0, came from a trainer"),
        (RankHeard(77, 0), "RankHeard from rank 77, .* came from a rank that has never reported"),
    ],
)
def test_what_only_relays_say_is_refused_from_others(job, event, message):
    with pytest.raises(ProtocolError, match=message):
        job.tell(event)
