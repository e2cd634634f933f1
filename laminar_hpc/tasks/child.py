"""A process in which requests are answered, and which can be lost at any time.

It is forked from a process that has all modules and rows, so it has them at once, and answers request after request. When
it is lost, to a deadline or to whatever a verifier does, all that it has started is ended with it, and another one is
forked, which takes milliseconds.

Requests are sent ahead, so that the child goes on without waiting for anybody. It answers in order: the first request that
is unanswered is the one it is at, since the moment the one before was answered. That one is what a lost child costs; those
behind it go to the next child.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from laminar_hpc.errors import ProtocolError
from laminar_hpc.process.channel import Channel, ChannelClosed
from laminar_hpc.protocol.peer import EncodePrompt, Grade, Graded, PromptEncoded
from laminar_hpc.tasks.grading import Answer, Request, no_answer
from laminar_hpc.tasks.guard import end_children, end_with, fork


class _Asked(NamedTuple):
    request: Request
    timeout_s: float


class Child:
    """Answers requests in a forked process, in order. All times `now` are seconds of time.monotonic.

    To be used from the main thread, in a process that adopts orphans and has no other children: all that it finds it ends.
    """

    def __init__(self, answer: Callable[[Request], Answer], inherited: list[Channel]) -> None:
        """`answer` is what the child calls; `inherited` are channels of this process that the child must not hold open."""
        self._answer = answer
        self._inherited = inherited
        self._channel: Channel | None = None
        self._pid = 0
        self._asked: deque[_Asked] = deque()
        self._since_s = 0.0  # when the child came to the first request in _asked

    def ask(self, request: Request, timeout_s: float) -> None:
        """Have a request answered, `timeout_s` after the child comes to it at the latest."""
        self._asked.append(_Asked(request, timeout_s))
        if self._channel is None:
            self._fork()
        else:
            if len(self._asked) == 1:
                self._since_s = time.monotonic()
            self._send(request)

    def channels(self) -> list[Channel]:
        """What to wait on between calls of `poll`; another one after each loss."""
        return [] if self._channel is None else [self._channel]

    def left_s(self, now: float) -> float | None:
        """Until when `poll` has to be called at the latest, in seconds from `now`; None where nothing is asked."""
        return max(0.0, self._since_s + self._asked[0].timeout_s - now) if self._asked else None

    def poll(self) -> list[Answer]:
        """The answers that are there; those that a child was lost to, or is late with, say so."""
        answers: list[Answer] = []
        try:
            while self._channel is not None and (message := self._channel.receive()) is not None:
                if not self._asked or not _is_answer(message, self._asked[0].request):
                    raise ProtocolError("an answer to another request")
                self._asked.popleft()
                self._since_s = time.monotonic()
                answers.append(message)  # type: ignore[arg-type]
        except ChannelClosed:
            return answers + self._replace(lambda how: f"the process ended while it was at this: {how}")
        except ProtocolError as error:
            text = str(error)
            return answers + self._replace(lambda _: f"the process broke its pipe: {text}")
        if self.left_s(time.monotonic()) == 0.0:
            timeout_s = self._asked[0].timeout_s
            answers += self._replace(lambda _: f"longer than {timeout_s:g} s", late=True)
        return answers

    def _replace(self, reason: Callable[[str], str], late: bool = False) -> list[Answer]:
        """End the child and all that it has started; the request that it was at is answered, the others go to the next."""
        assert self._channel is not None
        self._channel.close()
        self._channel = None
        how = end_children().get(self._pid)
        if not self._asked:
            return []
        lost = self._asked.popleft().request
        if self._asked:
            self._fork()
        return [no_answer(lost, reason("not known" if how is None else _in_words(how)), late)]

    def _fork(self) -> None:
        ours, theirs = Channel.pair()
        parent = os.getpid()
        self._pid = fork()
        if self._pid == 0:
            try:
                end_with(parent)
                for channel in (ours, *self._inherited):
                    channel.close()
                _serve(self._answer, Channel(theirs, waits=True))
            finally:
                os._exit(1)
        theirs.close()
        self._channel = ours
        self._since_s = time.monotonic()
        for asked in self._asked:
            self._send(asked.request)

    def _send(self, request: Request) -> None:
        assert self._channel is not None
        try:
            self._channel.send(request)
        except ChannelClosed:
            return  # the next poll finds out


def _serve(answer: Callable[[Request], Answer], channel: Channel) -> NoReturn:
    """The child, which never comes back into the code of the process that it was forked from."""
    gc.freeze()  # else the first collection would copy all pages that are shared with that process
    own = os.getpid()
    while True:
        request = channel.receive(None)
        assert isinstance(request, EncodePrompt | Grade)
        result = answer(request)
        if os.getpid() != own:  # a verifier that forks comes back twice
            os._exit(0)
        sys.stdout.flush()
        channel.send(result)


def _is_answer(message: object, request: Request) -> bool:
    return isinstance(message, PromptEncoded | Graded) and message.trajectory == request.trajectory


def _in_words(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"signal {-code}" if code < 0 else f"exit code {code}"
