"""Who waits for whom, in words: for the live display, and for the last message of a job that has stalled."""

from __future__ import annotations

from collections.abc import Iterable

from laminar_hpc.control.fleet import Rollout
from laminar_hpc.control.state import JobState
from laminar_hpc.control.training import Step, Training
from laminar_hpc.policy.roles import Role
from laminar_hpc.protocol.trajectory import State


def describe_waits(state: JobState, training: Training) -> list[str]:
    """One line for each thing that is waited for."""
    return [
        *_start(state),
        *_training(state, training),
        *_weights(state),
        *_evaluation(state),
        *(_rollout(state, rollout) for rollout in state.fleet.rollouts.values()),
    ]


def _start(state: JobState) -> list[str]:
    lines = []
    counts = {
        Role.TRAINER: state.fleet.missing(Role.TRAINER),
        Role.RELAY: state.distribution.relays.missing,
        Role.ROLLOUT: state.fleet.missing(Role.ROLLOUT),
    }
    for role, missing in counts.items():
        if missing:
            lines.append(f"the job waits for {missing} more {role.value} ranks to report")
    return lines


def _training(state: JobState, training: Training) -> list[str]:
    step, settings = training.current, state.settings
    if step is not None:
        waits = [_step(state, step)] if any(len(done) < len(state.fleet.trainers) for done in step.done) else []
        return waits if training.fed else [*waits, _groups(state, step.number, settings.prompts - len(step.groups))]
    newest = state.versions.newest
    if newest is not None and not newest.published:
        missing = state.versions.missing_trainers(newest, list(state.fleet.trainers))
        return [f"version {newest.id} waits for trainer ranks {_join(missing)} to publish it"]
    if newest is None or training.steps_done == settings.steps:
        return []
    return [_groups(state, training.steps_done + 1, settings.prompts)]


def _groups(state: JobState, step: int, needed: int) -> str:
    """What `step` waits for, which takes `needed` groups more."""
    held = len(state.buffer)
    in_flight = state.ledger.open_groups - held
    if held >= needed and state.settings.colocated and state.rounds.open_rounds:
        return f"step {step} waits for the GPUs, which evaluate version {state.rounds.open_rounds[0].version}"
    if held >= needed and state.pressing(needed, needed) is None:
        return f"step {step} waits for groups in flight that would become too stale"
    return f"step {step} waits for {needed - held} groups ({held} of {needed} in the buffer, {in_flight} in flight)"


def _step(state: JobState, step: Step) -> str:
    place, done = next((place, done) for place, done in enumerate(step.done) if len(done) < len(state.fleet.trainers))
    missing = [trainer.rank for trainer in state.fleet.trainers.values() if trainer.index not in done]
    return f"step {step.number} waits for trainer ranks {_join(missing)} to train mini-batch {place}"


def _weights(state: JobState) -> list[str]:
    lines = []
    for version, late, chain in state.distribution.late():
        lines.append(f"version {version} is on its way to relay ranks {_join(late)} (chain {_join(chain)})")
    for relay in state.distribution.relays.called:
        lines.append(
            f"node {relay.node} waits for rank {relay.rank} to report as its relay, incarnation {relay.incarnation}"
        )
    return lines


def _evaluation(state: JobState) -> list[str]:
    lines = []
    for one in state.rounds.open_rounds:
        by = "a rollout to begin it" if one.answered_by is None else f"rollouts under version {one.answered_by}"
        lines.append(
            f"the evaluation of version {one.version} waits for {by} "
            f"({one.unfinished} of {one.prompts} prompts unanswered, {len(one.pending)} not handed out)"
        )
    return lines


def _rollout(state: JobState, rollout: Rollout) -> str:
    name = f"rollout {rollout.rank}"
    if not rollout.alive:
        return f"{name} is lost and waited for"
    relay = state.distribution.readers.relay_rank(rollout.rank)
    if rollout.pull_due:
        return f"{name} waits for a version that it can load at relay {relay}"
    if rollout.loading is not None:
        return f"{name} loads version {rollout.loading} from relay {relay}"
    if rollout.version is None:
        return f"{name} waits for the first version at relay {relay}"
    if not rollout.trajectories:
        return f"{name} is idle under version {rollout.version}"
    if rollout.interrupting:
        return f"{name} lets go of {len(rollout.trajectories)} trajectories, to go on under newer weights"
    at_tool = sum(state.pool.trajectories[id].state is State.AT_TOOL for id in rollout.trajectories)
    tools = f", {at_tool} of them at a tool," if at_tool else ""
    if rollout.giving_to is not None:
        return f"{name} hands {len(rollout.trajectories)} trajectories over to rollout {rollout.giving_to}"
    return f"{name} generates {len(rollout.trajectories)} trajectories{tools} under version {rollout.version}"


def _join(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
