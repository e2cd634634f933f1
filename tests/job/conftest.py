"""A small model, and the command in a directory of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from laminar_command import Laminar


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model without warm start: enough for everything but learning."""
    from laminar_hpc.trainer.tiny import make_tiny_model
    from laminar_hpc.trainer.warm_start import WarmStart

    directory = tmp_path_factory.mktemp("model") / "tiny"
    pair = [("1 + 1 =", "2")]
    make_tiny_model(str(directory), pair, pair, seed=0, plan=WarmStart(max_steps=0))
    return directory


@pytest.fixture
def laminar(tmp_path: Path, model: Path) -> Iterator[Laminar]:
    """The command, with a small model at hand."""
    command = Laminar(tmp_path, model)
    yield command
    command.end()
