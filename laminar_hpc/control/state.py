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


class JobState:
    """The state of a job; each part keeps its own invariants."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.mode = settings.pipeline
        self.ledger = PromptLedger(settings)
        self.pool = TrajectoryPool(settings.first_hand_out)
        self.buffer = Buffer(make_sampler(settings.sampler), make_eviction(settings.eviction, settings.max_staleness))
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

    @property
    def hands_out(self) -> bool:
        """Whether rollouts are given work: until the job has been asked to stop, and no step that has begun lacks any."""
        return not self.stopping or self.step_lacks_groups
