"""A trainer's journal: the worker that comes next is asked for what came after its checkpoint, in the same order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_hpc.errors import EngineError
from laminar_hpc.protocol.peer import TrainOn, WriteWeights
from laminar_hpc.runtime.journal import MOST_SAVES, Journal


def train(step: int, minibatch: int = 0) -> TrainOn:
    return TrainOn(step, minibatch, 2, [], [], [], [], [])


def write(version: int) -> WriteWeights:
    return WriteWeights(version, "/somewhere", 0)


def test_a_worker_that_begins_with_the_model_does_all_again_but_what_was_written():
    journal = Journal(True, None)
    for work in (write(0), train(1), train(1, 1), write(1), train(2)):
        journal.ask(work).told = True
    journal.ask(train(2, 1))
    journal.ask(write(2))
    again = journal.since(None)
    assert [one.work for one in again] == [train(1), train(1, 1), train(2), train(2, 1), write(2)]
    assert [one.told for one in again] == [True, True, True, False, False]


def test_after_a_checkpoint_only_what_came_after_it():
    journal = Journal(True, None)
    journal.ask(train(1)).told = True
    journal.save(1, None)
    journal.ask(write(1)).told = True
    journal.ask(train(2)).told = True
    journal.save(2, 1)
    journal.ask(train(3))
    assert [one.work for one in journal.since(1)] == [train(2), train(3)]
    assert [one.work for one in journal.since(2)] == [train(3)]


def test_a_run_that_goes_on_begins_with_its_checkpoint():
    journal = Journal(True, 7)
    journal.ask(train(8))
    assert [one.work for one in journal.since(7)] == [train(8)]
    with pytest.raises(EngineError, match="cannot do again what came after step 3"):
        journal.since(3)


def test_what_no_checkpoint_is_made_of_is_not_kept_for_ever():
    """Step 1 is saved, and nothing for long; then there is a checkpoint again."""
    journal = Journal(True, None)
    journal.ask(train(1))
    journal.save(1, None)
    for step in range(2, 3 * MOST_SAVES):
        journal.ask(train(step))
        journal.save(step, 1)
        assert len(journal._entries) <= 2 * MOST_SAVES
    with pytest.raises(EngineError, match="cannot do again what came after step 1"):
        journal.since(1)
    journal.ask(train(99))
    assert [one.work.step for one in journal.since(step)] == [99]


def test_nothing_is_kept_where_there_are_no_checkpoints():
    journal = Journal(False, None)
    journal.ask(train(1))
    journal.save(1, None)
    assert journal.since(None) == []


@given(st.data(), st.integers(1, 30), st.integers(1, 5))
def test_whatever_was_committed_the_steps_after_it_are_all_there(data: st.DataObject, steps: int, every: int) -> None:
    """Checkpoints are committed some time after they were asked for, and no step that is needed is ever forgotten."""
    journal, saved, newest = Journal(True, None), [], None
    for step in range(1, steps + 1):
        journal.ask(train(step)).told = True
        if step % every == 0:
            later = [one for one in saved if one > (newest or 0)]
            newest = data.draw(st.sampled_from([newest, *later] if len(later) < MOST_SAVES else later))
            journal.save(step, newest)
            saved.append(step)
    base = data.draw(st.sampled_from([newest, *(one for one in saved if one > (newest or 0))]))
    assert [one.work.step for one in journal.since(base)] == list(range((base or 0) + 1, steps + 1))
    assert [one.work.step for one in journal.since(base)] == list(range((base or 0) + 1, steps + 1))
