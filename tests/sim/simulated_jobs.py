"""Simulated jobs whose costs are round numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from laminar_hpc.config.load import check_config
from laminar_hpc.config.schema import Config
from laminar_hpc.record.reader import Run, open_run
from laminar_hpc.sim.run import simulate

PAPER_LENGTHS = "32b-math"


def lengths_file(folder: Path, short: int, long: int) -> str:
    """A distribution in which half of the responses have `short` tokens, half have `long`."""
    path = folder / f"lengths-{short}-{long}.csv"
    path.write_text(f"tokens,cdf\n{short},0\n{short},0.5\n{long},0.5\n{long},1\n")
    return str(path)


def small_config(run_dir: Path, lengths: str, **sections: dict[str, Any]) -> Config:
    """One trainer, one relay, one rollout, one step of one prompt with two responses; `sections` go over it, key by key."""
    values: dict[str, Any] = {
        "job": {"trainers": 1, "relays": 1, "rollouts": 1, "seed": 0},
        "task": {"name": "synthetic", "parameters": {"min_tokens": 32, "max_tokens": 32}},
        "rollout": {
            "engine": "paced",
            "concurrency": 8,
            "slots": 8,
            "max_prompt_tokens": 64,
            "max_response_tokens": 64,
            "kv_cache_tokens": 4096,
            "stream_interval_s": 1000.0,
        },
        "trainer": {"engine": "paced"},
        "paced": {
            "time_scale": 1.0,
            "lengths": lengths,
            "decode": [[1, 0.125], [2, 0.25]],
            "step_overhead_s": 0.0,
            "prefill_call_s": 1.0,
            "prefill_token_s": 0.0078125,
            "train_call_s": 2.0,
            "train_token_s": 0.0078125,
            "publish_s": 0.5,
            "load_s": 0.25,
            "image_bytes": 1 << 20,
        },
        "batch": {"prompts": 1, "group_size": 2, "minibatches": 1},
        "control": {"mode": "laminar", "steps": 1},
        "weights": {"chunk_bytes": 1 << 20},
        "evaluation": {"every": 0},
    }
    for section, own in sections.items():
        values[section] = values.get(section, {}) | own
    return check_config({"run_dir": str(run_dir), **values}, "test")


def tail_config(run_dir: Path, **sections: dict[str, Any]) -> Config:
    """Four rollouts with published lengths and enough work for them: long tails, which are repacked."""
    job = {"rollouts": 4, "relays": 2}
    rollout = {"max_response_tokens": 16384, "kv_cache_tokens": 640_000, "concurrency": 64, "slots": 64}
    batch = {"prompts": 16, "group_size": 8, "minibatches": 2}
    paced = {
        "decode": [[1, 0.0106], [64, 0.0182], [256, 0.0372]],
        "step_overhead_s": 0.023,
        "prefill_call_s": 0.0,
        "prefill_token_s": 4e-5,
        "train_token_s": 1e-6,
        "train_call_s": 0.1,
    }
    own = {
        "job": job,
        "rollout": rollout | {"stream_interval_s": 2.0},
        "batch": batch,
        "paced": paced,
        "control": {"steps": 5, "ahead": 3.0},
    }
    for section, values in sections.items():
        own[section] = own.get(section, {}) | values
    return small_config(run_dir, PAPER_LENGTHS, **own)


def simulated(config: Config, *, reverse_ties: bool = False) -> Run:
    """The record of a simulated run that has finished."""
    ended = simulate(config, lambda _line: None, reverse_ties=reverse_ties)
    assert ended.ending.outcome == "finished", ended.ending.reason
    return open_run(config.run_dir)
