"""Reads a run: the files of all ranks and attempts together, also while they grow and after a kill.

`open_run` takes a snapshot: every table of every file, each file open only while it is read. The event and command
streams and the tokens, which can be far larger, are read from the files when asked for.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import h5py
import msgspec
import numpy as np
from numpy.typing import NDArray

from laminar_hpc.errors import RecordError
from laminar_hpc.record import schema
from laminar_hpc.record.status import Status, read_status

RECORDS = "records"
"""The folder of a run that holds its files."""

STREAMED_ROWS = 4096
"""Rows of a stream that are read at once."""

Rows = NDArray[np.void]


class Logged(NamedTuple):
    """An event or a command: when, its bytes, and for a command the index of the event that caused it."""

    time_s: float
    data: bytes
    cause: int | None


class TokenBlock(NamedTuple):
    """A block of recorded tokens: where it begins in its trajectory, and int32 tokens and float32 log-probabilities."""

    attempt: int
    trajectory: int
    position: int
    source: str
    version: int | None
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]


class RecordFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file: whose it is, its metadata, and the tables as they stood when it was read."""

    path: str
    role: str
    rank: int
    attempt: int
    metadata: dict[str, str]
    closed_unix_s: float | None
    tables: dict[str, Rows]

    @property
    def clock_zero_unix_s(self) -> float | None:
        """The Unix time of 0 in the file's clock, None where it does not say."""
        value = self.metadata.get("clock_zero_unix_s")
        return None if value is None else float(value)


class Unreadable(NamedTuple):
    """A file that could not be read, and why."""

    path: str
    reason: str


class Run:
    """A run as its files tell it.

    Moments of all files are in one clock, that of the first manager's file. A version's number is unique in a run, also
    over attempts.
    """

    def __init__(self, run_dir: str, files: list[RecordFile], unreadable: list[Unreadable], status: Status | None):
        self.run_dir = run_dir
        self.files = files
        self.unreadable = unreadable
        self.status = status

    @property
    def attempts(self) -> list[int]:
        """The attempts that have left a file."""
        return sorted({file.attempt for file in self.files})

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata of the last attempt, from the manager's file where it can be read."""
        return self._leading.metadata

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config of the last attempt; empty where the file has none."""
        return self.setting("config")

    def setting(self, key: str) -> dict[str, Any]:
        """Metadata that are JSON (config, mode, controller_settings, packages) as a dict; empty where they are absent."""
        settings: dict[str, Any] = json.loads(self.metadata.get(key, "{}"))
        return settings

    @property
    def closed(self) -> bool:
        """Whether the last attempt's manager closed its file: the record ends where the run did."""
        return self._leading.role == "manager" and self._leading.closed_unix_s is not None

    def table(self, name: str) -> Rows:
        """All rows of a table, file after file (by attempt, then rank), with the columns `rank` and `attempt`.

        These are the file's, unless the table has its own column of that name. Enumerations are codes
        (`values` has their names), text is bytes. RecordError for a table that the schema does not have.
        """
        if name not in schema.TABLES:
            raise RecordError(f"{self.run_dir}: unknown table {name!r}; tables are {', '.join(schema.TABLES)}")
        table = schema.TABLES[name]
        added = [(column, "<i4") for column in ("rank", "attempt") if column not in table.names]
        parts = [self._in_common_clock(table, file, added) for file in self.files if name in file.tables]
        if not parts:
            return np.empty(0, dtype=[*table.dtype.descr, *added])
        return np.concatenate(parts)

    def values(self, name: str, column: str) -> list[Any]:
        """A column of a table for people: enumerations as their names, text as str, what is missing as None."""
        rows = self.table(name)
        known = {one.name: one for one in schema.TABLES[name].columns}
        if column not in (rows.dtype.names or ()):
            raise RecordError(f"{self.run_dir}: {name} has no column {column!r}; columns are {', '.join(known)}")
        cells: list[Any] = rows[column].tolist()
        if column not in known:
            return cells
        if known[column].names:
            return [known[column].names[code] for code in cells]
        return [_plain(cell, known[column]) for cell in cells]

    def events(self, attempt: int | None = None) -> Iterator[Logged]:
        """The recorded events of an attempt (None: the last), in order; times as the controller got them."""
        return self._logged("events", attempt)

    def commands(self, attempt: int | None = None) -> Iterator[Logged]:
        """The recorded commands of an attempt (None: the last), in order."""
        return self._logged("commands", attempt)

    def tokens(self) -> Iterator[TokenBlock]:
        """The recorded tokens, block by block."""
        names = schema.TABLES["tokens"].column("source").names
        for file in self._managers():
            with _open(file.path) as handle:
                for row in _rows(handle, schema.TABLES["tokens"]):
                    part = slice(int(row["offset"]), int(row["offset"]) + int(row["tokens"]))
                    version = None if row["version"] == schema.MISSING else int(row["version"])
                    yield TokenBlock(
                        file.attempt,
                        int(row["trajectory"]),
                        int(row["position"]),
                        names[row["source"]],
                        version,
                        handle["token_ids"][part],
                        handle["token_logprobs"][part],
                    )

    # --- inside -----------------------------------------------------------------------------------------------------

    @property
    def _leading(self) -> RecordFile:
        last = [file for file in self.files if file.attempt == self.attempts[-1]]
        return min(last, key=lambda file: (file.role != "manager", file.rank))

    def _managers(self) -> list[RecordFile]:
        return [file for file in self.files if file.role == "manager"]

    def _in_common_clock(self, table: schema.Table, file: RecordFile, added: list[tuple[str, str]]) -> Rows:
        rows = file.tables[table.name]
        joined = np.empty(len(rows), dtype=[*table.dtype.descr, *added])
        shift = self._shift(file)
        for column in table.columns:
            joined[column.name] = rows[column.name]
            if column.unit == schema.INSTANT:
                joined[column.name] += shift
        for name, _ in added:
            joined[name] = file.rank if name == "rank" else file.attempt
        return joined

    def _shift(self, file: RecordFile) -> float:
        reference = self._managers()[0] if self._managers() else self.files[0]
        if file.clock_zero_unix_s is None or reference.clock_zero_unix_s is None:
            return 0.0
        return file.clock_zero_unix_s - reference.clock_zero_unix_s

    def _logged(self, name: str, attempt: int | None) -> Iterator[Logged]:
        attempt = self.attempts[-1] if attempt is None else attempt
        for file in self._managers():
            if file.attempt != attempt:
                continue
            with _open(file.path) as handle:
                yield from _stream(handle, schema.TABLES[name])


def open_run(run_dir: str) -> Run:
    """The run in `run_dir`.

    A file that cannot be read is listed in `Run.unreadable`; RecordError, one line, where none is left.
    """
    folder = os.path.join(run_dir, RECORDS)
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise RecordError(
            f"{folder}: cannot be read: {error.strerror}; a run directory has a folder {RECORDS}"
        ) from error
    files, unreadable = [], []
    for name in names:
        path = os.path.join(folder, name)
        if name.endswith(".h5.part"):
            unreadable.append(Unreadable(path, "was being created"))
        elif name.endswith(".h5"):
            try:
                files.append(read_file(path))
            except RecordError as error:
                unreadable.append(Unreadable(path, str(error).removeprefix(f"{path}: ")))
    if not files:
        why = f": {unreadable[0].reason}" if unreadable else ""
        raise RecordError(f"{folder}: no readable record file{why}")
    files.sort(key=lambda file: (file.attempt, file.rank))
    status = None
    with suppress(RecordError):
        status = read_status(run_dir)
    return Run(run_dir, files, unreadable, status)


def read_file(path: str) -> RecordFile:
    """One file with all its tables, but for the streams; RecordError where it cannot be read."""
    try:
        with _open(path) as handle:
            version = int(handle.attrs["schema_version"])
            if version != schema.SCHEMA_VERSION:
                raise RecordError(f"{path}: has schema version {version}, this program reads {schema.SCHEMA_VERSION}")
            role = handle.attrs["role"].decode()
            closed = float(handle[schema.CLOSED][()])
            return RecordFile(
                path=path,
                role=role,
                rank=int(handle.attrs["rank"]),
                attempt=int(handle.attrs["attempt"]),
                metadata=_metadata(handle),
                closed_unix_s=None if math.isnan(closed) else closed,
                tables={table.name: _rows(handle, table) for table in schema.tables_of(role)},
            )
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise RecordError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error


def _open(path: str) -> h5py.File:
    """Open for reading; with `swmr=True` also while it is written, and after its writer was killed."""
    return h5py.File(path, "r", swmr=True, locking="best-effort")


def _plain(cell: Any, column: schema.Column) -> Any:
    if isinstance(cell, bytes):
        return cell.decode(errors="replace")
    if not column.nullable:
        return cell
    if isinstance(cell, float):
        return None if math.isnan(cell) else cell
    absent = 0 if column.dtype.startswith("<u") else schema.MISSING
    return None if cell == absent else cell


def _metadata(handle: h5py.File) -> dict[str, str]:
    texts = {key: handle.attrs[key] for key in handle.attrs if key not in schema.IDENTITY}
    metadata = {key: value.decode() for key, value in texts.items()}
    for key, data in handle[schema.METADATA].items():
        metadata[key] = data[:].tobytes().decode()
    return metadata


def _rows(handle: h5py.File, table: schema.Table) -> Rows:
    return _without_unwritten(handle[table.name][:].astype(table.dtype))


def _without_unwritten(rows: Rows) -> Rows:
    """Without the rows at the end whose place is there already but whose content is not (all bits set)."""
    count = len(rows)
    unwritten = b"\xff" * rows.dtype.itemsize
    while count and rows[count - 1].tobytes() == unwritten:
        count -= 1
    return rows[:count]


def _stream(handle: h5py.File, table: schema.Table) -> Iterator[Logged]:
    index = _rows(handle, table)
    data = handle[table.streams[0].name]
    ends = index["offset"] + index["nbytes"]
    index = index[ends <= len(data)]
    has_cause = "cause" in table.names
    for first in range(0, len(index), STREAMED_ROWS):
        rows = index[first : first + STREAMED_ROWS]
        base = int(rows["offset"][0])
        part = data[base : int(rows["offset"][-1]) + int(rows["nbytes"][-1])].tobytes()
        for row in rows:
            low = int(row["offset"]) - base
            cause = int(row["cause"]) if has_cause else None
            yield Logged(float(row["time_s"]), part[low : low + int(row["nbytes"])], cause)
