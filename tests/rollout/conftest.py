"""Fixtures: the models of saved_models.py, each made once."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from saved_models import CONFIGS, Saved  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """The tests run beside others on few cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", params=sorted(CONFIGS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Each kind of model in turn."""
    return Saved(tmp_path_factory.mktemp(request.param), CONFIGS[request.param](), seed=11)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """One kind of model, where the kind does not matter."""
    return Saved(tmp_path_factory.mktemp("one-llama"), CONFIGS["llama"](), seed=12)
