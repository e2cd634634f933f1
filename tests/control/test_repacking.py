"""Moves of trajectories between rollouts: when they are made, who owns what meanwhile, and what is told of them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from scripted_job import ScriptedJob, ids, only

from laminar_hpc.control.settings import RepackSettings
from laminar_hpc.control.snapshot import Snapshot
from laminar_hpc.errors import ProtocolError
from laminar_hpc.protocol.commands import Command, EndJob, Generate, HandOver, Pull, ReportMove
from laminar_hpc.protocol.events import HandedOver, StopRequested, WentToTool

A, B, C = 3, 4, 5
UNGATED = RepackSettings(batch=8, gain_gate=False)


class Tail(ScriptedJob):
    """Every rollout is in the middle of eight trajectories of version 0, of which the last four are finished.

    Its cache has room for 100 tokens. A check was made when version 0 was published, at 0 s; the next one is due at 5 s.
    Step 1 is in training, and groups for another rollout may be handed out.
    """

    def __init__(self, rollouts: int = 2, repack: RepackSettings = UNGATED, **changes: Any) -> None:
        fields = {"concurrency": 8, "kv_capacity_tokens": 100, "steps": 9, "prompts": 4, "ahead": 2.0, **changes}
        super().__init__(rollouts=rollouts, repack=repack, **fields)
        given = self.start()
        self.left = {rank: ids(given[rank][0])[:4] for rank in self.incarnation}
        for rank in self.incarnation:
            for trajectory in ids(given[rank][0])[4:]:
                self.finish(rank, trajectory, 0)

    def speak(self, rank: int, kv_use: float, tokens: int = 5, times: int = 2, waiting: int = 0) -> list[Command]:
        """A rollout streams that each of its four has so many tokens, and one more each time."""
        commands = []
        for more in range(times):
            progress = [(trajectory, tokens + more) for trajectory in self.left[rank]]
            commands += self.streamed(rank, *progress, kv_use=kv_use, waiting=waiting)
        return commands

    def check(self, now: float = 5.0, tokens: int = 8) -> list[HandOver]:
        """What A's next stream leads to at this time."""
        self.now = now
        return only(self.speak(A, 0.2, tokens, times=1), HandOver)

    def ask(self) -> HandOver:
        """A, with 20 tokens in its cache, is to hand over to B, which has 30."""
        self.speak(A, 0.2)
        self.speak(B, 0.3)
        (hand_over,) = self.check()
        assert (hand_over.rank, hand_over.destination) == (A, B)
        assert hand_over.trajectories == self.left[A]
        return hand_over

    def give(self, hand_over: HandOver, tokens: int = 9) -> list[Command]:
        """A hands all over, after some more tokens."""
        return self.handed_over(A, hand_over.move, *[(trajectory, tokens) for trajectory in hand_over.trajectories])


# --- when -----------------------------------------------------------------------------------------------------------


def test_at_the_next_check_the_emptiest_goes_onto_the_fullest_that_has_room():
    job = Tail(rollouts=3)
    for rank, use in ((A, 0.3), (B, 0.1), (C, 0.5)):
        assert only(job.speak(rank, use), HandOver) == []
    assert job.check(4.9) == []
    (hand_over,) = job.check(5.0, 9)
    # with eight trajectories C is full, and so A stays where it is
    assert (hand_over.rank, hand_over.incarnation, hand_over.destination) == (B, 0, C)
    assert (hand_over.move, hand_over.trajectories) == (0, job.left[B])
    assert hand_over.reason == "4 trajectories with 10 tokens onto rollout 5, which then has 8"
    assert f"rollout {B} hands 4 trajectories over to rollout {C}" in job.controller.waits()
    assert job.check(11.0, 10) == []  # nobody is left for A


def test_a_publication_is_followed_by_a_check_at_once():
    job = Tail()
    job.speak(A, 0.2)
    job.speak(B, 0.3)
    job.now = 1.0
    job.trained(1)
    (hand_over,) = only(job.published(1), HandOver)
    assert (hand_over.rank, hand_over.destination) == (A, B)


@pytest.mark.parametrize(
    "changes",
    [
        {"repack": RepackSettings(batch=8, gain_gate=False, enabled=False)},
        {"repack": RepackSettings(batch=7, gain_gate=False)},
        {"repack": RepackSettings(batch=8, gain_gate=False, most_batch=7)},
        {"repack": RepackSettings(batch=8, gain_gate=False, kv_share=0.49)},
        {
            "repack": RepackSettings(batch=0, gain_gate=False)
        },  # no step has been measured, so no batch is too large or not
        {"kv_capacity_tokens": 0},
    ],
)
def test_nothing_moves_where_the_config_or_the_room_forbids_it(changes):
    job = Tail(**changes)
    job.speak(A, 0.2)
    job.speak(B, 0.3)
    assert job.check() == []


def test_nothing_moves_where_all_take_new_weights_together():
    job = ScriptedJob(mode="sync", concurrency=8, kv_capacity_tokens=100, repack=UNGATED)
    given = job.start()
    for now in (1.0, 2.0, 6.0):
        job.now = now
        for rank in (A, B):
            trajectories = [id for generate in given[rank] for id in ids(generate)]
            commands = job.streamed(rank, *[(id, int(now)) for id in trajectories], kv_use=0.1)
            assert only(commands, HandOver) == []


def test_who_has_trajectories_waiting_takes_no_part():
    job = Tail()
    job.speak(A, 0.2)
    job.speak(B, 0.3, waiting=1)
    assert job.check() == []


def test_who_has_trajectories_at_a_tool_takes_no_part():
    job = Tail()
    job.speak(A, 0.2)
    job.speak(B, 0.3)
    job.tell(WentToTool(B, 0, job.left[B][0]))
    assert job.check() == []


def test_what_was_said_before_work_was_given_counts_no_more():
    job = Tail(rollouts=3, repack=RepackSettings(batch=12, gain_gate=False))
    for rank in (A, B):
        job.speak(rank, 0.2)
    taken = only(job.lose(C), Generate)
    assert {generate.rank for generate in taken} == {A, B}  # two each of what C had
    assert job.check() == []
    job.speak(A, 0.2, 9)
    job.speak(B, 0.2, 9)
    (hand_over,) = job.check(10.0, 11)
    assert len(hand_over.trajectories) == 6


def test_only_rollouts_of_one_version_exchange_trajectories():
    job = Tail(ahead=9.0)
    for trajectory in job.left[B][:-1]:
        job.finish(B, trajectory, 0)
    job.train_and_spread(1)
    job.finish(B, job.left[B][-1], 0)
    (generate,) = only(job.loaded(B, 1), Generate)
    for trajectory in ids(generate)[4:]:
        job.finish(B, trajectory, 1)
    job.left[B] = ids(generate)[:4]
    job.speak(A, 0.2)
    job.speak(B, 0.3)
    assert job.check(20.0) == []


# --- what it must gain ----------------------------------------------------------------------------------------------


def measured(job: Tail, four_s: float, three_s: float, streams: int = 8) -> None:
    """A streams one token after the other with four trajectories, B with three: its decode steps take so long."""
    job.finish(B, job.left[B].pop(), 0)
    for tokens in range(10, 10 + streams):
        job.now = tokens * four_s
        job.speak(A, 0.2, tokens, times=1)
    for tokens in range(10, 10 + streams):
        job.now = (10 + streams) * four_s + tokens * three_s
        job.speak(B, 0.3, tokens, times=1)


GATED = RepackSettings(batch=8)


def gated(job: Tail) -> list[HandOver]:
    """What a check leads to now: one follows a publication."""
    job.trained(1)
    return only(job.published(1), HandOver)


def test_a_move_is_made_where_the_steps_that_are_shared_are_worth_the_prefill():
    job = Tail(repack=GATED, max_response_tokens=1010, kv_capacity_tokens=10_000)
    measured(job, four_s=0.024, three_s=0.023)  # 0.02 s, and 0.001 s for each
    (hand_over,) = gated(job)
    assert (hand_over.rank, hand_over.destination) == (A, B)
    assert hand_over.reason == "4 trajectories with 2070 tokens onto rollout 4, which then has 7, 12.6 s gained"
    # A had 2000 tokens 0.415 s ago, 17.3 steps.
    # The responses that have ended had 10 tokens, fewer than these have: the limit is all that is known, 1010 - 17 steps.
    # Together a step takes 0.027 s, not 0.024 and 0.023. A token of prefill: an eighth of a step of eight, 0.028 s.
    report, *_ = job.lose(A)
    assert report.expected_gain_s == pytest.approx((1010 - 17) * 0.020 - 2070 * 0.028 / 8)


def test_a_move_is_not_made_where_the_prefill_costs_more():
    job = Tail(repack=GATED, max_response_tokens=1010, kv_capacity_tokens=40_000)
    measured(job, four_s=0.024, three_s=0.023)  # 8000 tokens of 0.0035 s are more than 19.9 s
    assert gated(job) == []


@pytest.mark.parametrize(("share", "moves"), [(0.45, 0), (0.5, 1), (0.0, 1)])
def test_a_move_is_not_made_where_it_delays_somebody_too_much(share, moves):
    repack = RepackSettings(batch=8, delay_share=share)
    job = Tail(repack=repack, max_response_tokens=1010, kv_capacity_tokens=10_000)
    measured(job, four_s=0.024, three_s=0.023)
    # 993 steps of 0.027 s instead of 0.023 s, and 2070 tokens of 0.0035 s, are 11.2 s for B's, begun 0.9 s ago and with
    # 23.2 s to go: a share of 0.47; for A's it is 10.2 s of 25.1 s
    commands = gated(job)
    assert len(commands) == moves
    if moves:
        job.give(commands[0])
        books = msgspec.msgpack.decode(job.controller.snapshot()[0], type=Snapshot)
        delays_s = {one.id: one.delayed_s for one in books.trajectories}
        prefill_s = 2070 * 0.028 / 8
        assert [delays_s[id] for id in job.left[A]] == pytest.approx([993 * 0.003 + prefill_s] * 4)
        assert [delays_s[id] for id in job.left[B]] == pytest.approx([993 * 0.004 + prefill_s] * 3)


def test_a_move_is_not_made_where_steps_get_longer_by_as_much_as_is_shared():
    job = Tail(repack=GATED, max_response_tokens=1010, kv_capacity_tokens=10_000)
    measured(job, four_s=0.4, three_s=0.3)
    assert gated(job) == []


def test_a_move_is_not_made_where_an_emptied_rollout_would_have_nothing_to_do():
    job = Tail(repack=GATED, max_response_tokens=1010, kv_capacity_tokens=10_000, steps=2)
    measured(job, four_s=0.024, three_s=0.023)
    assert gated(job) == []


def test_nothing_moves_before_steps_were_measured():
    job = Tail(repack=GATED, max_response_tokens=1010, kv_capacity_tokens=10_000)
    measured(job, four_s=0.024, three_s=0.023, streams=5)
    assert gated(job) == []


# --- who owns what --------------------------------------------------------------------------------------------------


def test_what_was_handed_over_goes_on_at_the_destination_and_the_source_takes_new_weights():
    job = Tail()
    hand_over = job.ask()
    job.train_and_spread(1)
    generate, pull = job.give(hand_over)
    assert isinstance(generate, Generate)
    assert (generate.rank, generate.version, generate.reason) == (B, 0, "4 moved")
    assert [(spec.id, spec.resume_tokens) for spec in generate.trajectories] == [(id, 9) for id in job.left[A]]
    assert isinstance(pull, Pull)
    assert (pull.rank, pull.version) == (A, 1)
    assert job.finish(A, job.left[A][0], 0) == []  # not its own any more
    job.finish(B, job.left[A][0], 0)
    assert f"rollout {B} generates 7 trajectories under version 0" in job.controller.waits()


def test_without_newer_weights_the_source_draws_again():
    job = Tail()
    _, fresh = only(job.give(job.ask()), Generate)
    assert (fresh.rank, fresh.version) == (A, 0)
    assert all(spec.resume_tokens == 0 for spec in fresh.trajectories)


def test_what_has_ended_in_the_meantime_stays_until_it_is_graded():
    job = Tail()
    hand_over = job.ask()
    first, *others = hand_over.trajectories
    (generate,) = job.handed_over(A, hand_over.move, *[(trajectory, 9) for trajectory in others])
    assert ids(generate) == others
    (fresh,) = only(job.finish(A, first, 0), Generate)
    assert fresh.rank == A


def test_an_answer_counts_once_and_only_to_what_was_asked():
    job = Tail()
    hand_over = job.ask()
    answer = HandedOver(A, 0, hand_over.move, [])
    assert job.tell(HandedOver(B, 0, hand_over.move, [])) == job.tell(HandedOver(A, 0, 7, [])) == []
    (report,) = job.tell(answer)
    assert isinstance(report, ReportMove)
    assert report.ending == "nothing was left to hand over"
    assert job.tell(answer) == []
    with pytest.raises(ProtocolError, match="only a rollout sends it"):
        job.tell(HandedOver(1, 0, 0, []))


def test_a_source_lost_before_it_answers_is_like_any_lost_rollout():
    job = Tail()
    hand_over = job.ask()
    report, generate = job.lose(A)
    assert (report.ending, report.gain_s) == ("the source was lost before it had handed over", None)
    assert [(spec.id, spec.resume_tokens) for spec in generate.trajectories] == [(id, 8) for id in job.left[A]]
    job.ready(A)
    late = HandedOver(A, 0, hand_over.move, [])
    assert job.tell(late) == job.tell(HandedOver(A, 1, hand_over.move, [])) == []


def test_without_its_destination_the_source_goes_on_with_them_itself():
    job = Tail()
    hand_over = job.ask()
    assert only(job.lose(B), Generate)  # A has room for what B had
    commands = job.give(hand_over)
    (report,) = only(commands, ReportMove)
    assert (report.ending, report.trajectories, report.gain_s) == (f"rollout {B} could not take them", 0, None)
    (generate,) = only(commands, Generate)
    assert (generate.rank, generate.reason) == (A, "4 taken over")
    assert {spec.id: spec.resume_tokens for spec in generate.trajectories} == dict.fromkeys(job.left[A], 9)


def test_what_the_destination_has_no_room_for_is_as_after_a_loss():
    job = Tail(concurrency=8, rollouts=3, repack=RepackSettings(batch=12, gain_gate=False))
    job.speak(A, 0.2)
    job.speak(B, 0.3)
    (hand_over,) = job.check()
    job.lose(C)  # A and B take two each of what it had
    commands = job.give(hand_over)
    (moved,) = [one for one in only(commands, Generate) if one.rank == B]
    assert (ids(moved), moved.reason) == (job.left[A][:2], "2 moved")
    (back,) = [one for one in only(commands, Generate) if one.rank == A]
    assert (ids(back), back.reason) == (job.left[A][2:], "2 taken over")


def test_what_was_moved_and_then_lost_goes_on_from_what_the_destination_had_streamed():
    job = Tail()
    hand_over = job.ask()
    _, fresh = only(job.give(hand_over), Generate)  # A draws eight new ones
    job.streamed(B, *[(trajectory, 11) for trajectory in job.left[A]])
    assert only(job.lose(B), Generate) == []  # A is full
    taken = [only(job.finish(A, trajectory, 0), Generate)[0].trajectories[0] for trajectory in ids(fresh)]
    own, moved = job.left[B], job.left[A]
    assert {spec.id: spec.resume_tokens for spec in taken} == {**dict.fromkeys(own, 6), **dict.fromkeys(moved, 11)}


# --- what came of it ------------------------------------------------------------------------------------------------


def test_a_move_is_reported_when_all_that_it_concerns_has_ended():
    job = Tail(max_response_tokens=1010, kv_capacity_tokens=10_000)
    measured(job, four_s=0.024, three_s=0.023)
    (hand_over,) = only(job.trained(1) and job.published(1), HandOver)
    job.relay_holds(1)
    planned_s = job.now
    job.now += 1.0
    job.give(hand_over, 18)
    job.now += 0.5
    job.loaded(A, 1)
    job.now += 0.5
    # four steps of 0.027 s, and so 0.892 s for the prefill
    job.streamed(B, *[(trajectory, 22) for trajectory in job.left[A]], running=7)
    reports: list[ReportMove] = []
    for trajectory in [*job.left[B], *job.left[A]]:
        assert reports == []
        job.now += 1.0
        tokens = 100 if trajectory in job.left[A] else 67
        reports = only(job.finish(B, trajectory, 0, tokens=tokens), ReportMove)
    (report,) = reports
    assert (report.move, report.version, report.source, report.destination, report.ending) == (0, 0, A, B, "moved")
    assert report.planned_s == planned_s
    assert report.handed_over_s == report.released_s == planned_s + 1.0
    assert (report.loaded_s, report.loaded_version) == (planned_s + 1.5, 1)
    assert report.resumed_s == planned_s + 2.0
    assert (report.trajectories, report.tokens) == (4, 4 * (5 + 18))  # prompts of 5 tokens
    assert report.expected_gain_s is None  # not asked for
    assert report.prefill_s == pytest.approx(1.0 - 4 * 0.027)
    # what was moved went on for 82 steps, what was beside it, at 17 tokens, for 50
    assert report.gain_s == pytest.approx(50 * 0.020 - report.prefill_s)


def test_a_move_whose_trajectories_start_over_has_no_gain():
    job = Tail()
    hand_over = job.ask()
    job.train_and_spread(1)
    job.give(hand_over)
    job.loaded(A, 1)
    job.lose(B, "rollout")  # the last one that held version 0
    job.now = 11.0
    (report,) = only(job.streamed(A, kv_use=0.1), ReportMove)
    assert (report.ending, report.gain_s, report.tokens) == ("moved", None, 4 * 9)


def test_at_the_end_of_the_job_open_moves_are_reported_too():
    job = Tail()
    hand_over = job.ask()
    report, *_, end = job.tell(StopRequested("enough"))
    assert isinstance(end, EndJob)
    assert (report.move, report.ending, report.gain_s) == (
        hand_over.move,
        "the job has ended before the hand-over",
        None,
    )
