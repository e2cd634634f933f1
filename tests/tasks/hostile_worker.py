"""Task workers whose verifier does what real ones do at worst: `main` for the grader's tests, and others that do not start."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from laminar_hpc.process.channel import Channel
from laminar_hpc.protocol.trajectory import Purpose


def _hang() -> NoReturn:
    while True:
        threading.Event().wait()


def _slow() -> float:
    threading.Event().wait(0.1)
    return 0.5


def _raise() -> NoReturn:
    raise ValueError("two\nlines")


def _interrupt() -> NoReturn:
    raise KeyboardInterrupt("now")


def _catch_everything() -> NoReturn:
    for _ in itertools.count():
        with contextlib.suppress(BaseException):
            threading.Event().wait(0.01)
    raise AssertionError


def _recurse() -> float:
    return 1.0 + _recurse()


def _allocate() -> NoReturn:
    kept = [bytearray(1 << 28)]
    while True:
        kept.append(bytearray(1 << 28))


def _come_back_twice() -> float:
    os.fork()
    return 1.0


def _leave_a_process() -> NoReturn:
    """The process left behind also leaves the group of the worker."""
    if os.fork() == 0:
        os.setsid()
        _hang()
    os._exit(4)


def _start_a_daemon() -> float:
    """Two forks and a session of its own; the log says which process it is."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            print(f"daemon {os.getpid()}.", flush=True)
            _hang()
        os._exit(0)
    return 1.0


def _close_everything() -> float:
    os.closerange(0, 1000)
    return 1.0


def _write_everywhere() -> float:
    for descriptor in range(3, 50):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"\x05\0\0\0\0\0\0\0hello")
    return 1.0


def _print() -> float:
    print("a verifier that talks")
    return 1.0


def _kill_the_parent() -> float:
    os.kill(os.getppid(), signal.SIGKILL)
    return 1.0


def _stop_the_parent() -> float:
    os.kill(os.getppid(), signal.SIGSTOP)
    return 1.0


DEEDS: dict[str, Callable[[], float]] = {
    "hang": _hang,
    "slow": _slow,
    "raise": _raise,
    "exit": lambda: sys.exit("leaving"),
    "interrupt": _interrupt,
    "catch": _catch_everything,
    "recurse": _recurse,
    "allocate": _allocate,
    "die": lambda: os._exit(3),
    "abort": os.abort,
    "twice": _come_back_twice,
    "leave": _leave_a_process,
    "daemon": _start_a_daemon,
    "close": _close_everything,
    "write": _write_everywhere,
    "print": _print,
    "kill": _kill_the_parent,
    "stop": _stop_the_parent,
}


class HostileTask:
    """The response says what its grading does; a number is its own reward."""

    prompts = 1000
    held_out = 10
    has_special_tokens = False

    def text(self, purpose: Purpose, index: int, quote: Callable[[str], str] = str) -> str:
        """Prompt 666 ends the process, 777 never comes back."""
        if index == 777:
            _hang()
        if index == 666:
            os._exit(3)
        return quote(f"{purpose.value} {index}")

    def solution(self, purpose: Purpose, index: int) -> str:
        """Any number that is 1."""
        del purpose, index
        return "1"

    def grade(self, purpose: Purpose, index: int, response: str) -> float:
        """One misbehaviour each."""
        del purpose, index
        deed = DEEDS.get(response.strip("."))
        return float(response) if deed is None else deed()


def main(channel: Channel) -> None:
    """The task worker with the hostile task."""
    from laminar_hpc.tasks.worker import limit_memory, receive_start, serve

    config = receive_start(channel)
    limit_memory(1 << 30)
    serve(channel, config, HostileTask())


def dies_at_once(channel: Channel) -> None:
    """Never comes up."""
    channel.receive(None)
    os._exit(3)


def never_up(channel: Channel) -> None:
    """Neither comes up nor ends."""
    channel.receive(None)
    threading.Event().wait()
