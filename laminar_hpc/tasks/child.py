"""A process of the task worker's own in which requests are answered, and which can be lost at any time.

It is forked from the task worker, so that it has all modules and rows at once, and answers request after request. When it is
lost, to a deadline or to whatever a verifier does, all that it has started is ended with it, and the next request forks another
one, which takes milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from laminar_hpc.errors import ProtocolError
from laminar_hpc.process.channel import Channel, ChannelClosed
from laminar_hpc.protocol.peer import EncodePrompt, Grade, Graded, PromptEncoded
from laminar_hpc.tasks.grading import Answer, Request, no_answer

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_SWEEPS = 1000

_libc = ctypes.CDLL(None)


class Child:
    """Answers requests in a forked process, one at a time.

    To be used from the main thread, in a process that has no other children: all that it finds it ends.
    """

    def __init__(self, answer: Callable[[Request], Answer], inherited: Channel) -> None:
        """`answer` is what the child calls; `inherited` is a channel of this process that the child must not hold open."""
        self._answer = answer
        self._inherited = inherited
        self._channel: Channel | None = None
        self._pid = 0
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what a lost child has started becomes ours, and is found

    def ask(self, request: Request, timeout_s: float) -> Answer:
        """The child's answer; where there is none within `timeout_s`, or the child is lost, one that says so."""
        if self._channel is None:
            self._fork()
        assert self._channel is not None
        deadline = time.monotonic() + timeout_s
        try:
            self._channel.send(request)
            while (left_s := deadline - time.monotonic()) > 0:
                answer = self._channel.receive(left_s)
                if isinstance(answer, PromptEncoded | Graded) and answer.trajectory == request.trajectory:
                    return answer
                if answer is not None:
                    raise ProtocolError("an answer to another request")
        except ChannelClosed:
            return no_answer(request, f"the process ended while it was at this: {self._end()}")
        except ProtocolError as error:
            self._end()
            return no_answer(request, f"the process broke its pipe: {error}")
        self._end()
        return no_answer(request, f"longer than {timeout_s:g} s", late=True)

    def _fork(self) -> None:
        ours, theirs = Channel.pair()
        worker = os.getpid()
        sys.stdout.flush()  # else both would write what is in the buffer
        self._pid = os.fork()
        if self._pid == 0:
            try:
                self._inherited.close()
                ours.close()
                _serve(self._answer, theirs, worker)
            finally:
                os._exit(1)
        theirs.close()
        self._channel = ours

    def _end(self) -> str:
        """End the child and all that it has started, and leave no zombie; how the child itself ended, in words."""
        assert self._channel is not None
        self._channel.close()
        self._channel = None
        how = "not known"
        for _ in range(_SWEEPS):  # what is orphaned by one sweep is found by the next
            pids = {self._pid} | _children() if self._pid else _children()
            if not pids:
                break
            for pid in pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            for pid in pids:
                with contextlib.suppress(ChildProcessError):
                    _, status = os.waitpid(pid, 0)
                    if pid == self._pid:
                        how = _in_words(os.waitstatus_to_exitcode(status))
            self._pid = 0
        return how


def _serve(answer: Callable[[Request], Answer], stream: socket.socket, worker: int) -> NoReturn:
    """The child: it ends with the task worker, and never comes back into the worker's code."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != worker:  # it had ended before
        os._exit(0)
    gc.freeze()  # else the first collection would copy all pages that are shared with the worker
    own = os.getpid()
    channel = Channel(stream, waits=True)
    while True:
        request = channel.receive(None)
        assert isinstance(request, EncodePrompt | Grade)
        result = answer(request)
        if os.getpid() != own:  # a verifier that forks comes back twice
            os._exit(0)
        sys.stdout.flush()
        channel.send(result)


def _children() -> set[int]:
    """Processes whose parent this one is."""
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children", encoding="ascii") as file:
            found |= {int(pid) for pid in file.read().split()}
    return found


def _in_words(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
