"""The experience buffer: training groups whose trajectories have all finished, until a batch takes them.

    (in flight) -> BUFFERED -> taken by a batch, or evicted with a reason

Invariants: a group is in the buffer at most once, and leaves it at most once. Candidates keep the order in which they
finished. If `evict` is called after every publication, the buffer never has more, or older groups, than the eviction allows.
"""

from __future__ import annotations

from collections.abc import Sequence

from laminar_hpc.policy.sampling import Candidate, Evicted, Eviction, Sampler


class Buffer:
    """Finished groups; what is taken and what is thrown away is decided by two policies."""

    def __init__(self, sampler: Sampler, eviction: Eviction) -> None:
        self._sampler = sampler
        self._eviction = eviction
        self._candidates: dict[int, Candidate] = {}

    def __len__(self) -> int:
        return len(self._candidates)

    def add(self, candidate: Candidate, newest_step: int) -> list[Evicted]:
        """A group has finished; what goes for that, perhaps itself."""
        assert candidate.group not in self._candidates, f"group {candidate.group} is in the buffer already"
        self._candidates[candidate.group] = candidate
        return self.evict(newest_step)

    @property
    def candidates(self) -> list[Candidate]:
        """What is in the buffer, in the order in which it finished."""
        return list(self._candidates.values())

    def restore(self, candidates: list[Candidate]) -> None:
        """Take over what was in the buffer of an earlier attempt."""
        self._candidates = {candidate.group: candidate for candidate in candidates}

    def __contains__(self, group: int) -> bool:
        return group in self._candidates

    def take(self, count: int, newest_step: int, pressing: Sequence[int] = ()) -> list[int]:
        """`count` groups for a step, no longer in the buffer: the `pressing` ones, which are in it, before all others."""
        first = dict.fromkeys(pressing[:count])
        others = [one for one in self._candidates.values() if one.group not in first]
        groups = [*first, *self._sampler.choose(others, count - len(first), newest_step)]
        for group in groups:
            del self._candidates[group]
        return groups

    def evict(self, newest_step: int) -> list[Evicted]:
        """What goes now, since a publication has made it older, no longer in the buffer."""
        evicted = self._eviction.evict(self._candidates.values(), newest_step)
        for item in evicted:
            del self._candidates[item.group]
        return evicted
