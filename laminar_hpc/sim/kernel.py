"""Virtual time: what is to happen when, and in which order where it happens at once.

What is due at the same moment happens in the order in which it was asked for, or, with `reverse_ties`, in the opposite one:
nothing that matters may depend on it. Messages of one lane, from one rank to another, arrive in the order in which they were
sent all the same, as MPI has it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable

Action = Callable[[], object]


class Timer:
    """Something that is to happen; `cancel` keeps it from happening."""

    def __init__(self, action: Action) -> None:
        self._action: Action | None = action

    def cancel(self) -> None:
        """It will not happen; nothing changes where it has."""
        self._action = None

    def fire(self) -> None:
        """Its time has come."""
        action, self._action = self._action, None
        if action is not None:
            action()


class Kernel:
    """The clock of a simulation. `now` is in seconds and never goes back."""

    def __init__(self, *, reverse_ties: bool = False) -> None:
        self.now = 0.0
        self.happened = 0
        """How many things have happened so far."""
        self._step = -1 if reverse_ties else 1
        self._order = 0
        self._heap: list[tuple[float, int, Action]] = []
        self._lanes: dict[Hashable, deque[Action]] = {}
        self._stopped = False

    def at(self, time_s: float, action: Action) -> Timer:
        """Have `action` called at `time_s`, or now where that has passed."""
        timer = Timer(action)
        self._push(time_s, timer.fire)
        return timer

    def send(self, lane: Hashable, action: Action) -> None:
        """Have `action` called now, after all that is under way, and after what was sent on this lane before."""
        waiting = self._lanes.setdefault(lane, deque())
        waiting.append(action)
        self._push(self.now, lambda: waiting.popleft()())

    def run(self) -> None:
        """Until nothing is left to happen, or `stop`."""
        while self._heap and not self._stopped:
            self.now, _, action = heapq.heappop(self._heap)
            self.happened += 1
            action()

    def stop(self) -> None:
        """Nothing happens any more."""
        self._stopped = True

    def _push(self, time_s: float, action: Action) -> None:
        self._order += self._step
        heapq.heappush(self._heap, (max(time_s, self.now), self._order, action))
