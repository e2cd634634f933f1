"""Who generates what: weights and work for rollouts, and what becomes of a lost rollout's work.

Work comes in units, and a rollout is given them in this order:

1. a trajectory of its version that has lost its owner, also while the rollout is in the middle of a batch;
2. an evaluation prompt, if the round may be answered by its version;
3. a group that has to start over, since nobody holds the version it was begun under;
4. a fresh group, if admission allows.

Fresh work (2 to 4) is given where rollouts refresh alone only to a rollout that has nothing to do, and then as much as it
has room for; where they are interrupted, whenever there is room; where they refresh together, too, once all of them hold the
newest version. A rollout with nothing to do takes newer weights before fresh groups, but after evaluation prompts: so a round,
once begun, ends. One that is interrupted takes up what it had as soon as it has newer weights, before anything else; it is not
interrupted in evaluation prompts, which one version answers.

Invariant: a trajectory without owner waits only while rollouts that hold its version exist and are all full, or one is to load
it again (reloads.py). Else its group, finished members included, starts over; so does an evaluation round.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence

import msgspec

from laminar_hpc.control.fleet import Rollout
from laminar_hpc.control.pool import Owner
from laminar_hpc.control.prompts import Group
from laminar_hpc.control.reloads import Reloads
from laminar_hpc.control.settlement import Settlement
from laminar_hpc.control.state import JobState
from laminar_hpc.policy.admission import room
from laminar_hpc.policy.modes import Refresh
from laminar_hpc.protocol.commands import Command, Generate, Interrupt, Pull
from laminar_hpc.protocol.events import Progress
from laminar_hpc.protocol.trajectory import Purpose, TrajectorySpec


class Portion(msgspec.Struct, eq=False):
    """What one rollout is given at once. `fresh`: it may be given fresh work; `groups_too`: groups to train on, too.

    One whose relay has newer weights finishes what waits for its own, and begins nothing that is to be trained on.
    """

    rollout: Rollout
    version: int
    fresh: bool
    groups_too: bool = False
    trajectories: list[TrajectorySpec] = []
    taken_up: int = 0
    taken_over: int = 0
    moved: int = 0
    evaluation: int = 0
    groups: int = 0

    def command(self) -> Generate:
        """The command that hands the portion over."""
        parts = (
            (self.groups, "groups"),
            (self.evaluation, "evaluation prompts"),
            (self.taken_up, "taken up again"),
            (self.taken_over, "taken over"),
            (self.moved, "moved"),
        )
        reason = ", ".join(f"{count} {what}" for count, what in parts if count)
        rollout = self.rollout
        return Generate(reason, rollout.rank, rollout.incarnation, self.version, self.trajectories)


class Dispatcher:
    """Hands out work and weights."""

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._cohorts = state.mode.refresh is Refresh.TOGETHER
        self._interrupts = state.mode.refresh is Refresh.INTERRUPTED
        self._restarts: deque[Group] = deque()
        self._reloads = Reloads()
        self._together: int | None = None

    def start_over(self, groups: list[Group]) -> None:
        """These groups have no version any more, and wait for a rollout."""
        self._restarts.extend(groups)

    @property
    def refreshes_together(self) -> bool:
        """Whether work may depend on what all rollouts hold, and not only on the one that is asked for."""
        return self._cohorts

    # --- work and weights -------------------------------------------------------------------------------------------

    def consider(self, rollout: Rollout, now: float) -> list[Command]:
        """Weights or work for one rollout whose situation has changed."""
        if not rollout.alive or not self._state.hands_out:
            return []
        if rollout.loading is not None:
            return self._pull_again(rollout) if rollout.pull_due else []
        if rollout.interrupting:
            return []
        if self._interrupts and not rollout.paused and self._is_to_be_interrupted(rollout):
            return self._interrupt(rollout)
        if rollout.trajectories and (rollout.paused or not self._may_add(rollout)):
            return []
        return self._refresh(rollout) or self._give([rollout], now)

    def attached(self, rollout: Rollout, now: float) -> list[Command]:
        """The rollout pulls from another relay from now on; what it was to pull from the old one it pulls from that."""
        if rollout.loading is not None:
            self._state.fleet.void_pull(rollout)
        return self.consider(rollout, now)

    def _may_add(self, rollout: Rollout) -> bool:
        """Whether there can be anything for a rollout that is in the middle of its work."""
        if self._state.pool.has_work(rollout.version):
            return True
        if self._interrupts:
            return rollout.free > 0 and self._has_fresh_work()
        return rollout.version == self._together and self._has_fresh_work()

    def consider_all(self, now: float) -> list[Command]:
        """Work for the rollouts that can take fresh work, after some has appeared."""
        self._state.work_has_appeared = False
        if not self._state.hands_out:
            return []
        if self._cohorts:
            return self._consider_together(now)
        if self._interrupts:
            return self._give(self._able(), now)
        commands: list[Command] = []
        for rollout in list(self._state.fleet.idle.values()):
            if not self._has_fresh_work():
                break
            commands += self.consider(rollout, now)
        return commands

    def _consider_together(self, now: float) -> list[Command]:
        fleet, newest = self._state.fleet, self._state.versions.newest_published
        if newest is not None and newest != self._together and fleet.all_rollouts and fleet.together(newest):
            self._together = newest
        if self._together is None or not self._has_fresh_work():
            return []
        return self._give(fleet.holders(self._together), now)

    def _has_fresh_work(self) -> bool:
        rounds = self._state.rounds
        evaluation = rounds.handing_out if self._together is None else rounds.drawable(self._together)
        return bool(self._restarts) or evaluation is not None or self._room() > 0

    def _room(self, version: int | None = None) -> int:
        """How many groups may be handed out, under `version` (None: the newest)."""
        state, settings = self._state, self._state.settings
        held = None if self._together is None else state.versions[self._together].step
        return room(
            state.mode,
            steps=settings.steps,
            prompts=settings.prompts,
            ahead=settings.ahead,
            kept=state.ledger.kept,
            open_groups=state.ledger.open_groups,
            in_flight=state.ledger.open_groups - len(state.buffer),
            step_held=held,
            most_kept=state.most_kept(version),
        )

    def _refresh(self, rollout: Rollout) -> list[Command]:
        """The command to load newer weights, if there are any and nothing holds the rollout to its own."""
        state, version = self._state, rollout.version
        if rollout.trajectories:
            return []
        if self._to_reload(rollout) is not None:
            return self._reload(rollout)
        newer = state.fleet.newer_at_relay(rollout)
        if newer is None:
            return []
        if version is not None and (state.pool.has_orphans(version) or self._evaluates(version)):
            return []
        if version is not None and version == self._together and self._has_fresh_work():
            return []  # its cohort is not all handed out
        return [self._pull(rollout, newer, "nothing in progress")]

    def _pull_again(self, rollout: Rollout) -> list[Command]:
        """The command to load from another relay than the one it was to load from, as soon as that has something for it."""
        if self._to_reload(rollout) is not None:
            return self._reload(rollout)
        newer = self._state.fleet.newer_at_relay(rollout)
        return [] if newer is None else [self._pull(rollout, newer, "its relay has changed")]

    def _to_reload(self, rollout: Rollout) -> int | None:
        """The version that trajectories wait for this rollout to load again (None: others have taken them, or there are none)."""
        version = self._reloads.due(rollout.rank)
        if version is None or not rollout.alive:
            return None
        if self._state.pool.has_orphans(version) and not self._state.fleet.holders(version):
            return version
        self._reloads.end(rollout.rank)
        return None

    def _reload(self, rollout: Rollout) -> list[Command]:
        """The command to load a version again, if there is a relay to ask for it."""
        state, version = self._state, self._reloads.due(rollout.rank)
        relay = state.distribution.readers.relay_of(rollout.rank)
        if relay is None or version is None:
            return []
        state.fleet.start_loading(rollout, version)
        reason = f"trajectories wait for version {version}, which nobody holds"
        return [Pull(reason, rollout.rank, rollout.incarnation, version, exactly=True)]

    def _pull(self, rollout: Rollout, newer: int, why: str) -> Pull:
        self._state.fleet.start_loading(rollout, newer)
        held = "no weights" if rollout.version is None else f"version {rollout.version}"
        relay = self._state.distribution.readers.relay_rank(rollout.rank)
        reason = f"{why}, holds {held}, relay {relay} holds {newer}"
        return Pull(reason, rollout.rank, rollout.incarnation, newer)

    def _evaluates(self, version: int) -> bool:
        return self._state.rounds.drawable(version) is not None and (not self._cohorts or version == self._together)

    # --- units of work ----------------------------------------------------------------------------------------------

    def _give(self, rollouts: Sequence[Rollout], now: float) -> list[Command]:
        """Hand work to these rollouts, unit by unit to the one with the fewest trajectories, until none is left."""
        portions: dict[int, Portion] = {}
        loads = []
        for rollout in rollouts:
            if rollout.version is None:
                continue
            fresh = rollout.version == self._together if self._cohorts else self._interrupts or not rollout.trajectories
            newest = self._cohorts or self._state.fleet.newer_at_relay(rollout) is None
            portions[rollout.rank] = Portion(rollout, rollout.version, fresh, fresh and newest)
            loads.append((len(rollout.trajectories), rollout.rank))
        heapq.heapify(loads)
        while loads:
            portion = portions[loads[0][1]]
            if self._add_unit(portion, now):
                heapq.heapreplace(loads, (len(portion.rollout.trajectories), portion.rollout.rank))
            else:
                heapq.heappop(loads)
        return [portion.command() for portion in portions.values() if portion.trajectories]

    def _add_unit(self, portion: Portion, now: float) -> bool:
        """Give one more unit to the portion's rollout; False where it has no room or there is nothing for it."""
        rollout = portion.rollout
        if rollout.paused:
            self._take_up(portion, rollout.paused.pop(0))
            return True
        if rollout.free > 0 and self._add_orphan(portion):
            return True
        if not portion.fresh:
            return False
        if rollout.free > 0 and self._add_evaluation(portion, now):
            return True
        if not portion.groups_too or (rollout.trajectories and rollout.free < self._state.settings.group_size):
            return False
        return self._add_group(portion, now)

    def _add_orphan(self, portion: Portion) -> bool:
        rollout = portion.rollout
        trajectory = self._state.pool.adopt(portion.version, Owner(rollout.rank, rollout.incarnation))
        if trajectory is None:
            return False
        self._state.fleet.assign(rollout, trajectory.id)
        portion.trajectories.append(trajectory.spec)
        portion.taken_over += 1
        return True

    def _take_up(self, portion: Portion, id: int) -> None:
        """Go on with a trajectory that the rollout was interrupted in."""
        rollout = portion.rollout
        trajectory = self._state.pool.pass_on(id, Owner(rollout.rank, rollout.incarnation), portion.version)
        self._state.fleet.assign(rollout, id)
        portion.trajectories.append(trajectory.spec)
        portion.taken_up += 1

    def _add_evaluation(self, portion: Portion, now: float) -> bool:
        state = self._state
        one = state.rounds.drawable(portion.version)
        if one is None:
            return False
        prompt = state.rounds.draw(one, portion.version)
        if prompt in one.groups:
            group = state.ledger.groups[one.groups[prompt]]
        else:
            group = state.ledger.draw_evaluation(prompt, now)
            state.rounds.note_group(one, prompt, group.id)
        self._begin(group, 1, portion, now)
        portion.evaluation += 1
        if not one.pending and state.rounds.handing_out is not None:
            state.work_has_appeared = True
        return True

    def _add_group(self, portion: Portion, now: float) -> bool:
        state, most = self._state, self._state.most_kept(portion.version)
        if self._restarts and (most is None or state.ledger.kept <= most):
            group = self._restarts.popleft()
        elif not self._restarts and self._room(portion.version) > 0:
            group = self._state.ledger.draw_training(now)
        else:
            return False
        self._begin(group, self._state.settings.group_size, portion, now)
        portion.groups += 1
        return True

    def _begin(self, group: Group, size: int, portion: Portion, now: float) -> None:
        """Begin all trajectories of a group at the portion's rollout."""
        state, rollout = self._state, portion.rollout
        owner = Owner(rollout.rank, rollout.incarnation)
        group.version = portion.version
        group.unfinished = size
        for sample in range(size):
            seed = state.ledger.noise_seed(group, sample)
            trajectory = state.pool.begin(group, sample, seed, portion.version, owner, now)
            group.members.append(trajectory.id)
            state.fleet.assign(rollout, trajectory.id)
            portion.trajectories.append(trajectory.spec)

    # --- moves ------------------------------------------------------------------------------------------------------

    def could_feed(self) -> int:
        """How many rollouts could be given fresh work now, beyond those that have nothing to generate."""
        state, fleet = self._state, self._state.fleet
        one = state.rounds.handing_out
        prompts = 0 if one is None else len(one.pending)
        trajectories = state.settings.group_size * (len(self._restarts) + self._room()) + prompts
        alive = [rollout for rollout in fleet.rollouts.values() if rollout.alive]
        waiting = sum(not rollout.trajectories for rollout in alive)
        largest = max((rollout.concurrency for rollout in alive), default=1)
        return max(0, math.ceil(trajectories / largest) - waiting)

    def pass_on(
        self, ids: list[int], source: Rollout, destination: Rollout | None, now: float
    ) -> tuple[list[Command], int]:
        """Give what `source` has let go of to `destination`, as far as it has room: the commands, and how many it has taken.

        The others wait, as after a loss, for any rollout of their version.
        """
        state = self._state
        for id in ids:
            state.fleet.release(source, id)
        room = 0 if destination is None else max(0, destination.free)
        commands: list[Command] = []
        if destination is not None and ids[:room] and source.version is not None:
            portion = Portion(destination, source.version, fresh=False)
            for id in ids[:room]:
                trajectory = state.pool.pass_on(id, Owner(destination.rank, destination.incarnation), source.version)
                state.fleet.assign(destination, id)
                portion.trajectories.append(trajectory.spec)
                portion.moved += 1
            commands.append(portion.command())
        if ids[room:] and source.version is not None:
            state.pool.orphan(ids[room:])
            others = [rollout for rollout in state.fleet.holders(source.version) if rollout is not source]
            commands += self._give(others, now) if state.hands_out else []
        return commands, min(room, len(ids))

    # --- interrupts -------------------------------------------------------------------------------------------------

    def interrupted(self, rollout: Rollout, progress: list[Progress], now: float) -> list[Command]:
        """The rollout has let go of what it was generating; of what has ended already it will tell."""
        if not rollout.interrupting:
            return []
        rollout.interrupting = False
        self._state.pool.stream(progress, rollout.rank, now)
        for item in progress:
            if item.trajectory in rollout.trajectories:
                self._state.fleet.pause(rollout, item.trajectory)
        return self.consider(rollout, now)

    def streamed(self, rollout: Rollout, progress: list[Progress]) -> list[Command]:
        """Of a rollout that is to be interrupted, something that had not begun when it was asked may have begun since."""
        if not rollout.paused or rollout.interrupting or not self._is_to_be_interrupted(rollout):
            return []
        return self._interrupt(rollout) if any(one.trajectory in rollout.trajectories for one in progress) else []

    def _interrupt(self, rollout: Rollout) -> list[Command]:
        rollout.interrupting = True
        newer = self._state.fleet.newer_at_relay(rollout)
        return [Interrupt(f"its relay holds version {newer}", rollout.rank, rollout.incarnation)]

    def _is_to_be_interrupted(self, rollout: Rollout) -> bool:
        """Whether the rollout is in the middle of something that can go on under the newer weights at its relay."""
        state, version = self._state, rollout.version
        if not rollout.trajectories or version is None or state.fleet.newer_at_relay(rollout) is None:
            return False
        pool = state.pool.trajectories
        evaluates = any(pool[id].purpose is Purpose.EVALUATION for id in rollout.trajectories)
        return not (evaluates or self._evaluates(version) or state.pool.has_orphans(version))

    def _able(self) -> list[Rollout]:
        """The rollouts that can be given something now."""
        rollouts = self._state.fleet.rollouts.values()
        idle = [one for one in rollouts if one.alive and one.version is not None and one.loading is None]
        return [one for one in idle if not one.interrupting and not one.paused]

    # --- losses -----------------------------------------------------------------------------------------------------

    def lost(self, rollout: Rollout, comes_back: bool, now: float) -> list[Command]:
        """The rollout's incarnation is over: others of its version go on with its work, or it does so, or the work starts over.

        `comes_back`: its rank lives, and starts another engine.
        """
        state, version = self._state, rollout.version
        state.pool.orphan(state.fleet.lose(rollout))
        state.work_has_appeared = True
        if version is None:
            return [] if comes_back else self.gone(rollout, now)
        holders = state.fleet.holders(version)
        takers = self._able() if state.mode.mixes else holders
        commands = self._give(takers, now) if takers and state.hands_out else []
        if holders or (state.mode.mixes and not state.pool.has_orphans(version)):
            return commands
        if comes_back and state.pool.waiting_tokens(version):
            self._reloads.expect(rollout.rank, version)
        if self._reloads.awaited(version):
            return commands
        why = f"rollout {rollout.rank} was the last that held version {version}"
        return commands + self._start_over(version, why, now)

    def gone(self, rollout: Rollout, now: float) -> list[Command]:
        """A rollout that has no engine will not have another one: nobody waits for it."""
        return self._end_reload(rollout, f"rollout {rollout.rank}, which was to load it again, is gone", now)

    def refused(self, rollout: Rollout, version: int, now: float) -> list[Command]:
        """The rollout's relay has not got `version`, which it was to load again."""
        if rollout.loading != version or rollout.pull_due or self._reloads.due(rollout.rank) != version:
            return []
        self._state.fleet.stop_loading(rollout)
        commands = self._end_reload(rollout, f"no relay has version {version} any more", now)
        return commands + self.consider(rollout, now)

    def loaded(self, rollout: Rollout) -> None:
        """The rollout has loaded what it was to load last."""
        self._reloads.end(rollout.rank)

    def _end_reload(self, rollout: Rollout, why: str, now: float) -> list[Command]:
        version = self._reloads.end(rollout.rank)
        if version is None or self._reloads.awaited(version) or self._state.fleet.holders(version):
            return []
        self._state.work_has_appeared = True
        return self._start_over(version, why, now)

    def _start_over(self, version: int, why: str, now: float) -> list[Command]:
        state = self._state
        settlement = Settlement(state, now)
        abandoned = state.pool.abandon(version)
        for number in dict.fromkeys(one.group for one in abandoned if one.purpose is Purpose.TRAIN):
            group = state.ledger.groups[number]
            settlement.start_over(group, why)
            self._restarts.append(group)
        for one in state.rounds.bound_to(version):
            for number in one.groups.values():
                settlement.start_over(state.ledger.groups[number], why)
            state.rounds.start_over(one)
        return [*settlement.commands(why)]
