"""A short supervised warm start: from random weights to a model that can answer, but often does not.

A pretrained model has right and wrong ways to answer in it, and reinforcement learning selects among them. The
demonstrations here are made like that: most of them give the answer back to front. Training ends as soon as the right
answer has the probability asked for, so that there is something to select, and something to raise.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache


class Example(msgspec.Struct, frozen=True):
    """A prompt's tokens, and the answer's with the end token."""

    prompt: list[int]
    answer: list[int]

    def back_to_front(self) -> Example:
        """The same with the answer's tokens in reverse, the end token last."""
        return Example(self.prompt, [*self.answer[-2::-1], self.answer[-1]])


class WarmStart(msgspec.Struct, frozen=True, kw_only=True):
    """How long, how fast, and on what."""

    target: float = 0.08
    """Training ends where a held-out prompt's right answer has this probability, on average."""
    wrong_share: float = 0.65
    """Share of demonstrations whose answer is back to front."""
    max_steps: int = 400
    batch: int = 64
    learning_rate: float = 3e-3
    warmup_steps: int = 20
    check_every: int = 10
    """Steps between two looks at the held-out prompts."""


class Accuracy(msgspec.Struct, frozen=True):
    """How well prompts are answered: share right when decoded greedily, probability of the right answer when sampled."""

    greedy: float
    sampled: float


class WarmStartResult(msgspec.Struct, frozen=True):
    """What came of it: steps made, and how well the held-out prompts are answered at the end."""

    steps: int
    accuracy: Accuracy


def warm_start(
    model: Any, examples: list[Example], held_out: list[Example], plan: WarmStart, seed: int
) -> WarmStartResult:
    """Train `model` on demonstrations made of `examples` until `held_out` is answered as well as `plan` asks for.

    Deterministic by `seed`, given the model, the examples and the number of threads.
    """
    order = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    step = 0
    while (accuracy := held_out_accuracy(model, held_out)).sampled < plan.target and step < plan.max_steps:
        for _ in range(plan.check_every):
            step += 1
            for group in optimizer.param_groups:
                group["lr"] = plan.learning_rate * min(1.0, step / plan.warmup_steps)
            chosen = order.choices(examples, k=plan.batch)
            batch = [e.back_to_front() if order.random() < plan.wrong_share else e for e in chosen]
            logits, answers = _predict(model, batch)
            optimizer.zero_grad()
            torch.autograd.backward(cross_entropy(logits, answers))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return WarmStartResult(step, accuracy)


@torch.no_grad()
def held_out_accuracy(model: Any, examples: list[Example]) -> Accuracy:
    """Exact accuracy without decoding: one pass tells.

    Greedy decoding gives an answer if and only if each of its tokens is the likeliest one after those before; sampling
    gives it with the product of its tokens' probabilities.
    """
    logits, answers = _predict(model, examples)
    likeliest = logits.argmax(dim=-1) == answers
    logprobs = torch.log_softmax(logits, dim=-1).gather(1, answers[:, None])[:, 0]
    lengths = [len(example.answer) for example in examples]
    greedy = [float(part.all()) for part in torch.split(likeliest, lengths)]
    sampled = [float(part.sum().exp()) for part in torch.split(logprobs, lengths)]
    return Accuracy(sum(greedy) / len(examples), sum(sampled) / len(examples))


def _predict(model: Any, examples: list[Example]) -> tuple[Tensor, Tensor]:
    """The model's logits (N, vocabulary) for all tokens of the answers, in order, and those tokens (N,).

    What all prompts begin with goes through the model once, not once an example: a question's wording is most of it.
    """
    shared = _shared_tokens([example.prompt for example in examples])
    length = max(len(example.prompt) + len(example.answer) for example in examples) - shared
    tokens = torch.zeros((len(examples), length), dtype=torch.int64)
    mask = torch.zeros((len(examples), length), dtype=torch.bool)
    for row, example in enumerate(examples):
        rest = example.prompt[shared:]
        tokens[row, : len(rest) + len(example.answer)] = torch.tensor(rest + example.answer)
        mask[row, len(rest) : len(rest) + len(example.answer)] = True
    cache = DynamicCache()
    if shared:
        model.base_model(torch.tensor([examples[0].prompt[:shared]]), None, None, cache)
        cache.batch_repeat_interleave(len(examples))
    hidden = model.base_model(tokens, None, None, cache).last_hidden_state
    return model.get_output_embeddings()(hidden[:, :-1][mask[:, 1:]]), tokens[mask]


def _shared_tokens(prompts: list[list[int]]) -> int:
    """How many tokens all prompts begin with; the last token of each does not count."""
    first, last = min(prompts), max(prompts)  # in the order of lists, all others share what these two do
    longest = min(len(prompt) for prompt in prompts) - 1
    return next((place for place in range(longest) if first[place] != last[place]), longest)
