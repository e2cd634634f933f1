"""A worker process as its driver holds it, and the frame in which the worker's own code runs.

Workers are forked from a forkserver that was started before MPI: forking after `MPI_Init` can hang, and a child that
inherits the launcher's variables takes itself for a rank. A worker that is forked from there outlives a driver that is
killed, so each one watches its driver, and ends itself and all it has started when the driver is gone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from multiprocessing.forkserver import ensure_running, set_forkserver_preload

from laminar_hpc.errors import FinalError
from laminar_hpc.process.channel import Channel, ChannelClosed
from laminar_hpc.protocol.peer import Shutdown, WorkerError
from laminar_hpc.protocol.wire import AnyRecord

LAUNCHER_PREFIXES = ("PMI", "PMIX", "OMPI", "PRTE", "SLURM", "MPI", "HYDRA", "FLUX")
"""Variables through which a process learns that it is a rank. Workers must not see them."""

LARGE_COPY_BYTES = 1 << 19
"""From this size on, copies in workers go past the caches, which for weights is faster by half; glibc alone would do so for
copies of about the size of the last cache only, and few tensors are that large."""

LAUNCHER_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""A launcher may send these to all processes of a job. The ranks see to an orderly end, for which they need their workers."""

_context = multiprocessing.get_context("forkserver")

WorkerMain = Callable[[Channel], None]


@contextlib.contextmanager
def _without_launcher_variables() -> Iterator[None]:
    hidden = {name: value for name, value in os.environ.items() if name.startswith(LAUNCHER_PREFIXES)}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


def start_forkserver() -> None:
    """Start the process that workers are forked from. To be called before MPI is initialised, once.

    Numerical libraries begin with one thread in the workers; an engine sets the number that its config says.
    """
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = os.environ["TQDM_DISABLE"] = "1"
    os.environ.setdefault("PYTHONHASHSEED", "0")  # some tasks draw from sets, and all ranks must see the same prompts
    os.environ.setdefault("GLIBC_TUNABLES", f"glibc.cpu.x86_non_temporal_threshold={LARGE_COPY_BYTES}")
    set_forkserver_preload([])
    # multiprocessing's tracker removes what a killed engine has left of its semaphores, and need not tell people
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
    before = {number: signal.signal(number, signal.SIG_IGN) for number in LAUNCHER_SIGNALS}  # inherited
    try:
        with _without_launcher_variables():
            ensure_running()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Worker:
    """One worker process and the channel to it."""

    def __init__(self, name: str, main: WorkerMain, log_path: str) -> None:
        """Start `main(channel)` in a new process whose output goes to the end of `log_path`."""
        self.name = name
        self.channel, theirs = Channel.pair()
        self._process = _context.Process(target=_run, args=(main, theirs, log_path), name=name, daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Process id, also its process group's."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process has not ended yet."""
        return self._process.is_alive()

    def send(self, message: AnyRecord) -> None:
        """Send a message; ChannelClosed where the worker is gone."""
        self.channel.send(message)

    def receive_all(self) -> list[AnyRecord]:
        """All that the worker has said; ChannelClosed where it is gone and nothing is left to read."""
        return self.channel.receive_all()

    def kill(self) -> None:
        """End the worker and all that it has started, at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._process.join(timeout=5.0)
        self.channel.close()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Ask the worker to end, and kill it if it has not after `timeout_s`."""
        with contextlib.suppress(ChannelClosed):
            self.channel.send(Shutdown())
        self._process.join(timeout=timeout_s)
        self.kill()


def _run(main: WorkerMain, stream: socket.socket, log_path: str) -> None:
    os.setpgid(0, 0)  # so that all it starts can be ended with it
    _take_name(f"laminar {multiprocessing.current_process().name}")
    _redirect_output(log_path)
    faulthandler.enable()
    for number in LAUNCHER_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_driver, name="end-with-driver", daemon=True).start()
    channel = Channel(stream, waits=True)
    try:
        main(channel)
    except ChannelClosed:
        pass
    except Exception as error:
        traceback.print_exc()
        with contextlib.suppress(ChannelClosed):
            line = " ".join(str(error).split())
            channel.send(WorkerError(f"{type(error).__name__}: {line}", isinstance(error, FinalError)))
            channel.close()
        _leave(1)
    _leave(0)


def _take_name(name: str) -> None:
    """For ps and top, which would show all workers as forkservers; Linux keeps the first 15 bytes."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "wb") as file:
        file.write(name.encode()[:15])


def _redirect_output(log_path: str) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _end_with_driver() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    _leave(1)


def _leave(code: int) -> None:
    """End without the clean-up of libraries that may hang, and take along whatever this worker has started."""
    _kill_descendants()
    os._exit(code)


def _kill_descendants() -> None:
    own = os.getpid()
    for pid in _group_members(os.getpgid(0)):
        if pid != own:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _group_members(group: int) -> list[int]:
    members = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if os.getpgid(int(entry)) == group:
                    members.append(int(entry))
    return members
