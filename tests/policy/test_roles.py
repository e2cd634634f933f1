"""Roles from a node map, by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_hpc.errors import ConfigError
from laminar_hpc.policy.roles import Placement, Role, assign

M, T, E, R, S = Role.MANAGER, Role.TRAINER, Role.RELAY, Role.ROLLOUT, Role.SPARE


def roles(nodes: str, trainers: int, relays: int, rollouts: int, spares: int = 0) -> list[Role]:
    """Roles for one letter of node a rank."""
    return [placement.role for placement in assign(list(nodes), trainers, relays, rollouts, spares)]


def test_everything_on_one_node():
    assert assign(["x"] * 5, 1, 1, 2) == [
        Placement(M, 0, "x"),
        Placement(E, 0, "x"),
        Placement(T, 0, "x"),
        Placement(R, 0, "x", 1),
        Placement(R, 1, "x", 1),
    ]


def test_trainer_node_and_two_rollout_nodes():
    # a: manager and trainers; b and c: a relay and two rollouts each
    assert assign(list("aaabbbccc"), 2, 2, 4) == [
        Placement(M, 0, "a"),
        Placement(T, 0, "a"),
        Placement(T, 1, "a"),
        Placement(E, 0, "b"),
        Placement(R, 0, "b", 3),
        Placement(R, 1, "b", 3),
        Placement(E, 1, "c"),
        Placement(R, 2, "c", 6),
        Placement(R, 3, "c", 6),
    ]


def test_trainers_fill_up_a_rollout_node_as_far_as_its_rollouts_allow():
    # b has 5 ranks for a relay and two rollouts: two are spare, and the first ones go to trainers
    assert roles("aabbbbbccc", 3, 2, 4) == [M, T, E, T, T, R, R, E, R, R]


def test_manager_on_a_rollout_node_beside_the_trainers():
    assert roles("aaaaabbb", 1, 2, 4) == [M, E, T, R, R, E, R, R]


def test_ranks_dealt_round_robin_over_the_nodes():
    # a: 0 2 4 6, b: 1 3 5 7; the relays are the first free ranks, 1 and 2
    assert roles("abababab", 1, 2, 4) == [M, E, E, T, R, R, R, R]


def test_the_last_nodes_are_the_rollout_nodes():
    assert roles("abcc", 1, 1, 1) == [M, T, E, R]


def test_spares_are_the_last_ranks_of_each_rollout_node():
    assert assign(list("aabbbbcccc"), 1, 2, 2, spares=2) == [
        Placement(M, 0, "a"),
        Placement(T, 0, "a"),
        Placement(E, 0, "b"),
        Placement(R, 0, "b", 2),
        Placement(S, 0, "b"),
        Placement(S, 1, "b"),
        Placement(E, 1, "c"),
        Placement(R, 1, "c", 6),
        Placement(S, 2, "c"),
        Placement(S, 3, "c"),
    ]


def test_spares_beside_the_manager_and_trainers_on_one_node():
    assert roles("xxxxxxx", 2, 1, 2, spares=1) == [M, E, T, T, R, R, S]
    # dealt round-robin: a has 0 2 4 6 8, b has 1 3 5 7 9
    assert roles("ababababab", 1, 2, 4, spares=1) == [M, E, E, T, R, R, R, R, S, S]


@pytest.mark.parametrize(
    ("nodes", "trainers", "relays", "rollouts", "spares", "message"),
    [
        ("aabbb", 1, 1, 1, 2, "the job needs 6 ranks (1 manager, 1 trainers, 1 relays, 1 rollouts, 2 spares), got 5"),
        ("aaabbb", 1, 1, 1, 2, "node b needs at least 4 ranks (1 relay, 1 rollouts, 2 spares), got 3"),
        ("aaabbbb", 0, 2, 2, 1, "node a needs at least 4 ranks (1 manager, 1 relay, 1 rollouts, 1 spares), got 3"),
    ],
)
def test_a_node_without_room_for_its_spares_is_refused(nodes, trainers, relays, rollouts, spares, message):
    with pytest.raises(ConfigError) as error:
        assign(list(nodes), trainers, relays, rollouts, spares)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("nodes", "trainers", "relays", "rollouts", "message"),
    [
        (
            "aaaa",
            1,
            1,
            2,
            "the job needs 5 ranks (1 manager, 1 trainers, 1 relays, 2 rollouts), got 4",
        ),
        ("aaaaaa", 1, 2, 2, "job.relays: 2 relays need as many nodes, one each, got 1 nodes (a)"),
        ("aaaaaa", 1, 1, 2, "the job needs 5 ranks (1 manager, 1 trainers, 1 relays, 2 rollouts), got 6"),
        ("aaaaabb", 1, 2, 3, "job.rollouts must be a multiple of job.relays, which is at least 1, got 3 and 2"),
        ("aaaaaabb", 1, 2, 4, "node b needs at least 3 ranks (1 relay, 2 rollouts), got 2"),
        ("aaabbbbb", 1, 2, 4, "node a needs at least 4 ranks (1 manager, 1 relay, 2 rollouts), got 3"),
        ("abbb", 0, 2, 1, "job.rollouts must be a multiple of job.relays, which is at least 1, got 1 and 2"),
    ],
)
def test_what_does_not_add_up_is_refused_in_one_line(nodes, trainers, relays, rollouts, message):
    with pytest.raises(ConfigError) as error:
        assign(list(nodes), trainers, relays, rollouts)
    assert str(error.value) == message


@settings(deadline=None)
@given(
    trainer_nodes=st.integers(0, 3),
    relays=st.integers(1, 4),
    share=st.integers(1, 4),
    spares=st.integers(0, 2),
    surplus=st.lists(st.integers(0, 2), min_size=4, max_size=4),
    data=st.data(),
)
def test_any_map_with_enough_ranks_on_each_node_gets_all_roles(trainer_nodes, relays, share, spares, surplus, data):
    counts = {f"t{node}": data.draw(st.integers(1, 3)) for node in range(trainer_nodes)}
    counts |= {f"r{node}": 1 + share + spares + surplus[node] for node in range(relays)}
    first = next(iter(counts))
    counts[first] += 1
    trainers = sum(counts.values()) - 1 - relays * (1 + share + spares)
    ranks = [node for node, count in counts.items() for _ in range(count)]
    placements = assign(ranks, trainers, relays, relays * share, spares)
    by_role = {role: [one for one in placements if one.role is role] for role in Role}
    assert [len(by_role[role]) for role in Role] == [1, trainers, relays, relays * share, relays * spares]
    assert placements[0].role is Role.MANAGER
    for role in Role:
        assert [one.index for one in by_role[role]] == list(range(len(by_role[role])))
    for rollout in by_role[Role.ROLLOUT]:
        relay = placements[rollout.relay_rank]
        assert (relay.role, relay.node) == (Role.RELAY, rollout.node)
    for node in range(relays):
        assert sum(one.node == f"r{node}" for one in by_role[Role.ROLLOUT]) == share
        assert sum(one.node == f"r{node}" for one in by_role[Role.SPARE]) == spares
