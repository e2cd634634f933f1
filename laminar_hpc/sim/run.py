"""One simulation: a config in, the record of a run out."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from laminar_hpc.config.schema import Config
from laminar_hpc.control.settings import Settings
from laminar_hpc.data.presets import check_paced
from laminar_hpc.errors import ConfigError, EngineError
from laminar_hpc.policy.roles import Placement, assign
from laminar_hpc.protocol.commands import AnyCommand, EndJob, ReportStep
from laminar_hpc.record.paths import create_run_dir
from laminar_hpc.record.status import Status, write_status
from laminar_hpc.settings import check_control, controller_settings
from laminar_hpc.sim.cluster import Cluster
from laminar_hpc.sim.kernel import Kernel
from laminar_hpc.sim.recording import FileRecorder, Recorder
from laminar_hpc.tasks.build import check_task


def check_simulation(config: Config) -> None:
    """ConfigError where the config describes no run that can be simulated."""
    if not config.timing_only:
        raise ConfigError(
            f"rollout.engine: only emulated GPUs can be simulated, so it must be 'paced', with paced.tokens 'lengths', got "
            f"{config.rollout.engine!r} and {config.paced.tokens!r}"
        )
    check_control(config)
    check_paced(config)
    check_task(config)


def placements_of(config: Config) -> list[Placement]:
    """The ranks of the job: manager and trainers on a node of their own, and each relay with its share of the rollouts."""
    job = config.job
    nodes = ["trainers"] * (1 + job.trainers)
    for relay in range(job.relays):
        nodes += [f"node-{relay:05d}"] * (1 + job.rollouts // job.relays + job.spares)
    return assign(nodes, job.trainers, job.relays, job.rollouts, job.spares)


def settings_of(config: Config, placements: list[Placement]) -> Settings:
    """The controller's settings: those of the job, without checkpoints."""
    return msgspec.structs.replace(controller_settings(config, 0, placements, {}), checkpoint_every=None)


class Ended(msgspec.Struct, frozen=True):
    """How a simulated job has ended, when (seconds of the job's clock), and how many things happened until then."""

    ending: EndJob
    ended_s: float
    happened: int


def drive(
    config: Config,
    recorder: Recorder | None = None,
    *,
    reverse_ties: bool = False,
    watch: Callable[[AnyCommand], object] = lambda _command: None,
) -> Ended:
    """Simulate a job of a config that `check_simulation` lets in; `watch` is shown every command of the controller.

    EngineError where the job stands still, naming who waits for whom.
    """
    placements = placements_of(config)
    kernel = Kernel(reverse_ties=reverse_ties)
    cluster = Cluster(config, settings_of(config, placements), placements, kernel, recorder, watch)
    cluster.start()
    kernel.run()
    if cluster.ending is None:
        waits = cluster.controller.waits() or ["the controller waits for nobody"]
        raise EngineError(f"the simulated job stands still at {kernel.now:.3f} s: {waits[0]}")
    return Ended(cluster.ending, kernel.now, kernel.happened)


def simulate(config: Config, say: Callable[[str], object], *, reverse_ties: bool = False) -> Ended:
    """Make the run directory of the config, as `laminar run` does, and simulate the run that it would hold.

    `say` is given a line for each step. ConfigError where the config cannot be simulated, or its run directory be made.
    """
    check_simulation(config)
    placements = placements_of(config)
    create_run_dir(config)
    status = Status.blank()
    status.steps, status.rollouts = config.control.steps, config.job.rollouts
    last_s = 0.0

    def watch(command: AnyCommand) -> None:
        nonlocal last_s
        if isinstance(command, ReportStep):
            tokens = command.prompt_tokens + command.response_tokens
            status.training_tokens_per_s = tokens / max(command.finished_s - last_s, 1e-9)
            last_s = command.finished_s
            status.step, status.version = command.step, command.version
            status.reward, status.staleness = command.reward_mean, command.staleness_consumption_mean
            say(status.line())

    recorder = FileRecorder(config, settings_of(config, placements), placements)
    ended = drive(config, recorder, reverse_ties=reverse_ties, watch=watch)
    status.state, status.reason = ended.ending.outcome, ended.ending.reason
    status.updated_s = status.ended_s = status.started_s + ended.ended_s
    write_status(config.run_dir, status)
    return ended
