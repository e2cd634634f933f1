"""Versions that are loaded again: by a rollout whose engine was lost, for the trajectories that nobody else can go on with.

    (the last rollout that holds version v loses its engine) -> DUE (its trajectories wait, if any has tokens)
        -> ASKED (the engine is back: `Pull` of exactly v) -> it has v, and goes on with them
        -> over: its relay has v no more, or the rank is gone; then their groups start over

A relay keeps a version until it needs the slot (weights/image.py), which here nobody knows: it is asked. Waiting for the engine
is worth its while as soon as one token would have to be generated again: the whole group would, finished members included,
and no other rollout is kept from anything meanwhile.

Invariant: a rollout is waited for only while its rank lives and its engine is on its way, which its rank bounds, or while its
`Pull` is out, which a relay answers at once.
"""

from __future__ import annotations


class Reloads:
    """Which rollout is to load which version again."""

    def __init__(self) -> None:
        self._due: dict[int, int] = {}

    def due(self, rank: int) -> int | None:
        """The version that this rollout is to load again."""
        return self._due.get(rank)

    def expect(self, rank: int, version: int) -> None:
        """When its engine is back, this rollout loads `version` again."""
        self._due[rank] = version

    def end(self, rank: int) -> int | None:
        """This rollout has loaded what it was to load, or never will; which version that was (None: it was to load none)."""
        return self._due.pop(rank, None)

    def awaited(self, version: int) -> bool:
        """Whether there is a rollout that will, or may, load `version` again."""
        return version in self._due.values()
