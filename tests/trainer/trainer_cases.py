"""A tiny model, a mini-batch for it, and the gradient that the formulas give, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from laminar_hpc.config.schema import Config
from laminar_hpc.protocol.trajectory import Block, Source
from laminar_hpc.trainer.api import Sequence
from laminar_hpc.trainer.tiny import character_tokenizer

VOCABULARY = 99
LENGTHS = ((3, 2), (5, 7), (2, 1), (9, 4), (4, 12), (6, 3), (1, 5))
"""Tokens of prompt and response of each sequence."""
ADVANTAGES = (1.0, -1.0, 2.0, -0.5, 0.75, -1.5, 0.25)

CASES = {
    "token_mean-shared": ("token_mean", ([0, 2, 4, 6], [1, 3, 5])),
    "token_mean-one_idle": ("token_mean", ([0, 1, 2, 3, 4, 5, 6], [])),
    "sequence_mean-shared": ("sequence_mean", ([0, 2, 4, 6], [1, 3, 5])),
    "sequence_mean-one_idle": ("sequence_mean", ([0, 1, 2, 3, 4, 5, 6], [])),
}
"""Ways to train the mini-batch on two ranks: how the loss is averaged, and who has which sequences."""


def save_model(directory: Path, tied: bool = True) -> str:
    """A random Qwen2, small enough to check by brute force, with the character tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(3)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=48,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
            initializer_range=0.05,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
    )
    model.save_pretrained(directory)
    character_tokenizer().save(str(directory / "tokenizer.json"))
    return str(directory)


def config_for(path: str, chunk_bytes: int = 4096, trainers: int = 1, **trainer: Any) -> Config:
    """A config for the model at `path`; keywords are keys of its section `trainer`."""
    return Config.model_validate(
        {
            "run_dir": "unused",
            "job": {"trainers": trainers, "start_timeout_s": 60.0},
            "model": {"path": path},
            "trainer": {"clip_grad_norm": 0.0, "learning_rate": 1e-3, **trainer},
            "weights": {"chunk_bytes": chunk_bytes},
        }
    )


def mini_batch() -> list[Sequence]:
    """Sequences of different lengths, with a behaviour far enough from the model for some tokens to be clipped.

    The model is nearly uniform over its vocabulary, exp(-4.6) a token, so ratios lie between exp(-0.7) and exp(0.7).
    """
    rng = np.random.default_rng(7)
    sequences = []
    for (prompt, response), advantage in zip(LENGTHS, ADVANTAGES, strict=True):
        length = prompt + response
        mask = np.arange(length) >= prompt
        logprobs = np.where(mask, rng.uniform(-5.2, -4.0, length), 0.0).astype(np.float32)
        tokens = rng.integers(3, VOCABULARY, length)
        sequences.append(Sequence(tokens, logprobs, mask, advantage))
    return sequences


def blocks_of(trajectory: int, sequence: Sequence) -> list[Block]:
    """The sequence as the store keeps it, the response in two blocks where it has two tokens."""
    begin, end = int(np.argmax(sequence.loss_mask)), len(sequence.tokens)
    middle = (begin + end) // 2
    tokens, logprobs = sequence.tokens.astype("<i4"), sequence.behaviour_logprobs.astype("<f4")
    blocks = [Block(trajectory, 0, Source.PROMPT, None, tokens[:begin].tobytes())]
    for low, high in ((begin, middle), (middle, end)):
        if low < high:
            blocks.append(
                Block(trajectory, low, Source.MODEL, 1, tokens[low:high].tobytes(), logprobs[low:high].tobytes())
            )
    return blocks


def reference_gradients(
    model: Any, sequences: list[Sequence], aggregation: str, low: float, high: float
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients in float64, one sequence after the other without padding, every token's term written out."""
    model = model.double()
    model.zero_grad()
    tokens = sum(int(sequence.loss_mask.sum()) for sequence in sequences)
    loss = torch.zeros((), dtype=torch.float64)
    for sequence in sequences:
        logits = model(input_ids=torch.tensor(sequence.tokens)[None], use_cache=False).logits[0]
        places = np.flatnonzero(sequence.loss_mask)
        for place in places:
            distribution = torch.log_softmax(logits[place - 1], dim=0)
            ratio = (distribution[int(sequence.tokens[place])] - float(sequence.behaviour_logprobs[place])).exp()
            bounded = min(max(float(ratio.detach()), 1.0 - low), 1.0 + high)
            gain = min(ratio * sequence.advantage, ratio.new_tensor(bounded * sequence.advantage))
            share = 1.0 / tokens if aggregation == "token_mean" else 1.0 / (len(sequences) * len(places))
            loss = loss - share * gain
    loss.backward()
    return float(loss.detach()), {name: parameter.grad for name, parameter in model.named_parameters()}
