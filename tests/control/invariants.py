"""Checks design.md's invariants of a run from outside: from its events and commands, never from the controller's state."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable

import msgspec
from tier_invariants import TierChecker

from laminar_hpc.control.controller import Settings
from laminar_hpc.control.snapshot import Snapshot
from laminar_hpc.policy.modes import MODES
from laminar_hpc.protocol.commands import (
    Attach,
    Checkpoint,
    Command,
    Commit,
    EndJob,
    Generate,
    HandOver,
    Interrupt,
    Publish,
    Pull,
    ReportEvaluation,
    ReportMove,
    ReportStep,
    Settle,
    Train,
    TrajectoryOutcome,
)
from laminar_hpc.protocol.events import (
    Event,
    Finished,
    HandedOver,
    Interrupted,
    Loaded,
    Published,
    PullRefused,
    RankLost,
    RolloutReady,
    StopRequested,
    Streamed,
    TrainerReady,
)
from laminar_hpc.protocol.trajectory import Purpose, State, TrajectorySpec, Verdict


class SeenRollout(msgspec.Struct, eq=False):
    """`pulling` is what its last `Pull` named, `void` whether an `Attach` came after it, `voided` the lowest such one.

    `exactly`: it named that version and no other. `had`: what the incarnation before held when its engine was lost, until it
    has loaded something, or was told to load something else.
    """

    incarnation: int
    concurrency: int
    node: str
    relay: int
    alive: bool = True
    version: int | None = None
    pulling: int | None = None
    void: bool = False
    exactly: bool = False
    had: int | None = None
    voided: int | None = None
    owned: set[int] = set()
    interrupting: bool = False
    paused: set[int] = set()

    def load(self, version: int) -> None:
        assert self.version is None or version > self.version, (
            f"version {self.version} would be taken back for {version}"
        )
        if self.void or (self.pulling is not None and version >= self.pulling):
            self.pulling, self.void, self.voided = None, False, None
        self.version = version


class SeenTrajectory(msgspec.Struct, eq=False):
    spec: TrajectorySpec
    version: int
    current: int
    tokens: int = 0
    finished: Finished | None = None
    staleness_finish: int | None = None


class InvariantChecker:
    """Follows a run through its attempts; any broken invariant is an AssertionError.

    What a step had consumed is void where the next attempt goes on from a checkpoint before it.
    """

    def __init__(self, settings: Settings) -> None:
        self.mixes = MODES[settings.mode].mixes
        self.ahead = MODES[settings.mode].cohorts_ahead
        """Cohorts that may be ahead of the weights; None where rollouts take weights alone."""
        self.trajectories: dict[int, SeenTrajectory] = {}
        self.settled: dict[int, TrajectoryOutcome] = {}
        self.groups: dict[int, TrajectorySpec] = {}
        self.group_ends: dict[int, State] = {}
        self.in_batch: dict[int, tuple[int, int]] = {}
        """Trajectory -> (step, staleness when the batch formed)."""
        self.batched_groups: dict[int, int] = {}
        self.reports: list[ReportStep] = []
        self.evaluations: list[ReportEvaluation] = []
        self.left_out = 0
        """Evaluations that a resumed attempt has made into one."""
        self.step_of: dict[int, int] = {}
        """Of every version, in all attempts, the step."""
        self._saved: dict[int, dict[str, object]] = {}
        self.committed: int | None = None
        self._begin(settings, 0)

    def _begin(self, settings: Settings, step: int) -> None:
        """An attempt begins with the weights of `step`."""
        self.settings = settings
        self._first_step = step
        self.rollouts: dict[int, SeenRollout] = {}
        self.given_up: set[int] = set()
        self.announced: dict[int, int] = {}
        self.complete: list[int] = []
        self.publishers: dict[int, set[int]] = {}
        self.tier = TierChecker(settings.trainers, settings.relays)
        self.trainers: dict[int, int] = {}
        self.cohort_versions: set[int] = set()
        self.moves: dict[int, HandOver] = {}
        self.open_moves: set[int] = set()
        """Moves whose source has neither answered nor been lost."""
        self.moves_reported: set[int] = set()
        self.ended: EndJob | None = None
        self.stopping = False
        self.minibatches_given: Counter[int] = Counter()
        self._first_was_held = False

    def start_again(self, settings: Settings) -> None:
        """Another attempt, without a checkpoint: nothing of what was before counts."""
        kept = self.step_of
        self.__init__(settings)  # type: ignore[misc]
        self.step_of = kept

    def resume(self, settings: Settings, books: Snapshot) -> None:
        """Another attempt goes on from the checkpoint of `books`: what came after it is void."""
        vars(self).update(copy.deepcopy(self._saved[books.step]))
        self._saved, self.committed = {books.step: self._saved[books.step]}, books.step
        open_rounds = len([step for step in self._evaluation_steps() if step <= books.evaluated_step])
        self.left_out += max(0, open_rounds - self.left_out - len(self.evaluations) - 1)
        self._begin(settings, books.step)
        same = {version for version, step in self.step_of.items() if step == books.step}
        for one in self.trajectories.values():
            if one.version in same:
                one.version = settings.first_version
            if one.current in same:
                one.current = settings.first_version
        self.step_of[settings.first_version] = books.step

    def _see_Checkpoint(self, command: Checkpoint) -> None:
        assert command.step == len(self.reports)
        assert all(step <= command.step for step in self.batched_groups.values()), "a step had begun"
        names = ("trajectories", "settled", "groups", "group_ends", "in_batch", "batched_groups", "reports")
        self._saved[command.step] = copy.deepcopy(
            {name: getattr(self, name) for name in (*names, "evaluations", "left_out")}
        )

    def _see_Commit(self, command: Commit) -> None:
        assert command.step in self._saved
        self.committed = command.step

    # --- events -----------------------------------------------------------------------------------------------------

    def see(self, event: Event, commands: list[Command]) -> None:
        """One event and what followed from it."""
        assert self.ended is None or not commands, f"commands after the end: {commands}"
        self._see_event(event)
        if self.ended is None:
            self.tier.event(event)
            self.tier.commands(commands)
        for command in commands:
            see = getattr(self, f"_see_{type(command).__name__}", None)
            if see is not None:
                see(command)
        self._note_cohort()
        assert self._consecutive(self.trajectories), "trajectory ids are consecutive"
        assert self._consecutive(self.groups), "group numbers are consecutive"
        if self.ended is None and not self.stopping:
            self._check_nobody_is_left_waiting()
        self._check_admission()

    def _note_cohort(self) -> None:
        """All rollouts hold one version now: from now on a cohort may be generated under it, whoever is lost."""
        versions = {seen.version for seen in self.rollouts.values() if seen.alive and seen.pulling is None}
        complete = len(self.rollouts) + len(self.given_up) >= self.settings.rollouts
        if self.ahead is not None and complete and len(versions) == 1 and None not in versions:
            self.cohort_versions |= versions

    def _consecutive(self, ids: Iterable[int]) -> bool:
        first = self.settings.first_hand_out
        own = [id for id in ids if id >= first]
        return len(own) == max(own, default=first - 1) + 1 - first

    def _current(self, event: Event) -> SeenRollout | None:
        seen = self.rollouts.get(event.rank)
        return seen if seen and seen.alive and seen.incarnation == event.incarnation else None

    def _see_event(self, event: Event) -> None:
        match event:
            case TrainerReady():
                self.trainers.setdefault(event.rank, event.trainer)
            case RolloutReady() if event.rank not in self.given_up:
                seen = self.rollouts.get(event.rank)
                if seen is None or event.incarnation > seen.incarnation:
                    self._void_moves_of(event.rank)
                    relay = event.relay if seen is None else seen.relay
                    had = (
                        None if seen is None else seen.version if seen.alive and seen.version is not None else seen.had
                    )
                    self.rollouts[event.rank] = SeenRollout(
                        event.incarnation, event.concurrency, event.node, relay, had=had
                    )
            case RankLost():
                known = self.rollouts.get(event.rank)
                if seen := self._current(event):
                    had = seen.had if seen.version is None else seen.version
                    seen.alive, seen.owned, seen.had = False, set(), None if event.role else had
                    seen.interrupting, seen.paused = False, set()
                    seen.version, seen.pulling = None, None
                    self._void_moves_of(event.rank)
                elif event.role and known is not None and not known.alive:
                    known.had = None
                elif event.role == "rollout" and event.rank not in self.rollouts:
                    self.given_up.add(event.rank)
            case Loaded():
                seen = self._current(event)
                if seen and seen.pulling is not None and (seen.version is None or event.version > seen.version):
                    assert event.version >= (seen.pulling if seen.voided is None else min(seen.pulling, seen.voided))
                    seen.load(event.version)
                    seen.had = None
                    self._first_was_held |= event.version == self.settings.first_version
            case PullRefused():
                if (seen := self._current(event)) and seen.exactly and seen.pulling == event.version and not seen.void:
                    seen.pulling, seen.had = None, None
            case Streamed():
                self._see_streamed(event)
            case Finished():
                self._see_finished(event)
            case StopRequested():
                self.stopping = True
            case HandedOver():
                self._see_handed_over(event)
            case Interrupted():
                self._see_interrupted(event)
            case Published():
                ranks = self.publishers.setdefault(event.version, set())
                ranks.add(event.rank)
                if len(ranks) == self.settings.trainers and event.version not in self.complete:
                    self.complete.append(event.version)
            case _:
                pass

    def _see_streamed(self, event: Streamed) -> None:
        seen = self._current(event)
        for progress in event.progress:
            if seen and progress.trajectory in seen.owned:
                one = self.trajectories[progress.trajectory]
                one.tokens = max(one.tokens, progress.tokens)

    def _void_moves_of(self, rank: int) -> None:
        self.open_moves -= {id for id in self.open_moves if self.moves[id].rank == rank}

    def _see_handed_over(self, event: HandedOver) -> None:
        seen = self._current(event)
        if seen is None or event.move not in self.open_moves:
            return
        self.open_moves.remove(event.move)
        assert self.moves[event.move].rank == event.rank
        for progress in event.progress:
            if progress.trajectory in seen.owned:
                seen.owned.remove(progress.trajectory)
                one = self.trajectories[progress.trajectory]
                one.tokens = max(one.tokens, progress.tokens)

    def _see_interrupted(self, event: Interrupted) -> None:
        seen = self._current(event)
        if seen is None or not seen.interrupting:
            return
        seen.interrupting = False
        for progress in event.progress:
            if progress.trajectory in seen.owned:
                seen.owned.remove(progress.trajectory)
                seen.paused.add(progress.trajectory)
                one = self.trajectories[progress.trajectory]
                one.tokens = max(one.tokens, progress.tokens)

    def _see_Interrupt(self, command: Interrupt) -> None:
        """Newer weights are there, and it does not answer evaluation prompts."""
        assert self.mixes
        seen = self.rollouts[command.rank]
        assert (seen.alive, seen.incarnation, seen.interrupting) == (True, command.incarnation, False)
        assert seen.pulling is None
        assert seen.owned
        assert max(self.tier.relays[seen.relay].held) > seen.version
        assert all(self.trajectories[id].spec.purpose is Purpose.TRAIN for id in seen.owned)
        seen.interrupting = True

    def _see_finished(self, event: Finished) -> None:
        seen = self._current(event)
        if seen and event.trajectory in seen.owned:
            seen.owned.remove(event.trajectory)
            one = self.trajectories[event.trajectory]
            assert one.finished is None, f"trajectory {event.trajectory} finished twice"
            one.finished = event
            one.staleness_finish = self._age(one.version)

    def _age(self, version: int) -> int:
        """Steps whose weights became complete after those of `version`."""
        return max(self.step_of[other] for other in self.complete) - self.step_of[version]

    # --- commands: rollouts -----------------------------------------------------------------------------------------

    def _see_Generate(self, command: Generate) -> None:
        seen = self.rollouts[command.rank]
        assert seen.alive, f"work for lost rollout {command.rank}"
        given = self.minibatches_given[len(self.reports) + 1]
        lacks_groups = 0 < given < self.settings.minibatches
        assert not self.stopping or lacks_groups, "nothing new begins in a job that is to stop"
        assert seen.incarnation == command.incarnation
        assert seen.pulling is None, f"rollout {command.rank} is loading"
        assert seen.version == command.version, f"rollout {command.rank} holds {seen.version}, not {command.version}"
        assert command.trajectories
        self._check_fresh(command, seen)
        assert not seen.interrupting
        assert seen.paused <= {spec.id for spec in command.trajectories}, "what was interrupted comes first"
        seen.paused = set()
        for spec in command.trajectories:
            self._see_hand_out(spec, command.version)
            seen.owned.add(spec.id)
        groups = {self.trajectories[id].spec.group for id in seen.owned}
        assert len(seen.owned) <= seen.concurrency or len(groups) == 1, f"rollout {command.rank} is overfull"

    def _check_fresh(self, command: Generate, seen: SeenRollout) -> None:
        """Fresh work goes to a rollout at its own boundary, or, with cohorts, to a fleet that holds one version."""
        fresh = [spec for spec in command.trajectories if spec.id not in self.trajectories]
        if not fresh:
            return
        if self.mixes:
            return
        if self.ahead is None:
            assert not seen.owned, f"rollout {command.rank} was in the middle of its batch"
        elif command.version not in self.cohort_versions:
            versions = {other.version for other in self.rollouts.values() if other.alive}
            assert versions == {command.version}, f"work under {command.version} while rollouts hold {versions}"
            assert len(self.rollouts) + len(self.given_up) >= self.settings.rollouts
            self.cohort_versions.add(command.version)

    def _see_hand_out(self, spec: TrajectorySpec, version: int) -> None:
        owners = [rank for rank, seen in self.rollouts.items() if spec.id in seen.owned]
        assert not owners, f"trajectory {spec.id} is owned by {owners} already"
        assert spec.id not in self.settled
        known = self.trajectories.get(spec.id)
        if known is None:
            assert spec.resume_tokens == 0
            self.trajectories[spec.id] = SeenTrajectory(spec, version, version)
        else:
            assert known.finished is None, f"trajectory {spec.id} had finished"
            mixes = self.mixes and spec.purpose is Purpose.TRAIN and version >= known.current
            assert mixes or known.version == version, (
                f"trajectory {spec.id} would mix versions {known.version} and {version}"
            )
            assert msgspec.structs.replace(spec, resume_tokens=0) == known.spec
            assert spec.resume_tokens == known.tokens
            known.current = version
        first = self.groups.setdefault(spec.group, spec)
        assert (first.prompt, first.purpose) == (spec.prompt, spec.purpose)
        assert spec.group not in self.group_ends, f"group {spec.group} had ended"
        assert spec.group not in self.batched_groups, f"group {spec.group} was trained on"
        versions = {one.version for one in self._open_members(spec.group)}
        assert versions == {self.trajectories[spec.id].version}, f"group {spec.group} mixes versions {versions}"
        if self.ahead is not None and spec.purpose is Purpose.TRAIN and known is None:
            assert self._cohort_of(spec.group) <= self.step_of[version] + 1 + self.ahead, (
                "weights too old for the cohort"
            )

    def _open_members(self, group: int) -> list[SeenTrajectory]:
        return [one for id, one in self.trajectories.items() if one.spec.group == group and id not in self.settled]

    def _see_HandOver(self, command: HandOver) -> None:
        """Between two rollouts of one version, all that the source has, and never from one that is a destination."""
        assert self.settings.repack.enabled
        assert self.ahead is None
        assert command.reason
        assert command.move == len(self.moves)
        source, destination = self.rollouts[command.rank], self.rollouts[command.destination]
        assert command.rank != command.destination
        assert source.alive
        assert destination.alive
        assert source.incarnation == command.incarnation
        assert source.version == destination.version
        assert source.pulling is None
        assert destination.pulling is None
        assert set(command.trajectories) == source.owned
        assert source.owned
        assert destination.owned
        under_way = [self.moves[id] for id in self.open_moves]
        assert command.rank not in {rank for one in under_way for rank in (one.rank, one.destination)}
        assert command.destination not in {one.rank for one in under_way}
        self.moves[command.move] = command
        self.open_moves.add(command.move)

    def _see_ReportMove(self, report: ReportMove) -> None:
        command = self.moves[report.move]
        assert report.move not in self.moves_reported, f"move {report.move} is reported twice"
        self.moves_reported.add(report.move)
        assert (report.source, report.destination) == (command.rank, command.destination)
        assert report.ending
        assert (report.expected_gain_s is not None) == self.settings.repack.gain_gate
        if report.expected_gain_s is not None:
            assert report.expected_gain_s > 0.0
        if report.trajectories == 0:
            assert report.gain_s is None

    def _see_Pull(self, command: Pull) -> None:
        seen = self.rollouts[command.rank]
        assert seen.alive
        assert seen.incarnation == command.incarnation
        assert not seen.owned, (
            f"rollout {command.rank} would take weights in the middle of {len(seen.owned)} trajectories"
        )
        assert seen.pulling is None or seen.void
        assert seen.version is None or command.version > seen.version
        if command.exactly:
            assert command.version == seen.had, "what its last incarnation held"
            assert self._waiting_versions() >= {command.version}
            others = [other for other in self.rollouts.values() if other.alive and other.pulling is None]
            assert all(other.version != command.version for other in others), "somebody holds it"
        else:
            assert command.version in self.tier.relays[seen.relay].held, "its relay has it"
            seen.had = None
        seen.pulling, seen.void, seen.exactly = command.version, False, command.exactly

    def _see_Attach(self, command: Attach) -> None:
        seen = self.rollouts[command.rank]
        assert seen.alive, f"lost rollout {command.rank} is attached"
        assert command.remote == (self.tier.relays[command.relay].node != seen.node)
        seen.relay = command.relay
        if seen.pulling is not None and not seen.void:
            seen.void = True
            seen.voided = seen.pulling if seen.voided is None else min(seen.voided, seen.pulling)

    # --- commands: trainers ------------------------------------------------------------------------------

    def _see_Train(self, command: Train) -> None:
        settings = self.settings
        assert not self.stopping or command.minibatch > 0, "no step begins in a job that is to stop"
        assert command.minibatch == self.minibatches_given[command.step], "mini-batches come in order"
        self.minibatches_given[command.step] += 1
        assert command.minibatches == settings.minibatches
        assert command.step == len(self.reports) + 1
        groups = Counter(sample.group for sample in command.samples)
        assert len(groups) == settings.prompts // settings.minibatches
        assert min(groups.values()) >= 2
        for sample in command.samples:
            one = self.trajectories[sample.trajectory]
            assert sample.trajectory not in self.in_batch, f"trajectory {sample.trajectory} trained twice"
            assert sample.trajectory not in self.settled
            assert one.finished is not None
            assert one.finished.verdict is Verdict.GRADED
            assert sample.reward == one.finished.reward
            assert sample.tokens == one.finished.prompt_tokens + one.finished.response_tokens
            assert 0 <= sample.replica < (settings.replicas or settings.trainers)
            assert one.spec.purpose is Purpose.TRAIN
            self.in_batch[sample.trajectory] = (command.step, self._age(one.version))
        for group, members in groups.items():
            scores = {_score(one.finished) for one in self._open_members(group)}
            assert len(scores) > 1 or not settings.dynamic_sampling, f"group {group} has nothing to teach"
            assert group not in self.batched_groups, f"group {group} trained twice"
            assert members == len(self._open_members(group)), f"group {group} trained without all its members"
            assert len({one.version for one in self._open_members(group)}) == 1
            self.batched_groups[group] = command.step

    def _see_Publish(self, command: Publish) -> None:
        assert len(self.trainers) == self.settings.trainers
        assert command.version not in self.announced
        assert command.version == self.settings.first_version + len(self.announced)
        assert command.step == self._first_step + len(self.announced)
        assert len(self.complete) == len(self.announced), "one publication at a time"
        self.announced[command.version] = self.step_of[command.version] = command.step

    # --- commands: ends ---------------------------------------------------------------------------------------------

    def _see_Settle(self, command: Settle) -> None:
        assert command.trajectories or command.groups
        for outcome in command.trajectories:
            one = self.trajectories[outcome.trajectory]
            assert outcome.trajectory not in self.settled, f"trajectory {outcome.trajectory} settled twice"
            assert outcome.reason
            assert outcome.version == one.version
            self._check_reason(outcome, one)
            assert outcome.staleness_finish == one.staleness_finish
            if outcome.state is State.CONSUMED and outcome.purpose is Purpose.TRAIN:
                assert (outcome.step, outcome.staleness_consumption) == self.in_batch[outcome.trajectory]
            for seen in self.rollouts.values():
                assert outcome.trajectory not in seen.owned or outcome.state is State.RETURNED
            self.settled[outcome.trajectory] = outcome
        for group in command.groups:
            assert group.group not in self.group_ends, f"group {group.group} settled twice"
            assert group.reason
            if group.purpose is Purpose.TRAIN and group.state is State.CONSUMED:
                assert group.step == self.batched_groups[group.group]
            self.group_ends[group.group] = group.state
            assert not self._open_members(group.group), f"group {group.group} ended before its trajectories"

    def _check_reason(self, outcome: TrajectoryOutcome, one: SeenTrajectory) -> None:
        """What dynamic sampling throws away is a whole finished group with one score."""
        if "have the reward" not in outcome.reason:
            return
        assert self.settings.dynamic_sampling
        assert (outcome.state, outcome.purpose) == (State.DISCARDED, Purpose.TRAIN)
        members = [other for other in self.trajectories.values() if other.spec.group == one.spec.group]
        ends = [other.finished for other in members[-self.settings.group_size :]]  # those before it have started over
        graded = [_score(end) for end in ends if end is not None and end.verdict is Verdict.GRADED]
        assert None not in ends
        assert len(graded) >= 2
        assert len(set(graded)) == 1

    def _see_ReportStep(self, report: ReportStep) -> None:
        assert report.step == len(self.reports) + 1
        assert report.samples == len([id for id, (step, _) in self.in_batch.items() if step == report.step])
        if self.ahead is not None:
            assert report.staleness_finish_max <= self.ahead
            assert report.staleness_consumption_max <= self.ahead
        if self.settings.eviction == "stale" or self.settings.most_staleness is not None:
            assert report.staleness_consumption_max <= self.settings.max_staleness
        self.reports.append(report)

    def _see_ReportEvaluation(self, report: ReportEvaluation) -> None:
        settings = self.settings
        assert report.prompts == min(settings.evaluation_prompts, settings.held_out_prompts)
        answers = [
            one
            for id, one in self.trajectories.items()
            if one.spec.purpose is Purpose.EVALUATION and id not in self.settled and one.finished is not None
        ]
        answers = [one for one in answers if one.version == report.version]
        graded = [one for one in answers if one.finished and one.finished.verdict is Verdict.GRADED]
        assert len(graded) >= report.graded
        assert {one.spec.prompt for one in answers} == set(range(report.prompts))
        assert report.step == self.announced[report.version]
        self.evaluations.append(report)

    def _evaluation_steps(self) -> list[int]:
        every, steps = self.settings.evaluation_every, self.settings.steps
        return [step for step in range(steps + 1) if step % every == 0 or step == steps] if every else []

    def _see_EndJob(self, command: EndJob) -> None:
        self.ended = command
        assert self.moves_reported == self.moves.keys(), "what came of every move is told"
        if command.outcome == "requeue":
            assert self.committed == len(self.reports)
            return
        assert self.settled.keys() == self.trajectories.keys(), "every trajectory has an end"
        assert self.group_ends.keys() == self.groups.keys(), "every prompt has an end"
        if command.outcome != "finished":
            return
        settings = self.settings
        assert [report.step for report in self.reports] == list(range(1, settings.steps + 1))
        due = self._evaluation_steps()[self.left_out :]
        answered_by = sorted(report.step for report in self.evaluations)
        assert len(answered_by) == len(due)
        if not self.left_out:
            assert all(step >= opened for step, opened in zip(answered_by, due, strict=True))
        trained = [group for group, spec in self.groups.items() if spec.purpose is Purpose.TRAIN]
        consumed = [group for group in trained if self.group_ends[group] is State.CONSUMED]
        assert len(consumed) == settings.steps * settings.prompts
        assert all(self.group_ends[group] is not State.RETURNED for group in self.groups)
        uses = Counter(dict.fromkeys(range(settings.train_prompts), 0))
        uses.update(self.groups[group].prompt for group in trained)
        assert max(uses.values()) - min(uses.values()) <= 1, "every epoch has every prompt once"

    # --- always -----------------------------------------------------------------------------------------------------

    def _not_held_yet(self) -> set[int]:
        """The version that a resumed run publishes first, until a rollout has held it."""
        first = self.settings.first_version
        if self._first_was_held or not self.settings.attempt:
            return set()
        return {first}

    def _check_nobody_is_left_waiting(self) -> None:
        """A trajectory without owner waits only while all rollouts that hold its version, of which there are some, are full.

        Or while the last one that held it is to load it again.
        """
        for version in self._waiting_versions() - self._not_held_yet():
            if any(seen.had == version for seen in self.rollouts.values()):
                continue  # it is to be loaded again
            holders = [seen for seen in self.rollouts.values() if seen.alive and seen.version == version]
            holders = [seen for seen in holders if seen.pulling is None]
            assert holders or self.mixes, f"nobody holds version {version}, and trajectories wait"
            if self.mixes:  # anybody can go on with them
                holders = [
                    seen
                    for seen in self.rollouts.values()
                    if seen.alive and seen.version is not None and seen.version >= version
                ]
                holders = [seen for seen in holders if not (seen.pulling or seen.interrupting or seen.paused)]
            assert all(len(seen.owned) >= seen.concurrency for seen in holders)

    def _waiting_versions(self) -> set[int]:
        """Those of trajectories that nobody owns."""
        owned = {id for seen in self.rollouts.values() for id in seen.owned | seen.paused}
        return {one.current for id, one in self.trajectories.items() if self._waits(id, one) and id not in owned}

    def _waits(self, id: int, one: SeenTrajectory) -> bool:
        return one.finished is None and id not in self.settled

    def _check_admission(self) -> None:
        settings = self.settings
        kept = self._kept()
        assert len(kept) <= settings.steps * settings.prompts
        waiting = [group for group in kept if group not in self.batched_groups and group not in self.group_ends]
        ahead = settings.ahead if self.ahead is None else self.ahead
        limit = settings.steps * settings.prompts if self.mixes else int((1 + ahead) * settings.prompts)
        most = settings.steps * settings.prompts
        if settings.most_staleness is not None and self.complete:
            newest = max(self.step_of[version] for version in self.complete)
            most = min(most, (newest + 1 + settings.max_staleness) * settings.prompts)
            assert len(kept) <= most, f"{len(kept)} groups are handed out, at most {most} may be"
        assert len(waiting) <= limit, f"{len(waiting)} groups are open, at most {limit} may be"
        if self.ended is None and not self.stopping:
            self._check_nobody_idles(len(waiting) < limit and len(kept) < most, len(kept))

    def _check_nobody_idles(self, room: bool, kept: int) -> None:
        """A rollout without work has the newest weights it can get, and there is none that it could be given."""
        settings, anywhere = self.settings, room
        for rank, seen in self.rollouts.items():
            if not seen.alive or seen.owned or seen.interrupting or (seen.pulling is not None and not seen.void):
                continue
            held = self.tier.relays[seen.relay].held if seen.relay in self.tier.relays else []
            newest = max(held, default=None)
            assert newest is None or (seen.version is not None and seen.version >= newest), f"rollout {rank} is behind"
            if seen.version is None or seen.pulling is not None:
                continue
            assert not seen.paused, f"rollout {rank} has let go of trajectories and does not take them up"
            room = anywhere
            if self.ahead is not None:
                together = all(other.version == self.complete[-1] for other in self.rollouts.values() if other.alive)
                everybody = len(self.rollouts) + len(self.given_up) >= self.settings.rollouts
                room = room and together and everybody and self._cohort_is_open()
            if settings.most_staleness is not None:
                room = room and kept < (self.step_of[seen.version] + 1 + settings.max_staleness) * settings.prompts
            assert not room, f"rollout {rank} idles though prompts may be handed out"

    def _kept(self) -> list[int]:
        """Training groups that were handed out and not discarded."""
        handed = [group for group, spec in self.groups.items() if spec.purpose is Purpose.TRAIN]
        return [group for group in handed if self.group_ends.get(group) is not State.DISCARDED]

    def _cohort_of(self, group: int) -> int:
        """The step of a group that is being handed out."""
        before = [other for other in self._kept() if other != group]
        return 1 + len(before) // self.settings.prompts

    def _cohort_is_open(self) -> bool:
        """Whether a group may be handed out under the newest version: of the first cohort that is not all generated."""
        assert self.ahead is not None
        kept, prompts = self._kept(), self.settings.prompts
        generated = sum(all(one.finished for one in self._open_members(group)) for group in kept)
        cohorts = min(self.announced[self.complete[-1]] + 1 + self.ahead, generated // prompts + 1)
        return len(kept) < cohorts * prompts


def _score(end: Finished | None) -> float | None:
    """The reward before any penalty for length."""
    if end is None:
        return None
    return end.reward if end.score is None else end.score
