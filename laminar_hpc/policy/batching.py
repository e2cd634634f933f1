"""Continuous batching as an inference engine does it, in emulated time: who runs, who waits, and when each step ends.

    WAITING (in order of arrival) -> RUNNING (in order of admission) -> ended
        ^                               |
        +----------- preempted ---------+

Time passes in decode steps. Before each, as in vLLM's scheduler: while the cache has no room for one more token of every
running trajectory, the newest running one is preempted, loses all its keys and values, and becomes the first of those that
wait; where none had to be, the first ones that wait are admitted, as long as there is a slot and room for them and for one
more token of all. They are prefilled in the same step, whole, with what they had generated before.

A step that has begun ends when it was going to, whoever comes or goes meanwhile. Nothing here waits: `advance` is told up
to when, and steps that are all alike cost no more than one.
"""

from __future__ import annotations

import heapq
import math
from collections import deque

import msgspec

from laminar_hpc.policy.costs import Costs


class EndedAt(msgspec.Struct, frozen=True):
    """A trajectory that came at `came_s` had its last token at `ended_s`."""

    trajectory: int
    came_s: float
    ended_s: float


class _Member(msgspec.Struct, eq=False):
    """A trajectory. `context_tokens` (prompt and response so far) and `left_tokens` are as of step `since`, while it runs."""

    trajectory: int
    came_s: float
    context_tokens: int
    left_tokens: int
    since: int = 0
    admission: int = 0


class Batch:
    """The trajectories of one emulated engine. All times are seconds of one clock that never goes back.

    Invariant: after `advance(t)` nobody is here, or a step is under way that began at or before t and ends after it.
    """

    def __init__(self, costs: Costs, capacity_tokens: int, slots: int) -> None:
        """`capacity_tokens` is the room of the KV cache, `slots` how many trajectories run at most."""
        self._costs = costs
        self._capacity = capacity_tokens
        self._slots = slots
        self._members: dict[int, _Member] = {}
        self._waiting: deque[_Member] = deque()
        self._running: dict[int, _Member] = {}  # the newest one last
        self._ends: list[tuple[int, int, int]] = []  # heap: the step after which one ends, its admission, who
        self._offset = 0  # what context_tokens - since add up to
        self._steps = 0
        self._admissions = 0
        self._at_s = 0.0  # when the last step ended
        self._step_s: float | None = None  # how long the one under way takes; None: it is not settled yet
        self._alike = 0  # so many steps from there on are like it, if nobody comes or goes
        self.preemptions = 0
        self.prefilled_tokens = 0
        self.generated_tokens = 0

    @property
    def running(self) -> int:
        """How many trajectories have a place."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """How many have none."""
        return len(self._waiting)

    @property
    def used_tokens(self) -> int:
        """Tokens in the KV cache: prompts and responses of all that run."""
        return self._offset + self._steps * len(self._running)

    @property
    def due_s(self) -> float:
        """When the next change comes if nobody comes or goes: an end, a preemption, an admission; infinite where nobody is."""
        if self._step_s is None:
            return self._at_s if self._running or self._waiting else math.inf
        return self._at_s + self._alike * self._step_s

    def left_tokens(self, trajectory: int) -> int:
        """Tokens that a trajectory has still to come after the last whole step; KeyError where it is not here."""
        member = self._members[trajectory]
        return member.left_tokens - (self._steps - member.since if trajectory in self._running else 0)

    def lefts(self) -> list[tuple[int, int]]:
        """Each trajectory that runs, with what `left_tokens` says of it."""
        steps = self._steps
        return [(one.trajectory, one.left_tokens - steps + one.since) for one in self._running.values()]

    def add(self, trajectory: int, context_tokens: int, left_tokens: int, now_s: float) -> None:
        """A trajectory comes: prompt and response so far have `context_tokens`, and `left_tokens`, at least 1, are to come.

        Together they fit into the cache. `advance` has been told of `now_s`.
        """
        assert left_tokens >= 1
        assert context_tokens + left_tokens <= self._capacity
        if not self._running and not self._waiting:
            self._at_s = max(self._at_s, now_s)
        member = _Member(trajectory, now_s, context_tokens, left_tokens)
        self._members[trajectory] = member
        self._waiting.append(member)
        self._alike = min(self._alike, 1)

    def remove(self, trajectory: int) -> None:
        """A trajectory goes; nothing happens where it is not here."""
        member = self._members.pop(trajectory, None)
        if member is None:
            return
        if trajectory in self._running:
            self._stop(member)
        else:
            self._waiting.remove(member)
        self._alike = min(self._alike, 1)
        if not self._running and not self._waiting:
            self._step_s = None

    def advance(self, until_s: float) -> list[EndedAt]:
        """All steps that end by `until_s`, and who has ended in them, in order."""
        ended: list[EndedAt] = []
        while self._step_s is not None or self._begin_step():
            assert self._step_s is not None
            steps = min(self._alike, math.floor((until_s - self._at_s) / self._step_s + 1e-9))
            if steps <= 0:
                break
            self._steps += steps
            self.generated_tokens += steps * len(self._running)
            self._at_s += steps * self._step_s
            self._step_s = None
            ended += self._leave_ended()
        return ended

    def _begin_step(self) -> bool:
        """Settle who is in the next step, and how long it takes; false where nobody is here."""
        if not self._running and not self._waiting:
            return False
        prefill = 0 if self._preempt() else self._admit()
        batch = len(self._running)
        self._step_s = self._costs.step_s(batch) + self._costs.prefill_s(prefill)
        self._alike = 1 if prefill else min(self._next_end() - self._steps, self._free() // batch)
        return True

    def _free(self) -> int:
        return self._capacity - self.used_tokens

    def _preempt(self) -> bool:
        """Take places from the newest ones until one more token of all others fits; whether there was any."""
        before = self.preemptions
        while len(self._running) > self._free():
            member = self._running[next(reversed(self._running))]
            self._stop(member)
            self._waiting.appendleft(member)
            self.preemptions += 1
        return self.preemptions > before

    def _admit(self) -> int:
        """Give places to the first ones that wait; the tokens to prefill."""
        prefill = 0
        while self._waiting and len(self._running) < self._slots:
            member = self._waiting[0]
            if member.context_tokens + len(self._running) + 1 > self._free():
                break
            self._waiting.popleft()
            self._start(member)
            prefill += member.context_tokens
        self.prefilled_tokens += prefill
        return prefill

    def _start(self, member: _Member) -> None:
        self._admissions += 1
        member.since, member.admission = self._steps, self._admissions
        self._running[member.trajectory] = member
        self._offset += member.context_tokens - member.since
        heapq.heappush(self._ends, (self._steps + member.left_tokens, member.admission, member.trajectory))

    def _stop(self, member: _Member) -> None:
        del self._running[member.trajectory]
        self._offset -= member.context_tokens - member.since
        steps = self._steps - member.since
        member.context_tokens += steps
        member.left_tokens -= steps

    def _next_end(self) -> int:
        """The step after which the next one of those that run ends."""
        while self._is_void(*self._ends[0][1:]):
            heapq.heappop(self._ends)
        return self._ends[0][0]

    def _is_void(self, admission: int, trajectory: int) -> bool:
        """Whether that one has lost its place since."""
        member = self._running.get(trajectory)
        return member is None or member.admission != admission

    def _leave_ended(self) -> list[EndedAt]:
        ended = []
        while self._running and self._next_end() == self._steps:
            member = self._members.pop(heapq.heappop(self._ends)[2])
            self._stop(member)
            ended.append(EndedAt(member.trajectory, member.came_s, self._at_s))
        return ended
