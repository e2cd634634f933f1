"""A Slurm allocation of several nodes: which of them answer, how many ranks each gets, and the end of steps that are dead.

A node can be lost while the allocation stays (`sbatch --no-kill`). Its processes are then gone, the step that they were in is
not: until it is cancelled, Slurm may hold what it had, and a new step on the other nodes waits for ever.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import NamedTuple

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError
from laminar_hpc.launch.mpiexec import end_with_parent

PROGRAMS = ("scontrol", "srun", "squeue", "scancel")

PROBE_S = 10.0
"""How long a node has to run a step that does nothing."""

COMMAND_S = 30.0
"""How long Slurm's controller has to answer."""

PER_TASK = ("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK")
"""What a daemon of mpiexec, which is one task of its step, must not be held to: all CPUs of the node are for its ranks."""

_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")


class Node(NamedTuple):
    """A node of the allocation: how many ranks it may have, and its GPUs (None: Slurm gives none out)."""

    name: str
    slots: int
    gpus: int | None = None


class Need(NamedTuple):
    """What a job asks of nodes: a rollout node has `ranks` ranks, whose engines take `gpus` GPUs; a trainer takes one."""

    trainers: int
    relays: int
    ranks: int
    gpus: int

    @classmethod
    def of(cls, config: Config) -> Need:
        """The need of the config's job."""
        job = config.job
        rollouts = job.rollouts // job.relays
        return cls(job.trainers, job.relays, 1 + job.spares + rollouts, rollouts * config.rollout.tensor_parallel)


class Allocation:
    """The nodes of this program's allocation, in Slurm's order, and which of them answered when they were last asked."""

    def __init__(self, job_id: str, nodes: list[Node]) -> None:
        self.nodes = nodes
        self._job_id = job_id
        self._answering = nodes
        self._step = f"laminar-{os.getpid()}"  # the name of all steps of this program: a user may have others

    @property
    def silent(self) -> list[str]:
        """The names of the nodes that did not answer."""
        return [node.name for node in self.nodes if node not in self._answering]

    def look(self) -> list[str]:
        """Cancel what is left of this program's steps, and ask all nodes; names of those that answered before, and now do not."""
        self._cancel_steps()
        before = self._answering
        self._answering = self._probe()
        return [node.name for node in before if node not in self._answering]

    def hosts(self, config: Config) -> list[tuple[str, int]]:
        """Nodes that answered, and how many ranks each gets, as `place` says; ConfigError where they are too few."""
        need = Need.of(config)
        found = place(need, self._answering)
        if found is not None:
            return found
        fewest = fewest_nodes(need, self.nodes)
        if fewest is None:
            slots = ", ".join(f"{node.name}: {node.slots}" for node in self.nodes)
            on_gpus = f" and {need.gpus} GPUs" if self.nodes[0].gpus is not None and need.gpus else ""
            raise ConfigError(
                f"job: its {config.job.ranks} ranks do not fit into the allocation: {need.relays} rollout nodes with "
                f"{need.ranks} ranks{on_gpus} each, and {1 + need.trainers} ranks for manager and trainers; allowed "
                f"ranks are {slots} (--ntasks-per-node)"
            )
        raise ConfigError(
            f"{len(self._answering)} of {len(self.nodes)} nodes answer, the job needs {fewest}; no answer from "
            f"{', '.join(self.silent)}"
        )

    def options(self) -> list[str]:
        """What mpiexec has to be told, so that its daemons start beside the batch script and can be found."""
        return ["--prtemca", "plm_slurm_args", f"--overlap --job-name={self._step}"]

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The environment for mpiexec, made from `base`."""
        return {name: value for name, value in base.items() if name not in PER_TASK}

    def _cancel_steps(self) -> None:
        with contextlib.suppress(ConfigError):  # of a controller that does not answer: then no node does
            listed = _output("squeue", "--steps", "--noheader", f"--jobs={self._job_id}", "--format=%i %j")
            pairs = [line.split(maxsplit=1) for line in listed.splitlines()]
            steps = [pair[0] for pair in pairs if len(pair) == 2 and pair[1].strip() == self._step]
            if steps:
                _output("scancel", *steps)

    def _probe(self) -> list[Node]:
        """The nodes that run a small step within PROBE_S, all asked at once."""
        probes = {
            node: subprocess.Popen(
                [
                    *("srun", "--overlap", f"--job-name={self._step}", f"--nodelist={node.name}"),
                    *("--nodes=1", "--ntasks=1", "--cpus-per-task=1", "true"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
            for node in self.nodes
        }
        deadline_s = time.monotonic() + PROBE_S
        answering = []
        for node, probe in probes.items():
            try:
                if probe.wait(max(0.0, deadline_s - time.monotonic())) == 0:
                    answering.append(node)
            except subprocess.TimeoutExpired:
                probe.kill()
                probe.wait()
        return answering


def open_allocation(variables: Mapping[str, str]) -> Allocation | None:
    """The allocation that `variables`, a batch script's environment, tell of; None outside of one, or where it is one node.

    ConfigError where Slurm's programs are missing or do not answer.
    """
    job_id, node_list = variables.get("SLURM_JOB_ID"), variables.get("SLURM_JOB_NODELIST")
    if not job_id or not node_list or variables.get("SLURM_JOB_NUM_NODES", "1") == "1":
        return None
    for program in PROGRAMS:
        if shutil.which(program) is None:
            raise ConfigError(f"Slurm job {job_id}: there is no `{program}` on PATH")
    names = _output("scontrol", "show", "hostnames", node_list).split()
    slots = repeated(variables.get("SLURM_TASKS_PER_NODE", ""))
    if not names or len(names) != len(slots):
        raise ConfigError(
            f"Slurm job {job_id}: `scontrol show hostnames {node_list}` names {len(names)} nodes, SLURM_TASKS_PER_NODE "
            f"{variables.get('SLURM_TASKS_PER_NODE', '')!r} is for {len(slots)}"
        )
    on_node = variables.get("SLURM_GPUS_ON_NODE", "")  # of the first node; the others are taken to have as many
    gpus = int(on_node) if on_node.isdigit() else None
    return Allocation(job_id, [Node(name, count, gpus) for name, count in zip(names, slots, strict=True)])


def repeated(text: str) -> list[int]:
    """Slurm's short form of a number for each node: "5(x2),3" is 5, 5, 3. ConfigError for anything else."""
    numbers: list[int] = []
    for part in filter(None, text.split(",")):
        found = _REPEATED.fullmatch(part)
        if found is None:
            raise ConfigError(f"a number for each node looks like 5(x2),3, got {text!r}")
        numbers += [int(found[1])] * int(found[2] or 1)
    return numbers


def place(need: Need, nodes: list[Node]) -> list[tuple[str, int]] | None:
    """How many ranks which nodes get, in the order of `nodes`, as policy.roles.assign expects; None where they do not fit.

    Manager and trainers are on the first nodes, by themselves where there are enough nodes, and each rollout node has one
    relay, its rollouts and its spares. Nodes that are not needed get none. Where nodes are few, trainers that have no place
    on the first ones take what rollout nodes have left.
    """
    splits = [split for count in range(len(nodes) + 1) if (split := _split(need, nodes, count)) is not None]
    for front, behind in splits:
        if _fill(need, front, []) is not None:
            return _fill(need, front, behind)
    filled = [_fill(need, front, behind) for front, behind in reversed(splits)]
    return next((ranks for ranks in filled if ranks is not None), None)


def fewest_nodes(need: Need, nodes: list[Node]) -> int | None:
    """How many of `nodes` are needed, if the first ones are taken; None where all of them are too few."""
    return next((count for count in range(1, len(nodes) + 1) if place(need, nodes[:count]) is not None), None)


def _split(need: Need, nodes: list[Node], count: int) -> tuple[list[Node], list[Node]] | None:
    """The first `count` nodes, and the rollout nodes behind them; None where these are too few."""
    able = [node for node in nodes[count:] if node.slots >= need.ranks and _gpus(node) >= need.gpus]
    return (nodes[:count], able[: need.relays]) if len(able) >= need.relays else None


def _fill(need: Need, front: list[Node], behind: list[Node]) -> list[tuple[str, int]] | None:
    """The ranks of each node, `behind` being rollout nodes; None where a trainer, or the manager, finds no place."""
    trainers, ranks = need.trainers, []
    for index, node in enumerate([*front, *behind]):
        is_behind = index >= len(front)
        own = (index == 0) + (need.ranks if is_behind else 0)
        if own > node.slots:
            return None
        here = min(trainers, node.slots - own, _gpus(node) - (need.gpus if is_behind else 0))
        trainers -= here
        ranks.append((node.name, own + here))
    return None if trainers else [(name, count) for name, count in ranks if count]


def _gpus(node: Node) -> int:
    """The node's GPUs; where Slurm gives none out, ranks alone are counted."""
    return sys.maxsize if node.gpus is None else node.gpus


def _output(*command: str) -> str:
    """What one of Slurm's programs prints; ConfigError where it fails or does not end within COMMAND_S."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMMAND_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"`{command[0]}` has not answered within {COMMAND_S:g} s") from None
    except (OSError, subprocess.CalledProcessError) as error:
        said = " ".join(str(getattr(error, "stderr", None) or error).split())
        raise ConfigError(f"`{' '.join(command[:3])}` failed: {said}") from error
    return done.stdout
