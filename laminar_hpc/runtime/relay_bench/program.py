"""From a process that MPI has started to its part in the bench, and out again."""

from __future__ import annotations

import argparse
import json
import os
import time

from laminar_hpc.config.schema import Config
from laminar_hpc.control.settings import Settings
from laminar_hpc.errors import ConfigError, LaminarError
from laminar_hpc.mpi.bare import Notes
from laminar_hpc.mpi.world import World, open_world
from laminar_hpc.policy.roles import Placement, Role
from laminar_hpc.process.worker import start_forkserver
from laminar_hpc.record import provenance
from laminar_hpc.record.paths import RunPaths, create_run_dir
from laminar_hpc.record.schema import BENCH
from laminar_hpc.record.writer import RecordWriter
from laminar_hpc.runtime.rank import FAREWELL_S, Leaving, Rank, RankLoop, run_loop, say, say_goodbye
from laminar_hpc.runtime.relay_bench.comparing import Broadcasts, Publications
from laminar_hpc.runtime.relay_bench.director import Director
from laminar_hpc.runtime.relay_bench.failing import Failures
from laminar_hpc.runtime.relay_bench.parties import BenchRelay, BenchTrainer
from laminar_hpc.runtime.relay_bench.plan import Plan, add_arguments, read_plan
from laminar_hpc.runtime.relay_bench.pulling import measure_pulls
from laminar_hpc.runtime.relay_bench.ways import FIRST_RELAY, TRAINER, Ways

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2

FLUSH_S = 1.0

OVER = "bench-over"
"""On stdout, when the record is complete: ranks that were stopped or cut off may keep mpiexec from ending."""

FAILED = "bench-failed"
"""The same, where the script has not come to its end."""

DIRECTORS: dict[str, type[Director]] = {"broadcast": Broadcasts, "publish": Publications, "failure": Failures}


def main(arguments: list[str]) -> int:
    """Be one rank of the bench; the exit code of this process.

    The first rank makes the run directory where there is none, and writes the record; several starts of the bench, each
    with an attempt number of its own, share a directory.
    """
    parser = argparse.ArgumentParser(
        prog="bench_relay.py", description="One rank of the bench; started by mpiexec or srun."
    )
    parser.add_argument("--run-dir", required=True, help="a directory; a new one is made")
    parser.add_argument("--attempt", type=int, default=0, help="the number of this start in that directory, 0 first")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    start_forkserver()  # before MPI: see process/worker.py
    world = open_world()
    plan: Plan | None = None
    error = ""
    try:
        plan = read_plan(options)
        config = plan.config(options.run_dir)
        _check_world(world, plan)
        if world.rank == 0 and not os.path.isdir(RunPaths(config.run_dir).records):
            create_run_dir(config)
    except LaminarError as problem:
        error = str(problem)
    error = world.broadcast(error.encode()).decode()
    if error or plan is None:
        if world.rank == 0:
            say(f"laminar: {error}", error=True)
        world.finish(clean=True, timeout_s=FAREWELL_S)
        return EXIT_BAD_INPUT
    try:
        return _be(world, plan, config, options.attempt)
    except LaminarError as problem:
        say(f"laminar: rank {world.rank}: {problem}", error=True)
        os._exit(EXIT_FAILED)  # without MPI_Finalize: the launcher then ends the other ranks


def _check_world(world: World, plan: Plan) -> None:
    if world.size != plan.ranks:
        raise ConfigError(f"bench relay: these options take {plan.ranks} ranks, got {world.size}")


def _be(world: World, plan: Plan, config: Config, attempt: int) -> int:
    settings = Settings(
        mode=config.control.mode,
        steps=1,
        prompts=1,
        group_size=2,
        train_prompts=1,
        trainers=1,
        relays=config.job.relays,
        rollouts=config.job.rollouts,
        attempt=attempt,
    )
    rank = Rank(config, settings, world, _placements(world))
    record = _open_record(rank, plan) if world.rank == 0 else None
    if plan.part == "pull":
        assert record is not None
        measure_pulls(plan, record, rank.log_path("reader"))
        record.close()
        say(OVER)
        world.finish(clean=True, timeout_s=FAREWELL_S)
        return 0
    leaving = run_loop(rank, _build_loop(rank, plan, record))
    if record is not None:
        record.close()
        say(FAILED if leaving is Leaving.LOST else OVER)
    elif leaving is not Leaving.LOST:
        say_goodbye(rank)
    if not world.finish(clean=leaving is Leaving.TOGETHER, timeout_s=FAREWELL_S):
        os._exit(EXIT_FAILED if leaving is Leaving.LOST else 0)
    return 0


def _build_loop(rank: Rank, plan: Plan, record: RecordWriter | None) -> RankLoop:
    notes = Notes(rank.world)
    ways = Ways(rank.world, notes, plan, rank.log_path("gloo"))
    if record is not None:
        return DIRECTORS[plan.part](rank, notes, ways, plan, record)
    if rank.world.rank == TRAINER:
        return BenchTrainer(rank, notes, ways, plan)
    return BenchRelay(rank, notes, ways)


def _placements(world: World) -> list[Placement]:
    nodes = world.node_of_rank()
    placements = [Placement(Role.MANAGER, 0, nodes[0])]
    placements += [Placement(Role.TRAINER, 0, node) for node in nodes[TRAINER:FIRST_RELAY]]
    return placements + [Placement(Role.RELAY, index, node) for index, node in enumerate(nodes[FIRST_RELAY:])]


def _open_record(rank: Rank, plan: Plan) -> RecordWriter:
    settings = json.dumps({"plan": plan.arguments(), "mpi": rank.world.library})
    metadata = provenance.gather(rank.config, settings, clock_zero_unix_s=time.time() - rank.now())
    return RecordWriter(rank.paths.record(rank.attempt, 0, BENCH), BENCH, 0, rank.attempt, metadata, FLUSH_S)
