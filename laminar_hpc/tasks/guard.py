"""Processes that verifiers start, and how none of them stays behind: whose they become, and who ends them.

A process that a verifier has started may leave the group and the session that it was born in, and its parent may end before
it. What no process can leave is the tree: an orphan becomes a child of the nearest process above it that adopts orphans.

    the driver's worker     adopts; builds the task, forks the guard, and waits for its end
    `- guard                adopts; answers the driver, and runs no code of a verifier
       `- child              runs verifiers; ends with the guard
          `- ...             whatever they start

The guard is in a group of its own, so that it outlives a worker that is killed with its group, or by its verifier: then it
ends all that is below it, and itself. Where it is the guard that is killed, the worker does.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

from laminar_hpc.process.channel import Channel

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_SWEEPS = 1000

_libc = ctypes.CDLL(None)


def fork_guard() -> Channel | None:
    """Fork, and return in the guard: a channel that closes when the worker ends. It gives None in the worker, at the end.

    In the worker it returns when the guard has ended, and all that was below it.
    """
    adopt_orphans()
    ours, theirs = Channel.pair()
    pid = fork()
    if pid == 0:
        os.setpgid(0, 0)
        ours.close()
        adopt_orphans()
        return Channel(theirs, waits=True)
    theirs.close()
    os.waitpid(pid, 0)
    end_children()
    return None


def fork() -> int:
    """As os.fork, for a process that prints."""
    sys.stdout.flush()  # else both would write what is in the buffer
    return os.fork()


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent ends."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with(parent: int) -> None:
    """Have this process killed when `parent`, which has forked it, ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had ended before
        os._exit(0)


def end_children() -> dict[int, int]:
    """End all processes below this one, which adopts orphans, and leave no zombie; the wait status of each."""
    ended: dict[int, int] = {}
    for _ in range(_SWEEPS):  # what is orphaned by one sweep is found by the next
        pids = _children()
        if not pids:
            break
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                ended[pid] = os.waitpid(pid, 0)[1]
    return ended


def _children() -> set[int]:
    """Processes whose parent this one is."""
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children", encoding="ascii") as file:
            found |= {int(pid) for pid in file.read().split()}
    return found
