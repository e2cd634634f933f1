"""Rows with known content, and a child process that writes them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

WRITER = Path(__file__).parent / "endless_writer.py"


@pytest.fixture
def start_writer() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start the endless writer on a file; all that are left are killed at the end of the test."""
    children: list[subprocess.Popen[str]] = []

    def start(path: Path, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(WRITER), str(path), *arguments]
        children.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
