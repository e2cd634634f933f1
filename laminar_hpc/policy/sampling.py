"""Which finished groups a step takes, and which are thrown away unused."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Protocol

import msgspec

from laminar_hpc.errors import ConfigError
from laminar_hpc.policy.staleness import staleness


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

    def choose(self, candidates: Iterable[Candidate], count: int) -> list[int]:
        """`count` groups out of at least as many candidates, which come in the order in which they finished."""


class Eviction(Protocol):
    """Throws finished groups away, each for what it is itself: what else is in the buffer does not matter."""

    @property
    def above(self) -> int | None:
        """The staleness above which a group goes (None: staleness does not matter)."""

    def evict(self, candidates: Iterable[Candidate], newest_step: int) -> list[Evicted]:
        """Those of the candidates to throw away now."""


class Fifo:
    """First finished, first taken."""

    def choose(self, candidates: Iterable[Candidate], count: int) -> list[int]:
        """The first `count` of the candidates."""
        return [candidate.group for candidate in islice(candidates, count)]


class KeepAll:
    """Nothing is thrown away."""

    above = None

    def evict(self, candidates: Iterable[Candidate], newest_step: int) -> list[Evicted]:
        """Nothing."""
        return []


class DropStale:
    """Groups older than `above` versions go."""

    def __init__(self, above: int) -> None:
        self.above = above

    def evict(self, candidates: Iterable[Candidate], newest_step: int) -> list[Evicted]:
        """The candidates that have become too old."""
        evicted = []
        for candidate in candidates:
            age = staleness(candidate.step, newest_step)
            if age > self.above:
                evicted.append(Evicted(candidate.group, f"{age} versions old in the buffer, at most {self.above}"))
        return evicted


def make_sampler(name: str) -> Sampler:
    """The sampler called `name`; ConfigError where there is none."""
    if name == "fifo":
        return Fifo()
    raise ConfigError(f"control.sampler: must be one of fifo, got {name!r}")


def make_eviction(name: str, max_staleness: int) -> Eviction:
    """The eviction called `name`; ConfigError where there is none."""
    if name in ("none", "wait"):
        return KeepAll()
    if name == "stale":
        return DropStale(max_staleness)
    raise ConfigError(f"control.eviction: must be one of none, stale, wait, got {name!r}")
