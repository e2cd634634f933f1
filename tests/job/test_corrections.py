"""Whole runs with each correction: what it weighs, masks and cuts is in the record, and it is what its name says."""

from __future__ import annotations

import numpy as np
import pytest
from laminar_command import Laminar
from test_run import finished

from laminar_hpc.record.reader import Run

pytestmark = pytest.mark.job

STEPS = 3
BOUNDS = {"correction_cap": 1.1, "correction_low": 0.9, "correction_high": 1.1}
"""So narrow that one step moves the weights of some tokens out of them."""


def metrics_by_name(run: Run) -> dict[str, list[float]]:
    """The values of each metric, step after step."""
    steps = run.table("steps")
    found = {
        name: steps[name].tolist() for name in ("loss", "entropy", "kl_behaviour", "ratio_max", "grad_norm", "skipped")
    }
    for row in run.table("step_metrics"):
        found.setdefault(row["name"].decode(), []).append(float(row["value"]))
    return found


def corrected(
    laminar: Laminar, correction: str, job: dict[str, object], trainer: dict[str, object]
) -> dict[str, list[float]]:
    """Run three steps, the second of them on what the version before it generated; the metrics, all of them finite.

    Rewards are those of the lengths, so some are lower than others, and weight decay moves weights whatever they are.
    """
    prompts = laminar.directory / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{n} + 1 =", "answer": "{n + 1}"}}\n' for n in range(40)))
    run = finished(
        laminar,
        job={"rollouts": 1, "start_timeout_s": 300, **job},
        trainer={
            "correction": correction,
            "dual_clip": 1.5,
            "learning_rate": 2e-3,
            "weight_decay": 5.0,
            **BOUNDS,
            **trainer,
        },
        task={"name": "jsonl", "path": str(prompts), "overlong_tokens": 12},
        rollout={"concurrency": 64, "slots": 64},  # two steps' worth, so that the second one is under way at the first
        control={"steps": STEPS},
        batch={"prompts": 8, "group_size": 4, "minibatches": 2},
        evaluation={"every": 0},
    )
    steps = run.table("steps")
    assert list(steps["step"]) == list(range(1, STEPS + 1))
    assert list(steps["staleness_consumption_max"])[:2] == [0, 1]
    metrics = metrics_by_name(run)
    for name in ("importance_mean", "masked_fraction", "truncated_fraction"):
        assert len(metrics[name]) == STEPS, name
    assert np.all(np.isfinite(np.concatenate(list(metrics.values()))))
    assert max(metrics["skipped"]) == 0.0
    return metrics


def check(correction: str, metrics: dict[str, list[float]]) -> None:
    """Once the first step has moved the weights, ratios are beyond the bounds."""
    masked, truncated, mean = (metrics[name] for name in ("masked_fraction", "truncated_fraction", "importance_mean"))
    assert masked[0] == truncated[0] == 0.0  # the weights that are trained have generated it
    assert mean[0] == pytest.approx(1.0, abs=1e-3)
    assert (0.0 < max(masked[1:]) < 1.0) if correction == "icepop" else (max(masked) == 0.0)
    # of a few whole sequences, all may be beyond the cap
    assert (0.0 < max(truncated[1:]) <= 1.0) if correction.startswith("tis") else (max(truncated) == 0.0), truncated
    assert abs(mean[1] - 1.0) > 1e-3
    if correction.startswith("tis"):
        assert max(mean) < BOUNDS["correction_cap"]


@pytest.mark.parametrize(
    "correction",
    ["tis_sequence", "icepop", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tis_token", "decoupled"))],
)
def test_a_correction_weighs_what_another_version_generated(laminar: Laminar, correction: str) -> None:
    check(correction, corrected(laminar, correction, job={}, trainer={}))


@pytest.mark.slow
@pytest.mark.megatron
def test_megatron_on_two_stages_of_two_ranks_corrects_in_the_same_way(laminar: Laminar) -> None:
    pytest.importorskip("megatron.core")
    trainer = {"engine": "megatron", "tensor_parallel": 2, "pipeline_parallel": 2}
    check("icepop", corrected(laminar, "icepop", job={"trainers": 4}, trainer=trainer))
