"""What has to be on the disk before anybody counts on it."""

from __future__ import annotations

import os


def sync_directory(directory: str) -> None:
    """Return when the names in `directory` are on the disk: a file's own sync does not see to that. OSError where it fails."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
