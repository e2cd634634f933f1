"""Writes one rank's HDF5 file, so that it can be read while it grows and after a kill.

Theory of operation. All datasets are made first, under a hidden name; then the file goes into SWMR mode (single writer,
multiple readers) and gets its own name. So a file under its own name can always be opened, with `swmr=True`. Rows are
held in memory and written by `flush`, which the owner calls on a timer: a kill loses what came after the last one.
A flush goes dataset by dataset: HDF5 then writes the rows before the index that leads to them, and stops at the first
error, which flushing the whole file would not. After an error of the disk the file is frozen: what HDF5 still wants to
write goes nowhere, and the file stays as a kill would have left it. A node's crash may lose more: nothing is synced.

SWMR needs a file system that keeps the order of writes (local disks, GPFS, Lustre); NFS does not, and a file that is
written there can be read once it is closed. HDF5 locks files while it opens them; where the file system has no locks it
goes on without. HDF5_USE_FILE_LOCKING in the environment goes before this.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np

from laminar_hpc.errors import RecordError
from laminar_hpc.protocol.trajectory import Block
from laminar_hpc.record import schema
from laminar_hpc.record.buffer import TableBuffer, put_text


class RecordWriter:
    """One rank's file. Not for several threads."""

    def __init__(self, path: str, role: str, rank: int, attempt: int, metadata: dict[str, str], flush_s: float) -> None:
        """Create the file at `path`, which must not exist. `metadata` becomes its attributes (record/provenance.py).

        `flush_s` is the interval of `flush_if_due`, in the clock of its `now`. RecordError where the file cannot be made.
        """
        self.path = path
        self._flush_s = flush_s
        self._last_flush_s: float | None = None
        self._broken = ""
        self._tables: dict[str, TableBuffer] = {}
        self._file: Any = None
        for name in metadata.keys() & set(schema.IDENTITY):
            raise ValueError(f"metadata must not have the key {name}, which the writer sets")
        if os.path.exists(path):
            raise RecordError(f"{path}: exists already; a rank's record is written once in each attempt")
        tables = schema.tables_of(role)
        part = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.part")
        try:
            self._file = h5py.File(part, "w", libver=("v110", "latest"), locking="best-effort")
            _put_metadata(self._file, role, rank, attempt, metadata)
            for table in tables:
                self._tables[table.name] = TableBuffer(self._file, table)
            self._closed = self._file.create_dataset(schema.CLOSED, dtype="<f8", data=np.nan)
            self._file.swmr_mode = True
            os.rename(part, path)
        except (OSError, RuntimeError) as error:
            self._abandon(part)
            raise RecordError(f"{path}: cannot be created: {_cause(error)}") from error

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def add(self, table: str, **fields: Any) -> None:
        """Add a row. Every column needs its field, absent ones None; enumerations take an Enum or its value.

        ValueError, naming table and column, for a table, a field or a value that the schema does not have.
        """
        self._buffer(table).add(fields)
        self._flush_if_full(table)

    def add_stream(self, name: str, time_s: float, data: bytes, cause: int | None = None) -> int:
        """Add a record to the stream of `events` or, with the index of the event that caused it, `commands`.

        Returns its index in that table.
        """
        buffer = self._buffer(name)
        fields = {"time_s": time_s, "offset": buffer.stream_length(0), "nbytes": len(data)}
        if cause is not None:
            fields["cause"] = cause
        index = buffer.add(fields)
        buffer.extend(0, np.frombuffer(data, dtype=np.uint8))
        self._flush_if_full(name)
        return index

    def add_block(self, block: Block) -> None:
        """Add the tokens of a block."""
        buffer = self._buffer("tokens")
        logprobs = np.full(block.count, np.nan, dtype="<f4")
        if block.logprobs:
            logprobs[:] = np.frombuffer(block.logprobs, dtype="<f4")
        buffer.add(
            {
                "trajectory": block.trajectory,
                "position": block.offset,
                "source": block.source,
                "version": block.version,
                "offset": buffer.stream_length(0),
                "tokens": block.count,
            }
        )
        buffer.extend(0, np.frombuffer(block.tokens, dtype="<i4"))
        buffer.extend(1, logprobs)
        self._flush_if_full("tokens")

    def flush_if_due(self, now: float) -> bool:
        """Flush where the last time is at least `flush_s` ago; whether it was."""
        if self._last_flush_s is not None and now - self._last_flush_s < self._flush_s:
            return False
        self._last_flush_s = now
        self.flush()
        return True

    def flush(self) -> None:
        """Bring the file up to date: readers see all that was added, and a kill no longer loses it."""
        with self._disk():
            for buffer in self._tables.values():
                buffer.flush()

    def close(self, unix_s: float | None = None) -> None:
        """Flush, note the time (None: now), and close. A file whose disk has failed is only let go. Closing twice is no error."""
        if not self._file:
            return
        if not self._broken:
            self.flush()
            with self._disk():
                self._closed[()] = time.time() if unix_s is None else unix_s
                self._closed.flush()
                self._file.close()
        else:
            self._let_go()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _buffer(self, table: str) -> TableBuffer:
        if self._broken:
            raise RecordError(self._broken)
        if not self._file:
            raise RecordError(f"{self.path}: is closed")
        try:
            return self._tables[table]
        except KeyError:
            raise ValueError(f"{self.path}: unknown table {table!r}; tables here: {', '.join(self._tables)}") from None

    def _flush_if_full(self, table: str) -> None:
        if self._tables[table].full:
            self.flush()

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        """Around all that writes: an error of the disk freezes the file and becomes a RecordError, now and from then on."""
        if self._broken:
            raise RecordError(self._broken)
        try:
            yield
        except (OSError, RuntimeError) as error:
            self._broken = f"{self.path}: cannot be written: {_cause(error)}"
            self._freeze()
            raise RecordError(self._broken) from error

    def _freeze(self) -> None:
        """Point the file's descriptor at /dev/null: HDF5 would go on writing its index, also to rows that are not there."""
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, self._file.id.get_vfd_handle())
        os.close(null)

    def _let_go(self) -> None:
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            self._file.close()

    def _abandon(self, part: str) -> None:
        """Leave nothing of a file that could not be made."""
        if self._file:
            self._freeze()
            self._let_go()
        with contextlib.suppress(OSError):
            os.remove(part)


def _put_metadata(file: h5py.File, role: str, rank: int, attempt: int, metadata: dict[str, str]) -> None:
    file.attrs["schema_version"] = schema.SCHEMA_VERSION
    file.attrs["rank"] = rank
    file.attrs["attempt"] = attempt
    put_text(file, "role", role)
    long = file.create_group(schema.METADATA)
    for key, value in metadata.items():
        if len(value.encode()) <= schema.ATTRIBUTE_BYTES:
            put_text(file, key, value)
        else:
            long.create_dataset(key, data=np.frombuffer(value.encode(), dtype=np.uint8))


def _cause(error: Exception) -> str:
    """What the operating system said, out of HDF5's account of where it happened; all of it, in one line, where it did not."""
    said = re.search(r"error message = '([^']*)'", str(error))
    return said.group(1) if said else " ".join(str(error).split())
