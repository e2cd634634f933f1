"""Rows of `relay_events`, one for each thing that happened, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from laminar_hpc.protocol.commands import (
    Attach,
    Broadcast,
    Drop,
    Forget,
    Pull,
    Readmit,
    Release,
    Sever,
    TakeOver,
)
from laminar_hpc.protocol.events import LinkStalled, RelayHolds, RelayReady
from laminar_hpc.record import schema
from laminar_hpc.record.reader import open_run
from laminar_hpc.record.relay_events import RelayEvents
from laminar_hpc.record.writer import RecordWriter

OF_ONE = [
    (Forget("killed", 4), ("lost", None, 4, None, "killed")),
    (TakeOver("a spare", 8), ("taken_over", None, 8, None, "a spare")),
    (Readmit("speaks again", 4, 1), ("readmitted", None, 4, None, "speaks again")),
    (Attach("nearest", 12, 5, True), ("attached", None, 5, 12, "nearest")),
    (
        Sever("relay rank 6 waits in vain for rank 5", 5, 6),
        ("severed", None, 5, None, "relay rank 6 waits in vain for rank 5"),
    ),
]


def cells(row: dict | None) -> tuple | None:
    return None if row is None else (row["what"], row["version"], row["relay"], row["rollout"], row["reason"])


@pytest.mark.parametrize(("command", "expected"), OF_ONE)
def test_a_command_about_a_relay_is_a_row(command, expected):
    assert cells(RelayEvents().command(command)) == expected


def test_a_broadcast_is_the_first_of_its_version_or_takes_another_route():
    rows = RelayEvents()
    assert cells(rows.command(Broadcast("published", 3, [4, 5], []))) == (
        "broadcast",
        3,
        4,
        None,
        "published; chain 4 5",
    )
    assert cells(rows.command(Broadcast("4 was lost", 3, [5], []))) == ("rerouted", 3, 5, None, "4 was lost; chain 5")


def test_an_end_on_the_way_is_told_apart_by_what_came_before():
    rows = RelayEvents()
    for version in (3, 4):
        rows.command(Broadcast("published", version, [4], []))
    assert cells(rows.command(Drop("a newer one", 3))) == ("stopped", 3, None, None, "a newer one")
    assert rows.command(Release("a newer one", 3)) is None
    assert rows.command(Release("held", 4)) is None
    assert cells(rows.command(Drop("nobody has it", 4))) == ("dropped", 4, None, None, "nobody has it")
    assert cells(rows.command(Release("a newer one", 5))) == ("skipped", 5, None, None, "a newer one")


def test_events_about_relays_are_rows_and_others_are_not():
    rows = RelayEvents()
    assert cells(rows.event(RelayReady(4, 1, "x"))) == ("joined", None, 4, None, "incarnation 1 on node x")
    stalled = rows.event(LinkStalled(5, 0, 3, 4))
    assert cells(stalled) == ("stalled", 3, 5, None, "rank 4 has sent it nothing for too long")
    assert rows.event(RelayHolds(4, 0, 3, 0.1, b"")) is None
    assert rows.command(Pull("idle", 12, 0, 3)) is None


def test_every_kind_of_row_fits_the_table(tmp_path: Path):
    (tmp_path / "records").mkdir()
    path = tmp_path / "records" / schema.file_name("manager", 0, 0)
    rows = RelayEvents()
    made = [rows.event(RelayReady(4, 0, "x")), rows.event(LinkStalled(5, 0, 3, 4))]
    made += [rows.command(command) for command, _ in OF_ONE]
    made += [rows.command(Broadcast("published", version, [4], [])) for version in (3, 3, 4)]
    made += [rows.command(command) for command in (Release("r", 3), Drop("d", 3), Drop("s", 4), Release("k", 5))]
    with RecordWriter(str(path), "manager", 0, 0, {}, 1.0) as writer:
        for row in made:
            if row is not None:
                writer.add("relay_events", time_s=1.5, **row)
    table = open_run(str(tmp_path)).table("relay_events")
    assert sorted(set(table["what"])) == list(range(len(schema.RELAY_EVENTS)))
    attached = table[table["what"] == schema.RELAY_EVENTS.index("attached")]
    assert attached[["version", "relay", "rollout"]].tolist() == [(schema.MISSING, 5, 12)]
