"""A model directory as Hugging Face writes it: checked at the door, without loading anything, and read by the trainer."""

from __future__ import annotations

import json
import os
from typing import Any

import msgspec

from laminar_hpc.errors import ConfigError
from laminar_hpc.protocol.peer import Manifest
from laminar_hpc.weights.manifest import make_manifest

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

MAX_HEADER_BYTES = 100_000_000
"""The limit that safetensors itself sets."""

DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
"""From safetensors' names to torch's."""


class TensorFacts(msgspec.Struct, frozen=True):
    """One tensor as the header of a safetensors file describes it; `dtype` is torch's name."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class ModelFacts(msgspec.Struct, frozen=True):
    """What a model directory holds. `tensors` are in the order of their names; `end_tokens` may be empty."""

    model_type: str
    vocabulary: int
    tie_word_embeddings: bool
    end_tokens: tuple[int, ...]
    tensors: list[TensorFacts]


def check_model_directory(path: str) -> ModelFacts:
    """Read all descriptions in the directory `path`, and none of its weights.

    ConfigError, one line naming the path, where it is missing or unreadable, or lacks config.json, a supported
    architecture, safetensors with a sound header, or tokenizer.json.
    """
    files = _list_directory(path)
    config = _read_config(path, files)
    tensors: dict[str, TensorFacts] = {}
    shards = sorted(name for name in files if name.endswith(".safetensors"))
    if not shards:
        raise ConfigError(f"model.path: {path} has no *.safetensors file")
    for shard in shards:
        for tensor in _read_header(os.path.join(path, shard)):
            tensors[tensor.name] = tensor
    if "tokenizer.json" not in files:
        raise ConfigError(f"model.path: {path} has no tokenizer.json")
    _read_json(os.path.join(path, "tokenizer.json"))
    return ModelFacts(
        model_type=str(config.get("model_type")),
        vocabulary=config["vocab_size"],
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        end_tokens=_end_tokens(path, files, config),
        tensors=[tensors[name] for name in sorted(tensors)],
    )


def model_manifest(model: Any, chunk_bytes: int) -> Manifest:
    """The layout of the image of a transformers model: its parameters under their names, tied ones once."""
    return make_manifest(
        ((name, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in model.named_parameters()),
        chunk_bytes,
    )


def load_model(path: str, dtype: str) -> Any:
    """The transformers model in `path` with weights of `dtype` ("float32", "bfloat16"), from its safetensors files only.

    ConfigError where the directory is not sound, or its weights do not belong to the model that it describes.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    check_model_directory(path)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            attn_implementation="sdpa",
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"model.path: {path} cannot be loaded: {' '.join(str(error).split())}") from error
    model, info = loaded
    absent = sorted(info["missing_keys"])
    if absent:
        raise ConfigError(f"model.path: {path} lacks the tensor {absent[0]} ({len(absent)} missing in all)")
    return model


def _list_directory(path: str) -> set[str]:
    if not os.path.isdir(path):
        raise ConfigError(f"model.path: {path} is not a directory")
    try:
        return set(os.listdir(path))
    except OSError as error:
        raise ConfigError(f"model.path: {path} cannot be read: {error.strerror}") from error


def _read_config(path: str, files: set[str]) -> dict[str, Any]:
    if "config.json" not in files:
        raise ConfigError(f"model.path: {path} has no config.json")
    file = os.path.join(path, "config.json")
    config = _read_json(file)
    architectures = config.get("architectures") or []
    if len(architectures) != 1 or architectures[0] not in ARCHITECTURES:
        found = ", ".join(map(str, architectures)) or "none"
        raise ConfigError(f"model.path: {file}: architectures must be one of {', '.join(ARCHITECTURES)}, got {found}")
    if not isinstance(config.get("vocab_size"), int):
        raise ConfigError(f"model.path: {file}: vocab_size must be a whole number, got {config.get('vocab_size')!r}")
    return config


def _end_tokens(path: str, files: set[str], config: dict[str, Any]) -> tuple[int, ...]:
    """`eos_token_id` of generation_config.json, else of config.json, as transformers' own `generate` looks it up."""
    ids = None
    if "generation_config.json" in files:
        ids = _read_json(os.path.join(path, "generation_config.json")).get("eos_token_id")
    if ids is None:
        ids = config.get("eos_token_id")
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def _read_json(file: str) -> dict[str, Any]:
    try:
        with open(file, encoding="utf-8") as stream:
            data = json.load(stream)
    except OSError as error:
        raise ConfigError(f"model.path: {file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"model.path: {file} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"model.path: {file} must hold a JSON object, got {type(data).__name__}")
    return data


def _read_header(file: str) -> list[TensorFacts]:
    """The header of a safetensors file: 8 bytes of its length, little-endian, then JSON; the tensors' bytes follow."""
    try:
        with open(file, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise ConfigError(f"model.path: {file} is no safetensors file, or was cut off")
            header = json.loads(stream.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        ends = [entry["data_offsets"][1] for entry in entries.values()]
        tensors = [TensorFacts(name, tuple(e["shape"]), DTYPES[e["dtype"]]) for name, e in entries.items()]
    except OSError as error:
        raise ConfigError(f"model.path: {file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(f"model.path: {file} has a broken safetensors header: {error}") from error
    if max(ends, default=0) != size - 8 - length:
        raise ConfigError(f"model.path: {file} is no safetensors file, or was cut off")
    return tensors
