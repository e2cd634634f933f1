"""The moves of a repack: under way, carried out, and what came of them.

    ASKED (the source is told to hand over) -> MOVED (the destination has what the source gave up) -> reported
    ASKED -> reported: the source is lost, or has nothing left to give

A move is reported when the last trajectory that it concerns, of the source's and of those that the destination had then, has
ended: only then is known how many steps the two have shared. Invariant: a rollout is in one move that is ASKED as its source,
or in any number as their destination, never in both.
"""

from __future__ import annotations

import msgspec

from laminar_hpc.control.estimates import Estimates
from laminar_hpc.control.fleet import Rollout
from laminar_hpc.control.pool import Trajectory, TrajectoryPool
from laminar_hpc.policy.repack import Move
from laminar_hpc.protocol.commands import HandOver, ReportMove
from laminar_hpc.protocol.events import Progress

MOVED = "moved"


class _Followed(msgspec.Struct, eq=False):
    """A move, from its command to its report. `moved` and `beside` have the tokens that each trajectory had at the hand-over.

    `steps_*` are the most that one of each has gained since, `open` those that have not ended, `seen` whether all others
    have been seen to end. `given` counts the work that the source had been given when it was empty.
    """

    id: int
    plan: Move
    version: int
    planned_s: float
    ending: str = "the job has ended before the hand-over"
    handed_over_s: float | None = None
    resumed_s: float | None = None
    released_s: float | None = None
    loaded_s: float | None = None
    loaded_version: int | None = None
    prefill_s: float | None = None
    given: int | None = None
    moved: dict[int, int] = {}
    beside: dict[int, int] = {}
    prompt_tokens: int = 0
    steps_moved: int = 0
    steps_beside: int = 0
    open: set[int] = set()
    seen: bool = True


class Moves:
    """Follows moves; it asks for none."""

    def __init__(self, pool: TrajectoryPool, estimates: Estimates) -> None:
        self._pool = pool
        self._estimates = estimates
        self._next_id = 0
        self._asked: dict[int, _Followed] = {}
        self._moved: dict[int, _Followed] = {}
        self._of_trajectory: dict[int, list[_Followed]] = {}

    @property
    def ranks(self) -> set[int]:
        """The rollouts that a hand-over is under way from or to."""
        plans = [one.plan for one in self._asked.values()]
        return {rank for plan in plans for rank in (plan.source, plan.destination)}

    def ask(self, plan: Move, source: Rollout, now: float) -> HandOver:
        """The command with which a move begins; the source gives all that it has."""
        assert source.version is not None, f"rollout {source.rank} has trajectories and no weights"
        one = _Followed(self._next_id, plan, source.version, now)
        self._next_id += 1
        self._asked[one.id] = one
        source.giving_to = plan.destination
        trajectories = list(source.trajectories)
        return HandOver(plan.reason, source.rank, source.incarnation, one.id, plan.destination, trajectories)

    def asked(self, id: int, source: Rollout) -> Move | None:
        """The plan of this move, if `source` has been asked for it and has not answered yet."""
        one = self._asked.get(id)
        return None if one is None or one.plan.source != source.rank else one.plan

    def handed_over(
        self, id: int, progress: list[Progress], source: Rollout, destination: Rollout | None, now: float
    ) -> list[ReportMove]:
        """The source has answered; `progress` are the trajectories that the destination (None: it is gone) has now."""
        one = self._asked.pop(id)
        source.giving_to = None
        one.handed_over_s = now
        self._note_empty(one, source, now)
        if not progress or destination is None:
            gone = f"rollout {one.plan.destination} could not take them"
            one.ending = gone if destination is None else "nothing was left to hand over"
            return [self._report(one)]
        one.ending = MOVED
        one.moved = {item.trajectory: item.tokens for item in progress}
        trajectories = self._pool.trajectories
        one.beside = {id: trajectories[id].tokens for id in destination.trajectories if id not in one.moved}
        one.open = {*one.moved, *one.beside}
        for trajectory in one.open:
            self._of_trajectory.setdefault(trajectory, []).append(one)
        self._moved[id] = one
        return []

    def streamed(self, progress: list[Progress], now: float) -> None:
        """Trajectories have come further: the first new token of what was moved says how long its prefill took."""
        if all(one.resumed_s is not None for one in self._moved.values()):
            return
        for item in progress:
            for one in self._of_trajectory.get(item.trajectory, ()):
                steps = item.tokens - one.moved.get(item.trajectory, item.tokens)
                if one.resumed_s is None and steps > 0 and one.handed_over_s is not None:
                    one.resumed_s = now
                    if self._estimates.known:
                        batch = len(one.moved) + len(one.beside)
                        one.prefill_s = max(0.0, now - one.handed_over_s - steps * self._estimates.step_s(batch))
                        self._estimates.note_prefill(one.plan.tokens, one.prefill_s)

    def finished(self, trajectory: Trajectory, rollout: Rollout, now: float) -> list[ReportMove]:
        """A trajectory has ended, at `rollout`."""
        for one in self._moved.values():
            if one.plan.source == rollout.rank:
                self._note_empty(one, rollout, now)
        reports = []
        for one in self._of_trajectory.pop(trajectory.id, ()):
            one.open.discard(trajectory.id)
            if trajectory.id in one.moved:
                one.steps_moved = max(one.steps_moved, trajectory.tokens - one.moved[trajectory.id])
                one.prompt_tokens += trajectory.prompt_tokens
            else:
                one.steps_beside = max(one.steps_beside, trajectory.tokens - one.beside[trajectory.id])
            if not one.open:
                reports.append(self._report(one))
        return reports

    def loaded(self, rollout: Rollout, version: int, now: float) -> None:
        """A rollout holds `version` now."""
        for one in self._moved.values():
            idle_since = one.plan.source == rollout.rank and one.given == rollout.given and one.loaded_s is None
            if idle_since and version > one.version:
                one.loaded_s, one.loaded_version = now, version

    def lost(self, rollout: Rollout) -> list[ReportMove]:
        """A rollout's incarnation is over: what it was to hand over goes on elsewhere anyway."""
        reports = []
        for one in [one for one in self._asked.values() if one.plan.source == rollout.rank]:
            del self._asked[one.id]
            one.ending = "the source was lost before it had handed over"
            reports.append(self._report(one))
        return reports

    def abandoned(self) -> list[ReportMove]:
        """Reports of the moves with a trajectory that is gone without having ended here: it has started over."""
        for id in [id for id in self._of_trajectory if id not in self._pool.trajectories]:
            for one in self._of_trajectory.pop(id):
                one.open.discard(id)
                one.seen = False
        return [self._report(one) for one in list(self._moved.values()) if not one.open]

    def end(self) -> list[ReportMove]:
        """The job has ended: reports of all that is open."""
        for one in self._moved.values():
            one.seen = False
        return [self._report(one) for one in [*self._asked.values(), *self._moved.values()]]

    def _note_empty(self, one: _Followed, source: Rollout, now: float) -> None:
        if one.released_s is None and not source.trajectories:
            one.released_s, one.given = now, source.given

    def _report(self, one: _Followed) -> ReportMove:
        self._moved.pop(one.id, None)
        plan = one.plan
        return ReportMove(
            plan.reason,
            move=one.id,
            version=one.version,
            source=plan.source,
            destination=plan.destination,
            ending=one.ending,
            trajectories=len(one.moved),
            tokens=sum(one.moved.values()) + one.prompt_tokens,
            planned_s=one.planned_s,
            handed_over_s=one.handed_over_s,
            resumed_s=one.resumed_s,
            released_s=one.released_s,
            loaded_s=one.loaded_s,
            loaded_version=one.loaded_version,
            prefill_s=one.prefill_s,
            expected_gain_s=plan.gain_s,
            gain_s=self._gain_s(one),
        )

    def _gain_s(self, one: _Followed) -> float | None:
        if not one.moved or not one.seen or one.prefill_s is None or not self._estimates.known:
            return None
        step_s, moved, beside = self._estimates.step_s, len(one.moved), len(one.beside)
        shared_s = step_s(moved) + step_s(beside) - step_s(moved + beside)
        return min(one.steps_moved, one.steps_beside) * shared_s - one.prefill_s
