"""The partial-response pool."""

from __future__ import annotations

import pytest

from laminar_hpc.control.pool import Advance, Owner, Trajectory, TrajectoryPool
from laminar_hpc.control.prompts import Group
from laminar_hpc.protocol.events import Finished, Progress
from laminar_hpc.protocol.trajectory import Purpose, Segment, Source, State, Stop, TrajectorySpec, Verdict

A, B = Owner(4, 0), Owner(5, 2)


@pytest.fixture
def pool() -> TrajectoryPool:
    return TrajectoryPool()


def begin(pool: TrajectoryPool, sample: int = 0, version: int = 7) -> Trajectory:
    group = Group(3, Purpose.TRAIN, 11, 3, 0.0)
    return pool.begin(group, sample, 99, version, A, 1.0)


def finished(id: int, verdict: Verdict = Verdict.GRADED) -> Finished:
    return Finished(4, 0, id, 7, 5, 20, Stop.END_TOKEN, verdict, 0.5)


def test_a_trajectory_begins_with_an_owner_and_no_tokens(pool):
    one = begin(pool)
    assert (one.state, one.owner, one.tokens, one.segments) == (State.GENERATING, A, 0, [])
    assert one.spec == TrajectorySpec(0, 3, 11, 0, Purpose.TRAIN, 99, 0)
    assert begin(pool, 1).id == 1


def test_streamed_tokens_only_grow_and_only_by_the_owner(pool):
    one = begin(pool)
    pool.stream([Progress(0, 8), Progress(77, 3)], 4, 2.0)
    pool.stream([Progress(0, 6)], 4, 3.0)
    pool.stream([Progress(0, 60)], 5, 4.0)
    assert one.tokens == 8
    assert one.segments == [Segment(Source.MODEL, 8, 7)]


def test_an_advance_is_that_of_one_trajectory_between_two_words_of_it(pool):
    begin(pool), begin(pool, 1)
    assert pool.stream([Progress(0, 8), Progress(1, 2)], 4, 2.0) is None  # since when, nobody knows
    assert pool.stream([Progress(0, 13)], 4, 3.0) == Advance(5, 1.0)
    # the one that was not told of in between has gained its 9 tokens in two seconds, not in one
    assert pool.stream([Progress(0, 18), Progress(1, 11)], 4, 4.0) == Advance(9, 2.0)
    assert pool.stream([Progress(0, 18)], 4, 5.0) is None
    pool.orphan([0])
    pool.adopt(7, B)
    assert pool.stream([Progress(0, 30)], 5, 9.0) is None  # another engine, which first had to read it
    assert pool.stream([Progress(0, 31)], 5, 9.5) == Advance(1, 0.5)


def test_a_tool_takes_a_trajectory_and_gives_it_back_to_its_owner_only(pool):
    one = begin(pool)
    pool.go_to_tool(0, 5)
    assert one.state is State.GENERATING
    pool.go_to_tool(0, 4)
    assert one.state is State.AT_TOOL
    assert pool.owned(0, 4) is one
    pool.come_from_tool(0, 4)
    assert one.state is State.GENERATING


def test_finishing_ends_ownership_and_fixes_the_segments(pool):
    one = begin(pool)
    pool.stream([Progress(0, 8)], 4, 2.0)
    pool.finish(one, finished(0), 2, 9.0)
    assert (one.state, one.owner, one.rank) == (State.FINISHED, None, 4)
    assert (one.reward, one.staleness_finish, one.finished_s) == (0.5, 2, 9.0)
    assert one.segments == [Segment(Source.PROMPT, 5), Segment(Source.MODEL, 20, 7)]
    assert [segment.trained_on for segment in one.segments] == [False, True]
    assert pool.owned(0, 4) is None


def test_a_response_that_could_not_be_graded_has_no_reward(pool):
    one = begin(pool)
    pool.finish(one, finished(0, Verdict.RAISED), 0, 9.0)
    assert (one.verdict, one.reward) == (Verdict.RAISED, 0.0)


def test_orphans_go_to_an_owner_of_their_version_oldest_first_with_what_they_have(pool):
    first, second, other = begin(pool), begin(pool, 1), begin(pool, 2, version=8)
    pool.stream([Progress(0, 8)], 4, 2.0)
    pool.go_to_tool(1, 4)
    pool.orphan([0, 1, 2])
    assert [one.state for one in (first, second, other)] == [State.WAITING] * 3
    assert pool.adopt(9, B) is None
    assert pool.adopt(7, B) is first
    assert (first.owner, first.rank, first.state, first.spec.resume_tokens) == (B, 5, State.GENERATING, 8)
    assert pool.adopt(7, B) is second
    assert second.state is State.GENERATING
    assert pool.adopt(7, B) is None
    assert not pool.has_orphans(7)
    assert pool.has_orphans(8)


def test_abandoned_orphans_wait_no_longer(pool):
    one, two = begin(pool), begin(pool, 1)
    pool.orphan([0, 1])
    assert pool.abandon(7) == [one, two]
    assert pool.abandon(7) == []
    assert pool.adopt(7, B) is None
