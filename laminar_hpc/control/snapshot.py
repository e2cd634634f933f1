"""What a checkpoint keeps of the controller, and how a later attempt goes on from it.

Taken when a step is done and no other has begun. What is done with each training group of it, in the next attempt:

* one in the buffer stays there, and keeps the version, and so the staleness, that it had;
* one whose members are generated under the very weights of the checkpoint goes on: the attempt publishes those weights
  again, and its members wait for a rollout that holds them. (No rollout can miss them: had the buffer held a whole step
  besides, that step would have begun. So the next one needs groups that are generated under these weights.)
* one of older weights, which nobody has any more, starts over; what its members had is listed as discarded. Where versions
  mix in a trajectory it goes on too, under the newer weights.

A held-out prompt that is being answered is discarded, and its round is answered again. Groups that were handed out, or
consumed, after the snapshot are none of its business: the same draws come again, under other numbers.
"""

from __future__ import annotations

import msgspec

from laminar_hpc.control.pool import Trajectory
from laminar_hpc.control.prompts import Group
from laminar_hpc.control.settlement import Settlement
from laminar_hpc.control.state import JobState
from laminar_hpc.control.versions import Version
from laminar_hpc.errors import ProtocolError
from laminar_hpc.policy.sampling import Candidate
from laminar_hpc.protocol.commands import Settle
from laminar_hpc.protocol.trajectory import Purpose, State


class Snapshot(msgspec.Struct, kw_only=True):
    """The controller's books after step `step`, in attempt `attempt`. Times are in that attempt's clock, in seconds.

    `evaluating`: an evaluation is not reported yet; `evaluated_step` is the newest step that one was opened for. `uniform` and
    `fruitless` are the counters of groups in a row that were discarded.
    """

    step: int
    attempt: int
    draws: int
    closed: dict[Purpose, dict[State, int]]
    versions: list[Version]
    groups: list[Group]
    trajectories: list[Trajectory]
    buffer: list[Candidate]
    evaluating: bool
    evaluated_step: int
    uniform: int
    fruitless: int
    mixes: bool = False

    @property
    def same_weights(self) -> set[int]:
        """The versions that have the checkpoint's weights."""
        return {version.id for version in self.versions if version.step == self.step}

    def goes_on(self, group: Group) -> bool:
        """Whether the members of a group that is not in the buffer go on where they were."""
        return group.version in self.same_weights or (self.mixes and group.version is not None)

    @property
    def buffered(self) -> set[int]:
        """The groups in the buffer."""
        return {candidate.group for candidate in self.buffer}


def capture(state: JobState, step: int, uniform: int, fruitless: int) -> Snapshot:
    """The books as they are now, after `step`; it shares its parts with `state`, so encode it before anything happens."""
    named = {group.version for group in state.ledger.groups.values()}
    named |= {one.newest_version for one in state.pool.trajectories.values()}
    versions = state.versions.known
    return Snapshot(
        step=step,
        attempt=state.settings.attempt,
        draws=state.ledger.draws,
        closed=state.ledger.closed,
        versions=[version for version in versions if version.id in named or version.step == step],
        groups=list(state.ledger.groups.values()),
        trajectories=list(state.pool.trajectories.values()),
        buffer=state.buffer.candidates,
        evaluating=bool(state.rounds.open_rounds),
        evaluated_step=state.evaluated_step,
        uniform=uniform,
        fruitless=fruitless,
        mixes=state.mode.mixes,
    )


def kept_trajectories(snapshot: Snapshot) -> set[int]:
    """The trajectories whose payload the next attempt needs: those in the buffer, and those that go on."""
    buffered = snapshot.buffered
    return {
        id
        for group in snapshot.groups
        if group.purpose is Purpose.TRAIN and (group.id in buffered or snapshot.goes_on(group))
        for id in group.members
    }


def restore(
    state: JobState, snapshot: Snapshot, shift_s: float, now: float, reason: str
) -> tuple[list[Group], list[Settle]]:
    """Take the snapshot's books over into a `state` in which nothing has happened yet.

    Its times are moved by `shift_s`, from its attempt's clock to this one's. The groups that start over, and the command
    that lists what is discarded, for `reason`. ProtocolError where the snapshot is of this attempt or a later one.
    """
    if snapshot.attempt >= state.settings.attempt:
        raise ProtocolError(
            f"attempt {state.settings.attempt} cannot go on from a checkpoint of attempt {snapshot.attempt}"
        )
    _move_times(snapshot, shift_s)
    goes_on = {group.id for group in snapshot.groups if snapshot.goes_on(group)}
    state.ledger.restore(snapshot.draws, snapshot.closed, snapshot.groups)
    state.versions.remember(snapshot.versions)
    state.evaluated_step = snapshot.evaluated_step
    _relabel(snapshot, state.settings.first_version)
    buffered = snapshot.buffered
    state.buffer.restore(snapshot.buffer)
    state.pool.restore(snapshot.trajectories)
    settlement = Settlement(state, now)
    starts_over = []
    for group in snapshot.groups:
        if group.purpose is Purpose.EVALUATION:
            settlement.group(group, State.DISCARDED, reason)
        elif group.id not in buffered and group.id not in goes_on:
            settlement.start_over(group, reason)
            starts_over.append(group)
        else:
            state.pool.orphan([id for id in group.members if state.pool.trajectories[id].state is not State.FINISHED])
    if snapshot.evaluating:  # one round does: the older weights that it may have been for are gone
        state.rounds.open(state.settings.first_version, state.settings.evaluated_prompts)
    return starts_over, settlement.commands(reason)


def _move_times(snapshot: Snapshot, shift_s: float) -> None:
    for group in snapshot.groups:
        group.handed_out_s += shift_s
    for one in snapshot.trajectories:
        one.begun_s += shift_s
        if one.finished_s is not None:
            one.finished_s += shift_s
    snapshot.buffer = [
        msgspec.structs.replace(candidate, finished_s=candidate.finished_s + shift_s) for candidate in snapshot.buffer
    ]


def _relabel(snapshot: Snapshot, version: int) -> None:
    """What the checkpoint's weights have generated so far goes on under the id by which they are published again."""
    same = snapshot.same_weights
    for group in snapshot.groups:
        if group.version in same:
            group.version = version
    for one in snapshot.trajectories:
        if one.version in same:
            one.version = version
        if one.newest_version in same:
            one.newest_version = version
