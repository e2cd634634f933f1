"""One rollout, two trajectories, known costs: every moment by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulated_jobs import lengths_file, simulated, small_config

from laminar_hpc.record.reader import Run

EXACTLY = 1e-9

PUBLISHED_S = 0.5
HELD_S = PUBLISHED_S + 1e-3 + (1 << 20) * 1e-9  # one chunk over one link: 1 ms to start it, 1 ns a byte
LOADED_S = HELD_S + 0.25
PREFILL_S = 1.0 + 2 * 32 / 128  # two prompts of 32 tokens in one step


def job_with(folder: Path, lengths: tuple[int, int]) -> Run:
    """A job whose two responses have these lengths: a seed is looked for that draws them."""
    for seed in range(50):
        config = small_config(folder / f"seed-{seed}", lengths_file(folder, *lengths), job={"seed": seed})
        run = simulated(config)
        if sorted(run.table("trajectories")["response_tokens"]) == sorted(lengths):
            return run
    raise AssertionError("no seed draws these lengths")


def test_two_responses_of_one_length(tmp_path: Path) -> None:
    run = job_with(tmp_path, (10, 10))
    rows = run.table("trajectories")
    assert rows["begun_s"] == pytest.approx([LOADED_S] * 2, abs=EXACTLY)
    end_s = LOADED_S + PREFILL_S + 10 * 0.25
    assert rows["finished_s"] == pytest.approx([end_s] * 2, abs=EXACTLY)
    (step,) = run.table("steps")
    train_s = 2.0 + 2 * (32 + 10) / 128
    assert step["started_s"] == pytest.approx(end_s, abs=EXACTLY)
    assert step["finished_s"] == pytest.approx(end_s + train_s, abs=EXACTLY)
    assert run.table("publications")["time_s"] == pytest.approx([PUBLISHED_S, end_s + train_s + 0.5], abs=EXACTLY)
    assert (rows["staleness_finish"].tolist(), rows["staleness_consumption"].tolist()) == ([0, 0], [0, 0])
    assert rows["reward"].tolist() == [1.0, 1.0]  # an even number of tokens


def test_the_longer_one_goes_on_alone_at_its_own_speed(tmp_path: Path) -> None:
    run = job_with(tmp_path, (8, 20))
    ends = sorted(
        zip(run.table("trajectories")["response_tokens"], run.table("trajectories")["finished_s"], strict=True)
    )
    short_s = LOADED_S + PREFILL_S + 8 * 0.25
    assert [end for _, end in ends] == pytest.approx([short_s, short_s + 12 * 0.125], abs=EXACTLY)
    engine = run.table("engine")  # a row with each end
    assert engine["generated_tokens"].tolist() == [16, 12]
    assert engine["kv_use"] == pytest.approx([(32 + 8) / 4096, 0.0])
    assert engine["busy_s"] == pytest.approx([short_s - LOADED_S, 12 * 0.125], abs=EXACTLY)


def test_half_the_time_scale_is_half_the_time_but_for_the_chain(tmp_path: Path) -> None:
    config = small_config(
        tmp_path / "run",
        lengths_file(tmp_path, 10, 10),
        paced={"time_scale": 0.5},
        rollout={"stream_interval_s": 500.0},
    )
    run = simulated(config)
    loaded_s = 0.25 + (HELD_S - PUBLISHED_S) + 0.125
    assert run.table("trajectories")["finished_s"] == pytest.approx([loaded_s + (PREFILL_S + 2.5) / 2] * 2, abs=EXACTLY)


def test_a_trainer_publishes_before_it_trains_on_and_each_takes_its_own_share(tmp_path: Path) -> None:
    config = small_config(
        tmp_path / "run",
        lengths_file(tmp_path, 10, 10),
        job={"trainers": 2},
        batch={"prompts": 2, "minibatches": 2},
        control={"steps": 2, "ahead": 1.0},
    )
    run = simulated(config)
    first, second = run.table("steps")
    minibatch_s = 2.0 + 1 * (32 + 10) / 128  # each trainer has one of the two responses of a mini-batch
    assert first["finished_s"] - first["started_s"] == pytest.approx(2 * minibatch_s, abs=EXACTLY)
    # the groups of the second step are there already: it begins when the version of the first is published
    published_s = run.table("publications")["time_s"][1]
    assert published_s == pytest.approx(first["finished_s"] + 0.5, abs=EXACTLY)
    assert second["started_s"] == pytest.approx(published_s, abs=EXACTLY)
    assert second["staleness_consumption_mean"] == 1.0


def test_a_correction_scores_the_whole_step_first(tmp_path: Path) -> None:
    config = small_config(
        tmp_path / "run",
        lengths_file(tmp_path, 10, 10),
        trainer={"correction": "decoupled"},
        batch={"prompts": 2, "minibatches": 2},
    )
    (step,) = simulated(config).table("steps")
    minibatch_s = 2.0 + 2 * (32 + 10) / 128
    assert step["finished_s"] - step["started_s"] == pytest.approx((2 / 3 + 2) * minibatch_s, abs=EXACTLY)
