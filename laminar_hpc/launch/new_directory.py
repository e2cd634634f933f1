"""A new directory that is there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator

from laminar_hpc.errors import ConfigError


def check_new(directory: str) -> None:
    """ConfigError where `directory` is there and not empty; for callers that have much to import before they write."""
    if os.path.lexists(directory) and (not os.path.isdir(directory) or os.listdir(directory)):
        raise ConfigError(f"{directory}: must be a new or an empty directory")


@contextlib.contextmanager
def new_directory(directory: str) -> Iterator[str]:
    """Yields the path of a directory to make; at the end of the block it becomes `directory`, also after a kill in between.

    Where the block raises, nothing is left. ConfigError where `directory` is not empty, or cannot be made.
    """
    check_new(directory)
    part = f"{os.path.abspath(directory)}.{os.getpid()}.part"
    try:
        yield part
        os.replace(part, directory)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be made: {error.strerror or error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
