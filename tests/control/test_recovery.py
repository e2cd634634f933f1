"""The loss of a trainer's worker: all of them start again from the newest checkpoint, and the books stay as they are."""

from __future__ import annotations

import pytest
from scripted_job import TRAINER, A, ScriptedJob, kinds
from test_checkpoints import SavedJob, stop

from laminar_hpc.policy.restarts import WINDOW_S
from laminar_hpc.protocol.commands import Abandon, Checkpoint, EndJob, RestartTrainers
from laminar_hpc.protocol.events import RankLost, Repeated, Trained


def lose(job: ScriptedJob, worker: int = 0, rank: int = TRAINER, final: bool = False) -> list:
    return job.tell(RankLost(rank, worker, "signal 9", final=final))


def after_a_step(**changes: object) -> SavedJob:
    """Step 1 is trained, and its checkpoint asked for."""
    job = SavedJob(checkpoint_every=1, **changes)
    job.step(job.begin(), 1)
    return job


def test_before_the_first_checkpoint_they_begin_with_the_model():
    job = SavedJob(checkpoint_every=5)
    job.start()
    reason = f"rank {TRAINER} (trainer) has lost its worker, all begin again with the model"
    assert lose(job) == [RestartTrainers(reason, 1, None, 0.0)]


def test_they_begin_with_the_newest_checkpoint():
    job = after_a_step()
    job.commit(1)
    reason = f"rank {TRAINER} (trainer) has lost its worker, all begin again with step 1"
    assert lose(job) == [RestartTrainers(reason, 1, 1, 0.0)]


def test_what_the_trainers_had_told_stays_and_the_rest_comes_from_the_new_workers():
    job = SavedJob(checkpoint_every=5, minibatches=2)
    given = job.begin()
    job.finish_all(A, given[A])
    assert job.tell(Trained(TRAINER, 0, 1, 0, 100, 2.0, {"loss": 0.5})) == []
    lose(job)
    assert job.tell(Repeated(TRAINER, 0, 1, 0)) == []
    commands = job.tell(Trained(TRAINER, 0, 1, 1, 100, 2.0, {"loss": 0.5}))
    assert "ReportStep" in kinds(commands)


def test_one_loss_takes_the_workers_of_all_trainers_with_it():
    job = SavedJob(checkpoint_every=5)
    job.start()
    assert kinds(lose(job, worker=0)) == ["RestartTrainers"]
    assert lose(job, worker=0) == []
    again = lose(job, worker=1)
    assert (again[0].worker, again[0].delay_s) == (2, 2.0)


def test_a_checkpoint_that_is_being_written_is_given_up():
    job = after_a_step()
    job.books(1)
    abandon, restart = lose(job)
    assert abandon == Abandon("the trainers' workers are started again", 1, 0)
    assert restart.step is None
    assert job.state(1) == []


@pytest.mark.parametrize("error", ["", "no space"])
def test_one_that_is_being_put_into_place_is_waited_for(error):
    job = after_a_step()
    job.state(1)
    job.books(1)
    assert lose(job) == []
    commands = job.committed(1, error)
    assert commands[-1].step == (None if error else 1)
    assert isinstance(commands[-1], RestartTrainers)
    assert kinds(commands[:-1]) == (["Abandon"] if error else [])


def test_a_job_that_is_to_stop_saves_when_the_new_workers_have_come_so_far():
    job = SavedJob(checkpoint_every=5)
    given = job.begin()
    job.finish_all(A, given[A])
    stop(job)
    lose(job)
    commands = job.trained(1)
    assert Checkpoint("time limit", 1, 0) in commands
    assert job.commit(1)[-1] == EndJob("time limit; the checkpoint of step 1 is complete", "requeue")


@pytest.mark.parametrize("books_first", [True, False])
def test_a_job_that_is_to_stop_saves_again_what_was_lost_half_written(books_first):
    job = SavedJob(checkpoint_every=5)
    given = job.begin()
    job.finish_all(A, given[A])
    stop(job)
    assert Checkpoint("time limit", 1, 0) in job.trained(1)
    if books_first:
        job.books(1)
    *_, again = commands = lose(job)
    assert kinds(commands) == ["Abandon", "RestartTrainers", "Checkpoint"]
    assert again == Checkpoint("time limit", 1, 1)
    assert job.state(1, serial=0) == []  # of the worker that is gone
    assert job.books(1, serial=0) == []
    assert job.books(1) == []
    assert kinds(job.state(1)) == ["Commit"]
    assert job.committed(1)[-1] == EndJob("time limit; the checkpoint of step 1 is complete", "requeue")


@pytest.mark.parametrize("every", [0, None])
def test_without_checkpoints_the_job_fails(every):
    job = SavedJob(checkpoint_every=every)
    job.start()
    *_, end = lose(job)
    assert end == EndJob(
        f"trainer rank {TRAINER} lost its worker: signal 9; it cannot be replaced, since checkpoint.every is 0",
        "failed",
    )


def test_what_would_fail_again_is_not_tried_again():
    job = SavedJob(checkpoint_every=1)
    job.start()
    *_, end = lose(job, final=True)
    assert end.outcome == "failed"
    assert end.reason == f"trainer rank {TRAINER} lost its worker: signal 9; another one would fail in the same way"


def test_too_many_losses_end_the_job():
    job = SavedJob(checkpoint_every=1, worker_restarts=2)
    job.start()
    assert [lose(job, worker)[0].delay_s for worker in range(2)] == [0.0, 2.0]
    *_, end = lose(job, 2)
    assert end.reason == (
        f"trainer rank {TRAINER} lost its worker: signal 9; that is loss 3 within {WINDOW_S:.0f} s, "
        f"job.worker_restarts allows 2"
    )
