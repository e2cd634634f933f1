"""What the Megatron trainer is tested on: three kinds of random models, ways to cut them, and what is done with each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from trainer_cases import VOCABULARY, config_for, mini_batch

from laminar_hpc.config.schema import Config
from laminar_hpc.trainer.api import Sequence
from laminar_hpc.trainer.tiny import character_tokenizer

SIZES = {
    "vocab_size": VOCABULARY,  # odd, so that tensor ranks need padding
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.05,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
"""Scaled so early that of 8 frequencies some are kept, some are divided and some lie between."""


def llama() -> Any:
    """A Llama 3.1: scaled rotary embedding, output layer of its own."""
    from transformers import LlamaConfig

    return LlamaConfig(**SIZES, rope_parameters=dict(LLAMA3), tie_word_embeddings=False)


def qwen2() -> Any:
    """A Qwen2.5: biases of queries, keys and values, tied output layer."""
    from transformers import Qwen2Config

    return Qwen2Config(**SIZES, tie_word_embeddings=True)


def qwen3() -> Any:
    """A Qwen3: norms of queries and keys, heads larger than the hidden size would give, output layer of its own."""
    from transformers import Qwen3Config

    return Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=False)


MODELS: dict[str, Callable[[], Any]] = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3}


class Cut(msgspec.Struct, frozen=True):
    """Tensor ranks, stages and replicas."""

    tensor: int
    stages: int
    replicas: int

    @property
    def trainers(self) -> int:
        """All of them."""
        return self.tensor * self.stages * self.replicas

    @property
    def name(self) -> str:
        """For people and files."""
        return f"tp{self.tensor}-pp{self.stages}-dp{self.replicas}"

    def replica(self, trainer: int) -> int:
        """Megatron's order: tensor ranks fastest, then replicas, then stages."""
        return trainer // self.tensor % self.replicas


CUTS = [Cut(tensor, stages, replicas) for tensor in (1, 2) for stages in (1, 2) for replicas in (1, 2)]

TRAINER = {
    "learning_rate": 1e-3,
    "weight_decay": 0.1,
    "warmup_steps": 2,
    "clip_grad_norm": 0.5,
    "aggregation": "token_mean",
    "micro_batch_tokens": 30,
}
"""Keys of every case: clipping, decay and warm-up are at work, and there are several micro-batches."""


class Case(msgspec.Struct, frozen=True):
    """A model, what is done with it, and where it is done."""

    model: str
    cuts: tuple[Cut, ...] = tuple(CUTS)
    trainer: dict[str, Any] = {}
    dtype: str = "float32"
    sequences: str = "shared"
    """Of replicas: "shared": every second one each; "one_idle": the first has all; "broken": one has no finite advantage."""
    steps: int = 1
    reference: bool = False
    """Whether the reference model is scored after the steps."""
    resume: bool = False
    """Whether the state is saved then, and training goes on for as many steps, with and without a new start from it."""


WARMING = {"warmup_steps": 4}
"""Learning rates of four steps differ."""

CASES = {
    "llama": Case("llama"),
    "qwen2": Case("qwen2"),
    "qwen3": Case("qwen3"),
    "one_idle": Case("qwen2", (Cut(1, 2, 2),), sequences="one_idle"),
    "broken": Case("qwen2", (Cut(1, 2, 2), Cut(2, 1, 1)), sequences="broken"),
    "full_recompute": Case("qwen3", (Cut(2, 1, 1), Cut(1, 2, 1)), {"recompute": "full"}),
    "selective_recompute": Case("llama", (Cut(2, 1, 1),), {"recompute": "selective"}),
    "reference": Case("qwen2", (Cut(2, 2, 1),), {"kl_coefficient": 0.1}, reference=True),
    "bfloat16": Case("qwen2", (Cut(1, 1, 1), Cut(2, 1, 1), Cut(1, 2, 2)), dtype="bfloat16", steps=2),
    "resume": Case(
        "qwen2", (Cut(1, 1, 1), Cut(2, 1, 1), Cut(1, 2, 1), Cut(1, 1, 2), Cut(2, 2, 2)), WARMING, steps=2, resume=True
    ),
    "resume_untied": Case("qwen3", (Cut(2, 2, 1),), WARMING, steps=2, resume=True),
    "resume_bfloat16": Case("qwen2", (Cut(1, 1, 2), Cut(2, 1, 1)), WARMING, dtype="bfloat16", steps=2, resume=True),
}


def save_models(directory: Path) -> None:
    """Each of `MODELS` in a folder of its own, with biases and norms that matter, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    for seed, (name, make) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(make())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        model.save_pretrained(directory / name)
        character_tokenizer().save(str(directory / name / "tokenizer.json"))


def case_config(path: str, cut: Cut, case: Case) -> Config:
    """The config of a case for the model in `path`."""
    keys = TRAINER | case.trainer | {"tensor_parallel": cut.tensor, "pipeline_parallel": cut.stages}
    config = config_for(path, trainers=cut.trainers, engine="megatron", **keys)
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": case.dtype})})


def case_sequences(case: Case) -> list[Sequence]:
    """All sequences of a case."""
    sequences = mini_batch()
    if case.sequences == "broken":
        sequences[1] = msgspec.structs.replace(sequences[1], advantage=np.nan)
    return sequences


def own_sequences(case: Case, cut: Cut, trainer: int) -> list[Sequence]:
    """Those of them that a trainer's replica has."""
    sequences, replica = case_sequences(case), cut.replica(trainer)
    if case.sequences == "one_idle":
        return sequences if replica == 0 else []
    return sequences[replica :: cut.replicas]
