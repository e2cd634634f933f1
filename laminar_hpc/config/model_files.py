"""The small files of a model directory, and which models there are: what rollouts and trainers must agree on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from laminar_hpc.errors import ConfigError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""The models that can be trained and run, by `model_type` of config.json.

Their code in transformers hands keywords through to the attention function, and adds nothing to its scores.
"""


POSITIONS = {"llama": 2048, "qwen2": 32_768, "qwen3": 32_768}
"""How many positions transformers takes a model of each type to have whose config.json does not say."""


def read_end_tokens(model_dir: str) -> frozenset[int]:
    """The ids that end a response: `eos_token_id` of generation_config.json, else of config.json, at least one.

    That is the order in which transformers' own `generate` looks. ConfigError where neither file has one, since no
    response would ever end, or where it is no token.
    """
    for name in ("generation_config.json", "config.json"):
        path = os.path.join(model_dir, name)
        if os.path.isfile(path):
            ids = _eos_token_ids(path)
            if ids:
                return ids
    raise ConfigError(f"model.path: {model_dir}: eos_token_id is in neither generation_config.json nor config.json")


def read_json(path: str) -> dict[str, Any]:
    """The JSON object in the file at `path`; ConfigError, one line naming the path, where there is none."""
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # reading a pipe would wait for ever
            raise ConfigError(f"model.path: {path} is no regular file")
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except OSError as error:
        raise ConfigError(f"model.path: {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"model.path: {path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"model.path: {path} must hold a JSON object, got {type(content).__name__}")
    return content


def read_flag(config: Mapping[str, Any], key: str, where: str) -> bool:
    """A key of a config.json that is true or false, false where it is not there; ConfigError, begun with `where`, else."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{where}: {key} must be true or false, got {value!r}")
    return bool(value)


def read_layer_types(config: Mapping[str, Any], where: str) -> list[str]:
    """What a config.json says of the kinds of attention, layer by layer; empty where it does not say. ConfigError as above."""
    value = config.get("layer_types")
    if value is not None and not (isinstance(value, list) and all(isinstance(kind, str) for kind in value)):
        raise ConfigError(f"{where}: layer_types must be a list of names, got {value!r}")
    return value or []


def read_positions(config: Mapping[str, Any], where: str) -> int:
    """How many positions the model of a config.json, of a type of `ARCHITECTURES`, was made for; ConfigError as above."""
    value = config.get("max_position_embeddings", POSITIONS[config["model_type"]])
    if type(value) is not int or value < 1:
        raise ConfigError(f"{where}: max_position_embeddings must be a whole number of at least 1, got {value!r}")
    return value


def read_rope(config: Mapping[str, Any], where: str) -> tuple[Any, Mapping[str, Any]]:
    """The type of rotary embedding in a config.json, and its parameters; older files have other names for both."""
    values = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: rope_parameters must be an object, got {values!r}")
    return values.get("rope_type", values.get("type", "default")), values


def _eos_token_ids(path: str) -> frozenset[int]:
    value = read_json(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ConfigError(f"model.path: {path}: eos_token_id must be an integer or a list of them, got {value!r}")
    return frozenset(ids)
