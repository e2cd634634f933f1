"""A rollout driver's side of its task worker: prompts and rewards, each within a bound, whatever the worker does.

Requests go out in order and are answered in order. A few are sent ahead, so that nobody waits for the driver; no more
than the pipe holds, so that the driver never waits for a worker that hangs. The clock of a request starts when the one
before it is answered.

    request                      what becomes of it
    a verifier raises            RAISED, says the worker
    a verifier does not end      DEADLINE, says the worker, which has lost a child to it
    no prompt can be made, or    NO_PROMPT, says the worker
    none before its deadline

    worker                       what happens
    dies, or says nothing at     started again. One grade that was asked of it is RAISED or DEADLINE. Several are sent again,
    all for longer than that     one at a time, since it may have come further than it could say. Whatever is sent again is
                                 counted: too often in a row is an EngineError
    does not come up in time,    EngineError
    or cannot go on

"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Collection
from typing import NoReturn

import msgspec

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import EngineError, ProtocolError
from laminar_hpc.process.channel import Channel, ChannelClosed
from laminar_hpc.process.worker import Worker, WorkerMain
from laminar_hpc.protocol.peer import EncodePrompt, Grade, Graded, PromptEncoded, StartTask, TaskUp, WorkerError
from laminar_hpc.protocol.trajectory import Purpose, Verdict
from laminar_hpc.protocol.wire import AnyRecord
from laminar_hpc.tasks import worker as task_worker

MAX_DEATHS = 3
"""Deaths of the worker in a row, with no answer between them and no verifier to blame, after which the grader gives up."""

GRACE_S = 5.0
"""How much longer than the request's own bound a worker may take, which includes ending its child and starting another."""

_AHEAD = 16
_AHEAD_BYTES = 1 << 15


class Outcome(msgspec.Struct, frozen=True):
    """An answered request: a prompt's `tokens` (int32 bytes), or a grade's `verdict`.

    `reward` and `score` (as in `Graded`) count only where the verdict is GRADED; `reason` is one line where it is another.
    """

    trajectory: int
    tokens: bytes | None = None
    verdict: Verdict | None = None
    reward: float = 0.0
    reason: str = ""
    score: float | None = None


class _Request:
    """What is to be sent, and whether anybody still wants the answer."""

    def __init__(self, message: EncodePrompt | Grade) -> None:
        self.message = message
        self.wanted = True
        self.suspected = False  # it may have cost a worker

    @property
    def is_grade(self) -> bool:
        return isinstance(self.message, Grade)

    @property
    def response_bytes(self) -> int:
        return len(self.message.response) if isinstance(self.message, Grade) else 0


class Grader:
    """Makes prompts and grades responses in a worker process. All times `now` are seconds of one monotonic clock."""

    def __init__(self, config: Config, log_path: str, main: WorkerMain = task_worker.main) -> None:
        """Starts nothing yet. `main` is what the worker runs; its output goes to the end of `log_path`."""
        self.restarts = 0
        self.up: TaskUp | None = None
        self._config = config
        self._log_path = log_path
        self._main = main
        self._worker: Worker | None = None
        self._queue: deque[_Request] = deque()
        self._sent: deque[_Request] = deque()
        self._since_s = 0.0  # when the worker was started, or came to the first request in _sent
        self._deaths = 0

    @property
    def pid(self) -> int | None:
        """Process id of the worker, None where there is none."""
        return self._worker.pid if self._worker else None

    def channels(self) -> list[Channel]:
        """What to wait on between calls of `poll`; another one after each restart."""
        return [self._worker.channel] if self._worker else []

    def waiting_for(self) -> str:
        """What the task worker is at, "" where nothing is asked of it."""
        if self._worker is not None and self.up is None:
            return "the task worker to start"
        if not self._sent:
            return ""
        first = self._sent[0]
        return f"{'the grade' if first.is_grade else 'the prompt'} of trajectory {first.message.trajectory}"

    def start(self, now: float) -> None:
        """Start the worker; `up` is set by a later `poll`, and requests may be made at once."""
        self.up = None
        self._since_s = now
        self._worker = Worker("task", self._main, self._log_path)
        with contextlib.suppress(ChannelClosed):  # the next poll finds out, and counts it
            self._worker.send(StartTask(self._config.model_dump_json().encode()))

    def encode(self, trajectory: int, purpose: Purpose, prompt: int) -> None:
        """Ask for the tokens of a prompt."""
        self._queue.append(_Request(EncodePrompt(trajectory, prompt, purpose.value)))

    def grade(self, trajectory: int, purpose: Purpose, prompt: int, response: bytes) -> None:
        """Ask for the reward of a response (int32 tokens, without the end token)."""
        self._queue.append(_Request(Grade(trajectory, prompt, purpose.value, response)))

    def forget(self, trajectories: Collection[int]) -> None:
        """Nobody wants what was asked for these any more: `poll` will not return it."""
        self._queue = deque(request for request in self._queue if request.message.trajectory not in trajectories)
        for request in self._sent:
            if request.message.trajectory in trajectories:
                request.wanted = False

    def forget_all(self) -> None:
        """Nobody wants anything that was asked for until now."""
        self._queue.clear()
        for request in self._sent:
            request.wanted = False

    def poll(self, now: float) -> list[Outcome]:
        """Take answers, enforce bounds, send what waits. EngineError where the worker cannot be kept going."""
        if self._worker is None:
            return []
        outcomes: list[Outcome] = []
        try:
            for message in self._worker.receive_all():
                outcomes += self._take(message, now)
        except ChannelClosed:
            outcomes += self._after_loss(now, Verdict.RAISED, "died")
        if now - self._since_s > self._bound_s():
            outcomes += self._after_silence(now)
        self._send(now)
        return outcomes

    def stop(self, timeout_s: float = 2.0) -> None:
        """End the worker; one that has not ended after `timeout_s` is killed."""
        if self._worker is not None:
            self._worker.stop(timeout_s)
            self._worker = None

    def _take(self, message: AnyRecord, now: float) -> list[Outcome]:
        self._since_s = now
        match message:
            case TaskUp():
                self.up = message
                return []
            case WorkerError():
                self._give_up(message.text)
            case PromptEncoded(error=""):
                outcome = Outcome(message.trajectory, tokens=message.tokens)
            case PromptEncoded():
                outcome = Outcome(message.trajectory, verdict=Verdict.NO_PROMPT, reason=message.error)
            case Graded(error=""):
                outcome = Outcome(
                    message.trajectory, verdict=Verdict.GRADED, reward=message.reward, score=message.score
                )
            case Graded():
                verdict = Verdict.DEADLINE if message.late else Verdict.RAISED
                outcome = Outcome(message.trajectory, verdict=verdict, reason=message.error)
            case _:
                raise ProtocolError(f"task worker: unexpected {type(message).__name__}")
        if not self._sent or self._sent[0].message.trajectory != outcome.trajectory:
            asked = self.waiting_for() or "nothing"
            raise ProtocolError(f"task worker: an answer for trajectory {outcome.trajectory} while waiting for {asked}")
        return self._close_first(outcome)

    def _close_first(self, outcome: Outcome) -> list[Outcome]:
        self._deaths = 0
        return [outcome] if self._sent.popleft().wanted else []

    def _bound_s(self) -> float:
        """How long the worker may say nothing, given what it is at."""
        if self.up is None:
            return self._config.job.start_timeout_s
        if not self._sent:
            return math.inf
        task = self._config.task
        return GRACE_S + (task.deadline_s if self._sent[0].is_grade else task.prompt_deadline_s)

    def _after_silence(self, now: float) -> list[Outcome]:
        if self.up is None:
            self._give_up(f"not up after job.start_timeout_s = {self._bound_s():g} s")
        return self._after_loss(now, Verdict.DEADLINE, f"said nothing for {self._bound_s():g} s")

    def _after_loss(self, now: float, verdict: Verdict, what: str) -> list[Outcome]:
        if self.up is not None and len(self._sent) == 1 and self._sent[0].is_grade:
            reason = f"the task worker {what} while grading"
            return self._replace(now, Outcome(self._sent[0].message.trajectory, verdict=verdict, reason=reason))
        self._deaths += 1
        if self._deaths > MAX_DEATHS:
            at = self.waiting_for() or "a request"
            self._give_up(f"lost {self._deaths} times in a row while waiting for {at}: it {what}")
        return self._replace(now, None)

    def _replace(self, now: float, outcome: Outcome | None) -> list[Outcome]:
        """Start the worker again. `outcome` closes the first request; the others are sent once more."""
        assert self._worker is not None
        self._worker.kill()
        outcomes = self._close_first(outcome) if outcome is not None else []
        for request in self._sent:
            request.suspected = True
        self._queue.extendleft(request for request in reversed(self._sent) if request.wanted)
        self._sent.clear()
        self.restarts += 1
        self.start(now)
        return outcomes

    def _give_up(self, text: str) -> NoReturn:
        assert self._worker is not None
        self._worker.kill()
        self._worker = None
        raise EngineError(f"task worker: {text} (its log: {self._log_path})")

    def _send(self, now: float) -> None:
        assert self._worker is not None
        while self.up is not None and self._queue and self._has_room():
            request = self._queue.popleft()
            if not self._sent:
                self._since_s = now
            self._sent.append(request)
            try:
                self._worker.send(request.message)
            except ChannelClosed:
                return  # the next poll finds out

    def _has_room(self) -> bool:
        together = [*self._sent, self._queue[0]]
        if len(together) == 1:
            return True
        if len(together) > _AHEAD or any(request.suspected for request in together):
            return False
        return sum(request.response_bytes for request in together) <= _AHEAD_BYTES
