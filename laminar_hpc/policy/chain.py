"""The order in which relays pass a version on."""

from __future__ import annotations

from collections.abc import Iterable


def chain_order(relays: Iterable[int]) -> list[int]:
    """The relays' ranks in the order of the chain; the first is the master, which fetches from the trainers.

    Rank order, since launchers number ranks node by node and neighbours are then likely to share a switch.
    """
    return sorted(relays)
