"""Training steps: from the groups of a batch to the report of the step.

    IDLE -> TRAINING (mini-batches of step s are with the trainers, at last all of them) -> IDLE

Steps are numbered from 1; step 0 is the checkpoint. Invariants: one step at a time, in order; a mini-batch is done when
every trainer has said so, once; the step is done when all its mini-batches are.
"""

from __future__ import annotations

import math

import msgspec

from laminar_hpc.control.pool import Trajectory
from laminar_hpc.control.prompts import Group
from laminar_hpc.control.settings import Settings
from laminar_hpc.errors import ProtocolError
from laminar_hpc.policy.balance import balance
from laminar_hpc.protocol.commands import ReportStep, Sample, Train
from laminar_hpc.protocol.events import Trained

OF_A_STEP = ("loss", "grad_norm", "learning_rate", "skipped")
"""Metrics of an optimizer step, which count the same for each of them; others are measured on tokens."""


class BatchGroup(msgspec.Struct, frozen=True):
    """A group in a batch, with its trajectories and its staleness when the batch formed."""

    group: Group
    trajectories: list[Trajectory]
    staleness: int


class Step(msgspec.Struct, eq=False):
    """The step in training. `done` has, for each mini-batch given so far, what each trainer (by index) said of it."""

    number: int
    started_s: float
    version: int | None = None
    groups: list[BatchGroup] = []
    done: list[dict[int, Trained]] = []


class Training:
    """Cuts batches into mini-batches for the trainers and follows their work."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.steps_done = 0
        self.current: Step | None = None

    def restore(self, step: int) -> None:
        """So many steps were done by earlier attempts."""
        self.steps_done = step

    @property
    def taken(self) -> int:
        """How many groups the step in training has taken so far; 0 where there is none."""
        return len(self.current.groups) if self.current is not None else 0

    @property
    def fed(self) -> bool:
        """Whether all mini-batches of the step in training are with the trainers."""
        return self.current is not None and len(self.current.done) == self._settings.minibatches

    def feed(self, groups: list[BatchGroup], now: float) -> list[Train]:
        """The commands for the next mini-batches of the step in training, or of the next one: as many as these groups make."""
        assert not self.fed, "one step at a time"
        step = self.current = self.current or Step(self.steps_done + 1, now)
        share = self._settings.prompts // self._settings.minibatches
        trains = []
        for begin in range(0, len(groups), share):
            trains.append(self._train(step.number, len(step.done), groups[begin : begin + share]))
            step.groups += groups[begin : begin + share]
            step.done.append({})
        return trains

    def makes(self, version: int) -> None:
        """The weights after the step in training are `version`."""
        assert self.current is not None, "a step is in training"
        self.current.version = version

    def _train(self, number: int, minibatch: int, groups: list[BatchGroup]) -> Train:
        members = [one for item in groups for one in item.trajectories]
        tokens = [one.prompt_tokens + one.tokens for one in members]
        chosen = balance(tokens, self._settings.data_parallel)
        samples = [
            Sample(one.id, one.group, one.reward, length, replica)
            for one, length, replica in zip(members, tokens, chosen, strict=True)
        ]
        reason = f"{len(groups)} groups with {len(samples)} trajectories and {sum(tokens)} tokens"
        return Train(reason, number, minibatch, self._settings.minibatches, samples)

    def note(self, event: Trained, trainer: int) -> bool:
        """Trainer `trainer` has done a mini-batch. True where that completes the step; repeats change nothing."""
        step = self.current
        if event.step <= self.steps_done:
            return False
        if step is None or event.step != step.number or not 0 <= event.minibatch < len(step.done):
            raise ProtocolError(
                f"rank {event.rank} (trainer) has trained mini-batch {event.minibatch} of step {event.step}, "
                f"which was never asked for"
            )
        step.done[event.minibatch].setdefault(trainer, event)
        return self.fed and all(len(done) == self._settings.trainers for done in step.done)

    def complete(self, now: float) -> tuple[Step, ReportStep]:
        """The step is done: what it consisted of, and its report."""
        step = self.current
        assert step is not None, "a step was in training"
        self.current = None
        self.steps_done = step.number
        return step, _report(step, now)


def _report(step: Step, now: float) -> ReportStep:
    assert step.version is not None, "all of the step is with the trainers"
    members = [one for item in step.groups for one in item.trajectories]
    rewards = [one.reward for one in members]
    mean = math.fsum(rewards) / len(rewards)
    variance = math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)
    finish = [one.staleness_finish for one in members if one.staleness_finish is not None]
    consumption = [item.staleness for item in step.groups for _ in item.trajectories]
    reports = [done[0] for done in step.done]
    share = len(step.groups) // len(reports)
    tokens = [
        sum(one.tokens for item in step.groups[place * share : (place + 1) * share] for one in item.trajectories)
        for place in range(len(reports))
    ]
    return ReportStep(
        f"all mini-batches of step {step.number} are done",
        step=step.number,
        version=step.version,
        started_s=step.started_s,
        finished_s=now,
        train_s=math.fsum(report.seconds for report in reports),
        samples=len(members),
        prompt_tokens=sum(one.prompt_tokens for one in members),
        response_tokens=sum(one.tokens for one in members),
        reward_mean=mean,
        reward_std=math.sqrt(variance),
        staleness_finish_mean=sum(finish) / len(finish),
        staleness_finish_max=max(finish),
        staleness_consumption_mean=sum(consumption) / len(consumption),
        staleness_consumption_max=max(consumption),
        metrics=step_metrics([report.metrics for report in reports], tokens),
    )


def step_metrics(metrics: list[dict[str, float]], tokens: list[int]) -> dict[str, float]:
    """Metrics of a step from those of its mini-batches, each over the mini-batches that report it.

    What ends in _max is a maximum, what ends in _tokens a sum, and all else a mean: over optimizer steps (`OF_A_STEP`), over
    the tokens that `mismatch_tokens` counts (mismatch_*), or over the trained tokens, `tokens` in each mini-batch.
    """
    names = dict.fromkeys(name for one in metrics for name in one)
    found = {}
    for name in names:
        reported = [place for place, one in enumerate(metrics) if name in one]
        values = [metrics[place][name] for place in reported]
        if name.endswith("_max"):
            found[name] = max(values)
        elif name.endswith("_tokens"):
            found[name] = math.fsum(values)
        else:
            weights = [_weight(name, metrics[place], tokens[place]) for place in reported]
            total = math.fsum(value * weight for value, weight in zip(values, weights, strict=True))
            found[name] = total / (math.fsum(weights) or 1.0)
    return found


def _weight(name: str, metrics: dict[str, float], tokens: int) -> float:
    if name in OF_A_STEP:
        return 1.0
    return metrics["mismatch_tokens"] if name.startswith("mismatch_") else float(tokens)
