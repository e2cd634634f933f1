"""`laminar compare`: the same work in several modes, in turns and with several seeds, and what bounds them all.

Each turn is a run like any other, in a directory of its own, so a comparison that was interrupted goes on: runs that have
finished are kept, the others are made again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import msgspec

from laminar_hpc.config.load import check_config, merged
from laminar_hpc.config.schema import Config, Control
from laminar_hpc.errors import ConfigError, LaminarError
from laminar_hpc.launch.local import EXIT_INTERRUPTED, check_place, check_resumable, run
from laminar_hpc.launch.slurm import Allocation
from laminar_hpc.policy.modes import MODES
from laminar_hpc.record.paths import RunPaths, check_new_run_dir, read_config
from laminar_hpc.record.reader import read_file
from laminar_hpc.record.status import EXIT_REQUEUE, read_status
from laminar_hpc.runtime.check import check_parts
from laminar_hpc.sim.recording import CLOCK_ZERO_UNIX_S
from laminar_hpc.sim.run import check_simulation, simulate

UNBROKEN = next(mode.name for mode in MODES.values() if mode.mixes)
"""The mode in which engines always have work, since trajectories go on under newer weights: none generates faster, but for the
prompts and responses that this one reads again with each step's weights."""

PLAIN: dict[str, Any] = {"colocated": False, "sampler": "fifo", "capacity": 0, "eviction": "none"}
"""What keeps neither half waiting, nor throws anything away."""

ALONE: dict[str, dict[str, Any]] = {
    "alone-generation": {
        "control": {"mode": UNBROKEN, **PLAIN, "max_staleness": 10**6},
        "paced": {
            **dict.fromkeys(("train_call_s", "train_token_s", "publish_s", "load_s"), 0.0),
        },
        "evaluation": {"every": 0},
    },
    "alone-training": {
        "control": {"mode": Control().mode, **PLAIN},
        "paced": {
            "decode": [[1, 1e-6]],  # a step has to take some time
            **dict.fromkeys(("step_overhead_s", "load_s", "prefill_call_s", "prefill_token_s"), 0.0),
        },
        "evaluation": {"every": 0},
    },
}
"""What is put over a config to measure one half of the job alone: the other half takes no time."""


class Turn(msgspec.Struct, frozen=True):
    """One run of a comparison; `kind` is its mode, or a key of `ALONE`."""

    kind: str
    seed: int
    config: Config

    @property
    def name(self) -> str:
        """The name of its run directory."""
        return _name(self.kind, self.seed)


class Outcome(msgspec.Struct, frozen=True):
    """Why runs failed, by their names; and the exit code where somebody stopped the comparison before its end."""

    failures: dict[str, str]
    stopped: int | None = None


def plan(configs: dict[str, Config], seeds: list[int] | None, bound: bool) -> list[Turn]:
    """All turns in order: for each seed all modes, one after the other. `configs` are those of `load_modes`.

    Without `seeds` there is one, the config's. With `bound`, where all engines are emulated and responses are lengths, each
    half of the job has a turn alone: with the first seed and what the default mode has, or the last one where that is not there.
    """
    last = list(configs.values())[-1]
    seeds = list(dict.fromkeys([last.job.seed] if seeds is None else seeds))
    turns = [_turn(mode, seed, config, {}) for seed in seeds for mode, config in configs.items()]
    placed = configs.get(Control().mode, last)
    if bound and placed.timing_only:
        turns += [_turn(kind, seeds[0], placed, changes) for kind, changes in ALONE.items()]
    return turns


def _turn(kind: str, seed: int, config: Config, changes: dict[str, Any]) -> Turn:
    own = {"run_dir": os.path.join(config.run_dir, _name(kind, seed)), "job": {"seed": seed}}
    return Turn(kind, seed, check_config(merged(config.model_dump(), own | changes), kind))


def _name(kind: str, seed: int) -> str:
    return f"{kind}-seed{seed}"


def check_turns(turns: list[Turn], simulated: bool, allocation: Allocation | None = None) -> set[str]:
    """The names of those whose run has finished already.

    ConfigError where any cannot run, simulated or as a job, or its directory holds anything else than this run.
    """
    for config in {turn.kind: turn.config for turn in turns}.values():  # seeds change nothing about it
        if simulated:
            check_simulation(config)
        else:
            check_parts(config)
            check_place(config, allocation)
    return {turn.name for turn in turns if _has_finished(turn.config, simulated)}


def _has_finished(config: Config, simulated: bool) -> bool:
    run_dir = config.run_dir
    if not os.path.lexists(run_dir):
        check_new_run_dir(run_dir)
        return False
    for key, there, here in _differences(read_config(run_dir), config):
        raise ConfigError(
            f"{run_dir}: holds a run of another config: {key} is {there!r} there, {here!r} here; take another directory"
        )
    check_resumable(run_dir)
    status = read_status(run_dir)
    if status is None or status.state != "finished":
        return False
    zero_s = read_file(RunPaths(run_dir).record(0, 0, "manager")).clock_zero_unix_s
    if (zero_s == CLOCK_ZERO_UNIX_S) != simulated:
        raise ConfigError(f"{run_dir}: holds a {'real' if simulated else 'simulated'} run; take another directory")
    return True


def _differences(one: Config, other: Config) -> Iterator[tuple[str, Any, Any]]:
    """The keys of which the two have different values, and these."""
    for section, values in one.model_dump().items():
        others = other.model_dump()[section]
        if not isinstance(values, dict):
            values, others = {"": values}, {"": others}
        for key in values:
            if values[key] != others[key]:
                yield f"{section}.{key}".rstrip("."), values[key], others[key]


def run_turns(turns: list[Turn], finished: set[str], simulated: bool, allocation: Allocation | None = None) -> Outcome:
    """Make every run that has not `finished`, whatever becomes of the others, until somebody stops one."""
    failures: dict[str, str] = {}
    for place, turn in enumerate(turns, start=1):
        heading = f"run {place} of {len(turns)}: {turn.name}"
        if turn.name in finished:
            print(f"{heading}: has finished already", flush=True)
            continue
        print(heading, flush=True)
        shutil.rmtree(turn.config.run_dir, ignore_errors=True)
        try:
            if simulated:
                failure = _simulate(turn.config)
            else:
                code = run(turn.config, allocation)
                if code in (EXIT_INTERRUPTED, EXIT_REQUEUE):
                    return Outcome(failures, code)
                failure = _ending(turn.config) if code else ""
        except LaminarError as error:
            failure = str(error)
        if failure:
            print(f"{turn.name}: {failure}", flush=True)
            failures[turn.name] = failure
    return Outcome(failures)


def _simulate(config: Config) -> str:
    """Simulate a run; why it failed, "" where it finished."""
    ending = simulate(config, print).ending
    return "" if ending.outcome == "finished" else f"{ending.outcome}: {ending.reason}"


def _ending(config: Config) -> str:
    status = read_status(config.run_dir)
    return "failed" if status is None else f"{status.state}: {status.reason}"
