"""The order of the relays."""

from __future__ import annotations

from laminar_hpc.policy.chain import chain_order


def test_relays_stand_in_rank_order_whoever_reported_first():
    assert chain_order([12, 4, 8]) == [4, 8, 12]
