"""What config.json says of a model's architecture, as far as the Megatron trainer builds it, and whether it can be cut.

Neither torch nor Megatron is imported here, so that a launcher can look before any process starts.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from laminar_hpc.config.model_files import read_flag, read_json, read_layer_types, read_positions, read_rope
from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError
from laminar_hpc.trainer.hf import tensor_files
from laminar_hpc.weights.megatron_layout import ModelShape, Placement, placements

HEAD_SIZES = {"qwen3": 128}
"""Head sizes that transformers assumes where config.json has none; else it is hidden_size / num_attention_heads."""


class Llama3Scaling(msgspec.Struct, frozen=True):
    """How Llama 3.1 stretches its rotary embedding: low frequencies by `factor`, high ones not, others in between."""

    factor: float
    low: float
    high: float
    positions: float
    """The context length that the model was first trained with."""


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """A Llama, Qwen2 or Qwen3 decoder."""

    shape: ModelShape
    positions: int
    norm_epsilon: float
    rope_base: float
    rope_factor: float = 1.0
    """All positions are divided by it."""
    llama3: Llama3Scaling | None = None


def check_megatron_is_there() -> None:
    """ConfigError where megatron-core is not installed. Imports nothing of it."""
    try:
        found = importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:  # there is no `megatron` to look in
        found = False
    if not found:
        raise ConfigError(
            "trainer.engine: megatron-core is not installed; from the checkout: pip install '.[megatron]'"
        )


def check_megatron(config: Config) -> None:
    """ConfigError where the Megatron trainer cannot hold the model at `config.model.path`, or not cut like this.

    Reads config.json and the headers of the safetensors files. Nothing to do where another trainer is chosen.
    """
    if config.trainer.engine != "megatron":
        return
    shape = read_architecture(config.model.path).shape
    layout = placements(shape, config.trainer.tensor_parallel, config.trainer.pipeline_parallel)
    check_tensors(config.model.path, layout)


def read_architecture(path: str) -> Architecture:
    """The architecture of the model in the directory `path`; ConfigError names the key with which it cannot be built."""
    file = os.path.join(path, "config.json")
    return architecture(read_json(file), f"model.path: {file}")


def architecture(config: Mapping[str, Any], where: str) -> Architecture:
    """What these keys of a config.json say; a key that is not there has the value that transformers gives it."""
    kind = config.get("model_type")
    if kind not in ("llama", "qwen2", "qwen3"):
        raise ConfigError(f"{where}: the megatron trainer has model_type llama, qwen2 and qwen3, got {kind!r}")
    _refuse_variants(config, where)
    heads, hidden = _size(config, "num_attention_heads", where), _size(config, "hidden_size", where)
    groups = _size(config, "num_key_value_heads", where, heads)
    if heads % groups:
        raise ConfigError(f"{where}: num_key_value_heads must divide num_attention_heads ({heads}), got {groups}")
    shape = ModelShape(
        vocabulary=_size(config, "vocab_size", where),
        hidden=hidden,
        intermediate=_size(config, "intermediate_size", where),
        layers=_size(config, "num_hidden_layers", where),
        heads=heads,
        query_groups=groups,
        head_size=_size(config, "head_dim", where, HEAD_SIZES.get(kind, hidden // heads)),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        tied=read_flag(config, "tie_word_embeddings", where),
    )
    base, factor, llama3 = _rope(config, where)
    return Architecture(
        shape=shape,
        positions=read_positions(config, where),
        norm_epsilon=_number(config, "rms_norm_eps", where, 1e-6),
        rope_base=base,
        rope_factor=factor,
        llama3=llama3,
    )


def check_tensors(path: str, layout: list[Placement]) -> None:
    """ConfigError for the first tensor that the checkpoint in `path` lacks, or has in another shape."""
    there = tensor_files(path)
    absent = [placement.name for placement in layout if placement.name not in there]
    if absent:
        raise ConfigError(f"model.path: {path} lacks the tensor {absent[0]} ({len(absent)} missing in all)")
    for placement in layout:
        found = there[placement.name].shape
        if found != placement.shape:
            raise ConfigError(
                f"model.path: {path}: the tensor {placement.name} must have the shape {list(placement.shape)} by "
                f"config.json, got {list(found)}"
            )


def _refuse_variants(config: Mapping[str, Any], where: str) -> None:
    """What the three families could have, and the Megatron trainer does not build."""
    for key, allowed in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("use_sliding_window", False),
        ("partial_rotary_factor", 1.0),
    ):
        value = config.get(key)
        if value is not None and value != allowed:
            raise ConfigError(f"{where}: {key} must be {allowed!r} for the megatron trainer, got {value!r}")
    if "sliding_attention" in read_layer_types(config, where):
        raise ConfigError(f"{where}: layer_types must be all full_attention for the megatron trainer")


def _rope(config: Mapping[str, Any], where: str) -> tuple[float, float, Llama3Scaling | None]:
    """Base of the rotary embedding, factor of all positions, and scaling by frequency."""
    kind, values = read_rope(config, where)
    base = _number(values, "rope_theta", where, _number(config, "rope_theta", where, 10_000.0))
    if kind == "default":
        return base, 1.0, None
    if kind == "linear":
        return base, _number(values, "factor", where), None
    if kind == "llama3":
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        return base, 1.0, Llama3Scaling(*(_number(values, key, where) for key in keys))
    raise ConfigError(f"{where}: rope_type must be default, linear or llama3 for the megatron trainer, got {kind!r}")


def _size(config: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or value < 1:
        raise ConfigError(f"{where}: {key} must be a whole number of at least 1, got {value!r}")
    return value


def _number(config: Mapping[str, Any], key: str, where: str, default: float | None = None) -> float:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{where}: {key} must be a number above 0, got {value!r}")
    return float(value)
