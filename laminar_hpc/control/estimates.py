"""What the job has shown so far of decode steps, of prefill and of lengths: what a repack's gain is reckoned from.

Nothing is measured on purpose. A rollout whose queue is empty says between two streams how many tokens its trajectories have
gained, so how many steps it made in that time; a move shows how long its tokens took to be read again; and every response
that ends is a length.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence

KEPT = 1.0 - 1.0 / 5000.0
"""What a sample still weighs after the next one: about 5,000 of them count, a minute of twenty rollouts."""

FEWEST_SAMPLES = 10

LENGTHS = 4096
"""How many lengths of responses are kept, the newest ones."""

PRECISION = 256
"""Expected lengths are told to this part of the greatest one."""


class Estimates:
    """Estimates of times and lengths; all times in seconds."""

    def __init__(self, longest_tokens: int) -> None:
        """`longest_tokens` is where a response is cut."""
        self._longest = longest_tokens
        self._samples = 0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._prefill_s = 0.0
        self._prefill_tokens = 0
        self._lengths: deque[int] = deque()
        self._sorted: list[int] = []

    # --- decode steps -----------------------------------------------------------------------------------------------

    def note_steps(self, trajectories: float, steps: int, seconds: float) -> None:
        """A rollout that had so many trajectories made so many steps in this time."""
        self._samples += 1
        self._weight = KEPT * self._weight + steps
        self._x = KEPT * self._x + steps * trajectories
        self._y = KEPT * self._y + seconds
        self._xx = KEPT * self._xx + steps * trajectories * trajectories
        self._xy = KEPT * self._xy + seconds * trajectories

    @property
    def known(self) -> bool:
        """Whether there are samples enough, and of different batches, to say how long a step takes."""
        return self._samples >= FEWEST_SAMPLES and self._spread > 1e-6 * self._xx and self._y > 0.0

    @property
    def _spread(self) -> float:
        return self._xx - self._x * self._x / self._weight

    def step_s(self, trajectories: int) -> float:
        """Seconds of a decode step: the line of least squares, neither falling nor below zero. Only where it is `known`."""
        slope = max(0.0, (self._xy - self._x * self._y / self._weight) / self._spread)
        first = (self._y - slope * self._x) / self._weight
        if first < 0.0:
            return self._xy / self._xx * trajectories
        return first + slope * trajectories

    # --- prefill ----------------------------------------------------------------------------------------------------

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """So many tokens were read again in this time."""
        self._prefill_tokens += tokens
        self._prefill_s += seconds

    def prefill_token_s(self, batch: int) -> float:
        """Seconds that one token of a prefill takes. Only where steps are `known`.

        Before the first move has shown it: a step of `batch` trajectories, where decoding is about to be bound by compute,
        as much as a prefill is, has as many tokens. That is too much rather than too little.
        """
        if self._prefill_tokens == 0:
            return self.step_s(batch) / batch
        return self._prefill_s / self._prefill_tokens

    # --- lengths ----------------------------------------------------------------------------------------------------

    def note_length(self, tokens: int) -> None:
        """A response has ended with so many tokens."""
        if len(self._lengths) == LENGTHS:
            oldest = self._lengths.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._lengths.append(tokens)
        insort(self._sorted, tokens)

    def steps_left(self, responses: Sequence[int]) -> int:
        """After how many steps the last of these responses, given by the tokens that they have, has probably ended.

        A response of n tokens goes on for more than x with the probability p(n, x): the share of those longer than n + x
        among those longer than n. The greatest length counts as one more response: while nothing has ended yet, that is all
        that is known, and what ends first is short. The answer is the median of the maximum: the x for which the p add up to
        ln 2, since then none goes on with a probability of about exp(-ln 2), a half (the law of rare events).
        """
        lengths, count = self._sorted, len(self._sorted)
        longer = [(tokens, count - bisect_right(lengths, tokens) + 1) for tokens in responses]
        low, high = 0, max((self._longest - tokens for tokens in responses), default=0)
        while high - low > max(1, self._longest // PRECISION):
            middle = (low + high) // 2
            going_on = 0.0
            for tokens, among in longer:
                end = tokens + middle
                if end < self._longest:
                    going_on += (count - bisect_right(lengths, end) + 1) / among
            if going_on > math.log(2.0):
                low = middle
            else:
                high = middle
        return max(0, high)
