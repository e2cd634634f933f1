"""Batches, mini-batches and the report of a step, by hand."""

from __future__ import annotations

import math

import msgspec
import pytest

from laminar_hpc.control.pool import Trajectory
from laminar_hpc.control.prompts import Group
from laminar_hpc.control.settings import Settings
from laminar_hpc.control.training import BatchGroup, Training
from laminar_hpc.errors import ProtocolError
from laminar_hpc.protocol.commands import Sample, Train
from laminar_hpc.protocol.events import Trained
from laminar_hpc.protocol.trajectory import Purpose, State

JOB = Settings(
    mode="laminar", steps=5, prompts=2, group_size=2, minibatches=2, train_prompts=9, trainers=2, relays=1, rollouts=1
)


def member(id: int, group: int, tokens: int, reward: float, staleness: int) -> Trajectory:
    one = Trajectory(id, group, 0, id % 2, Purpose.TRAIN, 1, 3, 0.0, None, 4, State.FINISHED)
    one.prompt_tokens, one.tokens, one.reward, one.staleness_finish = 5, tokens, reward, staleness
    return one


def batch() -> list[BatchGroup]:
    return [
        BatchGroup(
            Group(7, Purpose.TRAIN, 0, 0, 0.0), [member(10, 7, 10, 1.0, 0), member(11, 7, 20, 0.0, 1)], staleness=1
        ),
        BatchGroup(
            Group(8, Purpose.TRAIN, 1, 1, 0.0), [member(12, 8, 30, 1.0, 2), member(13, 8, 40, 1.0, 2)], staleness=3
        ),
    ]


def begin(training: Training) -> list[Train]:
    trains = training.feed(batch(), 50.0)
    training.makes(4)
    return trains


def trained(rank: int, minibatch: int, step: int = 1, seconds: float = 2.0, **metrics: float) -> Trained:
    return Trained(rank, 0, step, minibatch, 1, seconds, metrics)


def test_a_batch_is_cut_into_minibatches_of_whole_groups_with_balanced_trainers():
    first, second = begin(Training(JOB))
    assert (first.step, first.minibatch, first.minibatches) == (1, 0, 2)
    # the longer trajectory of each mini-batch goes to trainer 0
    assert first.samples == [Sample(10, 7, 1.0, 15, 1), Sample(11, 7, 0.0, 25, 0)]
    assert second.samples == [Sample(12, 8, 1.0, 35, 1), Sample(13, 8, 1.0, 45, 0)]
    assert first.reason == "1 groups with 2 trajectories and 40 tokens"


def test_a_minibatch_is_spread_over_replicas_however_many_trainers_each_has():
    # four trainers hold two copies: 15, 25 of mini-batch 0 and 35, 45 of mini-batch 1, the longer one to replica 0
    training = Training(msgspec.structs.replace(JOB, trainers=4, replicas=2))
    first, second = begin(training)
    assert [sample.replica for sample in first.samples + second.samples] == [1, 0, 1, 0]
    for rank in (1, 2, 3):  # shards of a replica report as trainers do that hold all of it
        assert not any([training.note(trained(rank, 0), rank - 1), training.note(trained(rank, 1), rank - 1)])
    assert not training.note(trained(4, 0), 3)
    assert training.note(trained(4, 1), 3)


def test_settings_from_before_there_were_shards_load():
    old = msgspec.json.decode(msgspec.json.encode(JOB))
    del old["replicas"], old["dynamic_sampling"]
    settings = msgspec.convert(old, Settings)
    assert (settings.data_parallel, settings.dynamic_sampling) == (2, False)


def test_a_step_is_done_when_every_trainer_has_done_every_minibatch_once():
    training = Training(JOB)
    begin(training)
    assert not training.note(trained(1, 0), 0)
    assert not training.note(trained(1, 0), 0)
    assert not training.note(trained(2, 0), 1)
    assert not training.note(trained(1, 1), 0)
    assert training.note(trained(2, 1), 1)
    training.complete(60.0)
    assert training.steps_done == 1
    assert not training.note(trained(2, 1), 1)


def test_a_step_whose_mini_batches_come_one_by_one_is_done_when_the_last_one_is():
    training = Training(JOB)
    groups = batch()
    (first,) = training.feed(groups[:1], 50.0)
    assert (first.step, first.minibatch, training.fed) == (1, 0, False)
    assert not training.note(trained(1, 0), 0)
    assert not training.note(trained(2, 0), 1)  # all that there is so far
    (second,) = training.feed(groups[1:], 55.0)
    assert (second.step, second.minibatch, training.fed) == (1, 1, True)
    training.makes(4)
    assert not training.note(trained(1, 1), 0)
    assert training.note(trained(2, 1), 1)
    step, report = training.complete(60.0)
    assert [item.group.id for item in step.groups] == [7, 8]
    assert (report.started_s, report.finished_s, report.version) == (50.0, 60.0, 4)


def test_the_report_takes_minibatches_of_trainer_0_and_counts_samples():
    training = Training(JOB)
    begin(training)
    training.note(trained(1, 0, seconds=2.0, loss=1.0, kl=0.5), 0)
    training.note(trained(2, 0, seconds=9.0, loss=9.0), 1)
    training.note(trained(1, 1, seconds=3.0, loss=2.0), 0)
    training.note(trained(2, 1, seconds=9.0, loss=9.0), 1)
    step, report = training.complete(60.0)
    assert [item.group.id for item in step.groups] == [7, 8]
    assert (report.step, report.version, report.started_s, report.finished_s) == (1, 4, 50.0, 60.0)
    assert report.train_s == 5.0
    assert (report.samples, report.prompt_tokens, report.response_tokens) == (4, 20, 100)
    assert report.reward_mean == 0.75
    assert report.reward_std == pytest.approx(math.sqrt(3) / 4)  # population: (3 * 0.25^2 + 0.75^2) / 4 = 3 / 16
    assert (report.staleness_finish_mean, report.staleness_finish_max) == (1.25, 2)
    assert (report.staleness_consumption_mean, report.staleness_consumption_max) == (2.0, 3)
    assert report.metrics == {"loss": 1.5, "kl": 0.5}


def test_metrics_of_a_step_are_what_one_mini_batch_of_all_its_tokens_would_have():
    training = Training(JOB)
    begin(training)  # response tokens: 30 in mini-batch 0, 70 in mini-batch 1
    first = {"loss": 1.0, "skipped": 0.0, "ratio_max": 3.0, "entropy": 2.0, "kl_reference": 1.0}
    second = {"loss": 2.0, "skipped": 1.0, "ratio_max": 1.5, "entropy": 4.0}
    first |= {"mismatch_max": 0.25, "mismatch_tokens": 10.0, "mismatch_mean": 0.1}
    second |= {"mismatch_max": 0.5, "mismatch_tokens": 30.0, "mismatch_mean": 0.3}
    for place, metrics in enumerate((first, second)):
        training.note(trained(1, place, **metrics), 0)
        training.note(trained(2, place, **metrics), 1)
    _, report = training.complete(60.0)
    assert report.metrics == pytest.approx(
        {
            "loss": 1.5,
            "skipped": 0.5,
            "ratio_max": 3.0,
            "entropy": (30 * 2.0 + 70 * 4.0) / 100,
            "kl_reference": 1.0,
            "mismatch_max": 0.5,
            "mismatch_tokens": 40.0,
            "mismatch_mean": (10 * 0.1 + 30 * 0.3) / 40,
        }
    )


@pytest.mark.parametrize(("step", "minibatch"), [(2, 0), (1, 2), (1, -1)])
def test_work_that_was_never_asked_for_is_refused(step, minibatch):
    training = Training(JOB)
    begin(training)
    with pytest.raises(ProtocolError, match=f"has trained mini-batch {minibatch} of step {step}, which was never"):
        training.note(trained(1, minibatch, step), 0)
