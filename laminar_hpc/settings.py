"""From the config to what the controller needs of it."""

from __future__ import annotations

from laminar_hpc.config.schema import Config
from laminar_hpc.control.controller import Settings
from laminar_hpc.control.settings import RepackSettings
from laminar_hpc.errors import ConfigError
from laminar_hpc.policy.modes import MODES
from laminar_hpc.policy.roles import Placement, Role
from laminar_hpc.policy.staleness import waited_for
from laminar_hpc.tasks.build import prompt_counts


def controller_settings(
    config: Config, attempt: int, placements: list[Placement], switches: dict[str, str]
) -> Settings:
    """The controller's settings for one attempt at a run; `switches` has the switch of each node, where that is known."""
    counts = prompt_counts(config)
    return Settings(
        mode=config.control.mode,
        steps=config.control.steps,
        prompts=config.batch.prompts,
        group_size=config.batch.group_size,
        minibatches=config.batch.minibatches,
        ahead=config.control.ahead,
        colocated=config.control.colocated,
        sampler=config.control.sampler,
        sampler_half_life=config.control.sampler_half_life,
        capacity=config.control.capacity,
        eviction=config.control.eviction,
        max_staleness=config.control.max_staleness,
        evaluation_every=config.evaluation.every,
        evaluation_prompts=config.evaluation.prompts,
        train_prompts=counts.prompts,
        held_out_prompts=counts.held_out,
        seed=config.job.seed,
        trainers=config.job.trainers,
        relays=config.job.relays,
        rollouts=config.job.rollouts,
        attempt=attempt,
        replicas=config.replicas,
        dynamic_sampling=config.dynamic_sampling,
        checkpoint_every=config.checkpoint.every if config.checkpoint.every or config.checkpoint.on_stop else None,
        relay_timeout_s=config.weights.relay_timeout_s,
        trainer_nodes=sorted({placement.node for placement in placements if placement.role is Role.TRAINER}),
        switches=switches,
        max_response_tokens=config.rollout.max_response_tokens,
        worker_restarts=config.job.worker_restarts,
        repack=RepackSettings(
            enabled=config.repack.enabled,
            every_s=config.repack.every_s,
            kv_share=config.repack.kv_share,
            batch=config.repack.batch,
            gain_gate=config.repack.gain_gate,
            delay_share=config.repack.delay_share,
            most_batch=min(config.rollout.slots, config.rollout.concurrency),
        ),
    )


def check_control(config: Config) -> None:
    """ConfigError where `control` or `repack` asks for what the mode, or the engines, do not do."""
    control, mode = config.control, MODES[config.control.mode]
    if mode.cohorts_ahead is not None and control.sampler != "fifo":
        raise ConfigError(
            f"control.sampler must be 'fifo' in mode {mode.name}, which trains cohort by cohort, got {control.sampler!r}"
        )
    if control.capacity and waited_for(mode, control.eviction, control.max_staleness) is not None:
        raise ConfigError(
            f"control.capacity must be 0 where steps wait for what would become too stale (mode {mode.name}, eviction "
            f"{control.eviction!r}), got {control.capacity}"
        )
    if control.colocated and not mode.alternates:
        raise ConfigError(
            f"control.colocated must be false in mode {mode.name}, in which rollouts generate while trainers train"
        )
    if control.colocated and not (config.timing_only or config.timed_trainer):
        raise ConfigError("control.colocated needs paced rollouts and trainers: real ones have GPUs of their own")
    if mode.repack and config.repack.enabled and config.stretched:
        raise ConfigError(
            "repack.enabled must be false where paced.tokens is 'model' and paced.lengths is given: it reckons with tokens, "
            "each of which then takes many decode steps"
        )
