"""When the layout of the weights is complete, and how long its chunks are."""

from __future__ import annotations

import pytest

from laminar_hpc.errors import ProtocolError
from laminar_hpc.policy.chain import best_chunk_bytes
from laminar_hpc.protocol.peer import LinkMeasured, Shard, Tile
from laminar_hpc.runtime.layout import LayoutDesk
from laminar_hpc.weights.manifest import make_manifest

MANIFEST = make_manifest([("t", (1000, 1000), "float32")], 0)
WHOLE = Tile(0, 4_000_000, 1, 4_000_000, 0, 4_000_000)


def test_links_are_measured_once_all_relays_are_there() -> None:
    desk = LayoutDesk(1, [2, 3, 4], 0)
    assert desk.relay_ready(3) == []
    assert desk.relay_ready(2) == []
    assert desk.relay_ready(4) == [(3, 2), (4, 3)]
    assert desk.relay_ready(4) == []
    assert desk.relay_ready(9) == []  # a spare that takes over


def test_nothing_is_measured_for_chunks_whose_length_is_given() -> None:
    desk = LayoutDesk(1, [2, 3], 65_536)
    assert desk.relay_ready(2) == desk.relay_ready(3) == []
    desk.add(MANIFEST)
    desk.add(Shard(1, [WHOLE]))
    layout = desk.make(patient=True)
    assert layout is not None
    assert layout.manifest.chunk_bytes == 65_536


def test_the_layout_waits_for_shards_and_while_patient_for_links() -> None:
    desk = LayoutDesk(1, [2, 3, 4], 0)
    desk.add(MANIFEST)
    assert desk.make(patient=False) is None
    desk.add(Shard(1, [WHOLE]))
    assert desk.make(patient=True) is None
    desk.add(LinkMeasured(3, 2, 1e-3, 4e-8))
    assert desk.make(patient=True) is None
    desk.add(LinkMeasured(4, 3, 3e-3, 8e-8))
    layout = desk.make(patient=True)
    assert layout is not None
    assert desk.link == (2e-3, pytest.approx(6e-8))
    assert layout.manifest.chunk_bytes == best_chunk_bytes(3, 4_000_000, 2e-3, 6e-8)
    assert layout.manifest.tensors == MANIFEST.tensors
    assert desk.make(patient=True) is None  # it is made once


def test_a_link_that_nobody_has_measured_does_not_hold_it_up_for_ever() -> None:
    desk = LayoutDesk(1, [2, 3], 0)
    desk.add(MANIFEST)
    desk.add(Shard(1, [WHOLE]))
    layout = desk.make(patient=False)
    assert layout is not None
    assert layout.manifest.chunk_bytes > 0


def test_shards_that_leave_a_gap_are_refused() -> None:
    desk = LayoutDesk(2, [3], 65_536)
    desk.add(MANIFEST)
    desk.add(Shard(1, [Tile(0, 4_000_000, 1, 4_000_000, 0, 1_999_936)]))
    desk.add(Shard(2, [Tile(0, 4_000_000, 1, 4_000_000, 2_000_000, 2_000_000)]))
    with pytest.raises(ProtocolError, match="'t'"):
        desk.make(patient=True)
