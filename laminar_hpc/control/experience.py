"""From finished trajectories to training steps and evaluation reports.

A training group is complete when none of its trajectories is generated any more. One whose grading failed has been dropped
by then; with at least two left the group goes into the buffer, otherwise it is discarded and makes room for a replacement.
With dynamic sampling a group whose scores are all equal is discarded too, whatever its members' lengths: it cannot teach
which answers are right, and would take the place of one that can. Where a score says right or wrong, that is DAPO's
condition, an accuracy other than 0 and 1 (arXiv 2503.14476, section 3.2 and equation 11).
A step begins when the trainers have nothing to do, the version of the step before is published, and the buffer has enough
groups; its groups are taken then, and consumed when it is done.
"""

from __future__ import annotations

import math

from laminar_hpc.control.checkpoints import Checkpoints
from laminar_hpc.control.evaluation import Round
from laminar_hpc.control.pool import Trajectory
from laminar_hpc.control.prompts import Group
from laminar_hpc.control.settlement import Settlement
from laminar_hpc.control.state import JobState
from laminar_hpc.control.training import BatchGroup, Training
from laminar_hpc.policy.sampling import Candidate, Evicted
from laminar_hpc.protocol.commands import Command, Publish, ReportEvaluation
from laminar_hpc.protocol.trajectory import Purpose, State, Verdict

SMALLEST_GROUP = 2
"""Graded responses that a group needs: with fewer, none has an advantage over another."""

FULL_REWARD = 1.0


class Experience:
    """Collects what has finished, forms batches and closes steps and evaluation rounds."""

    def __init__(self, state: JobState, training: Training, checkpoints: Checkpoints) -> None:
        self._state = state
        self._training = training
        self._checkpoints = checkpoints
        self.fruitless_groups = 0
        """Groups in a row that were discarded because too few of their responses could be graded."""
        self.uniform_groups = 0
        """Gradable groups in a row that dynamic sampling discarded."""

    # --- finished trajectories --------------------------------------------------------------------------------------

    def finished(self, trajectory: Trajectory, now: float) -> list[Command]:
        """A trajectory has finished and was graded, or could not be."""
        group = self._state.ledger.groups[trajectory.group]
        group.unfinished -= 1
        if trajectory.purpose is Purpose.EVALUATION:
            complete = self._state.rounds.finish(group.id)
            return [] if complete is None else self._report(complete, now)
        commands: list[Command] = []
        if trajectory.verdict is not Verdict.GRADED:
            settlement = Settlement(self._state, now)
            group.members.remove(trajectory.id)
            settlement.trajectory(trajectory.id, State.DISCARDED, _failure(trajectory))
            commands += settlement.commands("grading failed")
        if group.unfinished == 0:
            commands += self._complete(group, now)
        return commands

    def _complete(self, group: Group, now: float) -> list[Command]:
        state, graded = self._state, len(group.members)
        if graded < SMALLEST_GROUP:
            self.fruitless_groups += 1
            needed = f"at least {SMALLEST_GROUP} needed"
            return self._replace(group, f"{graded} of {state.settings.group_size} responses graded, {needed}", now)
        self.fruitless_groups = 0
        scores = [state.pool.trajectories[id].score for id in group.members]
        if state.settings.dynamic_sampling and min(scores) == max(scores):
            self.uniform_groups += 1
            return self._replace(group, f"all {graded} graded responses have the reward {scores[0]:g}", now)
        self.uniform_groups = 0
        assert group.version is not None, f"group {group.id} has finished under no version"
        candidate = Candidate(group.id, state.versions[group.version].step, now)
        return self._throw_away(state.buffer.add(candidate, state.versions.newest_step), now)

    def _replace(self, group: Group, reason: str, now: float) -> list[Command]:
        """Discard a finished group, which makes room for another prompt."""
        settlement = Settlement(self._state, now)
        settlement.group(group, State.DISCARDED, reason)
        self._state.work_has_appeared = True
        return [*settlement.commands(reason)]

    def evict(self, now: float) -> list[Command]:
        """Throw away what a publication has made too old."""
        return self._throw_away(self._state.buffer.evict(self._state.versions.newest_step), now)

    def _throw_away(self, evicted: list[Evicted], now: float) -> list[Command]:
        state = self._state
        settlement = Settlement(state, now)
        for item in evicted:
            group = state.ledger.groups[item.group]
            assert group.version is not None, f"group {group.id} was in the buffer without a version"
            settlement.group(group, State.DISCARDED, item.reason, staleness=state.versions.staleness(group.version))
            state.work_has_appeared = True
        return [*settlement.commands(f"{len(evicted)} groups in the buffer are too old, or too many")]

    # --- steps ------------------------------------------------------------------------------------------------------

    def feed_trainers(self, now: float) -> list[Command]:
        """The commands for the next step or for more mini-batches of the one that has begun, as far as there are groups."""
        state, training, settings = self._state, self._training, self._state.settings
        unit = settings.prompts // settings.minibatches if state.mode.streams else settings.prompts
        commands: list[Command] = []
        while self._may_train() and len(state.buffer) >= unit:
            pressing = state.pressing(unit, settings.prompts - training.taken)
            if pressing is None:
                break
            newest = state.versions.newest_step
            batch = [self._take(number) for number in state.buffer.take(unit, newest, pressing)]
            batch.sort(key=lambda item: item.group.draw)  # mini-batches shall not depend on which group was done first
            commands += training.feed(batch, now)
            state.work_has_appeared = True
            if training.fed:
                step = training.steps_done + 1
                version = state.versions.announce(step).id
                training.makes(version)
                commands.append(Publish(f"the weights after step {step}", version, step))
        state.step_lacks_groups = training.current is not None and not training.fed
        return commands

    def _may_train(self) -> bool:
        """Whether a step may begin, or the one that has begun waits for groups."""
        state, training = self._state, self._training
        if training.current is not None:
            return not training.fed
        if state.settings.colocated and state.rounds.open_rounds:
            return False  # the GPUs are not free yet
        return state.versions.settled and training.steps_done < state.settings.steps and not state.stopping

    def _take(self, number: int) -> BatchGroup:
        state = self._state
        group = state.ledger.groups[number]
        assert group.version is not None, f"group {number} was in the buffer without a version"
        state.ledger.take(group)
        members = [state.pool.trajectories[id] for id in group.members]
        return BatchGroup(group, members, state.versions.staleness(group.version))

    def complete_step(self, now: float) -> list[Command]:
        """The step in training is done: its report, and its groups as consumed."""
        step, report = self._training.complete(now)
        settlement = Settlement(self._state, now)
        reason = f"trained on in step {step.number}"
        for item in step.groups:
            settlement.group(item.group, State.CONSUMED, reason, staleness=item.staleness, step=step.number)
        commands: list[Command] = [report, *settlement.commands(reason)]
        if self._state.settings.saves(step.number) and not self._state.stopping:
            commands += self._checkpoints.begin(step.number, f"step {step.number} is done")
        return commands

    # --- evaluation -------------------------------------------------------------------------------------------------

    def _report(self, one: Round, now: float) -> list[Command]:
        state = self._state
        assert one.answered_by is not None, "a round is complete that nobody has begun"
        version, step = one.answered_by, state.versions[one.answered_by].step
        reason = f"evaluation of version {version}"
        settlement = Settlement(state, now)
        graded: list[Trajectory] = []
        tokens = 0
        for number in one.groups.values():
            group = state.ledger.groups[number]
            trajectory = state.pool.trajectories[group.members[0]]
            tokens += trajectory.tokens
            if trajectory.verdict is Verdict.GRADED:
                graded.append(trajectory)
                settlement.group(group, State.CONSUMED, reason, step=step)
            else:
                settlement.group(group, State.DISCARDED, _failure(trajectory))
        count = max(1, len(graded))
        report = ReportEvaluation(
            f"all {one.prompts} held-out prompts are answered, opened for version {one.version}",
            version=version,
            step=step,
            prompts=one.prompts,
            graded=len(graded),
            accuracy=sum(trajectory.reward >= FULL_REWARD for trajectory in graded) / count,
            reward_mean=math.fsum(trajectory.reward for trajectory in graded) / count,
            response_tokens=tokens,
        )
        return [report, *settlement.commands(reason)]


def _failure(trajectory: Trajectory) -> str:
    match trajectory.verdict:
        case Verdict.DEADLINE:
            return "grading exceeded its deadline"
        case Verdict.NO_PROMPT:
            return "the prompt could not be made, or is too long"
        case _:
            return "grading raised an error"
