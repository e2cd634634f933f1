"""A short supervised warm start: from random weights to the answer's format and some of the answers.

It ends as soon as enough held-out prompts are answered, so that reinforcement learning has something to raise.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


class Example(msgspec.Struct, frozen=True):
    """A prompt's tokens, and the answer's with the end token."""

    prompt: list[int]
    answer: list[int]


class WarmStart(msgspec.Struct, frozen=True, kw_only=True):
    """How long and how fast."""

    target_accuracy: float
    """Share of held-out prompts, answered greedily, at which training ends."""
    max_steps: int = 400
    batch: int = 64
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    check_every: int = 5
    """Steps between two looks at the held-out prompts."""


class WarmStartResult(msgspec.Struct, frozen=True):
    """What came of it: steps made, and the held-out accuracy at the end."""

    steps: int
    accuracy: float


def warm_start(
    model: Any, examples: list[Example], held_out: list[Example], plan: WarmStart, seed: int
) -> WarmStartResult:
    """Train `model` on the answers in `examples` until it answers `plan.target_accuracy` of `held_out` greedily.

    Deterministic by `seed`, given the model, the examples and the number of threads.
    """
    order = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    accuracy = greedy_accuracy(model, held_out)
    for step in range(1, plan.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate * min(1.0, step / plan.warmup_steps)
        logits, answers = _predict(model, order.choices(examples, k=plan.batch))
        optimizer.zero_grad()
        cross_entropy(logits, answers).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % plan.check_every == 0:
            accuracy = greedy_accuracy(model, held_out)
            if accuracy >= plan.target_accuracy:
                return WarmStartResult(step, accuracy)
    return WarmStartResult(plan.max_steps, accuracy)


@torch.no_grad()
def greedy_accuracy(model: Any, examples: list[Example]) -> float:
    """Share of examples whose answer greedy decoding would give exactly.

    One pass tells: decoding gives the answer if and only if each of its tokens is the likeliest one after those before.
    """
    logits, answers = _predict(model, examples)
    right = (logits.argmax(dim=-1) == answers).tolist()
    count = first = 0
    for example in examples:
        end = first + len(example.answer)
        count += all(right[first:end])
        first = end
    return count / len(examples)


def _predict(model: Any, examples: list[Example]) -> tuple[Tensor, Tensor]:
    """The model's logits (N, vocabulary) for all tokens of the answers, in order, and those tokens (N,)."""
    length = max(len(example.prompt) + len(example.answer) for example in examples)
    tokens = torch.zeros((len(examples), length), dtype=torch.int64)
    mask = torch.zeros((len(examples), length), dtype=torch.bool)
    for row, example in enumerate(examples):
        begin, end = len(example.prompt), len(example.prompt) + len(example.answer)
        tokens[row, :end] = torch.tensor(example.prompt + example.answer)
        mask[row, begin:end] = True
    hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    return model.get_output_embeddings()(hidden[:, :-1][mask[:, 1:]]), tokens[mask]
