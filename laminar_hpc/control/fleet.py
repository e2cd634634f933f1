"""Trainers and rollouts: which incarnation of each is current, which weights it holds, what it does.

A rollout:

    EMPTY (no weights) -> LOADING -> HOLDING version v, idle or with trajectories -> (idle only) LOADING -> ...
    any -> LOST -> EMPTY in a higher incarnation
    (lost before it has reported) -> given up: the job goes on without it, and what it may say later is dropped

While it is LOADING its relay may be lost, and the `Pull` with it: `void_pull`, and then another one, `start_loading` again, as
soon as its new relay has something for it. The answer to the first may be on its way all the same; whichever answer satisfies
the last `Pull` ends LOADING, since a rollout takes no second `Pull` for what it has.

Invariants: only the current incarnation of a rank is listened to, and incarnations only rise. A rollout's version never
falls within an incarnation. It loads only while it has no trajectory. `holders(v)` are the rollouts that hold v and are
not loading another version; `idle` are those that hold weights, load nothing and have no trajectory.
"""

from __future__ import annotations

import msgspec

from laminar_hpc.control.readers import Readers
from laminar_hpc.errors import ProtocolError
from laminar_hpc.policy.roles import Role
from laminar_hpc.protocol.events import RolloutReady, TrainerReady


class Member(msgspec.Struct, eq=False):
    """A rank in its current incarnation, or, where it is not `alive`, in its last one."""

    rank: int
    incarnation: int
    role: Role
    alive: bool = True


class Trainer(Member, eq=False, kw_only=True):
    """A trainer; `index` is its place among the trainers."""

    index: int


class Rollout(Member, eq=False, kw_only=True):
    """A rollout: the version it holds, the trajectories it owns in order of assignment.

    `loading` is the version that its last `Pull` named. `pull_due`: that one is void, and another one is to be sent; `voided`:
    the lowest version that a void one named, whose answer may still come. `given` counts the trajectories that it was ever
    given; `giving_to` is the rollout that it was asked to hand its own over to. `interrupting`: it was asked to let go of them;
    `paused` are those that it has let go of and will take up again.
    """

    concurrency: int
    kv_capacity_tokens: int
    version: int | None = None
    loading: int | None = None
    pull_due: bool = False
    voided: int | None = None
    trajectories: dict[int, None] = {}
    given: int = 0
    giving_to: int | None = None
    interrupting: bool = False
    paused: list[int] = []

    @property
    def free(self) -> int:
        """Trajectories it has room for."""
        return self.concurrency - len(self.trajectories)


class Fleet:
    """All trainers and rollouts that have reported, with indexes so that no event looks at all of them."""

    def __init__(self, trainers: int, rollouts: int, readers: Readers) -> None:
        """`readers` knows what each rollout reads from."""
        self._expected = {Role.TRAINER: trainers, Role.ROLLOUT: rollouts}
        self._readers = readers
        self.members: dict[int, Member] = {}
        self.trainers: dict[int, Trainer] = {}
        self.rollouts: dict[int, Rollout] = {}
        self.idle: dict[int, Rollout] = {}
        self.alive_rollouts = 0
        self.busy_rollouts = 0
        self._holders: dict[int, dict[int, Rollout]] = {}
        self._given_up: set[int] = set()

    @property
    def all_trainers(self) -> bool:
        """Whether every trainer has reported."""
        return len(self.trainers) == self._expected[Role.TRAINER]

    @property
    def all_rollouts(self) -> bool:
        """Whether every rollout that is not given up has reported at least once; it may be lost since."""
        return self.missing(Role.ROLLOUT) == 0

    def missing(self, role: Role) -> int:
        """How many trainers or rollouts have never reported and may still do so."""
        known = {Role.TRAINER: len(self.trainers), Role.ROLLOUT: len(self.rollouts) + len(self._given_up)}
        return max(0, self._expected[role] - known[role])

    def add_trainer(self, event: TrainerReady) -> None:
        """A trainer has reported for the first time."""
        taken = any(trainer.index == event.trainer for trainer in self.trainers.values())
        if taken or not 0 <= event.trainer < self._expected[Role.TRAINER]:
            raise ProtocolError(
                f"rank {event.rank} reports as trainer {event.trainer} of {self._expected[Role.TRAINER]}: "
                f"{'that one has reported already' if taken else 'there is no such trainer'}"
            )
        trainer = Trainer(event.rank, event.incarnation, Role.TRAINER, index=event.trainer)
        self.members[event.rank] = self.trainers[event.rank] = trainer

    def add_rollout(self, event: RolloutReady) -> Rollout:
        """A rollout has reported, for the first time or in a new incarnation after `lose`; it holds no weights."""
        rollout = Rollout(
            event.rank,
            event.incarnation,
            Role.ROLLOUT,
            concurrency=event.concurrency,
            kv_capacity_tokens=event.kv_capacity_tokens,
        )
        self.members[event.rank] = self.rollouts[event.rank] = rollout
        self.alive_rollouts += 1
        return rollout

    @property
    def versions(self) -> list[int]:
        """The versions that rollouts hold, oldest first."""
        return sorted(self._holders)

    def give_up(self, rank: int) -> None:
        """A rollout that has never reported is lost: nobody waits for it any more."""
        assert rank not in self.members, f"rank {rank} has reported"
        self._given_up.add(rank)

    def gave_up(self, rank: int) -> bool:
        """Whether this rollout was lost before it has reported."""
        return rank in self._given_up

    def holders(self, version: int) -> list[Rollout]:
        """The rollouts that hold this version and load no other."""
        return list(self._holders.get(version, {}).values())

    def together(self, version: int) -> bool:
        """Whether this is the version of every rollout that is alive, and there is one."""
        return self.alive_rollouts > 0 and len(self._holders.get(version, ())) == self.alive_rollouts

    def under_relay(self, relay: int) -> list[Rollout]:
        """The rollouts that pull from this relay now."""
        return [self.rollouts[rank] for rank in self._readers.of(relay)]

    def newer_at_relay(self, rollout: Rollout) -> int | None:
        """The version at the relay that the rollout pulls from now, if it is newer than the rollout's own."""
        relay = self._readers.relay_of(rollout.rank)
        if relay is None or relay.version is None:
            return None
        return relay.version if rollout.version is None or relay.version > rollout.version else None

    def start_loading(self, rollout: Rollout, version: int) -> None:
        """The rollout was asked to load `version` or a newer one, for the first time or after `void_pull`."""
        assert not rollout.trajectories, f"rollout {rollout.rank} has {len(rollout.trajectories)} trajectories"
        self._leave_version(rollout)
        rollout.loading = version
        rollout.pull_due = False

    def stop_loading(self, rollout: Rollout) -> None:
        """What the rollout was asked to load cannot be had; it holds no weights."""
        assert rollout.version is None, f"rollout {rollout.rank} holds version {rollout.version}"
        rollout.loading = rollout.voided = None
        rollout.pull_due = False

    def void_pull(self, rollout: Rollout) -> None:
        """The relay that the rollout was to load from is another one now; it has to be asked again."""
        assert rollout.loading is not None, f"rollout {rollout.rank} loads nothing"
        if not rollout.pull_due:
            rollout.voided = rollout.loading if rollout.voided is None else min(rollout.voided, rollout.loading)
        rollout.pull_due = True

    def accepts(self, rollout: Rollout, version: int) -> bool:
        """Whether `version` answers one of the rollout's pulls, void ones included."""
        assert rollout.loading is not None, f"rollout {rollout.rank} loads nothing"
        return version >= rollout.loading or (rollout.voided is not None and version >= rollout.voided)

    def finish_loading(self, rollout: Rollout, version: int) -> bool:
        """The rollout holds `version` now; False where a newer `Pull` is still to be answered: then it goes on loading."""
        assert rollout.loading is not None, f"rollout {rollout.rank} loads nothing"
        rollout.version = version
        if not rollout.pull_due and version < rollout.loading:
            return False
        rollout.loading, rollout.pull_due, rollout.voided = None, False, None
        self._holders.setdefault(version, {})[rollout.rank] = rollout
        self.idle[rollout.rank] = rollout
        return True

    def assign(self, rollout: Rollout, trajectory: int) -> None:
        """The rollout owns one trajectory more."""
        if not rollout.trajectories:
            self.busy_rollouts += 1
            self.idle.pop(rollout.rank)
        rollout.trajectories[trajectory] = None
        rollout.given += 1

    def release(self, rollout: Rollout, trajectory: int) -> None:
        """The rollout owns one trajectory less."""
        del rollout.trajectories[trajectory]
        if not rollout.trajectories:
            self.busy_rollouts -= 1
            self.idle[rollout.rank] = rollout

    def lose(self, rollout: Rollout) -> list[int]:
        """The rollout's incarnation is over; these are the trajectories it had."""
        if rollout.trajectories:
            self.busy_rollouts -= 1
        orphans = [*rollout.trajectories, *rollout.paused]
        self.alive_rollouts -= 1
        self._leave_version(rollout)
        rollout.alive = False
        rollout.version = rollout.loading = rollout.voided = None
        rollout.pull_due = False
        rollout.giving_to = None
        rollout.interrupting = False
        rollout.trajectories, rollout.paused = {}, []
        return orphans

    def pause(self, rollout: Rollout, trajectory: int) -> None:
        """The rollout has let go of a trajectory, and will take it up again."""
        self.release(rollout, trajectory)
        rollout.paused.append(trajectory)

    def _leave_version(self, rollout: Rollout) -> None:
        self.idle.pop(rollout.rank, None)
        if rollout.version is not None and rollout.loading is None:
            holders = self._holders[rollout.version]
            del holders[rollout.rank]
            if not holders:
                del self._holders[rollout.version]
