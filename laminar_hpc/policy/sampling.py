"""Which finished groups a step takes, and which are thrown away unused."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable
from itertools import islice
from typing import Protocol

import msgspec

from laminar_hpc.errors import ConfigError
from laminar_hpc.policy.keyed import HASH_BITS, stable_hash
from laminar_hpc.policy.staleness import staleness

SAMPLERS = ("fifo", "freshest", "weighted")
EVICTIONS = ("none", "stale", "wait")


class Candidate(msgspec.Struct, frozen=True):
    """A finished group, as samplers and evictions see it; the weights after `step` generated it."""

    group: int
    step: int
    finished_s: float


class Evicted(msgspec.Struct, frozen=True):
    """A group that is thrown away, and why."""

    group: int
    reason: str


class Sampler(Protocol):
    """Chooses the groups of a step."""

    def choose(self, candidates: Iterable[Candidate], count: int, newest_step: int) -> list[int]:
        """`count` groups out of at least as many candidates, which come in the order in which they finished."""


class Fifo:
    """First finished, first taken."""

    def choose(self, candidates: Iterable[Candidate], count: int, newest_step: int) -> list[int]:
        """The first `count` of the candidates."""
        return [candidate.group for candidate in islice(candidates, count)]


class FreshestFirst:
    """Those of the newest weights; of equals the first finished."""

    def choose(self, candidates: Iterable[Candidate], count: int, newest_step: int) -> list[int]:
        """The `count` candidates of the newest weights."""
        return [one.group for one in heapq.nsmallest(count, candidates, key=lambda one: -one.step)]


class StalenessWeighted:
    """At random, without replacement: each group is `half_life` versions of staleness half as likely as one without.

    After Efraimidis and Spirakis (Weighted random sampling with a reservoir, 2006): with weight w and u uniform in (0, 1), those
    with the largest u ** (1 / w) are such a sample; here by the logarithm of -log(u) / w, which has no underflow.
    """

    def __init__(self, half_life: float, seed: int) -> None:
        """`half_life` is in versions, over 0. What is drawn depends on `seed`, group and newest step alone."""
        self._half_life = half_life
        self._seed = seed

    def choose(self, candidates: Iterable[Candidate], count: int, newest_step: int) -> list[int]:
        """A sample of `count` candidates, the first drawn first."""

        def key(candidate: Candidate) -> float:
            uniform = (stable_hash(self._seed, "sampler", candidate.group, newest_step) + 0.5) / 2**HASH_BITS
            age = staleness(candidate.step, newest_step)
            return math.log(-math.log(uniform)) + age / self._half_life * math.log(2.0)

        return [candidate.group for candidate in heapq.nsmallest(count, candidates, key=key)]


class Eviction(msgspec.Struct, frozen=True):
    """Throws away finished groups staler than `above` versions, and the stalest of more than `capacity` (None: no limit)."""

    above: int | None = None
    capacity: int | None = None

    def evict(self, candidates: Collection[Candidate], newest_step: int) -> list[Evicted]:
        """Those of the candidates, in the order in which they finished, to throw away now."""
        evicted, kept = [], []
        for candidate in candidates:
            age = staleness(candidate.step, newest_step)
            if self.above is not None and age > self.above:
                evicted.append(Evicted(candidate.group, f"{age} versions old in the buffer, at most {self.above}"))
            else:
                kept.append(candidate)
        if self.capacity is not None:
            reason = f"the buffer has room for {self.capacity} groups, and this is the stalest"
            stalest = heapq.nsmallest(len(kept) - self.capacity, kept, key=lambda one: one.step)
            evicted += [Evicted(candidate.group, reason) for candidate in stalest]
        return evicted


def make_sampler(name: str, half_life: float = 1.0, seed: int = 0) -> Sampler:
    """The sampler called `name`; ConfigError where there is none."""
    match name:
        case "fifo":
            return Fifo()
        case "freshest":
            return FreshestFirst()
        case "weighted":
            return StalenessWeighted(half_life, seed)
    raise ConfigError(f"control.sampler: must be one of {', '.join(SAMPLERS)}, got {name!r}")


def make_eviction(name: str, max_staleness: int, capacity: int = 0) -> Eviction:
    """The eviction called `name`, beside that for want of room (0: none); ConfigError where there is none of that name."""
    if name not in EVICTIONS:
        raise ConfigError(f"control.eviction: must be one of {', '.join(EVICTIONS)}, got {name!r}")
    return Eviction(max_staleness if name == "stale" else None, capacity or None)
