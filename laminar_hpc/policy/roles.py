"""Which rank plays which role, from the node of each rank alone."""

from __future__ import annotations

from enum import Enum

import msgspec

from laminar_hpc.errors import ConfigError


class Role(str, Enum):
    """What a rank does."""

    MANAGER = "manager"
    TRAINER = "trainer"
    RELAY = "relay"
    ROLLOUT = "rollout"
    SPARE = "spare"


class Placement(msgspec.Struct, frozen=True):
    """The part of one rank: its role, its place among the ranks of that role (0 first), its node.

    `relay_rank` is the rank that a rollout pulls its weights from; it is on the same node (None for other roles).
    """

    role: Role
    index: int
    node: str
    relay_rank: int | None = None


def assign(node_of_rank: list[str], trainers: int, relays: int, rollouts: int, spares: int = 0) -> list[Placement]:
    """The placement of each rank, in rank order; `node_of_rank` has a key of the node of each rank.

    Rank 0 is the manager. Of the distinct nodes, in the order in which the ranks name them, the last `relays` are rollout
    nodes. On each of these the first free rank is its relay, the last `spares` ranks are its spares, and `rollouts / relays`
    ranks stay free for its rollouts. Trainers take the first ranks, in rank order, that are left by that. ConfigError, one
    line, where it does not add up.
    """
    rollout_nodes = _rollout_nodes(node_of_rank, trainers, relays, rollouts, spares)
    share = rollouts // relays
    surplus = _surplus(node_of_rank, rollout_nodes, share, spares)
    relay_of_node = _relays(node_of_rank, rollout_nodes)
    spare_ranks = _spares(node_of_rank, rollout_nodes, spares)
    roles = []
    for rank, node in enumerate(node_of_rank):
        if rank == 0:
            roles.append(Role.MANAGER)
        elif relay_of_node.get(node) == rank:
            roles.append(Role.RELAY)
        elif rank in spare_ranks:
            roles.append(Role.SPARE)
        elif node not in surplus:
            roles.append(Role.TRAINER)
        elif surplus[node] > 0:
            surplus[node] -= 1
            roles.append(Role.TRAINER)
        else:
            roles.append(Role.ROLLOUT)
    found = roles.count(Role.TRAINER)
    assert found == trainers, "the world size was checked and every rollout node has its share"
    return _number(roles, node_of_rank, relay_of_node)


def _rollout_nodes(node_of_rank: list[str], trainers: int, relays: int, rollouts: int, spares: int) -> list[str]:
    if relays < 1 or rollouts % relays:
        raise ConfigError(
            f"job.rollouts must be a multiple of job.relays, which is at least 1, got {rollouts} and {relays}"
        )
    needed = 1 + trainers + relays * (1 + spares) + rollouts
    if len(node_of_rank) != needed:
        also = f", {relays * spares} spares" if spares else ""
        raise ConfigError(
            f"the job needs {needed} ranks (1 manager, {trainers} trainers, {relays} relays, {rollouts} rollouts{also}), "
            f"got {len(node_of_rank)}"
        )
    nodes = list(dict.fromkeys(node_of_rank))
    if len(nodes) < relays:
        raise ConfigError(
            f"job.relays: {relays} relays need as many nodes, one each, got {len(nodes)} nodes ({', '.join(nodes)})"
        )
    return nodes[-relays:]


def _relays(node_of_rank: list[str], rollout_nodes: list[str]) -> dict[str, int]:
    relays: dict[str, int] = {}
    for rank, node in enumerate(node_of_rank):
        if rank > 0 and node in rollout_nodes:
            relays.setdefault(node, rank)
    return relays


def _spares(node_of_rank: list[str], rollout_nodes: list[str], spares: int) -> set[int]:
    """The last ranks of each rollout node, `spares` of them."""
    found: set[int] = set()
    for node in rollout_nodes:
        ranks = [rank for rank, place in enumerate(node_of_rank) if place == node]
        found.update(ranks[len(ranks) - spares :])
    return found


def _surplus(node_of_rank: list[str], rollout_nodes: list[str], share: int, spares: int) -> dict[str, int]:
    """Ranks of each rollout node that neither its relay, its spares, its rollouts, nor the manager take."""
    surplus = {}
    for node in rollout_nodes:
        ranks = [rank for rank, place in enumerate(node_of_rank) if place == node]
        taken = 1 + share + spares + (ranks[0] == 0)
        if len(ranks) < taken:
            manager = "1 manager, " if ranks[0] == 0 else ""
            also = f", {spares} spares" if spares else ""
            raise ConfigError(
                f"node {node} needs at least {taken} ranks ({manager}1 relay, {share} rollouts{also}), got {len(ranks)}"
            )
        surplus[node] = len(ranks) - taken
    return surplus


def _number(roles: list[Role], node_of_rank: list[str], relay_of_node: dict[str, int]) -> list[Placement]:
    count = dict.fromkeys(Role, 0)
    placements = []
    for role, node in zip(roles, node_of_rank, strict=True):
        relay_rank = relay_of_node[node] if role is Role.ROLLOUT else None
        placements.append(Placement(role, count[role], node, relay_rank))
        count[role] += 1
    return placements
