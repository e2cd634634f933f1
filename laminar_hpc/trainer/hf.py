"""A model directory as Hugging Face writes it: checked at the door, without loading anything, and read by the trainer."""

from __future__ import annotations

import json
import os
from typing import Any

import msgspec

from laminar_hpc.config.model_files import ARCHITECTURES, read_end_tokens, read_json
from laminar_hpc.errors import ConfigError
from laminar_hpc.protocol.peer import Manifest
from laminar_hpc.weights.manifest import make_manifest

MAX_HEADER_BYTES = 100_000_000
"""The limit that safetensors itself sets."""

INDEX = "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"

DTYPES = {"BOOL", "U8", "I8", "I16", "I32", "I64", "F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2"}
"""Names of element types, as safetensors has them."""


def check_model_directory(path: str) -> None:
    """Read all descriptions in the directory `path`, and none of its weights.

    ConfigError, one line naming the path, where it is missing or unreadable, or lacks config.json, a supported
    architecture, an end token, safetensors with a sound header, or tokenizer.json.
    """
    files = _list_directory(path)
    vocab_size, hidden_size = _check_config(path, files)
    ends = read_end_tokens(path)
    if max(ends) >= vocab_size:
        raise ConfigError(f"model.path: {path}: eos_token_id {max(ends)} is no token: vocab_size is {vocab_size}")
    _check_shards(path, files, vocab_size, hidden_size)
    if "tokenizer.json" not in files:
        raise ConfigError(f"model.path: {path} has no tokenizer.json")
    read_json(os.path.join(path, "tokenizer.json"))


def model_manifest(model: Any, chunk_bytes: int) -> Manifest:
    """The layout of the image of a transformers model: its parameters under their names, tied ones once."""
    return make_manifest(
        ((name, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in model.named_parameters()),
        chunk_bytes,
    )


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor of a checkpoint: the safetensors file that it is in, and its shape."""

    file: str
    shape: tuple[int, ...]


def tensor_files(path: str) -> dict[str, StoredTensor]:
    """All tensors of the checkpoint in the directory `path`, by name; the files' headers are read, and no weights.

    Which files count is as in transformers: model.safetensors, else what the index names, else all there are.
    ConfigError where a file is missing or broken.
    """
    files = _list_directory(path)
    chosen = {"model.safetensors"} & files or _named_by_index(path, files)
    if chosen is None:
        chosen = {name for name in files if name.endswith(".safetensors")}
    if not chosen:
        raise ConfigError(f"model.path: {path} has no *.safetensors file")
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(chosen):
        file = os.path.join(path, name)
        tensors |= {tensor: StoredTensor(file, tuple(shape)) for tensor, shape in _read_shapes(file).items()}
    return tensors


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


def _check_config(path: str, files: set[str]) -> tuple[int, int]:
    """The sizes of vocabulary and hidden states."""
    if "config.json" not in files:
        raise ConfigError(f"model.path: {path} has no config.json")
    file = os.path.join(path, "config.json")
    config = read_json(file)
    architectures = config.get("architectures")
    if architectures not in [[name] for name in ARCHITECTURES.values()]:
        allowed = ", ".join(ARCHITECTURES.values())
        raise ConfigError(
            f"model.path: {file}: architectures must be a list of one of {allowed}, got {architectures!r}"
        )
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        value = config.get(key)
        if type(value) is not int or value < 1:
            raise ConfigError(f"model.path: {file}: {key} must be a whole number of at least 1, got {value!r}")
    return config["vocab_size"], config["hidden_size"]


def _check_shards(path: str, files: set[str], vocab_size: int, hidden_size: int) -> None:
    """The safetensors files: all that the index names, each sound, with an embedding of the config's shape."""
    shards = {name for name in files if name.endswith(".safetensors")}
    if not shards:
        raise ConfigError(f"model.path: {path} has no *.safetensors file")
    _named_by_index(path, files)
    shapes: dict[str, list[int]] = {}
    for shard in sorted(shards):
        shapes |= _read_shapes(os.path.join(path, shard))
    expected = [vocab_size, hidden_size]
    if shapes.get(EMBEDDING) != expected:
        raise ConfigError(
            f"model.path: {path}: the tensor {EMBEDDING} must have the shape {expected} (vocab_size, hidden_size of "
            f"config.json), got {shapes.get(EMBEDDING)}"
        )


def _named_by_index(path: str, files: set[str]) -> set[str] | None:
    """The files that the index names, all of them there; None where there is no index, or one file has all."""
    if INDEX not in files or "model.safetensors" in files:
        return None
    named = read_json(os.path.join(path, INDEX)).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise ConfigError(f"model.path: {path}/{INDEX}: weight_map must give the file of each tensor")
    absent = sorted(set(named.values()) - files)
    if absent:
        raise ConfigError(f"model.path: {path} lacks {absent[0]}, which {INDEX} names")
    return set(named.values())


def _read_shapes(file: str) -> dict[str, list[int]]:
    """The shape of each tensor in a safetensors file; ConfigError where it does not begin with a sound header.

    That is 8 bytes of its length, little-endian, and JSON; the tensors' bytes follow.
    """
    try:
        with open(file, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise ConfigError(f"model.path: {file} is no safetensors file, or was cut off")
            header = json.loads(stream.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        unknown = {entry["dtype"] for entry in entries.values()} - DTYPES
        shapes = {name: entry["shape"] for name, entry in entries.items()}
    except OSError as error:
        raise ConfigError(f"model.path: {file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ConfigError(f"model.path: {file} has a broken safetensors header: {error}") from error
    if unknown:
        raise ConfigError(f"model.path: {file} has tensors of unknown type {', '.join(sorted(map(repr, unknown)))}")
    if end != size - 8 - length:
        raise ConfigError(f"model.path: {file} is no safetensors file, or was cut off")
    return shapes
