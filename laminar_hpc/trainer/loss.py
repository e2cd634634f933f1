"""The policy loss on tokens: the clipped ratio, how it is averaged, and what is measured on the way.

A mini-batch may be cut into micro-batches and spread over ranks. So that the cut never shows in the gradient, every token
has a weight that is known before the first backward pass, from totals over the whole mini-batch, and losses are sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laminar_hpc.trainer.api import MiniBatchTotals

SUMMED = ("loss", "entropy", "clip_fraction_low", "clip_fraction_high", "kl_behaviour")
"""Metrics that are sums over the tokens of a mini-batch, in the order of `token_metrics`."""


def clipped_terms(logprobs: Tensor, behaviour: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """The loss of each token: -min(ratio * A, clip(ratio, 1 - low, 1 + high) * A), ratio = exp(logprobs - behaviour).

    All tensors have one entry a token; `behaviour` is the log-probability that the generating policy gave the token.
    Sources: Schulman et al. 2017 (PPO, arXiv 1707.06347), equation 7; a bound of its own above the ratio: Yu et al. 2025
    (DAPO "clip-higher", arXiv 2503.14476), equation 10.
    """
    ratio = torch.exp(logprobs - behaviour)
    clipped = torch.clamp(ratio, 1.0 - low, 1.0 + high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def token_weights(aggregation: str, lengths: Tensor, totals: MiniBatchTotals) -> Tensor:
    """The weight of every token of each sequence, float32 (B,): a mini-batch's loss is the sum of weight times term.

    `lengths` (B,) counts the trained tokens of each sequence; `totals` counts those of the whole mini-batch on all ranks.
    "token_mean": each token counts the same, 1 / tokens (DAPO, arXiv 2503.14476, section 3.3). "sequence_mean": each
    sequence counts the same, 1 / (sequences * its tokens) (GRPO, arXiv 2402.03300, equation 3).
    """
    if aggregation == "token_mean":
        return torch.full(lengths.shape, 1.0 / max(1, totals.tokens), device=lengths.device)
    if aggregation == "sequence_mean":
        return 1.0 / (max(1, totals.sequences) * lengths.clamp(min=1).float())
    raise ValueError(f"aggregation must be token_mean or sequence_mean, got {aggregation!r}")


def token_entropy(log_distribution: Tensor) -> Tensor:
    """Entropy in nats of each row of `log_distribution` (N, vocabulary), log-probabilities of all tokens."""
    return -(log_distribution.exp() * log_distribution).sum(dim=-1)


def behaviour_kl(logprobs: Tensor, behaviour: Tensor) -> Tensor:
    """An estimate of KL(behaviour || current) from each token: exp(d) - 1 - d with d = logprobs - behaviour.

    Its mean over tokens sampled from the behaviour policy is unbiased, and no term is negative. Source: Schulman 2020,
    "Approximating KL divergence" (joschu.net/blog/kl-approx.html), estimator k3.
    """
    difference = logprobs - behaviour
    return torch.expm1(difference) - difference


@torch.no_grad()
def token_metrics(
    logprobs: Tensor, behaviour: Tensor, advantages: Tensor, entropy: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Sums over these tokens of `SUMMED` without the loss, float64 (4,), and the largest ratio, float64 ().

    A clip fraction counts tokens on which that bound of the ratio cuts the gradient off: the lower one where the
    advantage is negative, the upper one where it is positive.
    """
    ratio = torch.exp(logprobs - behaviour)
    columns = torch.stack(
        [
            entropy,
            ((advantages < 0) & (ratio < 1.0 - low)).float(),
            ((advantages > 0) & (ratio > 1.0 + high)).float(),
            behaviour_kl(logprobs, behaviour),
        ]
    )
    return columns.double().sum(dim=1), ratio.double().max()
