"""What the torch engine cannot run is refused at the door, before torch is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError
from laminar_hpc.rollout.torch_setup import check_torch

MODEL = {"model_type": "qwen2", "max_position_embeddings": 128}


def config_for(directory: Path, model: dict[str, Any], **rollout: Any) -> Config:
    """A config for a directory with this config.json, whose trajectories may have 100 tokens."""
    (directory / "config.json").write_text(json.dumps(model))
    limits = {"max_prompt_tokens": 40, "max_response_tokens": 60, **rollout}
    return Config.model_validate({"run_dir": "unused", "model": {"path": str(directory)}, "rollout": limits})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_position_embeddings": 100},
        {"layer_types": ["full_attention"], "use_sliding_window": True},
        {"use_sliding_window": False, "sliding_window": 32},
        {"layer_types": None, "rope_scaling": None},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "llama3"}},
    ],
)
def test_what_it_can_run_is_let_in(tmp_path: Path, changes: dict[str, Any]) -> None:
    check_torch(config_for(tmp_path, MODEL | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "is of type gpt2; the torch engine runs llama, qwen2, qwen3"),
        ({"model_type": ["llama"]}, "is of type .*; the torch engine runs llama, qwen2, qwen3"),
        ({"max_position_embeddings": 99}, "max_response_tokens is 100; the model in .* has 99 positions"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings must be a whole number .*, got 'many'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window attention"),
        ({"layer_types": 5}, "layer_types must be a list of names, got 5"),
        ({"use_sliding_window": True}, "sliding-window attention"),
        ({"use_sliding_window": "no"}, "use_sliding_window must be true or false, got 'no'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rotary embeddings that change"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rotary embeddings that change"),
        ({"rope_scaling": "dynamic"}, "rope_parameters must be an object, got 'dynamic'"),
    ],
)
def test_what_it_cannot_run_is_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        check_torch(config_for(tmp_path, MODEL | changes))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("kind", "positions"), [("llama", 2048), ("qwen3", 32_768)])
def test_a_file_without_positions_has_as_many_as_transformers_takes(tmp_path: Path, kind: str, positions: int) -> None:
    check_torch(config_for(tmp_path, {"model_type": kind}, max_response_tokens=positions - 40))
    with pytest.raises(ConfigError, match=f"has {positions} positions"):
        check_torch(config_for(tmp_path, {"model_type": kind}, max_response_tokens=positions - 39))


def test_other_engines_are_not_looked_at(tmp_path: Path) -> None:
    check_torch(config_for(tmp_path, {"model_type": "gpt2"}, engine="vllm"))


def test_neither_torch_nor_transformers_is_loaded() -> None:
    code = "import sys, laminar_hpc.rollout.torch_setup; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
