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

    ConfigError where the file is no whole Parquet file, lacks a column, has two of that name or one of a type that holds
    other things than texts, or a text is not UTF-8; MemoryError; OSError as `open`.
    """
    with open(path, "rb"):  # for the operating system's own words
        pass
    number = 0
    try:
        with pq.ParquetFile(
            path, memory_map=False
        ) as file:  # a map of a large file is beyond a limit of the address space
            for key, name in columns.items():
                _check_column(file.schema_arrow, name, key, path)
            for batch in file.iter_batches(_BATCH_ROWS, columns=list(columns.values()), use_threads=False):
                for row in _rows(batch, path, number):
                    number += 1
                    yield f"{path}:{number}", row
    except MemoryError:  # of which Arrow's own is one
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"{path}: not a whole Parquet file, after row {number}: {_one_line(error)}") from error


def _check_column(schema: Any, name: str, key: str, path: str) -> None:
    """ConfigError where the column `name`, or the nested one that it leads to, is not there once and of texts."""
    fields = list(schema)
    parts = [name] if name in schema.names else name.split(".")
    for part in parts:
        found = [field for field in fields if field.name == part]
        if not found:
            there = ", ".join(field.name for field in fields)
            raise ConfigError(f"{path}: no column {name!r} ({key}); at {part!r} there are: {there or 'none'}")
        if len(found) > 1:
            raise ConfigError(f"{path}: {len(found)} columns are named {part!r} ({key} = {name!r}); it must be one")
        fields = list(found[0].type) if pa.types.is_struct(found[0].type) else []
    problem = _problem(found[0].type)
    if problem:
        raise ConfigError(
            f"{path}: the column {name!r} ({key}) {problem}; it must hold texts, or lists of chat messages"
        )


def _problem(kind: Any) -> str:
    """What is wrong with a column of this type, "" for nothing. Numbers pass: a row with one is named by its number."""
    types = pa.types
    if types.is_struct(kind):
        names = [field.name for field in kind]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            return f"has two fields named {twice[0]!r}"
        return next((problem for field in kind if (problem := _problem(field.type))), "")
    if any(is_list(kind) for is_list in (types.is_list, types.is_large_list, types.is_fixed_size_list)):
        return _problem(kind.value_type)
    if types.is_dictionary(kind):
        return _problem(kind.value_type)
    plain = (types.is_string, types.is_large_string, types.is_string_view, types.is_null, types.is_boolean)
    if any(is_kind(kind) for is_kind in (*plain, types.is_integer, types.is_floating)):
        return ""
    return f"is of the type {kind}"


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
