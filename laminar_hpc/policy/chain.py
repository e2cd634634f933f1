"""The relay chain: its order, the size of its chunks, how long a broadcast takes, and what changes when something fails.

p relays pass W bytes on in c chunks, each relay receiving one chunk while it sends another. A chunk takes W Tb / c + Ts over
a link (Tb seconds a byte, Ts for each transfer). With h links one behind the other the last chunk leaves after c - 1 others
and has h links to go, so

    T = (h + c - 1) (W Tb / c + Ts)

The first relay, the master, takes the version from the trainers. On a trainer's node that costs no link: h = p - 1, and T is
(p + c - 2) (W Tb / c + Ts), the formula of Laminar (arXiv 2510.12633). Elsewhere it is one link more: h = p. T is least where
its derivative by c is 0, at c = sqrt((h - 1) W Tb / Ts).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import msgspec

PAGE_BYTES = 4096

SMALLEST_CHUNK_BYTES = 64 << 10
"""Below this the cost of a chunk that the formula leaves out rules: a message, two digests, a row of the master's list."""

LARGEST_CHUNK_BYTES = 64 << 20
"""Above this a repaired chain repeats too much, and a slow link looks like a stalled one: 64 MiB take 2.7 s at 25 MB/s."""

ASSUMED_STARTUP_S = 1e-3
ASSUMED_BYTE_S = 1e-9
"""Of a link that nobody has measured: seconds that a transfer takes to start, and of each byte."""


class Place(msgspec.Struct, frozen=True):
    """Where a relay is: the key of its node, and the switch that the node is at ("": not known)."""

    rank: int
    node: str
    switch: str = ""


def order(places: Collection[Place], trainer_nodes: Collection[str] = ()) -> list[int]:
    """The relays' ranks in the order of the chain; the first is the master, which fetches from the trainers.

    The master is on a trainer's node where a relay is. Then come the relays of its switch, and one switch after the other:
    so each switch is entered and left once. Within a switch, and among switches, ranks decide, since launchers number them
    node by node and neighbours are then likely to be near each other.
    """
    if not places:
        return []
    first_of_switch: dict[str, int] = {}
    for place in sorted(places, key=_rank):
        first_of_switch.setdefault(place.switch, place.rank)
    beside_trainer = [place for place in places if place.node in trainer_nodes]
    master = min(beside_trainer or places, key=_rank)

    def key(place: Place) -> tuple[bool, int, bool, int]:
        away = place.switch != master.switch
        return away, first_of_switch[place.switch], place.rank != master.rank, place.rank

    return [place.rank for place in sorted(places, key=key)]


def _rank(place: Place) -> int:
    return place.rank


def links(relays: int, remote_master: bool = False) -> int:
    """How many links a version crosses to the last of `relays` relays; `remote_master`: none is on a trainer's node."""
    return relays - 1 + remote_master


def broadcast_seconds(
    relays: int, nbytes: int, chunks: int, startup_s: float, byte_s: float, *, remote_master: bool = False
) -> float:
    """How long `nbytes` bytes in `chunks` chunks take to the last relay; 0 where they cross no link.

    A transfer of n bytes over a link takes `startup_s + n * byte_s` seconds.
    """
    hops = links(relays, remote_master)
    return 0.0 if hops == 0 else (hops + chunks - 1) * (nbytes * byte_s / chunks + startup_s)


def best_chunk_bytes(
    relays: int,
    nbytes: int,
    startup_s: float,
    byte_s: float,
    *,
    largest: int = LARGEST_CHUNK_BYTES,
    smallest: int = SMALLEST_CHUNK_BYTES,
    remote_master: bool = False,
) -> int:
    """The chunk size, in whole pages within the bounds, with which a broadcast takes least time.

    With one link there is nothing to overlap and one chunk would be best; then, and where the formula asks for less than one
    chunk, the image is cut only for the upper bound.
    """
    gain = max(0, links(relays, remote_master) - 1) * nbytes * byte_s
    if startup_s > 0.0:
        best = nbytes / max(1.0, math.sqrt(gain / startup_s))
    else:
        best = 0.0 if gain > 0.0 else float(nbytes)  # transfers that cost nothing to start: the smaller the better
    pages = math.ceil(best / PAGE_BYTES)
    return max(smallest, min(largest, pages * PAGE_BYTES))


def overtakes(elapsed_s: float, expected_s: float | None, previous_stopped: bool) -> bool:
    """Whether a newer version stops the hand-over of an older one to the master, instead of waiting for its end.

    It does where more than half of the hand-over is still to come: less than half of the time that one takes has passed
    (`expected_s`, None: not known, then it waits). But not twice in a row, so that of any two versions that are begun one
    gets through, however fast they follow each other.
    """
    return expected_s is not None and not previous_stopped and elapsed_s < 0.5 * expected_s


def repaired(chain: Sequence[int], lost: int) -> list[int]:
    """The chain without relay `lost`: the one behind it goes on from the one before it."""
    return [rank for rank in chain if rank != lost]


def moved_back(chain: Sequence[int], source: int) -> list[int]:
    """The chain with relay `source` at its end, where nobody waits for it."""
    return [*repaired(chain, source), source]


def brought_forward(chain: Sequence[int], holder: int) -> list[int]:
    """The chain with relay `holder` at its front: it has the version already, and does not need the trainers."""
    return [holder, *repaired(chain, holder)]
