"""Task workers whose verifier does what real ones do at worst: `main` for the grader's tests, and others that do not start."""

from __future__ import annotations

import os
import sys
import threading

from laminar_hpc.process.channel import Channel
from laminar_hpc.protocol.trajectory import Purpose
from laminar_hpc.tasks.worker import limit_memory, receive_start, serve


class HostileTask:
    """The response says what its grading does; a number is its own reward."""

    prompts = 1000
    held_out = 10

    def text(self, purpose: Purpose, index: int) -> str:
        """Prompt 666 ends the process."""
        if index == 666:
            os._exit(3)
        return f"{purpose.value} {index}"

    def solution(self, purpose: Purpose, index: int) -> str:
        """Any number that is 1."""
        del purpose, index
        return "1"

    def grade(self, purpose: Purpose, index: int, response: str) -> float:
        """One misbehaviour each."""
        del purpose, index
        match response.strip("."):
            case "hang":
                threading.Event().wait()
            case "slow":
                threading.Event().wait(0.1)
                return 0.5
            case "raise":
                raise ValueError("two\nlines")
            case "exit":
                sys.exit("leaving")
            case "die":
                os._exit(3)
            case "memory":
                return float(len(bytearray(8 << 30)))
            case "print":
                print("a verifier that talks", flush=True)
                return 1.0
        return float(response)


def main(channel: Channel) -> None:
    """The task worker with the hostile task."""
    config = receive_start(channel)
    limit_memory(2 << 30)
    serve(channel, config, HostileTask())


def dies_at_once(channel: Channel) -> None:
    """Never comes up."""
    receive_start(channel)
    os._exit(3)


def never_up(channel: Channel) -> None:
    """Neither comes up nor ends."""
    receive_start(channel)
    threading.Event().wait()
