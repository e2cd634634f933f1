"""Costs and lengths: the published ones, a config's own ones, and what is refused at the door."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from laminar_hpc.config.load import check_config, load_config
from laminar_hpc.config.schema import Config
from laminar_hpc.data.presets import check_paced, costs_of, preset_costs, response_lengths
from laminar_hpc.errors import ConfigError
from laminar_hpc.runtime.check import check_parts, image_bytes

TIMING: dict[str, Any] = {
    "run_dir": "unused",
    "task": {"name": "synthetic"},
    "rollout": {"engine": "paced"},
    "trainer": {"engine": "paced"},
}


def config_of(paced: dict[str, Any] | None = None, **rollout: Any) -> Config:
    return check_config({**TIMING, "rollout": {"engine": "paced", **rollout}, "paced": paced or {}}, "test")


@pytest.mark.parametrize(
    ("model", "step_1_ms", "step_256_ms"),
    [("7b", 7.0, 29.5), ("32b", 10.6, 37.2), ("72b", 10.6 * 9.0875 / 8.2, 37.2 * 9.0875 / 8.2)],
)
def test_decode_steps_are_the_published_ones_and_the_overhead(model: str, step_1_ms: float, step_256_ms: float) -> None:
    costs = preset_costs(model)
    assert costs.step_s(1) * 1e3 == pytest.approx(step_1_ms + 23.0)
    assert costs.step_s(256) * 1e3 == pytest.approx(step_256_ms + 23.0)


def test_the_32b_numbers_are_the_published_ones() -> None:
    costs = preset_costs("32b")
    assert (costs.publish_s, costs.load_s, costs.kv_cache_tokens) == (0.64, 0.558, 640_000)
    assert costs.train_s(69_124) == pytest.approx(1.0, rel=1e-4)
    assert costs.switch_s == pytest.approx(1.312)  # 16.4 GB out and in again, at 25 GB/s
    assert costs.prefill_s(1000) == pytest.approx(1000 * 2 * 32.8e9 / (4 * 0.4 * 989e12))


@pytest.mark.parametrize(
    ("name", "quantiles"),
    [
        ("7b-math", {0.4997: 6139.9, 0.99011: 13821.4}),
        ("32b-math", {0.49963: 2816.3, 0.99214: 10664.2}),
        ("72b-math", {0.50005: 919.6, 0.99041: 2759.2}),
    ],
)
def test_lengths_are_the_published_ones(name: str, quantiles: dict[float, float]) -> None:
    lengths = response_lengths(config_of({"lengths": name}))
    for share, tokens in quantiles.items():
        assert lengths.at(share) == pytest.approx(tokens)
    assert response_lengths(config_of({"model": name[:-5]})) == lengths  # the model's own where none are named


def test_own_numbers_go_over_those_of_the_model() -> None:
    config = config_of(
        {"model": "7b", "decode": [[1, 0.5], [3, 1.5]], "step_overhead_s": 0.25, "load_s": 0.0}, kv_cache_tokens=1234
    )
    costs = costs_of(config)
    assert costs.step_s(2) == 1.25
    assert (costs.load_s, costs.kv_cache_tokens) == (0.0, 1234)
    assert costs.publish_s == preset_costs("7b").publish_s


def test_own_lengths_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("tokens,cdf\n10,0\n30,1\n")
    lengths = response_lengths(config_of({"lengths": str(path)}))
    assert [lengths.at(share) for share in (0.0, 0.5, 1.0)] == [10.0, 20.0, 30.0]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (None, "must be one of 7b-math, 32b-math, 72b-math or a CSV file; .*: No such file"),
        ("", "must begin with the line tokens,cdf, got None"),
        ("length,cdf\n1,1\n", "must begin with the line tokens,cdf"),
        ("tokens,cdf\n", "at least one point"),
        ("tokens,cdf\n1,0.5\n2\n", "not two numbers"),
        ("tokens,cdf\n1,0.5\nmany,1\n", "not two numbers"),
        ("tokens,cdf\n2,0.5\n1,1\n", "got 2 and then 1"),
        ("tokens,cdf\n1,0.5\n2,0.9\n", "the last cdf must be 1, got 0.9"),
    ],
)
def test_a_file_that_is_no_distribution_is_refused(tmp_path: Path, text: str | None, word: str) -> None:
    path = tmp_path / "own.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=f"paced.lengths: .*{word}"):
        check_paced(config_of({"lengths": str(path)}))


@pytest.mark.parametrize(
    ("paced", "rollout", "word"),
    [
        ({"decode": [[4, 1.0], [2, 2.0]]}, {}, "paced.decode: must rise from point to point, got 4 and then 2"),
        ({"decode": [[4, 1.0], [4, 2.0]]}, {}, "paced.decode: has two points for one batch"),
        ({"decode": [[1, 0.0]], "step_overhead_s": 0.0}, {}, "paced.decode: a decode step must take some time"),
        (
            {"load_s": 600.0, "time_scale": 0.2},
            {},
            "paced.load_s: a load takes 120 s of this machine; rollout.timeout_s",
        ),
        ({}, {"kv_cache_tokens": 511}, "rollout.kv_cache_tokens: the emulated KV cache has room for 511 tokens, but"),
    ],
)
def test_costs_that_make_no_sense_are_refused(paced: dict[str, Any], rollout: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        check_paced(config_of(paced, **rollout))
    check_paced(config_of())


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"trainer": {"engine": "torch"}}, "trainer.engine must be 'paced' where rollout.engine is 'paced' and"),
        ({"task": {"name": "reasoning_gym"}}, "task.name must be 'synthetic' where rollout.engine is 'paced' and"),
        ({"rollout": {"engine": "torch"}}, "trainer.engine = 'paced' needs rollout.engine = 'paced' and paced.tokens"),
        ({"paced": {"tokens": "model"}}, "trainer.engine = 'paced' needs rollout.engine = 'paced' and paced.tokens"),
        ({"rollout": {"engine": "torch"}, "trainer": {}}, "task.name = 'synthetic' needs rollout.engine = 'paced'"),
        ({"paced": {"tokens": "model"}, "trainer": {}, "task": {}}, "model.path is required"),
        ({"rollout": {"engine": "paced", "tensor_parallel": 2}}, "rollout.tensor_parallel must be 1 where"),
        ({"trainer": {"engine": "paced", "tensor_parallel": 2}}, "trainer.tensor_parallel and"),
        ({"paced": {"model": "3b"}}, "paced.model: "),
        ({"paced": {"time_scale": 0.0}}, "paced.time_scale: "),
        ({"paced": {"time_scale": 1.5}}, "paced.time_scale: "),
        ({"paced": {"speed": 2}}, "unknown key paced.speed"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        check_config({**TIMING, **changes}, "test")


def test_no_model_is_asked_for_where_all_is_paced() -> None:
    config = config_of({"image_bytes": 4096})
    assert config.timing_only
    assert image_bytes(config) == 4096
    check_parts(config)


def test_the_config_in_jobs_is_one() -> None:
    path = Path(__file__).parents[2] / "jobs" / "configs" / "paced-32b.toml"
    config = load_config(str(path))
    check_parts(config)
    assert (config.job.ranks, config.job.rollouts, config.paced.model) == (19, 16, "32b")
    assert config.paced.lengths == ""
