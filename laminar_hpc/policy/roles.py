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


class Placement(msgspec.Struct, frozen=True):
    """The part of one rank: its role, its place among the ranks of that role (0 first), its node.

    `relay_rank` is the rank that a rollout pulls its weights from; it is on the same node (None for other roles).
    """

    role: Role
    index: int
    node: str
    relay_rank: int | None = None


def assign(node_of_rank: list[str], trainers: int, relays: int, rollouts: int) -> list[Placement]:
    """The placement of each rank, in rank order; `node_of_rank` has a key of the node of each rank.

    Rank 0 is the manager. Of the distinct nodes, in the order in which the ranks name them, the last `relays` are rollout
    nodes. On each of these the first free rank is its relay, and `rollouts / relays` ranks stay free for its rollouts.
    Trainers take the first ranks, in rank order, that are left by that. ConfigError, one line, where it does not add up.
    """
    rollout_nodes = _rollout_nodes(node_of_rank, trainers, relays, rollouts)
    share = rollouts // relays
    spare = _spare(node_of_rank, rollout_nodes, share)
    relay_of_node = _relays(node_of_rank, rollout_nodes)
    roles = []
    for rank, node in enumerate(node_of_rank):
        if rank == 0:
            roles.append(Role.MANAGER)
        elif relay_of_node.get(node) == rank:
            roles.append(Role.RELAY)
        elif node not in spare:
            roles.append(Role.TRAINER)
        elif spare[node] > 0:
            spare[node] -= 1
            roles.append(Role.TRAINER)
        else:
            roles.append(Role.ROLLOUT)
    found = roles.count(Role.TRAINER)
    assert found == trainers, "the world size was checked and every rollout node has its share"
    return _number(roles, node_of_rank, relay_of_node)


def _rollout_nodes(node_of_rank: list[str], trainers: int, relays: int, rollouts: int) -> list[str]:
    if relays < 1 or rollouts % relays:
        raise ConfigError(
            f"job.rollouts must be a multiple of job.relays, which is at least 1, got {rollouts} and {relays}"
        )
    needed = 1 + trainers + relays + rollouts
    if len(node_of_rank) != needed:
        raise ConfigError(
            f"the job needs {needed} ranks (1 manager, {trainers} trainers, {relays} relays, {rollouts} rollouts), "
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


def _spare(node_of_rank: list[str], rollout_nodes: list[str], share: int) -> dict[str, int]:
    """Ranks of each rollout node that neither its relay, nor its rollouts, nor the manager take."""
    spare = {}
    for node in rollout_nodes:
        ranks = [rank for rank, place in enumerate(node_of_rank) if place == node]
        taken = 1 + share + (ranks[0] == 0)
        if len(ranks) < taken:
            manager = "1 manager, " if ranks[0] == 0 else ""
            raise ConfigError(
                f"node {node} needs at least {taken} ranks ({manager}1 relay, {share} rollouts), got {len(ranks)}"
            )
        spare[node] = len(ranks) - taken
    return spare


def _number(roles: list[Role], node_of_rank: list[str], relay_of_node: dict[str, int]) -> list[Placement]:
    count = dict.fromkeys(Role, 0)
    placements = []
    for role, node in zip(roles, node_of_rank, strict=True):
        relay_rank = relay_of_node[node] if role is Role.ROLLOUT else None
        placements.append(Placement(role, count[role], node, relay_rank))
        count[role] += 1
    return placements
