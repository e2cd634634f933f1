"""The weight versions: from announcement to publication; the way from there to the relays is in distribution.py.

    ANNOUNCED (`Publish` is out) -> PUBLISHED (every trainer holds its shard)

Invariants: an id is given once, counts up by one within an attempt, and stands for one (attempt, step). At most the newest
version is not published yet. Versions become PUBLISHED in order of id. Those of earlier attempts are known where something
that they generated is still there.
"""

from __future__ import annotations

import msgspec

from laminar_hpc.errors import ProtocolError
from laminar_hpc.policy.staleness import staleness
from laminar_hpc.protocol.commands import Share
from laminar_hpc.protocol.peer import DIGEST_BYTES


class Version(msgspec.Struct, eq=False):
    """One version; `digests` are those of each trainer's shard, by rank, until all are there and taken."""

    id: int
    attempt: int
    step: int
    digests: dict[int, bytes] = {}
    published: bool = False


class Versions:
    """Gives version ids out and follows each version."""

    def __init__(self, attempt: int, first_version: int, trainers: int) -> None:
        self._attempt = attempt
        self._first = first_version
        self._trainers = trainers
        self._versions: dict[int, Version] = {}
        self._announced = 0
        self.newest_published: int | None = None
        """The newest version that every trainer holds (None: none yet)."""

    def __getitem__(self, id: int) -> Version:
        return self._versions[id]

    def __contains__(self, id: int) -> bool:
        return id in self._versions

    @property
    def newest(self) -> Version | None:
        """The version announced last, in this attempt."""
        return self._versions[self._first + self._announced - 1] if self._announced else None

    @property
    def newest_step(self) -> int:
        """The step of the newest version that is published."""
        assert self.newest_published is not None, "nothing is published yet"
        return self._versions[self.newest_published].step

    def staleness(self, id: int) -> int:
        """How much newer than version `id` the newest published one is (policy/staleness.py)."""
        return staleness(self._versions[id].step, self.newest_step)

    @property
    def settled(self) -> bool:
        """Whether all announced versions are published, and there is one."""
        return self.newest is not None and self.newest.published

    @property
    def known(self) -> list[Version]:
        """All versions, older attempts' first."""
        return list(self._versions.values())

    def remember(self, versions: list[Version]) -> None:
        """Versions of earlier attempts, which something is left of. Before the first one is announced."""
        assert not self._announced, "the attempt has versions of its own already"
        self._versions.update((version.id, version) for version in versions)

    def announce(self, step: int) -> Version:
        """A new version: the weights after `step`."""
        assert not self._announced or self.settled, "one publication at a time"
        version = Version(self._first + self._announced, self._attempt, step)
        self._announced += 1
        self._versions[version.id] = version
        return version

    def publish(self, id: int, rank: int, digests: bytes) -> list[Share] | None:
        """Trainer `rank` holds its shard, with these digests (none where verification is off).

        All shares, by rank, where this made the version complete; else None. A repeated message changes nothing. That the
        shards cover the image is checked where they are described, once (weights/reshard.py).
        """
        if id not in self:
            raise ProtocolError(f"rank {rank} (trainer) published version {id}, which was never announced")
        version = self[id]
        if version.published or rank in version.digests:
            return None
        if len(digests) % DIGEST_BYTES:
            raise ProtocolError(f"rank {rank} (trainer) published version {id} with {len(digests)} bytes of digests")
        version.digests[rank] = digests
        if len(version.digests) < self._trainers:
            return None
        shares = [Share(rank, digests) for rank, digests in sorted(version.digests.items())]
        version.published, version.digests = True, {}
        self.newest_published = id
        return shares

    def missing_trainers(self, version: Version, ranks: list[int]) -> list[int]:
        """Those of the trainers `ranks` that have not published their shard of `version`."""
        return [] if version.published else [rank for rank in ranks if rank not in version.digests]
