"""The quickstart learns, in every mode and split; without a learning rate it does not. Minutes each."""

from __future__ import annotations

from pathlib import Path

import pytest
from laminar_command import Laminar

from laminar_hpc.analysis.checks import Result, run_checks
from laminar_hpc.record.reader import open_run

pytestmark = [pytest.mark.job, pytest.mark.slow]

CONFIG = Path(__file__).parents[2] / "jobs" / "configs" / "quickstart.toml"
RUN_S = 480.0


@pytest.fixture(scope="module")
def warm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model."""
    directory = tmp_path_factory.mktemp("warm")
    done = Laminar(directory, directory)("model", "tiny", directory / "model")
    assert done.returncode == 0, done.stderr
    return directory / "model"


def gains(directory: Path, model: Path, *overrides: str) -> tuple[float, float]:
    """How much held-out accuracy and training reward (last fifth against first) rose in a run of the quickstart."""
    values = [f"model.path={model}", "run_dir=run", *overrides]
    options = [word for value in values for word in ("--set", value)]
    done = Laminar(directory, model)("run", CONFIG, *options, deadline_s=RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    run = open_run(str(directory / "run"))
    for check in run_checks(run):
        assert check.result is Result.HOLDS, check
    reward = run.table("steps")["reward_mean"]
    accuracy = run.table("evaluations")
    accuracy = accuracy[accuracy["version"].argsort()]["accuracy"]
    fifth = len(reward) // 5
    return float(accuracy[-1] - accuracy[0]), float(reward[-fifth:].mean() - reward[:fifth].mean())


@pytest.mark.parametrize(
    "overrides",
    [
        ["job.seed=0"],
        ["job.seed=1"],
        ["job.seed=2"],
        ["control.mode=sync"],
        ["job.trainers=2", "job.relays=2"],
    ],
    ids="+".join,
)
def test_the_quickstart_learns(tmp_path: Path, warm_model: Path, overrides: list[str]) -> None:
    accuracy, reward = gains(tmp_path, warm_model, *overrides)
    assert accuracy >= 0.2
    assert reward >= 0.3


def test_without_a_learning_rate_nothing_is_learned(tmp_path: Path, warm_model: Path) -> None:
    _, reward = gains(tmp_path, warm_model, "trainer.learning_rate=0")
    assert abs(reward) < 0.1
