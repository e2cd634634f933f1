"""All that the controller has to know, as plain data: kept in the record, it makes a fresh controller for replay."""

from __future__ import annotations

import msgspec

from laminar_hpc.errors import ConfigError
from laminar_hpc.policy.modes import MODES, Mode
from laminar_hpc.policy.staleness import waited_for

VERSIONS_OF_AN_ATTEMPT = 1_000_000
HAND_OUTS_OF_AN_ATTEMPT = 1_000_000_000
"""Ids of attempt a begin at a times these, so that none is used twice in a run, whatever an attempt that was killed had used."""


class RepackSettings(msgspec.Struct, frozen=True, kw_only=True):
    """When and how far rollouts are repacked; the config's section `repack` explains the keys.

    `most_batch` is how many trajectories an engine can run at once, whatever `batch` and the decode steps allow.
    """

    enabled: bool = True
    every_s: float = 5.0
    kv_share: float = 0.99
    batch: int = 0
    gain_gate: bool = True
    delay_share: float = 0.0
    most_batch: int = 1024


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """A controller's settings; the config's keys of the same names explain them.

    `prompts` counts groups of a step, `train_prompts` and `held_out_prompts` different prompts that the task has.
    `trainers`, `relays` and `rollouts` count ranks, `replicas` the copies of the model that the trainers hold together (None:
    one each). `attempt` is 0 for the first start of a run. `checkpoint_every` is in steps (0: only when the job is asked to
    stop), and None where there are no checkpoints. `trainer_nodes` are the keys of the
    trainers' nodes, `switches` has the switch of each node where that is known; `relay_timeout_s` is the config's.
    `max_response_tokens` is where a response is cut. `worker_restarts` is how often the trainers' workers are started again
    within ten minutes.
    """

    mode: str
    steps: int
    prompts: int
    group_size: int
    train_prompts: int
    trainers: int
    relays: int
    rollouts: int
    minibatches: int = 1
    ahead: float = 1.0
    colocated: bool = False
    sampler: str = "fifo"
    sampler_half_life: float = 1.0
    capacity: int = 0
    eviction: str = "none"
    max_staleness: int = 8
    evaluation_every: int = 0
    evaluation_prompts: int = 0
    held_out_prompts: int = 0
    seed: int = 0
    attempt: int = 0
    checkpoint_every: int | None = None
    replicas: int | None = None
    dynamic_sampling: bool = False
    trainer_nodes: list[str] = []
    switches: dict[str, str] = {}
    relay_timeout_s: float = 5.0
    max_response_tokens: int = 256
    worker_restarts: int = 3
    repack: RepackSettings = RepackSettings()

    @property
    def pipeline(self) -> Mode:
        """The row of the modes' table; ConfigError where there is none of that name."""
        try:
            return MODES[self.mode]
        except KeyError:
            raise ConfigError(f"control.mode: must be one of {', '.join(MODES)}, got {self.mode!r}") from None

    @property
    def most_staleness(self) -> int | None:
        """The staleness at consumption that steps wait not to exceed; None where they do not wait."""
        return waited_for(self.pipeline, self.eviction, self.max_staleness)

    @property
    def first_version(self) -> int:
        """The id of this attempt's first version."""
        return self.attempt * VERSIONS_OF_AN_ATTEMPT

    @property
    def first_hand_out(self) -> int:
        """The number of this attempt's first group, and of its first trajectory."""
        return self.attempt * HAND_OUTS_OF_AN_ATTEMPT

    @property
    def data_parallel(self) -> int:
        """How many shares a mini-batch is cut into."""
        return self.trainers if self.replicas is None else self.replicas

    @property
    def evaluated_prompts(self) -> int:
        """Held-out prompts that each evaluation answers."""
        return min(self.evaluation_prompts, self.held_out_prompts)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is made after `step`, unasked: every so many steps, and after the last one."""
        if not self.checkpoint_every:
            return False
        return step % self.checkpoint_every == 0 or step == self.steps

    def evaluates(self, step: int) -> bool:
        """Whether the weights after `step` are evaluated: every so many steps, the first and the last ones always."""
        if self.evaluation_every == 0 or self.evaluated_prompts == 0:
            return False
        return step % self.evaluation_every == 0 or step == self.steps
