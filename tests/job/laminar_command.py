"""Whole jobs, started as a user starts them: the installed command, in a child process with a deadline."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

LAMINAR = shutil.which("laminar", path=os.path.dirname(sys.executable)) or "laminar"

JOB_DEADLINE_S = 600.0


class Laminar:
    """Runs the `laminar` command in a directory of its own."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.directory = directory
        self.model = model
        self._started: list[subprocess.Popen[str]] = []

    def config(self, text: str = "", **sections: dict[str, object]) -> Path:
        """A config file for a job of a few seconds; `sections` go over its values."""
        values: dict[str, dict[str, object]] = {
            "job": {"rollouts": 2, "stall_timeout_s": 60, "start_timeout_s": 120},
            "model": {"path": str(self.model)},
            "task": {"dataset": "chain_sum", "prompts": 500},
            "rollout": {"concurrency": 16, "slots": 16, "max_prompt_tokens": 128, "max_response_tokens": 12},
            "batch": {"prompts": 4, "group_size": 4},
            "control": {"steps": 4},
            "evaluation": {"every": 2, "prompts": 8},
            "weights": {"chunk_bytes": 65536},
            "record": {"flush_s": 0.5},
        }
        for name, keys in sections.items():
            values.setdefault(name, {}).update(keys)
        lines = [f"run_dir = {str(self.directory / 'run')!r}", text]
        for name, keys in values.items():
            lines.append(f"[{name}]")
            lines += [f"{key} = {_toml(value)}" for key, value in keys.items()]
        path = self.directory / "config.toml"
        path.write_text("\n".join(lines) + "\n")
        return path

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    def __call__(self, *arguments: object, deadline_s: float = JOB_DEADLINE_S) -> subprocess.CompletedProcess[str]:
        """Run to the end; the test fails where it takes longer than `deadline_s`."""
        line = [LAMINAR, *map(str, arguments)]
        return subprocess.run(line, capture_output=True, text=True, timeout=deadline_s, cwd=self.directory, check=False)

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        """Start, and leave it to the test to end it, or to `end`."""
        line = [LAMINAR, *map(str, arguments)]
        command = subprocess.Popen(
            line,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.directory,
            start_new_session=True,
            preexec_fn=_hear_interrupts,
        )
        self._started.append(command)
        return command

    def end(self) -> None:
        """Kill what a test that failed has left running; a job ends with its command."""
        for command in self._started:
            if command.poll() is None:
                command.kill()
                command.wait()


def _hear_interrupts() -> None:
    """Tests that run in the background of a shell ignore SIGINT, and so would all that they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def processes_of(run_dir: Path) -> list[int]:
    """Processes of this machine that have the run directory on their command line or a file of it open."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            links = [os.readlink(link) for link in (entry / "fd").iterdir()]
            words = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(run_dir) in words or any(str(run_dir) in link for link in links):
            found.append(int(entry.name))
    return found


def writers_of(run_dir: Path, log: Path) -> list[int]:
    """The run's processes that have this file open."""
    found = []
    for pid in processes_of(run_dir):
        with contextlib.suppress(OSError):
            if str(log) in [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]:
                found.append(pid)
    return found


def pid_of(run_dir: Path, rank: int) -> int:
    """The process of a rank, found by the number that Open MPI gave it; AssertionError where there is none."""
    for pid in processes_of(run_dir):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if b"laminar_hpc.jobs.train" in command and b"OMPI_COMM_WORLD_RANK=%d" % rank in variables:
                return pid
    raise AssertionError(f"no process is rank {rank}")


def wait_until(condition: object, deadline_s: float, what: str, every_s: float = 0.05) -> float:
    """Seconds until `condition()` holds, looked at `every_s`; the test fails after `deadline_s`."""
    begun = time.monotonic()
    pause = threading.Event()
    while not condition():  # type: ignore[operator]
        assert time.monotonic() - begun < deadline_s, f"not within {deadline_s} s: {what}"
        pause.wait(every_s)
    return time.monotonic() - begun


def shared_memory() -> set[str]:
    """What lies in the machine's shared memory though no process has it mapped: what somebody has left behind."""
    names = {str(path) for path in Path("/dev/shm").iterdir()}
    for entry in Path("/proc").iterdir():
        if names and entry.name.isdigit():
            with contextlib.suppress(OSError):
                maps = (entry / "maps").read_text()
                names = {name for name in names if name not in maps}
    return names
