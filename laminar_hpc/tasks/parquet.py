"""Rows of a Parquet file, of which only the columns that are used are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from laminar_hpc.errors import ConfigError

_BATCH_ROWS = 1024


def iterate_rows(path: str, columns: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row's `columns` (by the setting that names them; dots go into nested ones), with its place FILE:ROW from 1.

    ConfigError where the file is no whole Parquet file, lacks a column, or a text is not UTF-8; OSError as `open`.
    """
    with open(path, "rb"):  # for the operating system's own words
        pass
    number = 0
    try:
        with pq.ParquetFile(path, memory_map=True) as file:
            for key, name in columns.items():
                _check_column(file.schema_arrow, name, key, path)
            for batch in file.iter_batches(_BATCH_ROWS, columns=list(columns.values()), use_threads=False):
                for row in _rows(batch, path, number):
                    number += 1
                    yield f"{path}:{number}", row
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{path}: not a whole Parquet file, after row {number}: {_one_line(error)}") from error


def _check_column(schema: Any, name: str, key: str, path: str) -> None:
    there = [field.name for field in schema]
    if name in there:
        return
    fields: Any = {field.name: field.type for field in schema}
    for part in name.split("."):
        if part not in fields:
            raise ConfigError(
                f"{path}: no column {name!r} ({key}); at {part!r} there are: {', '.join(fields) or 'none'}"
            )
        inner = fields[part]
        fields = {field.name: field.type for field in inner} if pa.types.is_struct(inner) else {}


def _rows(batch: Any, path: str, before: int) -> list[dict[str, Any]]:
    try:
        return list(batch.to_pylist())
    except UnicodeDecodeError:
        return [_row(batch.slice(index, 1), f"{path}:{before + index + 1}") for index in range(batch.num_rows)]


def _row(batch: Any, place: str) -> dict[str, Any]:
    try:
        return dict(batch.to_pylist()[0])
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{place}: not UTF-8: byte {error.start + 1} of the text is 0x{error.object[error.start]:02x}"
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
