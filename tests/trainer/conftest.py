"""Fixtures: one tiny model for all tests that train."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a random Qwen2, tied embeddings, and a tokenizer."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    torch.set_num_threads(1)
    from trainer_cases import save_model

    directory: Path = tmp_path_factory.mktemp("trainer-model")
    return save_model(directory)
