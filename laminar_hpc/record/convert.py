"""From what a caller has to what a column holds, checked value by value when the row is added."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from laminar_hpc.record.schema import MISSING, NONE, Column

Converter = Callable[[Any], Any]


def converter(column: Column) -> Converter:
    """A function from a value to the column's cell; it raises TypeError or ValueError for one that does not fit."""
    if column.names:
        return _choice(column.names, column.nullable)
    kind = np.dtype(column.dtype).kind
    if kind == "f":
        return _real(column.nullable)
    if kind == "S":
        return _text(np.dtype(column.dtype).itemsize)
    return _integer(column)


def clip_text(text: str, nbytes: int) -> bytes:
    """`text` as UTF-8 in at most `nbytes` bytes, cut between two characters where it is longer."""
    data = text.encode("utf-8", errors="replace")
    if len(data) <= nbytes:
        return data
    return data[:nbytes].decode("utf-8", errors="ignore").encode()


def _choice(names: tuple[str, ...], nullable: bool) -> Converter:
    codes: dict[Any, int] = {name: code for code, name in enumerate(names)}
    if nullable:
        codes[None] = names.index(NONE)

    def convert(value: Any) -> int:
        code = codes.get(value)  # an Enum of text is found by its value
        if code is None:
            raise ValueError(f"must be one of {', '.join(names)}, got {value!r}")
        return code

    return convert


def _real(nullable: bool) -> Converter:
    def convert(value: Any) -> float:
        if type(value) is float:
            return value
        if value is None and nullable:
            return math.nan
        if not isinstance(value, (int, float, np.floating, np.integer)):
            raise TypeError(f"must be a number, got {value!r}")
        return float(value)

    return convert


def _text(nbytes: int) -> Converter:
    def convert(value: Any) -> bytes:
        if not isinstance(value, str):
            raise TypeError(f"must be text, got {value!r}")
        return clip_text(value, nbytes)

    return convert


def _integer(column: Column) -> Converter:
    bounds = np.iinfo(column.dtype)
    low, high = int(bounds.min), int(bounds.max)
    missing = MISSING if low < 0 else 0

    def convert(value: Any) -> int:
        if value is None and column.nullable:
            return missing
        number = operator.index(value)
        if not low <= number <= high:
            raise ValueError(f"must be within {low} and {high}, got {number}")
        return number

    return convert
