"""Rows go in and come out as they were; what the schema does not have is refused at once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import h5py
import msgspec
import numpy as np
import pytest

from laminar_hpc.errors import RecordError
from laminar_hpc.protocol.commands import TrajectoryOutcome
from laminar_hpc.protocol.trajectory import Block, Purpose, Source, State, Stop, Verdict
from laminar_hpc.record import schema
from laminar_hpc.record.buffer import HELD_ROWS
from laminar_hpc.record.convert import clip_text
from laminar_hpc.record.reader import open_run, read_file
from laminar_hpc.record.writer import RecordWriter

PULL: dict[str, Any] = {
    "version": 1,
    "time_s": 2.5,
    "wait_s": 0.25,
    "copy_s": 0.0,
    "pause_s": 0.125,
    "digest": 2**64 - 1,
}


def new_writer(run_dir: Path, role: str, rank: int = 0, **metadata: str) -> RecordWriter:
    (run_dir / "records").mkdir(exist_ok=True)
    path = run_dir / "records" / schema.file_name(role, rank, 0)
    return RecordWriter(str(path), role, rank, 0, {"config": "{}", **metadata}, flush_s=1.0)


def outcome(**changes: Any) -> TrajectoryOutcome:
    fields: dict[str, Any] = {
        "trajectory": 2**40,
        "group": 7,
        "prompt": 11,
        "sample": 3,
        "purpose": Purpose.EVALUATION,
        "state": State.CONSUMED,
        "reason": "counted",
        "version": 5,
        "newest_version": 6,
        "spans": 2,
        "prefilled_tokens": 110,
        "rank": 4,
        "prompt_tokens": 100,
        "response_tokens": 20,
        "reward": 0.5,
        "verdict": Verdict.GRADED,
        "stop": Stop.LENGTH,
        "begun_s": 1.5,
        "finished_s": 2.5,
        "settled_s": 3.5,
        "staleness_finish": 0,
        "staleness_consumption": 2,
        "step": 6,
    }
    return TrajectoryOutcome(**{**fields, **changes})


def test_a_trajectory_comes_back_as_it_was(tmp_path: Path) -> None:
    whole = outcome()
    bare = outcome(
        version=None,
        rank=None,
        verdict=None,
        stop=None,
        finished_s=None,
        staleness_finish=None,
        staleness_consumption=None,
        step=None,
    )
    with new_writer(tmp_path, "manager") as writer:
        writer.add("trajectories", **msgspec.structs.asdict(whole))
        writer.add("trajectories", **msgspec.structs.asdict(bare))
    table = schema.TABLES["trajectories"]
    first, second = open_run(str(tmp_path)).table("trajectories")
    for name, value in msgspec.structs.asdict(whole).items():
        column = table.column(name)
        if column.names:
            assert column.names[first[name]] == value.value
        elif isinstance(value, str):
            assert first[name].decode() == value
        else:
            assert first[name] == value
    for name in ("version", "rank", "staleness_finish", "staleness_consumption", "step"):
        assert second[name] == schema.MISSING
    assert math.isnan(second["finished_s"])
    assert table.column("verdict").names[second["verdict"]] == schema.NONE
    assert table.column("stop").names[second["stop"]] == schema.NONE


@pytest.mark.parametrize(
    ("table", "changes", "message"),
    [
        ("pull", {}, "unknown table 'pull'; tables here: pulls, engine, pacing, phases"),
        ("steps", {}, "unknown table 'steps'"),
        ("pulls", {"speed": 1}, "table pulls: unknown field speed; its columns are version, time_s"),
        ("pulls", {"version": ...}, "table pulls: missing field version"),
        ("pulls", {"version": ..., "versoin": 1}, "unknown field versoin, missing field version"),
        ("pulls", {"version": None}, "table pulls, column version: "),
        ("pulls", {"version": 2**31}, "column version: must be within -2147483648 and 2147483647, got 2147483648"),
        ("pulls", {"version": 1.5}, "column version: "),
        ("pulls", {"wait_s": "1"}, "column wait_s: must be a number, got '1'"),
        ("pulls", {"wait_s": None}, "column wait_s: must be a number, got None"),
        ("pulls", {"digest": -1}, "column digest: must be within 0 and"),
    ],
)
def test_a_wrong_row_is_refused_at_once(tmp_path: Path, table: str, changes: dict[str, Any], message: str) -> None:
    fields = {name: value for name, value in {**PULL, **changes}.items() if value is not ...}
    with new_writer(tmp_path, "rollout") as writer:
        with pytest.raises(ValueError, match=message):
            writer.add(table, **fields)
        writer.add("pulls", **PULL)
    (row,) = open_run(str(tmp_path)).table("pulls")
    assert {name: row[name] for name in PULL} == PULL


def test_an_unknown_name_in_an_enumeration_is_refused(tmp_path: Path) -> None:
    with (
        new_writer(tmp_path, "relay") as writer,
        pytest.raises(ValueError, match=r"table phases, column phase: must be one of work, idle, .* got 'sleep'"),
    ):
        writer.add("phases", time_s=1.0, phase="sleep", seconds=1.0)


@pytest.mark.parametrize(
    ("text", "nbytes", "expected"),
    [("abc", 3, b"abc"), ("abcd", 3, b"abc"), ("aéé", 4, "aé".encode()), ("a\ud800b", 8, b"a?b"), ("", 4, b"")],
)
def test_text_is_cut_between_characters(text: str, nbytes: int, expected: bytes) -> None:
    assert clip_text(text, nbytes) == expected


def test_streams_come_back_in_order_and_joined_to_their_cause(tmp_path: Path) -> None:
    events = [bytes([65 + i]) * i for i in range(5)]
    with new_writer(tmp_path, "manager") as writer:
        assert [writer.add_stream("events", float(i), data) for i, data in enumerate(events)] == [0, 1, 2, 3, 4]
        writer.flush()
        assert writer.add_stream("commands", 3.0, b"go", cause=3) == 0
        assert writer.add_stream("events", 5.0, b"last") == 5
        with pytest.raises(ValueError, match="table commands: missing field cause"):
            writer.add_stream("commands", 3.0, b"go")
    run = open_run(str(tmp_path))
    assert [(e.time_s, e.data) for e in run.events()] == [
        *((float(i), d) for i, d in enumerate(events)),
        (5.0, b"last"),
    ]
    assert [tuple(command) for command in run.commands()] == [(3.0, b"go", 3)]
    assert list(run.events(attempt=1)) == []


def test_tokens_come_back_block_by_block(tmp_path: Path) -> None:
    prompt = np.array([5, 6, 7], dtype="<i4")
    response = np.array([8, 9], dtype="<i4")
    logprobs = np.array([-0.5, -1.25], dtype="<f4")
    with new_writer(tmp_path, "manager") as writer:
        writer.add_block(Block(3, 0, Source.PROMPT, None, prompt.tobytes()))
        writer.add_block(Block(3, 3, Source.MODEL, 2, response.tobytes(), logprobs.tobytes()))
    first, second = open_run(str(tmp_path)).tokens()
    assert first[:5] == (0, 3, 0, "prompt", None)
    assert first.tokens.tolist() == [5, 6, 7]
    assert np.isnan(first.logprobs).all()
    assert second[:5] == (0, 3, 3, "model", 2)
    assert second.tokens.tolist() == [8, 9]
    assert second.logprobs.tolist() == [-0.5, -1.25]


def test_metadata_of_any_length_come_back(tmp_path: Path) -> None:
    long = "é" * 100_000
    with new_writer(tmp_path, "manager", host="node é", empty="", long=long):
        pass
    (file,) = open_run(str(tmp_path)).files
    assert file.metadata == {"config": "{}", "host": "node é", "empty": "", "long": long}
    with pytest.raises(ValueError, match="must not have the key rank"):
        RecordWriter(str(tmp_path / "x.h5"), "relay", 0, 0, {"rank": ""}, 1.0)


def test_the_file_explains_itself_without_this_package(tmp_path: Path) -> None:
    with new_writer(tmp_path, "manager") as writer:
        path = writer.path
    with h5py.File(path, "r") as file:
        assert file.attrs["schema_version"] == schema.SCHEMA_VERSION
        assert file.attrs["role"] == b"manager"
        for table in schema.tables_of("manager"):
            columns = msgspec.json.decode(file[table.name].attrs[schema.COLUMNS])
            assert list(columns) == list(table.names) == list(file[table.name].dtype.names)
            assert all(column["unit"] and column["description"] for column in columns.values())
        states = h5py.check_enum_dtype(file["trajectories"].dtype["state"])
        assert states == {name: code for code, name in enumerate(schema.STATES)}

        def no_variable_length(_name: str, item: h5py.Group | h5py.Dataset) -> None:
            types = [attribute.dtype for attribute in item.attrs.values() if hasattr(attribute, "dtype")]
            types += [item.dtype] if isinstance(item, h5py.Dataset) else []
            assert all(h5py.check_vlen_dtype(dtype) is None and dtype.kind != "O" for dtype in types)

        file.visititems(no_variable_length)


def test_flush_is_due_by_the_given_clock(tmp_path: Path) -> None:
    with new_writer(tmp_path, "rollout") as writer:
        assert writer.flush_if_due(10.0)
        writer.add("pulls", **PULL)
        assert not writer.flush_if_due(10.5)
        assert len(read_file(writer.path).tables["pulls"]) == 0
        assert writer.flush_if_due(11.0)
        assert len(read_file(writer.path).tables["pulls"]) == 1


def test_many_rows_do_not_wait_for_the_timer(tmp_path: Path) -> None:
    with new_writer(tmp_path, "rollout") as writer:
        for _ in range(HELD_ROWS):
            writer.add("pulls", **PULL)
        assert len(read_file(writer.path).tables["pulls"]) == HELD_ROWS


def test_a_file_is_not_written_twice(tmp_path: Path) -> None:
    writer = new_writer(tmp_path, "rollout")
    with pytest.raises(RecordError, match=r"rollout\.h5: exists already"):
        new_writer(tmp_path, "rollout")
    writer.close()
    writer.close()
    with pytest.raises(RecordError, match="is closed"):
        writer.add("pulls", **PULL)


def test_a_missing_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"x\.h5: cannot be created: [^\n]*No such file or directory$"):
        RecordWriter(str(tmp_path / "none" / "x.h5"), "relay", 0, 0, {}, 1.0)
