"""From a process that MPI has started to the loop of its role, and out again.

read the config -> forkserver -> MPI -> which role am I -> its loop -> leave together
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from laminar_hpc.config.load import load_config
from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError, LaminarError
from laminar_hpc.process.worker import start_forkserver
from laminar_hpc.record.status import read_status
from laminar_hpc.runtime.paths import create_run_dir, read_config

if TYPE_CHECKING:
    from laminar_hpc.runtime.rank import Rank, RankLoop

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
"""Where launchers tell a process its rank, before MPI is initialised."""


def main(arguments: list[str]) -> int:
    """Be one rank of the job until it is over; the exit code of this process.

    Bad input is found before MPI starts, by every rank alike; the first one says so.
    """
    parser = argparse.ArgumentParser(prog="train.py", description="One rank of the job; started by mpiexec or srun.")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--run-dir", help="a run directory that `laminar run` has made")
    which.add_argument("--config", help="a config file; the first rank makes the run directory")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides")
    options = parser.parse_args(arguments)
    first = _rank_by_launcher() == 0
    try:
        config = read_config(options.run_dir) if options.run_dir else load_config(options.config, options.overrides)
        if not options.run_dir and first:
            create_run_dir(config)
        return _run_rank(config)
    except ConfigError as error:
        if first:
            print(f"laminar: {error}", file=sys.stderr, flush=True)
        return EXIT_BAD_INPUT
    except LaminarError as error:
        print(f"laminar: {error}", file=sys.stderr, flush=True)
        os._exit(EXIT_FAILED)  # without MPI_Finalize: the launcher then ends the other ranks, which know nothing of it


def _rank_by_launcher() -> int:
    return next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)


def _run_rank(config: Config, attempt: int = 0) -> int:
    start_forkserver(config.job.threads)  # before MPI: see process/worker.py
    from laminar_hpc.mpi.world import open_world
    from laminar_hpc.policy.roles import Role, assign
    from laminar_hpc.runtime.rank import FAREWELL_S, Rank, run_loop, say_goodbye
    from laminar_hpc.runtime.recording import open_record

    world = open_world()
    try:
        placements = assign(world.node_of_rank(), config.job.trainers, config.job.relays, config.job.rollouts)
    except ConfigError:
        world.finish(clean=True, timeout_s=FAREWELL_S)
        raise
    rank = Rank(config, world, placements, attempt)
    rank.record = open_record(rank)
    clean = run_loop(rank, _build_loop(rank))
    rank.record.close()
    if clean and rank.me.role is not Role.MANAGER:
        say_goodbye(rank)
    if not world.finish(clean=clean, timeout_s=FAREWELL_S):
        sys.stdout.flush()
        os._exit(EXIT_FAILED)  # MPI is in no state to be finalised, and the interpreter's own clean-up would do so
    return EXIT_FAILED if rank.me.role is Role.MANAGER and not _ended_well(config.run_dir) else 0


def _ended_well(run_dir: str) -> bool:
    """By the status file, which is the only word on a job's outcome."""
    status = read_status(run_dir)
    return status is not None and status.state in ("finished", "stopped")


def _build_loop(rank: Rank) -> RankLoop:
    """The loop of this rank's role; only that one's modules are imported."""
    from laminar_hpc.policy.roles import Role

    match rank.me.role:
        case Role.MANAGER:
            from laminar_hpc.runtime.manager import ManagerLoop

            return ManagerLoop(rank)
        case Role.TRAINER:
            from laminar_hpc.runtime.trainer import TrainerLoop

            return TrainerLoop(rank)
        case Role.RELAY:
            from laminar_hpc.runtime.relay import RelayLoop

            return RelayLoop(rank)
        case Role.ROLLOUT:
            from laminar_hpc.runtime.rollout import RolloutLoop

            return RolloutLoop(rank)
