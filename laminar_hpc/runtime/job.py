"""From a process that MPI has started to the loop of its role, and out again.

forkserver -> MPI -> read and check the config, on the first rank -> which role am I -> its loop -> leave together
"""

from __future__ import annotations

import argparse
import os

import msgspec

from laminar_hpc.config.load import load_config
from laminar_hpc.config.schema import Config
from laminar_hpc.control.settings import Settings
from laminar_hpc.errors import LaminarError, RecordError
from laminar_hpc.policy.roles import Placement, Role, assign
from laminar_hpc.process.worker import start_forkserver
from laminar_hpc.protocol.peer import Resume
from laminar_hpc.record.paths import create_run_dir, read_config
from laminar_hpc.record.status import EXIT_REQUEUE, read_status
from laminar_hpc.runtime.check import check_parts, check_run, resumed
from laminar_hpc.runtime.rank import FAREWELL_S, Leaving, Rank, RankLoop, run_loop, say, say_goodbye
from laminar_hpc.runtime.recording import open_record
from laminar_hpc.settings import controller_settings

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2


def main(arguments: list[str]) -> int:
    """Be one rank of the job until it is over; the exit code of this process.

    The first rank alone reads and checks what the job needs, and tells the others: so they all see the same, and what is
    wrong is said once.
    """
    parser = argparse.ArgumentParser(prog="train.py", description="One rank of the job; started by mpiexec or srun.")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--run-dir", help="a run directory that `laminar run` has made")
    which.add_argument("--config", help="a config file; the first rank makes the run directory")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint, where the run directory is there already",
    )
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides")
    options = parser.parse_args(arguments)
    start_forkserver()  # before MPI: see process/worker.py
    from laminar_hpc.mpi.world import open_world

    world = open_world()
    prepared = _prepare(options, world.node_of_rank(), world.switch_of_node()) if world.rank == 0 else _Prepared()
    prepared = msgspec.msgpack.decode(world.broadcast(msgspec.msgpack.encode(prepared)), type=_Prepared)
    if prepared.error or prepared.settings is None:
        if world.rank == 0:
            say(f"laminar: {prepared.error}", error=True)
        world.finish(clean=True, timeout_s=FAREWELL_S)
        return EXIT_BAD_INPUT
    config = Config.model_validate_json(prepared.config)
    try:
        rank = Rank(config, prepared.settings, world, prepared.placements, prepared.resume)
        return _be(rank, may_be_stopped=bool(options.run_dir))
    except LaminarError as error:
        say(f"laminar: rank {world.rank}: {error}", error=True)
        os._exit(EXIT_FAILED)  # without MPI_Finalize: the launcher then ends the other ranks, which know nothing of it


class _Prepared(msgspec.Struct):
    """What the first rank tells the others: the resolved config as JSON, or what is wrong with it."""

    config: bytes = b""
    settings: Settings | None = None
    placements: list[Placement] = []
    resume: Resume | None = None
    error: str = ""


def _prepare(options: argparse.Namespace, nodes: list[str], switches: dict[str, str]) -> _Prepared:
    try:
        config = read_config(options.run_dir) if options.run_dir else load_config(options.config, options.overrides)
        resumes = options.resume and os.path.isdir(config.run_dir)
        if resumes:
            config = read_config(config.run_dir)  # as it began
        placements = assign(nodes, config.job.trainers, config.job.relays, config.job.rollouts, config.job.spares)
        if resumes:
            check_parts(config)
        elif not options.run_dir:
            check_run(config)
            create_run_dir(config)
        attempt, resume = resumed(config) if resumes else (0, None)
        settings = controller_settings(config, attempt, placements, switches)
        return _Prepared(config.model_dump_json().encode(), settings, placements, resume)
    except LaminarError as error:
        return _Prepared(error=str(error))


def _be(rank: Rank, *, may_be_stopped: bool) -> int:
    """Open the record, run the loop of the role, and leave with the others; the exit code of this process.

    `may_be_stopped`: nobody reads the exit code below `laminar run`, but a batch system must not take a run that was stopped
    for a finished one.
    """
    rank.record = open_record(rank)
    leaving = run_loop(rank, _build_loop(rank))
    try:
        rank.record.close()
    except RecordError as error:
        say(f"{rank.name}: {error}", error=True)
    if leaving is not Leaving.LOST and rank.me.role is not Role.MANAGER:
        say_goodbye(rank)
    code = 0
    if rank.me.role is Role.MANAGER:
        good = ("finished", "stopped") if may_be_stopped else ("finished",)
        status = read_status(rank.config.run_dir)  # the only word on a job's outcome
        code = 0 if status is not None and status.state in good else EXIT_FAILED
        if status is not None and status.state == "requeue":
            code = EXIT_REQUEUE
    if not rank.world.finish(clean=leaving is Leaving.TOGETHER, timeout_s=FAREWELL_S):
        # MPI is in no state to be finalised, and the interpreter's own clean-up would do so.
        os._exit(EXIT_FAILED if leaving is Leaving.LOST else code)
    return code


def _build_loop(rank: Rank) -> RankLoop:
    """The loop of this rank's role; only that one's modules are imported."""
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
        case Role.SPARE:
            from laminar_hpc.runtime.spare import SpareLoop

            return SpareLoop(rank)
        case Role.ROLLOUT:
            from laminar_hpc.runtime.rollout import RolloutLoop

            return RolloutLoop(rank)
