"""The weight versions: from announcement to the relays.

    ANNOUNCED (`Publish` is out) -> PUBLISHED (every trainer holds its share) -> BROADCAST (the relays fetch it)
    -> RELEASED (the master relay holds it, trainers may reuse the memory)

Invariants: an id is given once, counts up by one, and stands for one (attempt, step). At most the newest version is not
published yet. The shares of a published version join without gap or overlap. Versions become PUBLISHED in order of id.
"""

from __future__ import annotations

import msgspec

from laminar_hpc.errors import ProtocolError
from laminar_hpc.protocol.commands import Broadcast, Share
from laminar_hpc.protocol.peer import DIGEST_BYTES
from laminar_hpc.weights.reshard import check_shares


class Version(msgspec.Struct, eq=False):
    """One version; `shares` are by trainer rank, with their digests, and are dropped after the broadcast."""

    id: int
    attempt: int
    step: int
    shares: dict[int, tuple[Share, bytes]] = {}
    published: bool = False
    broadcast: bool = False
    released: bool = False


class Versions:
    """Gives version ids out and follows each version."""

    def __init__(self, attempt: int, first_version: int, trainers: int) -> None:
        self._attempt = attempt
        self._first = first_version
        self._trainers = trainers
        self._versions: list[Version] = []
        self.newest_published: int | None = None
        """The newest version that every trainer holds (None: none yet)."""

    def __getitem__(self, id: int) -> Version:
        return self._versions[id - self._first]

    def __contains__(self, id: int) -> bool:
        return 0 <= id - self._first < len(self._versions)

    @property
    def newest(self) -> Version | None:
        """The version announced last."""
        return self._versions[-1] if self._versions else None

    @property
    def settled(self) -> bool:
        """Whether all announced versions are published, and there is one."""
        return self.newest is not None and self.newest.published

    def announce(self, step: int) -> Version:
        """A new version: the weights after `step`."""
        assert not self._versions or self.settled, "one publication at a time"
        version = Version(self._first + len(self._versions), self._attempt, step)
        self._versions.append(version)
        return version

    def publish(self, id: int, rank: int, first_chunk: int, digests: bytes) -> bool:
        """Trainer `rank` holds its share. True where this made the version complete; a repeated message changes nothing."""
        if id not in self:
            raise ProtocolError(f"rank {rank} (trainer) published version {id}, which was never announced")
        version = self[id]
        if version.published or rank in version.shares:
            return False
        if len(digests) % DIGEST_BYTES:
            raise ProtocolError(f"rank {rank} (trainer) published version {id} with {len(digests)} bytes of digests")
        version.shares[rank] = (Share(rank, first_chunk, len(digests) // DIGEST_BYTES), digests)
        if len(version.shares) < self._trainers:
            return False
        self._check_shares(version)
        version.published = True
        self.newest_published = id
        return True

    def _check_shares(self, version: Version) -> None:
        shares = [share for share, _ in version.shares.values()]
        try:
            check_shares(shares, sum(share.chunks for share in shares))
        except ProtocolError as error:
            raise ProtocolError(f"version {version.id}: {error}") from error

    def missing_trainers(self, version: Version, ranks: list[int]) -> list[int]:
        """Those of the trainers `ranks` that have not published their share of `version`."""
        return [rank for rank in ranks if rank not in version.shares]

    def broadcasts(self, chain: list[int]) -> list[Broadcast]:
        """The commands that send all published versions on their way which are not yet, oldest first."""
        waiting: list[Version] = []
        for version in reversed(self._versions):
            if version.broadcast:
                break
            if version.published:
                waiting.append(version)
        return [self._broadcast(version, chain) for version in reversed(waiting)]

    def _broadcast(self, version: Version, chain: list[int]) -> Broadcast:
        ordered = _in_chunk_order(version)
        shares = [share for share, _ in ordered]
        digests = b"".join(part for _, part in ordered)
        version.broadcast = True
        version.shares = {}
        reason = f"all {self._trainers} trainers hold their share, {len(digests) // DIGEST_BYTES} chunks in all"
        return Broadcast(reason, version.id, chain, shares, digests)


def _in_chunk_order(version: Version) -> list[tuple[Share, bytes]]:
    """The shares with something in them, first chunk first."""
    filled = (item for item in version.shares.values() if item[0].chunks)
    return sorted(filled, key=lambda item: item[0].first_chunk)
