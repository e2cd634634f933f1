"""A distribution whose every event a test writes down itself."""

from __future__ import annotations

from laminar_hpc.control.distribution import Distribution
from laminar_hpc.control.relays import Relays
from laminar_hpc.protocol.commands import (
    Attach,
    Broadcast,
    Command,
    Drop,
    EndJob,
    Forget,
    Readmit,
    Release,
    Sever,
    Share,
    TakeOver,
)
from laminar_hpc.protocol.events import (
    LinkStalled,
    RankHeard,
    RankLost,
    RelayHolds,
    RelayReady,
    RolloutReady,
    SpareReady,
)

SHARES = [Share(1, b"digests."), Share(2, b"of more.")]


def brief(commands: list[Command]) -> list[tuple]:
    """The commands without their reasons, which there have to be."""
    found: list[tuple] = []
    for command in commands:
        assert command.reason
        match command:
            case Broadcast():
                assert command.shares == SHARES
                found.append(("broadcast", command.version, command.chain))
            case Drop():
                found.append(("drop", command.version))
            case Release():
                found.append(("release", command.version))
            case Forget():
                found.append(("forget", command.rank))
            case Sever():
                found.append(("sever", command.source, command.rank))
            case TakeOver():
                found.append(("take over", command.rank))
            case Readmit():
                found.append(("readmit", command.rank, command.incarnation))
            case Attach():
                found.append(("attach", command.rank, command.relay, "remote" if command.remote else "home"))
            case EndJob():
                found.append(("end", command.outcome))
            case _:
                raise AssertionError(f"a distribution does not give {command}")
    return found


class Tier:
    """Relays with the ranks given, relay r on node "nr"; all have reported. What a test is told is brief."""

    def __init__(
        self, *ranks: int, switches: dict[str, str] | None = None, trainer_nodes: tuple[str, ...] = ()
    ) -> None:
        self.now = 0.0
        self.incarnation = dict.fromkeys(ranks, 0)
        self.distribution = Distribution(Relays(len(ranks), trainer_nodes, switches), stall_s=5.0)
        for rank in ranks:
            assert self.ready(rank) == []

    def ready(self, rank: int, node: str | None = None) -> list[tuple]:
        event = RelayReady(rank, self.incarnation.setdefault(rank, 0), node or f"n{rank}")
        return brief(self.distribution.relay_ready(event, self.now))

    def spare(self, rank: int, node: str) -> list[tuple]:
        return brief(self.distribution.spare_ready(SpareReady(rank, 0, node)))

    def rollout(self, rank: int, relay: int, incarnation: int = 0) -> list[tuple]:
        """A rollout on the node of `relay` reports."""
        return brief(self.distribution.rollout_ready(RolloutReady(rank, incarnation, f"n{relay}", relay, 4)))

    def published(self, version: int) -> list[tuple]:
        return brief(self.distribution.published(version, SHARES, self.now))

    def holds(self, version: int, *ranks: int) -> list[tuple]:
        """These relays hold a version, one after the other; what follows from all that."""
        found = []
        for rank in ranks:
            event = RelayHolds(rank, self.incarnation[rank], version, 0.1, b"image 8.")
            found += brief(self.distribution.relay_holds(event, self.now))
        return found

    def lose(self, rank: int) -> list[tuple]:
        return brief(self.distribution.relay_lost(RankLost(rank, self.incarnation.get(rank, 0), "killed"), self.now))

    def stall(self, rank: int, source: int, version: int) -> list[tuple]:
        return brief(
            self.distribution.link_stalled(LinkStalled(rank, self.incarnation[rank], version, source), self.now)
        )

    def hear(self, rank: int) -> list[tuple]:
        """A lost rank speaks; what it says from now on is of the incarnation that it is given, if it is."""
        found = brief(self.distribution.rank_heard(RankHeard(rank, self.incarnation.get(rank, 0))))
        for what, *fields in found:
            if what == "readmit":
                self.incarnation[fields[0]] = fields[1]
        return found
