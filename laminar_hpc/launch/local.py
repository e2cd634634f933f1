"""`laminar run` and `laminar resume`: start the job, here or in this allocation, show how it goes, say how it ended."""

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
from laminar_hpc.launch.slurm import Allocation
from laminar_hpc.launch.summary import print_summary
from laminar_hpc.protocol.peer import Resume
from laminar_hpc.record.paths import RunPaths, check_new_run_dir, create_run_dir
from laminar_hpc.record.status import EXIT_REQUEUE, Status, read_status, was_killed, write_status
from laminar_hpc.runtime.check import check_memory_here, check_parts, resumed

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

ORDERLY_END_S = 6.0
"""After a Ctrl-C: how long the ranks have to close their records, before they are killed."""

LEAVING_S = 20.0
"""After the status file has said that the job is over: how long mpiexec may take to end."""

LAUNCHER_FAILED = 213
"""mpiexec's exit code where its own server does not come up: now and then, where network interfaces come and go just then."""

LAST_WORD_S = 5.0
"""After mpiexec has ended: how long the manager, if it still lives, has to say why."""


def check_place(config: Config, allocation: Allocation | None) -> None:
    """ConfigError where the job does not fit where it is to run: onto the nodes of an allocation, or (None) this machine."""
    if allocation is not None:
        allocation.hosts(config)
        return
    check_machine(config)
    check_memory_here(config)


def run(config: Config, allocation: Allocation | None = None) -> int:
    """Make the run directory, and run the job to its end; the exit code is 0 where its status file says "finished".

    It is 75 (EX_TEMPFAIL) where the job can be resumed: it was asked to stop, or too few nodes of its allocation are left.
    """
    create_run_dir(config)
    return _run(config, None, 0, allocation)


def resume(config: Config, attempt: int, saved: Resume | None, allocation: Allocation | None = None) -> int:
    """Start attempt `attempt` at a run, which goes on from `saved`; exit codes as of `run`."""
    return _run(config, attempt, 0 if saved is None else saved.step, allocation)


def check_resumable(run_dir: str) -> None:
    """ConfigError where the run is going on, as far as its status file and this host tell.

    Slurm starts a batch job again only after its nodes are clear of its last start, whatever that could not write any more.
    """
    try:
        status = read_status(run_dir)
    except RecordError as error:
        raise ConfigError(str(error)) from error
    starts_again = int(os.environ.get("SLURM_RESTART_COUNT") or 0) > 0
    if status is not None and not status.over and not was_killed(status) and not starts_again:
        raise ConfigError(f"{run_dir}: the run is going on: process {status.pid} on {status.host} says so")


def _run(config: Config, attempt: int | None, begins_with: int, allocation: Allocation | None) -> int:
    """Run attempts at the job, which begins with the weights of step `begins_with`, until one ends as it should.

    `attempt` is the number of the first one, None where the run is new. One that fails is followed by another where it has
    made a checkpoint, or where a node is lost: so what fails every time is not tried for ever.
    """
    console = Console(highlight=False)
    console.print(f"run directory: {config.run_dir}", soft_wrap=True)
    with _Interrupts() as interrupts:
        _look(allocation, console)
        opening = f"starting {config.job.ranks} ranks; engines and trainers take a while to load"
        status = _attempt(config, attempt, opening, allocation, interrupts, console)
        for relaunch in range(1, config.job.relaunches + 1):
            if status.state not in ("failed", "stalled") or interrupts.received is not None:
                break
            try:
                attempt, saved = resumed(config)
            except ConfigError as error:
                console.print(f"laminar: cannot be started again: {error}", markup=False, soft_wrap=True)
                break
            saved_step = 0 if saved is None else saved.step
            if not _look(allocation, console) and saved_step <= begins_with:
                break
            begins_with = saved_step
            times = f"{relaunch} of at most {config.job.relaunches} times"
            opening = f"starting again, {times}: it has {status.state}: {status.reason}"
            status = _attempt(config, attempt, opening, allocation, interrupts, console)
    print_summary(status, config.run_dir, console)
    if status.state == "finished":
        return 0
    if status.state == "requeue":
        return EXIT_REQUEUE
    return EXIT_INTERRUPTED if interrupts.received else EXIT_FAILED


def _look(allocation: Allocation | None, console: Console) -> bool:
    """Whether a node of the allocation has stopped to answer."""
    lost = [] if allocation is None else allocation.look()
    if lost:
        console.print(f"no answer from {', '.join(lost)}", markup=False, soft_wrap=True)
    return bool(lost)


def _again(config: Config, attempt: int) -> list[str]:
    """The arguments of jobs/train.py for another attempt; the status file says that it begins."""
    status = Status.blank()
    status.reason, status.attempt = "starting again", attempt
    write_status(config.run_dir, status)  # how the attempt before ended is not how this one does
    return ["--run-dir", config.run_dir, "--resume"]


def _attempt(
    config: Config,
    attempt: int | None,
    opening: str,
    allocation: Allocation | None,
    interrupts: _Interrupts,
    console: Console,
) -> Status:
    """Start the job once and follow it to its end; its last status. That is "requeue" where too few nodes answer."""
    if allocation is not None:
        try:
            hosts = allocation.hosts(config)
        except ConfigError as error:
            return _ended(config, "requeue", str(error))
        opening += "; on " + ", ".join(f"{name} ({ranks} ranks)" for name, ranks in hosts)
    console.print(opening, markup=False, soft_wrap=True)
    arguments = ["--run-dir", config.run_dir] if attempt is None else _again(config, attempt)
    exit_code = _start_once(config, arguments, allocation, interrupts, console)
    if exit_code == LAUNCHER_FAILED and interrupts.received is None:
        console.print("mpiexec could not start itself; trying once more")
        exit_code = _start_once(config, arguments, allocation, interrupts, console)
    return _last_status(config, exit_code, interrupts.received)


def _start_once(
    config: Config, arguments: list[str], allocation: Allocation | None, interrupts: _Interrupts, console: Console
) -> int | None:
    """Start mpiexec and follow it to its end; its exit code."""
    variables = environment(os.environ if allocation is None else allocation.environment(os.environ))
    job = Launch(_line(config, arguments, allocation), variables)
    try:
        _follow(job, config, interrupts, console)
    finally:
        job.end(signal.SIGKILL)  # it has ended, or this program cannot go on; without mpiexec the ranks end themselves
    return job.poll()


def _line(config: Config, arguments: list[str], allocation: Allocation | None) -> list[str]:
    if allocation is None:
        return command_line(config, arguments)
    return command_line(config, arguments, allocation.hosts(config), allocation.options())


def dry_run(config: Config, arguments: list[str], allocation: Allocation | None = None) -> int:
    """Print how many ranks the job has and what starts it, by srun and from here. `arguments` are those of jobs/train.py.

    ConfigError for what would be wrong anywhere; what is in the way on this machine alone, or may be gone until the job
    starts, is a note.
    """
    print(f"{config.job.ranks} ranks")
    print(shlex.join(srun_line(config, arguments)))
    check_parts(config)
    try:
        line = _line(config, arguments, allocation)
        print(shlex.join(["env", *(f"{name}={value}" for name, value in open_mpi_settings().items()), *line]))
    except ConfigError as error:
        print(f"note: {error}")
    here = (check_machine, check_memory_here) if allocation is None else ()
    for check in (*here, lambda config: check_new_run_dir(config.run_dir)):
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


def _follow(job: Launch, config: Config, interrupts: _Interrupts, console: Console) -> None:
    """Pass on what the job prints, with the state of the run below it on a terminal, until mpiexec has ended."""
    interrupted_at: float | None = None
    run_dir = config.run_dir
    begun = over_since = time.monotonic()
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
            if not _is_up(status) and now - begun > config.job.start_timeout_s:
                job.end(signal.SIGKILL)  # a node was lost in the very moment, and mpiexec waits for it
            if interrupts.received is not None:
                if interrupted_at is None:
                    interrupted_at = now
                    _ask_to_end(job, run_dir, interrupts.received)
                elif now - interrupted_at > ORDERLY_END_S + _grace_s(config, interrupts.received):
                    job.end(signal.SIGKILL)


def _grace_s(config: Config, number: signal.Signals) -> float:
    """How long the job may take to write a checkpoint before it ends."""
    return config.checkpoint.grace_s if config.checkpoint.on_stop and number is not signal.SIGINT else 0.0


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


def _is_up(status: Status | None) -> bool:
    """Whether the manager has written this status, and not this program for it."""
    return status is not None and status.pid != os.getpid()


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
    if not _is_up(status) and exit_code == -signal.SIGKILL:
        reason = f"no rank has come up within job.start_timeout_s = {config.job.start_timeout_s:g} s"
    if interrupted is not None:
        reason = f"{interrupted.name} before the job could end in order"
    return _ended(config, "failed" if interrupted is None else "interrupted", reason)


def _ended(config: Config, state: str, reason: str) -> Status:
    """Write down how the run ended, where no rank can."""
    status = _status(config.run_dir) or Status.blank()
    status.state, status.reason = state, reason
    status.updated_s = status.ended_s = time.time()
    with contextlib.suppress(RecordError):  # a full disk: what is printed is all that is left
        write_status(config.run_dir, status)
    return status
