"""Rows of a JSON Lines file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from laminar_hpc.errors import ConfigError


def iterate_rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line as an object, with its place FILE:LINE; ConfigError for the first that is none. OSError as `open`."""
    decoder = msgspec.json.Decoder(dict[str, Any])
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):  # bytes end at \n alone, as JSON Lines wants it
            place = f"{path}:{number}"
            yield place, _object(line.removesuffix(b"\n"), place, decoder)


def _object(line: bytes, place: str, decoder: msgspec.json.Decoder[dict[str, Any]]) -> dict[str, Any]:
    try:
        return decoder.decode(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{place}: not UTF-8: byte {error.start + 1} of the line is 0x{line[error.start]:02x}"
        ) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{place}: {error}; a line must be a JSON object") from error
