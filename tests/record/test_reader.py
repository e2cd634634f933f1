"""Files of all ranks and attempts together, in one clock; what cannot be read is named and left out."""

from __future__ import annotations

from pathlib import Path

import h5py
import pytest

from laminar_hpc.errors import RecordError
from laminar_hpc.protocol.commands import Generate
from laminar_hpc.protocol.events import Finished
from laminar_hpc.protocol.trajectory import Purpose, Stop, TrajectorySpec, Verdict
from laminar_hpc.protocol.wire import encode
from laminar_hpc.record import schema
from laminar_hpc.record.lineage import read_lineage
from laminar_hpc.record.reader import open_run
from laminar_hpc.record.writer import RecordWriter


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "records").mkdir()
    return tmp_path


def writer_of(run_dir: Path, role: str, rank: int, attempt: int = 0, zero_s: float | None = None) -> RecordWriter:
    metadata = {"config": f'{{"attempt": {attempt}}}'}
    if zero_s is not None:
        metadata["clock_zero_unix_s"] = repr(zero_s)
    path = run_dir / "records" / schema.file_name(role, rank, attempt)
    return RecordWriter(str(path), role, rank, attempt, metadata, flush_s=1.0)


def test_tables_are_joined_over_ranks_and_attempts(run_dir: Path) -> None:
    for rank, attempt in ((3, 1), (2, 0), (3, 0)):
        with writer_of(run_dir, "rollout", rank, attempt) as writer:
            writer.add(
                "pulls", version=10 * attempt + rank, time_s=1.0, wait_s=0.0, copy_s=0.0, pause_s=0.0, digest=None
            )
    run = open_run(str(run_dir))
    pulls = run.table("pulls")
    assert pulls[["attempt", "rank", "version"]].tolist() == [(0, 2, 2), (0, 3, 3), (1, 3, 13)]
    assert run.attempts == [0, 1]
    assert run.config == {"attempt": 1}
    assert len(run.table("steps")) == 0
    assert set(run.table("steps").dtype.names) == {*schema.TABLES["steps"].names, "rank", "attempt"}
    with pytest.raises(RecordError, match="unknown table 'pull'; tables are events"):
        run.table("pull")


def test_a_tables_own_rank_is_kept(run_dir: Path) -> None:
    with writer_of(run_dir, "manager", 0) as writer:
        writer.add("failures", time_s=1.0, rank=4, text="gone")
        writer.add("failures", time_s=2.0, rank=None, text="stalled: nothing moved")
    assert open_run(str(run_dir)).table("failures")[["rank", "attempt"]].tolist() == [(4, 0), (schema.MISSING, 0)]


def test_values_are_for_people(run_dir: Path) -> None:
    with writer_of(run_dir, "manager", 0) as writer:
        writer.add("failures", time_s=1.5, rank=4, text="gône")
        writer.add("failures", time_s=2.0, rank=None, text="")
        for purpose in ("evaluation", "train"):
            writer.add("hand_outs", handed_out_s=0.0, group=1, prompt=0, purpose=purpose)
    with writer_of(run_dir, "rollout", 3) as writer:
        for digest in (None, 2**63):
            writer.add("pulls", version=0, time_s=1.0, wait_s=0.0, copy_s=0.0, pause_s=0.0, digest=digest)
    run = open_run(str(run_dir))
    assert run.values("failures", "rank") == [4, None]
    assert run.values("failures", "text") == ["gône", ""]
    assert run.values("failures", "time_s") == [1.5, 2.0]
    assert run.values("failures", "attempt") == [0, 0]
    assert run.values("hand_outs", "purpose") == ["evaluation", "train"]
    assert run.values("pulls", "digest") == [None, 2**63]
    assert run.values("steps", "step") == []
    with pytest.raises(RecordError, match="failures has no column 'why'; columns are time_s, rank, text"):
        run.values("failures", "why")


def test_moments_are_in_the_managers_clock(run_dir: Path) -> None:
    with writer_of(run_dir, "manager", 0, zero_s=1000.0) as writer:
        writer.add("hand_outs", group=0, prompt=0, purpose="train", handed_out_s=5.0)
    with writer_of(run_dir, "rollout", 1, zero_s=1002.5) as writer:
        writer.add("pulls", version=0, time_s=4.0, wait_s=0.5, copy_s=0.0, pause_s=0.25, digest=None)
    with writer_of(run_dir, "rollout", 2) as writer:  # says nothing of its clock
        writer.add("pulls", version=0, time_s=4.0, wait_s=0.5, copy_s=0.0, pause_s=0.25, digest=None)
    run = open_run(str(run_dir))
    assert run.table("hand_outs")["handed_out_s"].tolist() == [5.0]
    assert run.table("pulls")[["time_s", "wait_s", "pause_s"]].tolist() == [(6.5, 0.5, 0.25), (4.0, 0.5, 0.25)]


def test_whether_the_manager_closed_its_file(run_dir: Path) -> None:
    writer = writer_of(run_dir, "manager", 0)
    assert not open_run(str(run_dir)).closed
    writer.close()
    assert open_run(str(run_dir)).closed


def test_unreadable_files_are_listed_with_the_reason(run_dir: Path) -> None:
    writer_of(run_dir, "manager", 0).close()
    records = run_dir / "records"
    (records / "attempt-0.rank-00001.relay.h5").write_bytes(b"no HDF5")
    with h5py.File(records / "attempt-0.rank-00002.rollout.h5", "w") as file:
        file.attrs["schema_version"] = 99
    with h5py.File(records / "attempt-0.rank-00004.rollout.h5", "w") as file:
        file.attrs["schema_version"] = schema.SCHEMA_VERSION
        file.attrs["role"] = 3
    (records / ".attempt-0.rank-00003.rollout.h5.part").write_bytes(b"")
    (records / "notes.txt").write_text("not ours")
    run = open_run(str(run_dir))
    assert [file.rank for file in run.files] == [0]
    reasons = {Path(path).name: reason for path, reason in run.unreadable}
    assert set(reasons) == {
        "attempt-0.rank-00001.relay.h5",
        "attempt-0.rank-00002.rollout.h5",
        "attempt-0.rank-00004.rollout.h5",
        ".attempt-0.rank-00003.rollout.h5.part",
    }
    assert "file signature not found" in reasons["attempt-0.rank-00001.relay.h5"]
    assert (
        reasons["attempt-0.rank-00002.rollout.h5"]
        == f"has schema version 99, this program reads {schema.SCHEMA_VERSION}"
    )
    assert all("\n" not in reason for reason in reasons.values())


def test_no_record_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"records: cannot be read: No such file or directory; a run directory has"):
        open_run(str(tmp_path))
    (tmp_path / "records").mkdir()
    with pytest.raises(RecordError, match=r"records: no readable record file$"):
        open_run(str(tmp_path))


def test_rows_whose_content_never_came_are_left_out(run_dir: Path) -> None:
    with writer_of(run_dir, "rollout", 1) as writer:
        writer.add("pulls", version=7, time_s=1.0, wait_s=0.0, copy_s=0.0, pause_s=0.0, digest=None)
        path = writer.path
    with h5py.File(path, "a", libver=("v110", "latest")) as file:
        file["pulls"].resize((4,))
    assert open_run(str(run_dir)).table("pulls")["version"].tolist() == [7]


def test_lineage_follows_orders_until_a_new_start(run_dir: Path) -> None:
    def generate(version: int, *specs: tuple[int, int]) -> bytes:
        trajectories = [TrajectorySpec(id, 0, 0, id, Purpose.TRAIN, 1, resume) for id, resume in specs]
        return encode(Generate("test", 3, 0, version, trajectories))

    with writer_of(run_dir, "manager", 0) as writer:
        writer.add_stream("events", 0.0, encode(Finished(3, 0, 1, 5, 4, 2, Stop.LENGTH, Verdict.GRADED, 1.0)))
        for data in (
            generate(2, (1, 0), (2, 0), (3, 0)),
            generate(4, (1, 10)),
            generate(4, (2, 0)),
            generate(2, (3, 8)),
        ):
            writer.add_stream("commands", 0.0, data, cause=0)
    lineage = read_lineage(open_run(str(run_dir)))
    assert lineage.ordered == {(0, 1): {2, 4}, (0, 2): {4}, (0, 3): {2}}
    assert lineage.finished == {(0, 1): 5}
