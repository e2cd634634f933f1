"""`laminar run`: prepare the run directory, start the job on this machine, show how it goes, say how it ended."""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import signal
import socket
import time
from types import FrameType

from rich.console import Console

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError, RecordError
from laminar_hpc.launch.mpiexec import Launch, check_machine, command_line, environment, open_mpi_settings, srun_line
from laminar_hpc.record.status import Status, read_status, was_killed, write_status
from laminar_hpc.runtime.check import check_memory_here, check_parts
from laminar_hpc.runtime.paths import RunPaths, check_new_run_dir, create_run_dir

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

ORDERLY_END_S = 6.0
"""After a Ctrl-C: how long the ranks have to close their records, before they are killed."""

LEAVING_S = 20.0
"""After the status file has said that the job is over: how long mpiexec may take to end."""

LAST_WORD_S = 5.0
"""After mpiexec has ended: how long the manager, if it still lives, has to say why."""


def run(config: Config) -> int:
    """Run the job to its end; the exit code is 0 where its status file says "finished"."""
    create_run_dir(config)
    line = command_line(config, ["--run-dir", config.run_dir])
    console = Console(highlight=False)
    console.print(f"run directory: {config.run_dir}", soft_wrap=True)
    with _Interrupts() as interrupts:
        console.print(f"starting {config.job.ranks} ranks; engines and trainers take a while to load")
        job = Launch(line, environment(os.environ))
        try:
            _follow(job, config.run_dir, interrupts, console)
        finally:
            job.end(
                signal.SIGKILL
            )  # it has ended, or this program cannot go on; without mpiexec the ranks end themselves
    status = _last_status(config, job.poll(), interrupts.received)
    _print_summary(status, config.run_dir, console)
    if status.state == "finished":
        return 0
    return EXIT_INTERRUPTED if interrupts.received else EXIT_FAILED


def dry_run(config: Config, arguments: list[str]) -> int:
    """Print how many ranks the job has and what starts it, under Slurm and here. `arguments` are those of jobs/train.py.

    ConfigError for what would be wrong anywhere; what is in the way on this machine alone, or may be gone until the job
    starts, is a note.
    """
    print(f"{config.job.ranks} ranks")
    print(shlex.join(srun_line(config, arguments)))
    check_parts(config)
    try:
        line = command_line(config, arguments)
        print(shlex.join(["env", *(f"{name}={value}" for name, value in open_mpi_settings().items()), *line]))
    except ConfigError as error:
        print(f"note: {error}")
    for check in (check_machine, check_memory_here, lambda config: check_new_run_dir(config.run_dir)):
        try:
            check(config)
        except ConfigError as error:
            print(f"note: {error}")
    return 0


class _Interrupts:
    """Notes SIGINT and SIGTERM instead of dying of them."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> _Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number)


def _follow(job: Launch, run_dir: str, interrupts: _Interrupts, console: Console) -> None:
    """Pass on what the job prints, with the state of the run below it on a terminal, until mpiexec has ended."""
    interrupted_at: float | None = None
    over_since = time.monotonic()
    live = console.status("starting") if console.is_terminal else contextlib.nullcontext()
    with selectors.DefaultSelector() as selector, live as display:
        selector.register(job.output, selectors.EVENT_READ)
        open_output = True
        while open_output or job.poll() is None:
            for _ in selector.select(0.5) if open_output else ():
                text = os.read(job.output.fileno(), 65536).decode(errors="replace")
                if not text:
                    selector.unregister(job.output)
                    open_output = False
                console.print(text, end="", markup=False, soft_wrap=True)
            if not open_output:
                job.wait(0.1)
            now = time.monotonic()
            status = _status(run_dir)
            if display is not None:
                display.update("starting" if status is None else status.line())
            if status is None or not status.over:
                over_since = now
            elif now - over_since > LEAVING_S:
                job.end(signal.SIGKILL)  # the job says that it is over, but mpiexec does not end
            if interrupts.received is not None:
                if interrupted_at is None:
                    interrupted_at = now
                    _ask_to_end(job, run_dir, interrupts.received)
                elif now - interrupted_at > ORDERLY_END_S:
                    job.end(signal.SIGKILL)


def _ask_to_end(job: Launch, run_dir: str, number: signal.Signals) -> None:
    """The signal to the manager, which ends all others in order; SIGTERM to mpiexec where there is no manager yet."""
    status = _status(run_dir)
    if status is not None and not status.over and status.host == socket.gethostname():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(status.pid, signal.SIGINT if number is signal.SIGINT else signal.SIGTERM)
            return
    job.end(signal.SIGTERM)


def _status(run_dir: str) -> Status | None:
    """What the status file says; None where it is not there, or cannot be read."""
    try:
        return read_status(run_dir)
    except RecordError:
        return None


def _last_status(config: Config, exit_code: int | None, interrupted: signal.Signals | None) -> Status:
    """What the status file says in the end; where no rank could say it, it is said here."""
    deadline = time.monotonic() + LAST_WORD_S
    status = _status(config.run_dir)
    while status is not None and not status.over and not was_killed(status) and time.monotonic() < deadline:
        time.sleep(0.1)
        status = _status(config.run_dir)
    if status is not None and status.over:
        return status
    reason = f"mpiexec ended with exit code {exit_code} and no rank said why; see {RunPaths(config.run_dir).logs}"
    if interrupted is not None:
        reason = f"{interrupted.name} before the job could end in order"
    status = status or Status.blank()
    status.state = "failed" if interrupted is None else "interrupted"
    status.reason = reason
    status.updated_s = status.ended_s = time.time()
    with contextlib.suppress(RecordError):  # a full disk: what is printed is all that is left
        write_status(config.run_dir, status)
    return status


def _print_summary(status: Status, run_dir: str, console: Console) -> None:
    seconds = (status.ended_s or status.updated_s) - status.started_s
    rows = [
        ("outcome", f"{status.state}: {status.reason}"),
        ("time", f"{seconds:.0f} s, {status.step} of {status.steps} steps"),
        ("reward", f"{_figure(status.reward)} in the last step"),
        ("accuracy", f"{_figure(status.first_accuracy)} at first, {_figure(status.last_accuracy)} at last (held-out)"),
        ("record", run_dir),
    ]
    for name, text in rows:
        console.print(f"{name:>9}: {text}", markup=False, soft_wrap=True)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
