"""The controller: every decision of a job, made from events alone.

`handle` takes one event and the time, and returns the commands that follow from it. Nothing here knows a clock, a socket or
a random number: the MPI job and the simulator drive the same object, and a recorded list of events gives the same commands.

The job, as the controller sees it:

    STARTING (trainers report) -> RUNNING (version 0 is announced) -> ENDED (`EndJob` is out; every further event is void)

While it runs, five loops turn side by side:

* rollouts load weights, are given work, finish trajectories                              dispatch.py
* groups are handed out, finish, are buffered, taken, consumed                            experience.py
* steps begin when the buffer has enough and the last version is published               training.py
* versions are announced with each step, published                                       versions.py
  and from there broadcast, held by relays, released, through the loss of relays         distribution.py
* rollouts in their tail hand their trajectories over to others, and are free             repacking.py

The loss of a trainer ends the job, and so does that of the last relay; the others go on without a lost relay or rollout.

Rules for messages: one from another incarnation than its sender's current one is dropped; one that repeats or comes late
changes nothing; one that contradicts what its sender was told is a ProtocolError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from laminar_hpc.control.checkpoints import Checkpoints
from laminar_hpc.control.dispatch import Dispatcher
from laminar_hpc.control.experience import Experience
from laminar_hpc.control.fleet import Member, Rollout, Trainer
from laminar_hpc.control.recovery import Recovery
from laminar_hpc.control.repacking import Repacker
from laminar_hpc.control.settings import Settings
from laminar_hpc.control.settlement import Settlement
from laminar_hpc.control.snapshot import Snapshot, capture, kept_trajectories, restore
from laminar_hpc.control.state import JobState
from laminar_hpc.control.training import Training
from laminar_hpc.control.waits import describe_waits
from laminar_hpc.errors import ProtocolError
from laminar_hpc.policy.roles import Role
from laminar_hpc.protocol.commands import Attach, Command, EndJob, Publish
from laminar_hpc.protocol.events import (
    CameFromTool,
    Committed,
    Event,
    Finished,
    HandedOver,
    Interrupted,
    JobFailed,
    LinkStalled,
    Loaded,
    Published,
    PullRefused,
    RankEvent,
    RankHeard,
    RankLost,
    RelayHolds,
    RelayReady,
    Repeated,
    Resumed,
    RolloutReady,
    SnapshotWritten,
    SpareReady,
    StateWritten,
    StopRequested,
    Streamed,
    Trained,
    TrainerReady,
    WentToTool,
)
from laminar_hpc.protocol.trajectory import State

__all__ = ["Controller", "Settings"]

Handler = Callable[[Any, Any, float], list[Command]]
Ready = TrainerReady | RelayReady | SpareReady | RolloutReady

FRUITLESS_GROUPS = 100
"""So many discarded groups in a row, and four steps' worth, mean that the task's grading is broken."""

UNIFORM_GROUPS = 1000
"""So many groups in a row that dynamic sampling discards, and ten steps' worth, mean that the task has nothing to teach.

Where one group in a hundred has different rewards, 1000 without one come with a probability of 0.99^1000, 4e-5.
"""

READY_ROLES: dict[type[Event], Role] = {
    TrainerReady: Role.TRAINER,
    RelayReady: Role.RELAY,
    SpareReady: Role.SPARE,
    RolloutReady: Role.ROLLOUT,
}

RELAY_TIER = (Role.RELAY, Role.SPARE)


class Controller:
    """Turns events into commands; one for each job and attempt."""

    def __init__(self, settings: Settings) -> None:
        """A job that has not started; ConfigError where a setting names something that does not exist."""
        self.settings = settings
        self.outcome: str | None = None
        """How the job ended (None: it has not)."""
        self._state = JobState(settings)
        self._training = Training(settings)
        self._checkpoints = Checkpoints(settings.trainers)
        self._recovery = Recovery(settings, self._checkpoints)
        self._dispatcher = Dispatcher(self._state)
        self._experience = Experience(self._state, self._training, self._checkpoints)
        self._repacker = Repacker(self._state, self._dispatcher)
        self._begun = False
        self._handlers: dict[type[Event], tuple[Role, Handler]] = {
            Published: (Role.TRAINER, self._published),
            Trained: (Role.TRAINER, self._trained),
            Loaded: (Role.ROLLOUT, self._loaded),
            PullRefused: (Role.ROLLOUT, self._pull_refused),
            Streamed: (Role.ROLLOUT, self._streamed),
            Finished: (Role.ROLLOUT, self._finished),
            HandedOver: (Role.ROLLOUT, self._handed_over),
            Interrupted: (Role.ROLLOUT, self._interrupted),
            WentToTool: (Role.ROLLOUT, self._went_to_tool),
            CameFromTool: (Role.ROLLOUT, self._came_from_tool),
            StateWritten: (Role.TRAINER, self._state_written),
            Repeated: (Role.TRAINER, lambda _event, _trainer, _now: []),
        }

    def handle(self, event: Event, now: float) -> list[Command]:
        """What follows from `event`, which became known at `now` (seconds; never less than at the call before)."""
        if self.outcome is not None:
            return []
        commands = self._from_rank(event, now) if isinstance(event, RankEvent) else self._from_outside(event, now)
        self._begun = True
        if self.outcome is None:
            commands += self._proceed(now)
            commands += self._finish_job(now)
            commands += self._give_up(now)
        if self.outcome is None:
            commands += self._repacker.check(now)
        return commands

    def _from_outside(self, event: Event, now: float) -> list[Command]:
        match event:
            case Resumed():
                return self._resume(event, now)
            case SnapshotWritten():
                return self._checkpoints.snapshot_written(event)
            case Committed():
                commands = self._checkpoints.committed_now(event)
                return commands + self._recovered(self._recovery.committed(now), now)
            case StopRequested():
                return self._stop(event, now)
            case JobFailed():
                return self._end(event.outcome, event.reason, now)
            case _:
                raise ProtocolError(f"the controller knows no event {type(event).__name__}")

    def _from_rank(self, event: RankEvent, now: float) -> list[Command]:
        role = self._role_of(event.rank)
        if isinstance(event, Ready):
            return self._ready(event, role, now)
        if role is None:
            if isinstance(event, RankLost):
                return self._lost_unready(event, now)
            raise ProtocolError(f"{_describe(event)} came from a rank that has never reported")
        if role in RELAY_TIER:
            return self._from_relay(event, role, now)
        member = self._state.fleet.members[event.rank]
        if role is Role.TRAINER and isinstance(event, RankLost) and not event.role:
            return self._recovered(self._recovery.lost(event, now), now)
        if isinstance(event, RankLost) and isinstance(member, Rollout) and event.role and not member.alive:
            return self._dispatcher.gone(member, now)
        if event.incarnation != member.incarnation or not member.alive:
            return []
        if isinstance(event, RankLost):
            return self._lost(event, member, now)
        sender, handler = self._handlers.get(type(event), (Role.RELAY, None))
        if handler is None or role is not sender:
            raise ProtocolError(f"{_describe(event)} came from a {role.value}, only a {sender.value} sends it")
        return handler(event, member, now)

    def _role_of(self, rank: int) -> Role | None:
        member, relays = self._state.fleet.members.get(rank), self._state.distribution.relays
        if member is not None:
            return member.role
        return (Role.SPARE if relays[rank].spare else Role.RELAY) if rank in relays else None

    def _proceed(self, now: float) -> list[Command]:
        """The next step and work for waiting rollouts, as far as they have become possible, whatever the event was."""
        commands = self._experience.feed_trainers(now)
        if self._state.work_has_appeared:
            commands += self._dispatcher.consider_all(now)
        return commands

    def _finish_job(self, now: float) -> list[Command]:
        state, steps = self._state, self.settings.steps
        if state.stopping:
            return self._finish_stopping(now)
        if self._training.steps_done < steps or not state.versions.settled or state.rounds.open_rounds:
            return []
        if self._checkpoints.busy:
            return []
        return self._end("finished", f"all {steps} steps are trained, published and evaluated", now)

    def _give_up(self, now: float) -> list[Command]:
        """A task whose grading always fails would be tried for ever, and so would one whose rewards are always the same."""
        fruitless, uniform = self._experience.fruitless_groups, self._experience.uniform_groups
        if self.outcome is not None:
            return []
        if fruitless >= max(FRUITLESS_GROUPS, 4 * self.settings.prompts):
            return self._end("failed", f"{fruitless} groups in a row had no two responses that could be graded", now)
        if uniform >= max(UNIFORM_GROUPS, 10 * self.settings.prompts):
            reason = (
                f"{uniform} groups in a row had the same reward for all responses, and batch.dynamic_sampling is on"
            )
            return self._end("failed", reason, now)
        return []

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def snapshot(self) -> tuple[bytes, set[int]]:
        """The books, for the checkpoint that the last commands ask for, and the trajectories whose payload belongs to it.

        The books are a control.snapshot.Snapshot in MessagePack.
        """
        experience = self._experience
        books = capture(self._state, self._training.steps_done, experience.uniform_groups, experience.fruitless_groups)
        return msgspec.msgpack.encode(books), kept_trajectories(books)

    def _resume(self, event: Resumed, now: float) -> list[Command]:
        if self._begun:
            raise ProtocolError("the controller can go on from a checkpoint only before anything has happened")
        try:
            books = msgspec.msgpack.decode(event.books, type=Snapshot)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"the books of the checkpoint cannot be read: {error}") from error
        reason = (
            f"attempt {self.settings.attempt} goes on from step {books.step}, without the weights it was begun under"
        )
        starts_over, settled = restore(self._state, books, event.shift_s, now, reason)
        self._training.restore(books.step)
        self._checkpoints.committed = books.step
        self._dispatcher.start_over(starts_over)
        self._experience.uniform_groups, self._experience.fruitless_groups = books.uniform, books.fruitless
        return [*settled]

    def _state_written(self, event: StateWritten, trainer: Trainer, now: float) -> list[Command]:
        return self._checkpoints.state_written(event, trainer.index)

    def _stop(self, event: StopRequested, now: float) -> list[Command]:
        """End; or first write a checkpoint, where that is asked for and there is something to save."""
        saves = event.save and self.settings.checkpoint_every is not None
        if not saves or self._state.versions.newest_published is None or self._state.stopping:
            return self._end("stopped", event.reason, now)
        self._state.stopping = event.reason
        return []

    def _finish_stopping(self, now: float) -> list[Command]:
        """When the step that was under way is done and saved, the job ends; where it cannot be saved, it ends all the same."""
        state, done = self._state, self._training.steps_done
        if self._training.current is not None or self._checkpoints.busy:
            return []
        if self._checkpoints.committed == done:
            return self._end("requeue", f"{state.stopping}; the checkpoint of step {done} is complete", now)
        if self._checkpoints.tried == done:
            return self._end(
                "stopped", f"{state.stopping}; no checkpoint of step {done}: {self._checkpoints.failed}", now
            )
        return self._checkpoints.begin(done, state.stopping)

    def _end(self, outcome: str, reason: str, now: float) -> list[Command]:
        self.outcome = outcome
        if outcome == "requeue":  # what is open is in the checkpoint, and the next attempt says what becomes of it
            return [*self._repacker.ended(), EndJob(reason, outcome)]
        settlement = Settlement(self._state, now)
        for group in list(self._state.ledger.groups.values()):
            settlement.group(group, State.RETURNED, f"the job has {outcome}: {reason}")
        return [*self._repacker.ended(), *settlement.commands(f"the job has {outcome}"), EndJob(reason, outcome)]

    # --- ranks come and go ------------------------------------------------------------------------------------------

    def _ready(self, event: Ready, known: Role | None, now: float) -> list[Command]:
        role = READY_ROLES[type(event)]
        if known is not None and known is not role and not (known in RELAY_TIER and role in RELAY_TIER):
            raise ProtocolError(f"{_describe(event)} came from a {known.value}")
        if isinstance(event, RelayReady):
            return self._carry_on(self._state.distribution.relay_ready(event, now), now)
        if isinstance(event, SpareReady):
            return self._state.distribution.spare_ready(event)
        member = self._state.fleet.members.get(event.rank)
        if member is not None and event.incarnation <= member.incarnation:
            return []
        if isinstance(event, RolloutReady):
            return self._rollout_ready(event, now)
        if member is not None:
            return self._end("failed", f"{role.value} rank {event.rank} was started again, its state is lost", now)
        return self._trainer_ready(event)

    def _trainer_ready(self, event: TrainerReady) -> list[Command]:
        fleet = self._state.fleet
        fleet.add_trainer(event)
        if not fleet.all_trainers:
            return []
        step = self._training.steps_done
        version = self._state.versions.announce(step)
        return [Publish(f"all {len(fleet.trainers)} trainers hold the weights of step {step}", version.id, step)]

    def _rollout_ready(self, event: RolloutReady, now: float) -> list[Command]:
        state, known = self._state, self._state.fleet.rollouts.get(event.rank)
        if state.fleet.gave_up(event.rank):
            return []
        commands = self._lost_rollout(known, True, now) if known is not None and known.alive else []
        rollout = state.fleet.add_rollout(event)
        commands += state.distribution.rollout_ready(event)
        state.work_has_appeared = True
        return commands + self._dispatcher.consider(rollout, now)

    def _lost(self, event: RankLost, member: Member, now: float) -> list[Command]:
        if isinstance(member, Rollout):
            self._state.distribution.readers.lose(member.rank)
            return self._lost_rollout(member, not event.role, now)
        return self._end("failed", f"{member.role.value} rank {event.rank} was lost: {event.reason}", now)

    def _recovered(self, commands: list[Command] | str, now: float) -> list[Command]:
        """What recovery from the loss of a trainer's worker takes, or the job's end, where it says that there is none."""
        return self._end("failed", commands, now) if isinstance(commands, str) else commands

    def _lost_rollout(self, rollout: Rollout, comes_back: bool, now: float) -> list[Command]:
        return [*self._repacker.lost(rollout), *self._dispatcher.lost(rollout, comes_back, now)]

    def _lost_unready(self, event: RankLost, now: float) -> list[Command]:
        if not event.role:
            return []  # the worker alone, and its rank starts another
        if event.role != Role.ROLLOUT.value:
            return self._end("failed", f"rank {event.rank} was lost before it was ready: {event.reason}", now)
        self._state.fleet.give_up(event.rank)
        self._state.work_has_appeared = True  # for rollouts that have waited for this one
        return []

    # --- versions ---------------------------------------------------------------------------------------------------

    def _published(self, event: Published, member: Trainer, now: float) -> list[Command]:
        state = self._state
        shares = state.versions.publish(event.version, member.rank, event.digests)
        if shares is None:
            return []
        step = state.versions[event.version].step
        if self.settings.evaluates(step) and step > state.evaluated_step:
            state.evaluated_step = step
            state.rounds.open(event.version, self.settings.evaluated_prompts)
        self._repacker.published(now)
        return state.distribution.published(event.version, shares, now) + self._experience.evict(now)

    def _from_relay(self, event: RankEvent, role: Role, now: float) -> list[Command]:
        distribution = self._state.distribution
        match event:
            case RelayHolds():
                return self._relay_holds(event, now)
            case LinkStalled():
                commands = distribution.link_stalled(event, now)
            case RankLost():
                commands = distribution.relay_lost(event, now)
            case RankHeard():
                commands = distribution.rank_heard(event)
            case _:
                sender = self._handlers[type(event)][0]
                raise ProtocolError(f"{_describe(event)} came from a {role.value}, only a {sender.value} sends it")
        return self._carry_on(commands, now)

    def _relay_holds(self, event: RelayHolds, now: float) -> list[Command]:
        state = self._state
        relay = state.distribution.relays[event.rank]
        before = relay.version
        commands = self._carry_on(state.distribution.relay_holds(event, now), now)
        if relay.version != before:
            for rollout in state.fleet.under_relay(relay.rank):
                commands += self._dispatcher.consider(rollout, now)
        return commands

    def _carry_on(self, commands: list[Command], now: float) -> list[Command]:
        """What follows from the distribution's commands: rollouts pull from their new relays; without relays the job ends."""
        if commands and isinstance(commands[-1], EndJob):
            ending = commands.pop()
            assert isinstance(ending, EndJob)
            return commands + self._end(ending.outcome, ending.reason, now)
        for command in commands[:]:
            if isinstance(command, Attach):
                commands += self._dispatcher.attached(self._state.fleet.rollouts[command.rank], now)
        return commands

    def _loaded(self, event: Loaded, rollout: Rollout, now: float) -> list[Command]:
        state = self._state
        if rollout.loading is None or (rollout.version is not None and event.version <= rollout.version):
            return []
        if not state.fleet.accepts(rollout, event.version) or not state.distribution.was_broadcast(event.version):
            raise ProtocolError(
                f"{_describe(event)} names version {event.version}, where {rollout.loading} or a newer one was due"
            )
        if not state.fleet.finish_loading(rollout, event.version):
            return []
        self._dispatcher.loaded(rollout)
        self._repacker.loaded(rollout, event.version, now)
        state.work_has_appeared |= self._dispatcher.refreshes_together
        return self._dispatcher.consider(rollout, now)

    def _pull_refused(self, event: PullRefused, rollout: Rollout, now: float) -> list[Command]:
        return self._dispatcher.refused(rollout, event.version, now)

    # --- trajectories and steps -------------------------------------------------------------------------------------

    def _streamed(self, event: Streamed, rollout: Rollout, now: float) -> list[Command]:
        advance = self._state.pool.stream(event.progress, rollout.rank, now)
        self._repacker.streamed(rollout, event, advance, now)
        return self._dispatcher.streamed(rollout, event.progress)

    def _handed_over(self, event: HandedOver, rollout: Rollout, now: float) -> list[Command]:
        return self._repacker.handed_over(event, rollout, now)

    def _interrupted(self, event: Interrupted, rollout: Rollout, now: float) -> list[Command]:
        return self._dispatcher.interrupted(rollout, event.progress, now)

    def _went_to_tool(self, event: WentToTool, rollout: Rollout, now: float) -> list[Command]:
        self._state.pool.go_to_tool(event.trajectory, rollout.rank)
        return []

    def _came_from_tool(self, event: CameFromTool, rollout: Rollout, now: float) -> list[Command]:
        self._state.pool.come_from_tool(event.trajectory, rollout.rank)
        return []

    def _finished(self, event: Finished, rollout: Rollout, now: float) -> list[Command]:
        state = self._state
        trajectory = state.pool.owned(event.trajectory, rollout.rank)
        if trajectory is None:
            return []
        if event.version != trajectory.current_version:
            raise ProtocolError(
                f"{_describe(event)} for trajectory {event.trajectory} names version {event.version}, "
                f"it is generated under {trajectory.current_version}"
            )
        state.fleet.release(rollout, trajectory.id)
        state.pool.finish(trajectory, event, state.versions.staleness(trajectory.version), now)
        commands = self._repacker.finished(trajectory, rollout, now)
        commands += self._experience.finished(trajectory, now)
        commands += self._proceed(now)  # first, so that a step that begins makes room, and who waits longer goes first
        return commands + self._dispatcher.consider(rollout, now)

    def _trained(self, event: Trained, trainer: Trainer, now: float) -> list[Command]:
        if not self._training.note(event, trainer.index):
            return []
        return self._experience.complete_step(now)

    # --- for people -------------------------------------------------------------------------------------------------

    @property
    def started(self) -> bool:
        """Whether every rank has reported and the first version is published."""
        fleet = self._state.fleet
        published = self._state.versions.newest_published is not None
        relays = self._state.distribution.relays
        return fleet.all_trainers and relays.missing == 0 and fleet.all_rollouts and published

    def incarnation_of(self, rank: int) -> int:
        """The incarnation of `rank` that is listened to, 0 where it has not reported: whoever notices its loss names it."""
        member, relays = self._state.fleet.members.get(rank), self._state.distribution.relays
        if member is not None:
            return member.incarnation
        return relays[rank].incarnation if rank in relays else 0

    def ends_without_relay(self, rank: int) -> bool:
        """Whether the loss of relay `rank` would end the job."""
        return self._state.distribution.relays.ends_without(rank)

    @property
    def rollouts_busy(self) -> int:
        """Rollouts that have trajectories."""
        return self._state.fleet.busy_rollouts

    def waits(self) -> list[str]:
        """Who waits for whom, a line each; nobody does once the job has ended."""
        if self.outcome is not None:
            return []
        trainers = sorted(self._state.fleet.trainers.values(), key=lambda trainer: trainer.index)
        waits = describe_waits(self._state, self._training)
        return self._checkpoints.waits([trainer.rank for trainer in trainers]) + waits


def _describe(event: RankEvent) -> str:
    what = getattr(event, "trajectory", getattr(event, "version", getattr(event, "step", "")))
    id = f" {what}" if what != "" else ""
    return f"{type(event).__name__}{id} from rank {event.rank}, incarnation {event.incarnation},"
