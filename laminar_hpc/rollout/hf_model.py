"""The Hugging Face model of the torch engine: built without weights, filled from an image, and read back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError, EngineError
from laminar_hpc.protocol.peer import Manifest, TensorEntry
from laminar_hpc.rollout.kv_cache import ATTENTION


def build_model(config: Config, device: str) -> Any:
    """The model that config.json in `config.model.path` describes, on `device`; its weights have no meaning yet.

    ConfigError where the directory holds none. It is one that `check_torch` lets in.
    """
    path = config.model.path
    try:
        hf_config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {path} has no readable config.json: {error}") from error
    dtype = getattr(torch, config.model.dtype)
    from_config: Callable[..., Any] = AutoModelForCausalLM.from_config
    model = from_config(hf_config, dtype=dtype, attn_implementation=ATTENTION)
    return model.requires_grad_(False).eval().to(device)


def fill(model: Any, manifest: Manifest, image: NDArray[np.uint8]) -> None:
    """Copy every tensor of `image` into the parameter of its name, in place.

    Nothing is copied before all names, shapes and types are known to agree; EngineError names the tensor that does not.
    """
    pairs = _pairs(model, manifest)
    if len(image) < manifest.nbytes:
        raise EngineError(f"torch engine: the image has {len(image)} bytes, its manifest {manifest.nbytes}")
    for entry, parameter in pairs:
        source = image[entry.offset : entry.offset + entry.nbytes]
        if parameter.device.type == "cpu":
            np.copyto(_bytes_of(parameter).numpy(), source)
        else:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*not writable")  # nobody writes to it
                _bytes_of(parameter).copy_(torch.from_numpy(source))


def stored(model: Any, manifest: Manifest) -> Iterator[NDArray[np.uint8]]:
    """The bytes of each of the manifest's tensors as it lies in the model."""
    for _, parameter in _pairs(model, manifest):
        yield _bytes_of(parameter).cpu().numpy()


def _bytes_of(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter's own memory as flat uint8."""
    return parameter.detach().view(-1).view(torch.uint8)


def _pairs(model: Any, manifest: Manifest) -> list[tuple[TensorEntry, torch.Tensor]]:
    """The manifest's tensors, each with its parameter. A tied output layer has no name of its own."""
    parameters = dict(model.named_parameters())
    pairs = []
    for entry in manifest.tensors:
        parameter = parameters.pop(entry.name, None)
        if parameter is None:
            raise EngineError(f"torch engine: the model has no tensor {entry.name}, or the manifest has it twice")
        shape, dtype = tuple(parameter.shape), str(parameter.dtype).removeprefix("torch.")
        if (entry.shape, entry.dtype, entry.nbytes) != (shape, dtype, parameter.nbytes):
            raise EngineError(
                f"torch engine: {entry.name} is {dtype} {shape} in the model, "
                f"but {entry.dtype} {entry.shape} with {entry.nbytes} bytes in the manifest"
            )
        pairs.append((entry, parameter))
    if parameters:
        raise EngineError(f"torch engine: the manifest lacks {', '.join(parameters)}")
    return pairs
