"""Prompts, batches of them through an engine, and what transformers makes of the same prompts."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from saved_models import END, VOCABULARY, Saved  # noqa: E402

from laminar_hpc.rollout.api import Engine, Request, Sampled  # noqa: E402


def prompts_of_lengths(*lengths: int) -> list[list[int]]:
    """Random prompts without end tokens, the same for the same lengths."""
    source = random.Random(5)
    return [[source.choice([t for t in range(VOCABULARY) if t != END]) for _ in range(length)] for length in lengths]


def request(trajectory: int, prompt: list[int], temperature: float, response: list[int] | None = None) -> Request:
    """A request with a seed of its own."""
    return Request(trajectory, prompt, response or [], 1000 + trajectory, temperature)


def run(engine: Engine, requests: list[Request]) -> dict[int, list[Sampled]]:
    """What a batch of trajectories becomes, by trajectory."""
    for each in requests:
        assert engine.add(each) is None
    results: dict[int, list[Sampled]] = {each.trajectory: [] for each in requests}
    while sampled := engine.step():
        for one in sampled:
            results[one.trajectory].append(one)
    return results


def tokens(sampled: list[Sampled]) -> list[int]:
    """The tokens alone."""
    return [one.token for one in sampled]


def generated(saved: Saved, prompt: list[int], max_new_tokens: int) -> list[int]:
    """The response that transformers generates greedily."""
    output = saved.model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=END, pad_token_id=END
    )
    response: list[int] = output[0, len(prompt) :].tolist()
    return response


def log_softmax(saved: Saved, prompt: list[int], response: list[int], temperature: float = 1.0) -> Any:
    """float32 (len(response), V): the model's log-probabilities where each response token is to come, by one forward pass."""
    with torch.no_grad():
        logits = saved.model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1)


def forward_logprobs(saved: Saved, prompt: list[int], response: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probabilities of the response tokens by one plain forward pass."""
    table = log_softmax(saved, prompt, response, temperature)
    chosen: list[float] = table[range(len(response)), response].tolist()
    return chosen
