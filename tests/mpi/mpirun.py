"""Starts a small MPI program in a child process, with a deadline after which nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from laminar_hpc.launch.local import LAUNCHER_FAILED

MPIEXEC = str(Path(sys.executable).with_name("mpiexec"))
PROGRAMS = Path(__file__).with_name("programs")

ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMP_NUM_THREADS": "1",
}
OPTIONS = ["--bind-to", "none", "--oversubscribe", "--mca", "pml", "ob1", "--mca", "btl", "self,sm"]


class MpiRun:
    """How a program ended. `code` is None where it was killed at the deadline."""

    def __init__(self, code: int | None, output: str) -> None:
        self.code = code
        self.output = output

    def lines(self) -> list[str]:
        """What the ranks have printed, sorted, since ranks are not in step."""
        return sorted(line for line in self.output.splitlines() if line.strip())


def run_mpi(ranks: int, program: str, *arguments: object, timeout_s: float = 60.0, survive: bool = False) -> MpiRun:
    """Run programs/`program` on `ranks` ranks; its output is stdout and stderr together.

    With `survive`, the other ranks go on when one dies. An mpiexec that cannot start itself, as happens where network
    interfaces of other tests are just being removed, is started once more.
    """
    ended = _run_once(ranks, program, *arguments, timeout_s=timeout_s, survive=survive)
    if ended.code == LAUNCHER_FAILED:
        ended = _run_once(ranks, program, *arguments, timeout_s=timeout_s, survive=survive)
    return ended


def _run_once(ranks: int, program: str, *arguments: object, timeout_s: float, survive: bool) -> MpiRun:
    words = [sys.executable, str(PROGRAMS / program), *map(str, arguments)]
    process = subprocess.Popen(
        [MPIEXEC, "-n", str(ranks), *(["--with-ft", "ulfm"] if survive else []), *OPTIONS, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | ENVIRONMENT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
        return MpiRun(process.returncode, output)
    except subprocess.TimeoutExpired:
        kill_family(process.pid)
        output, _ = process.communicate(timeout=10.0)
        return MpiRun(None, output)


def kill_family(pid: int) -> None:
    """SIGKILL `pid` and all processes that come from it."""
    for member in descendants(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """`pid` and all processes that come from it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    family = [pid]
    for member in family:
        family += [child for child, parent in parents.items() if parent == member]
    return family
