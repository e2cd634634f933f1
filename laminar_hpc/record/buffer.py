"""Rows and streams on their way into a file: held in memory, then written behind what the dataset has already."""

from __future__ import annotations

from typing import Any

import h5py
import msgspec
import numpy as np

from laminar_hpc.record import schema
from laminar_hpc.record.convert import Converter, converter

CHUNK_BYTES = 16 * 1024
"""Of a table; small, since each table that has a row takes at least one."""

STREAM_CHUNK_BYTES = 64 * 1024

HELD_ROWS = 4096
HELD_BYTES = 16 << 20
"""More than this is flushed without waiting for the timer, so that memory stays bounded."""


class TableBuffer:
    """A table's dataset and streams, and the rows that are not in it yet."""

    def __init__(self, file: h5py.File, table: schema.Table) -> None:
        self._table = table
        self._dtype = table.dtype
        self.columns = frozenset(table.names)
        self._converters: list[tuple[str, Converter]] = [(column.name, converter(column)) for column in table.columns]
        self._pending: list[tuple[Any, ...]] = []
        self._dataset = _create_table(file, table)
        self._written = 0
        self._streams = [StreamBuffer(file, stream) for stream in table.streams]

    @property
    def full(self) -> bool:
        """Whether more is held than should be."""
        held = sum(stream.held_bytes for stream in self._streams)
        return len(self._pending) >= HELD_ROWS or held >= HELD_BYTES

    def add(self, fields: dict[str, Any]) -> int:
        """Take a row; its number."""
        row = []
        name = ""
        try:
            for name, convert in self._converters:
                row.append(convert(fields[name]))
        except KeyError:
            raise ValueError(self._misfit(fields)) from None
        except (TypeError, ValueError) as error:
            raise ValueError(f"table {self._table.name}, column {name}: {error}") from None
        if len(fields) != len(row):
            raise ValueError(self._misfit(fields))
        self._pending.append(tuple(row))
        return self._written + len(self._pending) - 1

    def stream_length(self, stream: int) -> int:
        """Entries in a stream, those not written yet included."""
        return self._streams[stream].length

    def extend(self, stream: int, data: np.ndarray) -> None:
        """Add entries to a stream."""
        self._streams[stream].extend(data)

    def flush(self) -> None:
        """Write what is held; streams first, so that no row points beyond their end."""
        if not self._pending:
            return
        for stream in self._streams:
            stream.flush()
        rows = np.array(self._pending, dtype=self._dtype)
        end = self._written + len(rows)
        self._dataset.resize((end,))
        self._dataset[self._written : end] = rows
        self._dataset.flush()
        self._written = end
        self._pending.clear()

    def _misfit(self, fields: dict[str, Any]) -> str:
        problems = [f"unknown field {name}" for name in fields if name not in self.columns]
        problems += [f"missing field {name}" for name in self._table.names if name not in fields]
        return f"table {self._table.name}: {', '.join(problems)}; its columns are {', '.join(self._table.names)}"


class StreamBuffer:
    """A flat array that grows."""

    def __init__(self, file: h5py.File, stream: schema.Stream) -> None:
        self._dataset = file.create_dataset(
            stream.name,
            shape=(0,),
            maxshape=(None,),
            dtype=stream.dtype,
            chunks=(STREAM_CHUNK_BYTES // np.dtype(stream.dtype).itemsize,),
        )
        put_text(self._dataset, "unit", stream.unit)
        put_text(self._dataset, "description", stream.description)
        self._pending: list[np.ndarray] = []
        self._written = 0
        self.length = 0
        self.held_bytes = 0

    def extend(self, data: np.ndarray) -> None:
        """Add entries."""
        self._pending.append(data)
        self.length += len(data)
        self.held_bytes += data.nbytes

    def flush(self) -> None:
        """Write what is held."""
        self._dataset.resize((self.length,))
        self._dataset[self._written : self.length] = np.concatenate(self._pending)
        self._dataset.flush()
        self._pending.clear()
        self._written = self.length
        self.held_bytes = 0


def _create_table(file: h5py.File, table: schema.Table) -> h5py.Dataset:
    """The table's dataset. Unwritten rows read as all ones, which no row is, so that a reader can tell them."""
    stored = np.dtype([(column.name, _stored_type(column)) for column in table.columns])
    dataset = file.create_dataset(
        table.name,
        shape=(0,),
        maxshape=(None,),
        dtype=stored,
        chunks=(max(1, CHUNK_BYTES // stored.itemsize),),
        fillvalue=np.frombuffer(b"\xff" * stored.itemsize, dtype=table.dtype)[0],
    )
    put_text(dataset, "description", table.description)
    columns = {column.name: {"unit": column.unit, "description": column.description} for column in table.columns}
    put_text(dataset, schema.COLUMNS, msgspec.json.encode(columns).decode())
    return dataset


def _stored_type(column: schema.Column) -> Any:
    if column.names:
        return h5py.enum_dtype({name: code for code, name in enumerate(column.names)}, basetype=column.dtype)
    return column.dtype


def put_text(owner: h5py.File | h5py.Dataset, name: str, value: str) -> None:
    """A text attribute of fixed length (h5py's own are of variable length)."""
    data = value.encode()
    owner.attrs.create(name, np.bytes_(data), dtype=h5py.string_dtype("utf-8", max(1, len(data))))
