"""What the controller knows, as one object that its parts share."""

from __future__ import annotations

from laminar_hpc.control.buffer import Buffer
from laminar_hpc.control.distribution import Distribution
from laminar_hpc.control.evaluation import Rounds
from laminar_hpc.control.fleet import Fleet
from laminar_hpc.control.pool import TrajectoryPool
from laminar_hpc.control.prompts import PromptLedger
from laminar_hpc.control.relays import Relays
from laminar_hpc.control.settings import Settings
from laminar_hpc.control.versions import Versions
from laminar_hpc.policy.sampling import make_eviction, make_sampler
from laminar_hpc.policy.staleness import capacity, owed
from laminar_hpc.protocol.trajectory import Purpose


class JobState:
    """The state of a job; each part keeps its own invariants."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.mode = settings.pipeline
        self.ledger = PromptLedger(settings)
        self.pool = TrajectoryPool(settings.first_hand_out, self.mode.mixes)
        self.buffer = Buffer(
            make_sampler(settings.sampler, settings.sampler_half_life, settings.seed),
            make_eviction(settings.eviction, settings.max_staleness, settings.capacity),
        )
        self.versions = Versions(settings.attempt, settings.first_version, settings.trainers)
        relays = Relays(settings.relays, settings.trainer_nodes, settings.switches)
        self.distribution = Distribution(relays, settings.relay_timeout_s)
        self.fleet = Fleet(settings.trainers, settings.rollouts, self.distribution.readers)
        self.rounds = Rounds()
        self.evaluated_step = -1
        """The newest step that a round was opened for."""
        self.stopping = ""
        """Why the job has been asked to stop, if it was: nothing new begins then."""
        self.step_lacks_groups = False
        """Whether a step has begun for which not all groups are there."""
        self.work_has_appeared = False
        """There may be work for rollouts that were given none when they asked."""

    def pressing(self, unit: int, lacking: int) -> list[int] | None:
        """The groups that a step which lacks `lacking` has to have among the next `unit` ones, lest any becomes too stale.

        None: it has to wait for some that are in flight.
        """
        most = self.settings.most_staleness
        if most is None or self.versions.newest_published is None:
            return []
        newest = self.versions.newest_step
        of_step: dict[int, list[int]] = {}
        for group in self.ledger.groups.values():
            if group.purpose is Purpose.TRAIN and group.version is not None and not group.taken:
                of_step.setdefault(self.versions[group.version].step, []).append(group.id)
        left, there, pressing = 0, [], 0
        for step, groups in sorted(of_step.items()):
            left += len(groups)
            there += [group for group in groups if group in self.buffer]
            pressing = max(pressing, owed(left, step, newest, most, self.settings.prompts) - (lacking - unit))
            if pressing > len(there):
                return None
        return there[:pressing]

    def most_kept(self, version: int | None) -> int | None:
        """How many groups may have been handed out, discarded ones not counted, for one more to be generated under `version`.

        None: staleness has no part in it, or no version is named and there is none yet.
        """
        most = self.settings.most_staleness
        version = self.versions.newest_published if version is None else version
        if most is None or version is None:
            return None
        return capacity(self.versions[version].step, most, self.settings.prompts)

    @property
    def hands_out(self) -> bool:
        """Whether rollouts are given work: until the job has been asked to stop, and no step that has begun lacks any."""
        return not self.stopping or self.step_lacks_groups
