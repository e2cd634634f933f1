"""What the manager writes down of versions: one row each, with the digest of the first relay that holds it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from laminar_hpc.config.load import check_config
from laminar_hpc.protocol.commands import Broadcast, Drop, EndJob, Publish, Release, ReportMove
from laminar_hpc.protocol.events import Published, RelayHolds, TrainerReady
from laminar_hpc.record import schema
from laminar_hpc.record.manager import ManagerRecord
from laminar_hpc.record.reader import Run, open_run
from laminar_hpc.record.writer import RecordWriter

ONE, TWO = (1).to_bytes(8, "little"), (2).to_bytes(8, "little")


class Book:
    """A manager's record that a test fills."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        (run_dir / "records").mkdir()
        config = check_config(
            {"run_dir": str(run_dir), "model": {"path": "models/tiny"}, "job": {"trainers": 2}}, "test"
        )
        path = run_dir / "records" / schema.file_name("manager", 0, 0)
        self.writer = RecordWriter(str(path), "manager", 0, 0, {}, 1.0)
        self.record = ManagerRecord(self.writer, config, 0)
        self.record.image_nbytes = 1000
        self.record.event(TrainerReady(1, 0, 0), 0.0)

    def publish(self, version: int, step: int, first_s: float, second_s: float) -> None:
        self.record.commands([Publish("r", version, step)], 0.0)
        self.record.event(Published(1, 0, version, b"", 0.25), first_s)
        self.record.event(Published(2, 0, version, b"", 0.5), second_s)

    def close(self) -> Run:
        self.writer.close()
        return open_run(str(self.run_dir))


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path)


def rows(run: Run) -> list[tuple]:
    columns = ["version", "step", "time_s", "digest", "nbytes", "stall_s"]
    return [tuple(row) for row in run.table("publications")[columns].tolist()]


def test_a_publication_is_written_when_the_first_relay_holds_it_with_the_time_when_all_trainers_did(book):
    book.publish(0, 0, 1.0, 2.0)
    book.record.commands([Broadcast("r", 0, [3, 4], [])], 2.0)
    book.record.event(RelayHolds(3, 0, 0, 0.1, ONE), 4.0)
    book.record.event(RelayHolds(4, 0, 0, 0.1, TWO), 5.0)
    assert rows(book.close()) == [(0, 0, 2.0, 1, 1000, 0.5)]


def test_one_that_is_given_up_has_no_digest_and_its_row_comes_once(book):
    book.publish(0, 0, 1.0, 2.0)
    book.record.commands([Broadcast("r", 0, [3], [])], 2.0)
    book.record.event(RelayHolds(3, 0, 0, 0.1, ONE), 4.0)
    book.publish(1, 1, 5.0, 6.0)
    book.record.commands([Release("r", 0), Broadcast("r", 1, [3], [])], 6.0)
    book.publish(2, 2, 7.0, 8.0)
    book.record.commands([Drop("r", 1), Release("r", 1), Broadcast("r", 2, [3], [])], 8.0)
    book.record.event(RelayHolds(3, 0, 1, 0.1, ONE), 8.5)
    book.record.event(RelayHolds(3, 0, 2, 0.1, TWO), 9.0)
    run = book.close()
    assert rows(run) == [(0, 0, 2.0, 1, 1000, 0.5), (1, 1, 6.0, 0, 1000, 0.5), (2, 2, 8.0, 2, 1000, 0.5)]
    what = [schema.RELAY_EVENTS[code] for code in run.table("relay_events")["what"]]
    assert what == ["broadcast", "broadcast", "stopped", "broadcast"]


def test_the_end_writes_what_no_relay_held_yet_but_not_what_was_never_published(book):
    book.publish(0, 0, 1.0, 2.0)
    book.record.commands([Publish("r", 1, 1)], 3.0)
    book.record.event(Published(1, 0, 1, b"", 0.25), 4.0)
    book.record.event(Published(1, 0, 1, b"", 0.25), 5.0)
    book.record.ended(EndJob("enough", "stopped"), 6.0)
    assert rows(book.close()) == [(0, 0, 2.0, 0, 1000, 0.5)]


def test_a_move_is_a_row_with_what_is_not_known_left_out(book):
    report = ReportMove(
        "4 trajectories with 20 tokens onto rollout 4, which then has 7, 12.9 s gained",
        move=3,
        version=1,
        source=3,
        destination=4,
        ending="the source was lost before it had handed over",
        trajectories=0,
        tokens=0,
        planned_s=5.0,
        handed_over_s=None,
        resumed_s=None,
        released_s=None,
        loaded_s=None,
        loaded_version=None,
        prefill_s=None,
        expected_gain_s=12.9,
        gain_s=None,
    )
    book.record.commands([report], 6.0)
    (row,) = book.close().table("moves")
    assert (row["move"], row["source"], row["destination"], row["planned_s"]) == (3, 3, 4, 5.0)
    assert (row["reason"], row["ending"]) == (report.reason.encode(), report.ending.encode())
    assert (row["expected_gain_s"], row["loaded_version"]) == (12.9, schema.MISSING)
    assert math.isnan(row["gain_s"])
    assert math.isnan(row["handed_over_s"])
