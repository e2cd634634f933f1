"""Which trainer takes which trajectory of a mini-batch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balance(tokens: Sequence[int], trainers: int) -> list[int]:
    """The trainer (0 first) of each trajectory, such that the trainers' sums of `tokens` are close.

    Longest first, each to the trainer with the least so far: the largest sum is at most 4/3 - 1/(3 * trainers) of the best
    possible one (Graham, Bounds on Multiprocessing Timing Anomalies, 1969). Ties go to the earlier trajectory and the
    lower trainer, so the answer depends on the arguments alone.
    """
    loads = [(0, trainer) for trainer in range(trainers)]
    chosen = [0] * len(tokens)
    for place in sorted(range(len(tokens)), key=lambda place: -tokens[place]):
        load, trainer = loads[0]
        chosen[place] = trainer
        heapq.heapreplace(loads, (load + tokens[place], trainer))
    return chosen
