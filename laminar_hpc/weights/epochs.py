"""Which losses concern a rank, as far as it has heard: what it asks carries the last one, what it is asked with less is void."""

from __future__ import annotations


class Epochs:
    """The epoch of the last loss that concerned this rank and another one: `epochs[rank]`, 0 where there was none.

    Epochs count losses (protocol.peer.Lost). A rank that was lost throws away what was asked of it, or by it, before: so both
    have to know of a loss, whoever was lost, and whether there was anything between them or not yet.
    """

    def __init__(self) -> None:
        self._of: dict[int, int] = {}
        self._own = 0

    def __getitem__(self, rank: int) -> int:
        return max(self._own, self.of(rank))

    def of(self, rank: int) -> int:
        """The epoch of the last loss of `rank` itself."""
        return self._of.get(rank, 0)

    def lost(self, rank: int, epoch: int) -> None:
        """Another rank was lost."""
        self._of[rank] = max(epoch, self.of(rank))

    def begin_anew(self, epoch: int) -> None:
        """This one was lost, and the others have gone on without it."""
        self._own = max(epoch, self._own)
