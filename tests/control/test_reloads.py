"""A version that only lost rollouts held: loaded again for its trajectories, or they start over."""

from __future__ import annotations

from scripted_job import RELAY, A, B, ScriptedJob, ids, kinds, only

from laminar_hpc.protocol.commands import Attach, Generate, Pull, Settle
from laminar_hpc.protocol.events import RankLost, RelayReady

OTHER = 9
"""Another relay."""


def old_work(**changes: object) -> ScriptedJob:
    """All four groups of the run are handed out; A goes on with group 1 under version 0, B and the relay have version 1."""
    job = ScriptedJob(**{"concurrency": 4, "steps": 2, **changes})
    job.ranks_report()
    for rank in range(OTHER, OTHER + job.settings.relays - 1):
        job.tell(RelayReady(rank, 0, "y"))
    job.spread(0)
    given = {rank: only(job.loaded(rank, 0), Generate) for rank in (A, B)}
    for spec in given[A][0].trajectories[:2]:
        job.finish(A, spec.id, 0)
    job.finish_all(B, given[B][0])
    job.trained(1)
    job.spread(1)
    job.loaded(B, 1)
    job.streamed(A, (2, 9))
    return job


def test_the_engine_that_comes_back_loads_the_old_version_and_goes_on() -> None:
    job = old_work()
    assert job.lose(A) == []
    (pull,) = job.ready(A)
    assert (pull.rank, pull.incarnation, pull.version, pull.exactly) == (A, 1, 0, True)
    assert pull.reason == "trajectories wait for version 0, which nobody holds"
    (generate,) = job.loaded(A, 0)
    assert (generate.version, ids(generate), generate.reason) == (0, [2, 3], "2 taken over")
    assert [spec.resume_tokens for spec in generate.trajectories] == [9, 0]
    job.finish(A, 2, 0)
    (pull,) = only(job.finish(A, 3, 0), Pull)
    assert (pull.version, pull.exactly) == (1, False)


def test_a_relay_that_has_it_no_more_ends_the_wait() -> None:
    job = old_work()
    job.lose(A)
    job.ready(A)
    settle, pull, generate = job.refused(A, 0)
    assert isinstance(settle, Settle)
    assert [one.trajectory for one in settle.trajectories] == [2, 3]
    assert settle.reason == "no relay has version 0 any more"
    assert (pull.rank, pull.version, pull.exactly) == (A, 1, False)
    assert (generate.rank, generate.version, [spec.group for spec in generate.trajectories]) == (B, 1, [1, 1])
    assert job.refused(A, 0) == []  # once is enough


def test_without_tokens_to_save_nobody_waits() -> None:
    job = ScriptedJob()
    job.start()
    job.lose(B)
    assert kinds(job.lose(A)) == ["Settle"]


def test_a_rank_that_is_gone_is_not_waited_for() -> None:
    job = old_work()
    (settle, *_) = job.lose(A, "rollout")
    assert settle.reason == "rollout 3 was the last that held version 0"


def test_a_rank_that_is_lost_while_its_engine_is_on_its_way_ends_the_wait() -> None:
    job = old_work()
    job.lose(A)
    (settle, *_) = job.tell(RankLost(A, 0, "silent", "rollout"))
    assert settle.reason == "rollout 3, which was to load it again, is gone"
    assert job.tell(RankLost(A, 0, "silent", "rollout")) == []
    (pull,) = job.ready(A)  # it speaks again
    assert (pull.version, pull.exactly) == (1, False)


def test_an_engine_that_is_lost_again_while_it_loads_is_waited_for_again() -> None:
    job = old_work()
    job.lose(A)
    job.ready(A)
    assert job.lose(A) == []
    (pull,) = job.ready(A)
    assert (pull.incarnation, pull.version, pull.exactly) == (2, 0, True)


def test_of_two_that_held_it_the_first_to_come_back_takes_all() -> None:
    job = ScriptedJob(concurrency=8)
    job.start()
    job.streamed(A, (0, 5))
    job.lose(B)
    assert job.lose(A) == []
    (pull,) = job.ready(B)  # version 0 is still the newest
    assert (pull.rank, pull.version, pull.exactly) == (B, 0, False)
    generates = only(job.loaded(B, 0), Generate)
    assert {id for one in generates for id in ids(one)} >= {0, 1, 2, 3}
    (pull,) = job.ready(A)
    assert not pull.exactly


def test_another_relay_is_asked_where_the_first_one_is_lost_before_it_has_answered() -> None:
    job = old_work(relays=2)
    job.lose(A)
    job.ready(A)
    commands = job.tell(RankLost(RELAY, 0, "killed", "relay"))
    assert [command.relay for command in only(commands, Attach)] == [OTHER, OTHER]
    assert [(pull.rank, pull.version, pull.exactly) for pull in only(commands, Pull)] == [(A, 0, True)]
