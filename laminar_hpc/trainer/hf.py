"""A model directory as Hugging Face writes it: checked at the door, without loading anything, and read by the trainer."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from laminar_hpc.config.model_files import ARCHITECTURES, read_end_tokens, read_flag, read_json, read_layer_types
from laminar_hpc.errors import ConfigError
from laminar_hpc.protocol.peer import Manifest
from laminar_hpc.weights.manifest import make_manifest

MAX_HEADER_BYTES = 100_000_000
"""The limit that safetensors itself sets."""

INDEX = "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

WEIGHTS = ("F32", "BF16", "F16")
"""Element types, as safetensors names them, of weights that are what they say; narrower ones need scales beside them."""

COMPUTED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
"""Buffers that older versions of transformers have saved; everybody computes them."""


def check_model_directory(path: str) -> None:
    """Read all descriptions in the directory `path`, and none of its weights.

    ConfigError, one line naming the path, where it is missing or unreadable, or lacks config.json, a supported
    architecture, an end token, safetensors with a sound header and the model's tensors, or tokenizer.json; where it is
    quantized, or has tensors that the model has not, or tokens.
    """
    files = _list_directory(path)
    config = _check_config(path, files)
    vocab_size = config["vocab_size"]
    ends = read_end_tokens(path)
    if max(ends) >= vocab_size:
        raise ConfigError(f"model.path: {path}: eos_token_id {max(ends)} is no token: vocab_size is {vocab_size}")
    _check_shards(path, files, vocab_size, config["hidden_size"])
    _check_tensors(path, tensor_names(config, f"model.path: {path}"))
    if "tokenizer.json" not in files:
        raise ConfigError(f"model.path: {path} has no tokenizer.json")
    _check_tokenizer(os.path.join(path, "tokenizer.json"), vocab_size)


def model_manifest(model: Any) -> Manifest:
    """The layout of the image of a transformers model: its parameters under their names, tied ones once."""
    return make_manifest(
        (name, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in model.named_parameters()
    )


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor of a checkpoint: the safetensors file that it is in, its shape, and its element type as safetensors has it."""

    file: str
    shape: tuple[int, ...]
    dtype: str


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
        tensors |= _read_header(os.path.join(path, name))
    return tensors


def tensor_names(config: Mapping[str, Any], where: str) -> set[str]:
    """The tensors of the model that this config.json describes, tied ones once; ConfigError, begun with `where`.

    As the classes of `ARCHITECTURES` have them: Qwen2 always has biases of queries, keys and values, and never others.
    """
    kind = config["model_type"]
    attention_bias = kind != "qwen2" and read_flag(config, "attention_bias", where)
    mlp_bias = kind == "llama" and read_flag(config, "mlp_bias", where)
    parts = {"input_layernorm.weight", "post_attention_layernorm.weight"}
    for layer, has_bias in (
        *((f"self_attn.{name}_proj", attention_bias or kind == "qwen2") for name in "qkv"),
        ("self_attn.o_proj", attention_bias),
        *((f"mlp.{name}_proj", mlp_bias) for name in ("gate", "up", "down")),
    ):
        parts |= {f"{layer}.weight", f"{layer}.bias"} if has_bias else {f"{layer}.weight"}
    if kind == "qwen3":
        parts |= {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
    names = {f"model.layers.{layer}.{part}" for layer in range(config["num_hidden_layers"]) for part in parts}
    tied = read_flag(config, "tie_word_embeddings", where)
    return names | {EMBEDDING, "model.norm.weight"} | (set() if tied else {HEAD})


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


def _check_config(path: str, files: set[str]) -> dict[str, Any]:
    """config.json."""
    if "config.json" not in files:
        raise ConfigError(f"model.path: {path} has no config.json")
    file = os.path.join(path, "config.json")
    config = read_json(file)
    architectures, kind = config.get("architectures"), config.get("model_type")
    if architectures not in [[name] for name in ARCHITECTURES.values()]:
        allowed = ", ".join(ARCHITECTURES.values())
        raise ConfigError(
            f"model.path: {file}: architectures must be a list of one of {allowed}, got {architectures!r}"
        )
    if architectures != [ARCHITECTURES.get(str(kind))]:
        raise ConfigError(f"model.path: {file}: model_type must be that of {architectures[0]}, got {kind!r}")
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        value = config.get(key)
        if type(value) is not int or value < 1:
            raise ConfigError(f"model.path: {file}: {key} must be a whole number of at least 1, got {value!r}")
    if config.get("quantization_config") is not None:
        raise ConfigError(
            f"model.path: {file} has a quantization_config; a model that is trained must not be quantized, its weights must "
            f"be {', '.join(WEIGHTS)}"
        )
    read_layer_types(config, f"model.path: {file}")
    return config


def _check_shards(path: str, files: set[str], vocab_size: int, hidden_size: int) -> None:
    """The safetensors files: all that the index names, each sound, with an embedding of the config's shape."""
    shards = {name for name in files if name.endswith(".safetensors")}
    if not shards:
        raise ConfigError(f"model.path: {path} has no *.safetensors file")
    _named_by_index(path, files)
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(shards):
        tensors |= _read_header(os.path.join(path, shard))
    expected, found = [vocab_size, hidden_size], list(tensors[EMBEDDING].shape) if EMBEDDING in tensors else None
    if found != expected:
        raise ConfigError(
            f"model.path: {path}: the tensor {EMBEDDING} must have the shape {expected} (vocab_size, hidden_size of "
            f"config.json), got {found}"
        )


def _check_tensors(path: str, names: set[str]) -> None:
    """The checkpoint has the tensors of these names, as weights that can be trained on, and no others that could matter.

    A model that ties its output layer to the embedding may have it stored all the same.
    """
    there = {name: tensor for name, tensor in tensor_files(path).items() if not COMPUTED.fullmatch(name)}
    absent, unknown = names - there.keys(), there.keys() - names - {HEAD}
    if absent:
        raise ConfigError(f"model.path: {path} lacks the tensor {min(absent)} ({len(absent)} missing in all)")
    if unknown:
        raise ConfigError(
            f"model.path: {path} has the tensor {min(unknown)}, which the model of config.json has not "
            f"({len(unknown)} such in all)"
        )
    for name, tensor in there.items():
        if tensor.dtype not in WEIGHTS:
            raise ConfigError(
                f"model.path: {path}: the tensor {name} is {tensor.dtype}; weights must be {', '.join(WEIGHTS)}"
            )


def _check_tokenizer(file: str, vocab_size: int) -> None:
    """No token of tokenizer.json is beyond the model's vocabulary: a prompt with it could not be generated from."""
    content = read_json(file)
    try:
        vocabulary, added = content["model"]["vocab"], content.get("added_tokens") or []
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        largest = int(max([*ids, *(token["id"] for token in added)]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"model.path: {file} is no tokenizer: {error!r}") from error
    if largest >= vocab_size:
        raise ConfigError(
            f"model.path: {file} has a token with the id {largest}; vocab_size of config.json is {vocab_size}"
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


def _read_header(file: str) -> dict[str, StoredTensor]:
    """The tensors in a safetensors file, by name; ConfigError where it does not begin with a sound header.

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
        tensors = {
            name: StoredTensor(file, tuple(entry["shape"]), str(entry["dtype"])) for name, entry in entries.items()
        }
    except OSError as error:
        raise ConfigError(f"model.path: {file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ConfigError(f"model.path: {file} has a broken safetensors header: {error}") from error
    if end != size - 8 - length:
        raise ConfigError(f"model.path: {file} is no safetensors file, or was cut off")
    return tensors
