"""Which replica takes which trajectory of a mini-batch, and which trainers make up a replica."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balance(tokens: Sequence[int], replicas: int) -> list[int]:
    """The replica (0 first) of each trajectory, such that the replicas' sums of `tokens` are close.

    Longest first, each to the replica with the least so far: the largest sum is at most 4/3 - 1/(3 * replicas) of the best
    possible one (Graham, Bounds on Multiprocessing Timing Anomalies, 1969). Ties go to the earlier trajectory and the
    lower replica, so the answer depends on the arguments alone.
    """
    loads = [(0, replica) for replica in range(replicas)]
    chosen = [0] * len(tokens)
    for place in sorted(range(len(tokens)), key=lambda place: -tokens[place]):
        load, replica = loads[0]
        chosen[place] = replica
        heapq.heapreplace(loads, (load + tokens[place], replica))
    return chosen


def replica_of(trainer: int, tensor_parallel: int, replicas: int) -> int:
    """The replica (0 first) that trainer number `trainer` (0 first) is a shard of.

    Trainers are numbered as Megatron-core numbers ranks by default ("tp-cp-ep-dp-pp"): the tensor-parallel place runs
    fastest, then the replica, then the pipeline stage.
    """
    return trainer // tensor_parallel % replicas
