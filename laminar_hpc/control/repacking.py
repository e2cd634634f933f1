"""When rollouts are repacked, and with what: from what they say of themselves to moves, and from their answers to new owners.

A check takes place every `every_s` seconds, and at once when a version is published. There is no timer behind it: it is made
with the first event after it is due. Only rollouts with trajectories can be repacked, and each of these streams several
times a second, so that a check is never late; and the times of events are on record, so that a replay makes the same ones.

A candidate has said twice since it was last given anything that nothing waits in its engine: what it said once may be from
before. It has nothing at a tool, and is not in a move already.

A move pays only where the emptied rollout has something to begin. So there are no more moves than rollouts that could be
given fresh work, beyond those that have none: where the trainers are what is waited for, and prompts are held back, nothing
moves. (`gain_gate = false` leaves this out, too.)
"""

from __future__ import annotations

import math

import msgspec

from laminar_hpc.control.dispatch import Dispatcher
from laminar_hpc.control.estimates import Estimates
from laminar_hpc.control.fleet import Rollout
from laminar_hpc.control.moves import Moves
from laminar_hpc.control.pool import Advance, Trajectory
from laminar_hpc.control.state import JobState
from laminar_hpc.policy.repack import Candidate, Costs, Limits, Move, largest_batch, plan
from laminar_hpc.protocol.commands import Command
from laminar_hpc.protocol.events import HandedOver, Streamed
from laminar_hpc.protocol.trajectory import Purpose, State

SETTLED_STREAMS = 2
"""So many streams in a row, since a rollout was last given work, are needed to believe that nothing waits in it."""


class _Heard(msgspec.Struct, frozen=True):
    """What a rollout said last; `streams` counts what it has said since it was given work `given`."""

    incarnation: int
    given: int
    streams: int
    at_s: float
    said: Streamed


class Repacker:
    """Decides on moves and carries them through."""

    def __init__(self, state: JobState, dispatcher: Dispatcher) -> None:
        settings = state.settings
        self._state = state
        self._dispatcher = dispatcher
        self._rules = settings.repack
        self._on = state.mode.repack and settings.repack.enabled
        self._estimates = Estimates(settings.max_response_tokens)
        self._moves = Moves(state.pool, self._estimates)
        self._heard: dict[int, _Heard] = {}
        self._next_s = 0.0

    # --- what becomes known -----------------------------------------------------------------------------------------

    def streamed(self, rollout: Rollout, event: Streamed, advance: Advance | None, now: float) -> None:
        """A rollout has streamed; `advance` is that of the trajectory that gained most.

        Not every stream tells of all: the steps are those of one trajectory between two words of it.
        """
        if not self._on:
            return
        before = self._heard.get(rollout.rank)
        if before is not None and (before.incarnation, before.given) != (rollout.incarnation, rollout.given):
            before = None
        empty = before is not None and before.said.waiting == event.waiting == 0 and before.said.running > 0
        if before is not None and advance is not None and empty:
            trajectories = (before.said.running + event.running) / 2
            self._estimates.note_steps(trajectories, advance.tokens, advance.seconds)
        streams = 1 if before is None else before.streams + 1
        self._heard[rollout.rank] = _Heard(rollout.incarnation, rollout.given, streams, now, event)
        self._moves.streamed(event.progress, now)

    def finished(self, trajectory: Trajectory, rollout: Rollout, now: float) -> list[Command]:
        """A trajectory has ended, at `rollout`."""
        if not self._on:
            return []
        if trajectory.purpose is Purpose.TRAIN:
            self._estimates.note_length(trajectory.tokens)
        return [*self._moves.finished(trajectory, rollout, now)]

    def loaded(self, rollout: Rollout, version: int, now: float) -> None:
        """A rollout holds `version` now."""
        self._moves.loaded(rollout, version, now)

    def published(self, now: float) -> None:
        """A version is published: emptied rollouts could take it."""
        self._next_s = now

    def lost(self, rollout: Rollout) -> list[Command]:
        """A rollout's incarnation is over."""
        self._heard.pop(rollout.rank, None)
        return [*self._moves.lost(rollout)]

    def ended(self) -> list[Command]:
        """The job has ended."""
        return [*self._moves.end()]

    # --- moves ------------------------------------------------------------------------------------------------------

    def check(self, now: float) -> list[Command]:
        """The moves to make now, if it is time to look."""
        if not self._on or now < self._next_s or self._state.stopping:
            return []
        self._next_s = now + self._rules.every_s
        commands: list[Command] = [*self._moves.abandoned()]
        batch = self._batch()
        if batch is None:
            return commands
        gated, known = self._rules.gain_gate, self._estimates.known
        growth = self._rules.every_s / self._estimates.step_s(1) if known else 0.0
        limits = Limits(self._rules.kv_share, batch, growth)
        costs = None
        if gated:
            costs = Costs(self._estimates.step_s, self._estimates.prefill_token_s(batch))
        most = self._dispatcher.could_feed() if gated else len(self._state.fleet.rollouts)
        taken = self._moves.ranks
        for version in self._state.fleet.versions:
            if most > 0 and not self._state.pool.has_orphans(version):
                moves = plan(self._candidates(version, batch, taken, now), limits, costs, most)
                most -= len(moves)
                sources = self._state.fleet.rollouts
                commands += [self._moves.ask(move, sources[move.source], now) for move in moves]
        return commands

    def _batch(self) -> int | None:
        """The most trajectories of a destination; None where it is not known yet, or a gain could not be told."""
        rules, known = self._rules, self._estimates.known
        most = rules.most_batch
        if rules.batch:
            return min(rules.batch, most) if known or not rules.gain_gate else None
        return largest_batch(self._estimates.step_s, most) if known else None

    def _candidates(self, version: int, batch: int, taken: set[int], now: float) -> list[Candidate]:
        trajectories = self._state.pool.trajectories
        found = []
        for rollout in self._state.fleet.holders(version):
            heard = self._heard.get(rollout.rank)
            if heard is None or rollout.rank in taken or not self._in_tail(rollout, heard, batch):
                continue
            owned = [trajectories[id] for id in rollout.trajectories]
            if any(one.state is State.AT_TOOL for one in owned):
                continue
            steps = self._estimates.steps_left([one.tokens for one in owned])
            tokens = heard.said.kv_use * rollout.kv_capacity_tokens
            if self._estimates.known:  # and those that have come since it said so
                tokens += len(owned) * (now - heard.at_s) / self._estimates.step_s(len(owned))
            found.append(
                Candidate(
                    rollout.rank,
                    len(owned),
                    math.ceil(tokens),
                    rollout.kv_capacity_tokens,
                    steps,
                    self._slack_s(owned, steps, now),
                )
            )
        return found

    def _slack_s(self, owned: list[Trajectory], steps: int, now: float) -> float:
        """By how much later all of these, of which the last one has `steps` to go, may end."""
        if not self._rules.delay_share or not self._estimates.known:
            return math.inf
        youngest_s = now - max(one.begun_s for one in owned)
        expected_s = youngest_s + steps * self._estimates.step_s(len(owned))
        return self._rules.delay_share * expected_s - max(one.delayed_s for one in owned)

    def _in_tail(self, rollout: Rollout, heard: _Heard, batch: int) -> bool:
        if not 0 < len(rollout.trajectories) <= min(batch, rollout.concurrency) or rollout.kv_capacity_tokens == 0:
            return False
        current = (heard.incarnation, heard.given) == (rollout.incarnation, rollout.given)
        return current and heard.streams >= SETTLED_STREAMS and heard.said.waiting == 0

    def handed_over(self, event: HandedOver, source: Rollout, now: float) -> list[Command]:
        """The source has given its trajectories up: they get their new owner, and it is free for others."""
        move = self._moves.asked(event.move, source)
        if move is None:
            return []
        pool = self._state.pool
        pool.stream(event.progress, source.rank, now)
        given = [item for item in event.progress if pool.owned(item.trajectory, source.rank) is not None]
        destination = self._state.fleet.rollouts[move.destination]
        takes = destination.alive and destination.version == source.version and destination.loading is None
        takes = takes and not self._state.stopping
        ids = [item.trajectory for item in given]
        commands, moved = self._dispatcher.pass_on(ids, source, destination if takes else None, now)
        if moved:
            self._note_delays(move, destination, set(ids[:moved]))
        reports = self._moves.handed_over(event.move, given[:moved], source, destination if takes else None, now)
        return [*commands, *reports, *self._dispatcher.consider(source, now)]

    def _note_delays(self, move: Move, destination: Rollout, moved: set[int]) -> None:
        for id in destination.trajectories:
            self._state.pool.trajectories[id].delayed_s += (
                move.source_delay_s if id in moved else move.destination_delay_s
            )
