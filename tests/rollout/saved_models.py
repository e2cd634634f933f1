"""Tiny random models in directories as Hugging Face writes them, and their weights as images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from laminar_hpc.config.schema import Config  # noqa: E402
from laminar_hpc.protocol.peer import Lease, Manifest  # noqa: E402
from laminar_hpc.weights.manifest import make_manifest  # noqa: E402

VOCABULARY = 64
END = 3
OFFSET = 192
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": None,
    "initializer_range": 0.3,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=False, rope_theta=1000.0),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen2-tied": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
}


class Saved:
    """A model in a directory: the reference that transformers runs, and the image that the engine loads."""

    def __init__(self, directory: Path, hf_config: Any, seed: int, dtype: str = "float32") -> None:
        torch.manual_seed(seed)
        self.path = str(directory)
        self.dtype = dtype
        self.model = transformers.AutoModelForCausalLM.from_config(hf_config, dtype=getattr(torch, dtype)).eval()
        with torch.no_grad():
            for parameter in self.model.parameters():  # biases and norms, too, must matter
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        self.model.save_pretrained(directory)
        self.manifest, self.image = image_of(self.model)
        self.lease = lent(directory / "image", self.image)

    def config(self, **rollout: Any) -> Config:
        """`config_for` this model."""
        return config_for(self.path, self.dtype, **rollout)


def lent(path: Path, image: NDArray[np.uint8], version: int = 0) -> Lease:
    """A lease on a file with this image, which does not begin at its first byte."""
    path.write_bytes(bytes(OFFSET) + image.tobytes())
    return Lease(version, str(path), OFFSET)


def config_for(path: str, dtype: str = "float32", **rollout: Any) -> Config:
    """A config with small limits for the model at `path`; keywords are keys of its section `rollout`."""
    limits = {"slots": 4, "max_prompt_tokens": 24, "max_response_tokens": 20, **rollout}
    return Config.model_validate({"run_dir": "unused", "model": {"path": path, "dtype": dtype}, "rollout": limits})


def image_of(model: Any) -> tuple[Manifest, NDArray[np.uint8]]:
    """The flat image of a model's state dict; tied tensors are there once."""
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    names = [(name, tensor.shape, str(tensor.dtype).removeprefix("torch.")) for name, tensor in state.items()]
    manifest = make_manifest(names, chunk_bytes=4096)
    image = np.zeros(manifest.nbytes, dtype=np.uint8)
    for entry in manifest.tensors:
        raw = bytes(state[entry.name].reshape(-1).contiguous().view(torch.uint8).tolist())
        image[entry.offset : entry.offset + entry.nbytes] = np.frombuffer(raw, dtype=np.uint8)
    image.flags.writeable = False
    return manifest, image
