"""The chain's order, formula and repairs, by hand; the best chunk size also against all others."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from laminar_hpc.policy.chain import (
    LARGEST_CHUNK_BYTES,
    PAGE_BYTES,
    SMALLEST_CHUNK_BYTES,
    Place,
    best_chunk_bytes,
    broadcast_seconds,
    brought_forward,
    moved_back,
    order,
    overtakes,
    repaired,
)

MB = 10**6


def places(*items: str) -> list[Place]:
    """From "rank node switch" each."""
    split = [item.split() for item in items]
    return [Place(int(rank), node, *switch) for rank, node, *switch in split]


def test_without_a_node_map_the_chain_is_in_rank_order():
    assert order(places("12 c", "4 a", "8 b")) == [4, 8, 12]
    assert order([]) == []


def test_the_master_is_on_a_trainers_node():
    assert order(places("4 a", "8 b", "12 c"), trainer_nodes=["x", "b"]) == [8, 4, 12]
    assert order(places("4 a", "8 b", "12 c"), trainer_nodes=["c", "b"]) == [8, 4, 12]
    assert order(places("4 a", "8 b"), trainer_nodes=["x"]) == [4, 8]


def test_a_switch_is_entered_and_left_once_and_the_masters_comes_first():
    relays = places("1 a left", "2 b right", "3 c left", "4 d right", "5 e middle")
    assert order(relays) == [1, 3, 2, 4, 5]
    assert order(relays, trainer_nodes=["d"]) == [4, 2, 1, 3, 5]


@given(st.permutations(places("1 a left", "2 b", "3 c left", "4 d", "5 e middle")))
def test_the_order_does_not_depend_on_who_reported_first(relays):
    assert order(relays, ["c"]) == [3, 1, 2, 4, 5]


def test_broadcast_time_by_hand():
    # 8 relays, 25 MB in 20 chunks over 25 MB/s: (8 + 20 - 2) * (1 s / 20 + 1 ms) = 26 * 0.051
    assert broadcast_seconds(8, 25 * MB, 20, 1e-3, 1 / (25 * MB)) == pytest.approx(1.326)
    # two relays, one chunk: one link, one transfer
    assert broadcast_seconds(2, 25 * MB, 1, 1e-3, 1 / (25 * MB)) == pytest.approx(1.001)
    assert broadcast_seconds(1, 25 * MB, 20, 1e-3, 1 / (25 * MB)) == 0.0


def test_a_master_away_from_the_trainers_costs_one_link_more():
    assert broadcast_seconds(8, 25 * MB, 20, 1e-3, 1 / (25 * MB), remote_master=True) == pytest.approx(27 * 0.051)
    assert broadcast_seconds(1, 25 * MB, 1, 1e-3, 1 / (25 * MB), remote_master=True) == pytest.approx(1.001)


def test_best_chunks_by_hand():
    # c = sqrt((8 - 2) * 1 s / 1.5 ms) = 63.2; 25 MB / 63.2 = 395,285 bytes, up to whole pages of 4096: 97
    assert best_chunk_bytes(8, 25 * MB, 1.5e-3, 1 / (25 * MB)) == 97 * PAGE_BYTES
    # one link more: c = sqrt(7 / 1.5e-3) = 68.3; 365,963 bytes: 90 pages
    assert best_chunk_bytes(8, 25 * MB, 1.5e-3, 1 / (25 * MB), remote_master=True) == 90 * PAGE_BYTES


@pytest.mark.parametrize("relays", [1, 2])
def test_with_at_most_one_link_the_image_is_cut_for_the_upper_bound_alone(relays):
    assert best_chunk_bytes(relays, 25 * MB, 1e-3, 1 / (25 * MB)) == 6104 * PAGE_BYTES
    assert best_chunk_bytes(relays, 10**9, 1e-3, 1 / (25 * MB)) == LARGEST_CHUNK_BYTES
    assert best_chunk_bytes(relays, 10**9, 0.0, 1 / (25 * MB)) == LARGEST_CHUNK_BYTES


def test_bounds_hold_at_the_extremes():
    assert best_chunk_bytes(8, 3, 1e-3, 1e-9) == SMALLEST_CHUNK_BYTES
    assert best_chunk_bytes(8, 0, 1e-3, 1e-9) == SMALLEST_CHUNK_BYTES
    assert best_chunk_bytes(8, 10**9, 0.0, 1e-9) == SMALLEST_CHUNK_BYTES  # transfers that cost nothing to start
    assert best_chunk_bytes(8, 10**9, 1e-3, 0.0) == LARGEST_CHUNK_BYTES  # bytes that cost nothing
    assert best_chunk_bytes(8, 10**9, 1e-3, 1e-9, largest=1 << 20) == 1 << 20
    assert best_chunk_bytes(8, 10**9, 1e-3, 1e-12, largest=1 << 30) == 99670 * PAGE_BYTES  # c = sqrt(6)


@settings(max_examples=200, deadline=None)
@given(
    relays=st.integers(1, 200),
    nbytes=st.integers(1 << 20, 1 << 34),
    startup_s=st.floats(1e-6, 1e-1),
    byte_s=st.floats(1e-11, 1e-7),
    remote_master=st.booleans(),
)
@example(relays=8, nbytes=25 * MB, startup_s=2e-4, byte_s=4e-8, remote_master=False)
def test_no_other_chunk_size_within_the_bounds_is_faster(relays, nbytes, startup_s, byte_s, remote_master):
    def seconds(chunk_bytes: int) -> float:
        chunks = -(-nbytes // chunk_bytes)
        return broadcast_seconds(relays, nbytes, chunks, startup_s, byte_s, remote_master=remote_master)

    best = best_chunk_bytes(relays, nbytes, startup_s, byte_s, remote_master=remote_master)
    assert best % PAGE_BYTES == 0
    assert SMALLEST_CHUNK_BYTES <= best <= LARGEST_CHUNK_BYTES
    others = [SMALLEST_CHUNK_BYTES * 2**power for power in range(11)] + [max(best - PAGE_BYTES, SMALLEST_CHUNK_BYTES)]
    # the formula is of a continuous number of chunks; a whole number costs at most one transfer more or less
    slack = 1 + 2 * PAGE_BYTES / best
    for other in others:
        chunks = -(-nbytes // other)
        transfer_s = nbytes * byte_s / chunks + startup_s
        assert seconds(best) <= slack * (seconds(other) + transfer_s)


@pytest.mark.parametrize(
    ("elapsed_s", "expected_s", "previous_stopped", "stops"),
    [
        (0.0, 2.0, False, True),
        (0.99, 2.0, False, True),
        (1.0, 2.0, False, False),
        (9.0, 2.0, False, False),
        (0.0, 2.0, True, False),
        (0.0, None, False, False),
        (0.0, 0.0, False, False),
    ],
)
def test_a_newer_version_stops_an_older_one_in_its_first_half_but_not_twice_in_a_row(
    elapsed_s, expected_s, previous_stopped, stops
):
    assert overtakes(elapsed_s, expected_s, previous_stopped) is stops


def test_repairs_leave_the_others_in_order():
    assert repaired([4, 8, 12], 8) == [4, 12]
    assert repaired([4, 8], 5) == [4, 8]
    assert moved_back([4, 8, 12], 4) == [8, 12, 4]
    assert moved_back([4, 8, 12], 12) == [4, 8, 12]
    assert brought_forward([4, 8, 12], 12) == [12, 4, 8]
