"""How often what has failed is started again, and how soon."""

from __future__ import annotations

from collections import deque

WINDOW_S = 600.0
"""Losses further back than this count no longer."""

LONGEST_BACK_OFF_S = 30.0


class RestartLimit:
    """Allows `most` losses within `WINDOW_S`: the first is made good at once, each further one after twice as long."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._losses: deque[float] = deque()

    def lost(self, now: float) -> float | None:
        """Something was lost at `now` (s, never less than before): seconds to wait before it is started again.

        None where it was lost too often.
        """
        while self._losses and self._losses[0] < now - WINDOW_S:
            self._losses.popleft()
        self._losses.append(now)
        losses = len(self._losses)
        if losses > self.most:
            return None
        return 0.0 if losses == 1 else min(2.0 ** (losses - 1), LONGEST_BACK_OFF_S)
