"""The policy loss on tokens: the clipped ratio, its correction, how it is averaged, and what is measured on the way.

A mini-batch may be cut into micro-batches and spread over ranks. So that the cut never shows in the gradient, every token
has a weight that is known before the first backward pass, from totals over the whole mini-batch, and losses are sums.
Metrics are sums and maxima for the same reason.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laminar_hpc.config import schema
from laminar_hpc.trainer.api import MiniBatchTotals
from laminar_hpc.trainer.batch import PaddedBatch
from laminar_hpc.trainer.correction import CORRECTIONS, Importance, held, ratio_of

TOKEN_MEANS = ("entropy", "clip_fraction_low", "clip_fraction_high", "kl_behaviour")
"""Sums over all tokens of a mini-batch, reported as means over them."""

CORRECTION_MEANS = ("masked_fraction", "truncated_fraction", "importance_mean")
"""Sums over the tokens that a correction weighs, reported as means over them; `importance_tokens` counts them."""

MOMENTS = ("mismatch_x", "mismatch_y", "mismatch_xx", "mismatch_yy", "mismatch_xy")
"""Sums for a correlation, x from the rollout and y from the trainer."""

SUMMED: tuple[str, ...] = (
    "loss",
    *TOKEN_MEANS,
    *CORRECTION_MEANS,
    "importance_tokens",
    "kl_reference",
    "reference_tokens",
    "mismatch_mean",
    "mismatch_kl",
    "mismatch_tokens",
    *MOMENTS,
)
"""What `policy_loss` sums over tokens, in the order of its second result."""

MAXIMA: tuple[str, ...] = ("ratio_max", "mismatch_max")
"""What `policy_loss` takes the largest of, in the order of its third result; neither is negative."""

FLAT = 1e-12
"""A variance below this share of the mean square is rounding, and has no correlation with anything."""


class TokenBatch(msgspec.Struct, frozen=True):
    """The N trained tokens of a micro-batch, whole sequences.

    `logprobs` (N,) carries the gradient: log-probabilities of softmax(logits / temperature); `entropy` (N,) in nats, without
    gradient; `behaviour` (N,) what the generating policy recorded; `advantages` (N,). `sequence` int64 (N,) says which
    sequence of the micro-batch a token belongs to, 0 first, and `weights` (N,) are its sequence's `token_weights`.
    `same_version` bool (N,): generated under the very weights that the trainer holds now. `proximal` (N,) are
    log-probabilities at the start of the step (None: they are `logprobs`), `reference` (N,) those under the reference model
    (None: there is none).
    """

    logprobs: Tensor
    entropy: Tensor
    behaviour: Tensor
    advantages: Tensor
    sequence: Tensor
    weights: Tensor
    same_version: Tensor
    proximal: Tensor | None = None
    reference: Tensor | None = None


def policy_loss(config: schema.Trainer, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of a micro-batch, (), the sums of `SUMMED`, float64, and the maxima of `MAXIMA`, float64.

    The loss is the sum over tokens of weight * (importance * clipped term + kl_coefficient * KL estimate); what these are
    is said at `clipped_terms`, `dual_clipped`, in `correction` and at `kl_estimate`. The KL estimate is that of
    KL(current || reference), as GRPO adds it to the loss (arXiv 2402.03300, equations 3 and 4). Sums and maxima are without
    gradient; the first sum is the loss.
    """
    weigh = CORRECTIONS[config.correction]
    anchor, importance = batch.behaviour, None
    if weigh is not None:
        anchor = batch.logprobs.detach() if batch.proximal is None else batch.proximal
        importance = weigh(anchor - batch.behaviour, batch.sequence, config)
    terms = clipped_terms(batch.logprobs, anchor, batch.advantages, config.clip_low, config.clip_high)
    if config.dual_clip:
        terms = dual_clipped(terms, batch.advantages, config.dual_clip)
    if importance is not None:
        terms = importance.weights * terms
    if batch.reference is not None:
        terms = terms + config.kl_coefficient * kl_estimate(batch.logprobs, batch.reference)
    loss = (batch.weights * terms).sum()
    return loss, *_measure(config, batch, loss.detach(), anchor, importance)


def token_batch(
    config: schema.Trainer, padded: PaddedBatch, totals: MiniBatchTotals, logprobs: Tensor, entropy: Tensor
) -> TokenBatch:
    """The trained tokens of `padded`, in row order, on the device of `logprobs`.

    `logprobs` (N,), with gradient, and `entropy` (N,) are those of these tokens under the trainer's weights as they are.
    """
    mask = torch.from_numpy(padded.loss_mask)
    sequence = mask.nonzero()[:, 0]

    def of_tokens(array: NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(array)[mask].to(logprobs.device)

    def of_sequences(values: Tensor) -> Tensor:
        return values[sequence].to(logprobs.device)

    proximal, reference = padded.proximal_logprobs, padded.reference_logprobs
    return TokenBatch(
        logprobs=logprobs,
        entropy=entropy,
        behaviour=of_tokens(padded.behaviour_logprobs),
        advantages=of_sequences(torch.from_numpy(padded.advantages)),
        sequence=sequence.to(logprobs.device),
        weights=of_sequences(token_weights(config.aggregation, mask.sum(dim=1), totals)),
        same_version=of_sequences(torch.from_numpy(padded.same_version)),
        proximal=None if proximal is None else of_tokens(proximal),
        reference=None if reference is None else of_tokens(reference),
    )


def clipped_terms(logprobs: Tensor, anchor: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """The loss of each token: -min(ratio * A, clip(ratio, 1 - low, 1 + high) * A), ratio = exp(logprobs - anchor).

    All tensors have one entry a token; `anchor` is the log-probability under the policy that the update is kept near.
    Sources: Schulman et al. 2017 (PPO, arXiv 1707.06347), equation 7; a bound of its own above the ratio: Yu et al. 2025
    (DAPO "clip-higher", arXiv 2503.14476), equation 10.
    """
    ratio = ratio_of(logprobs - anchor)
    clipped = torch.clamp(ratio, 1.0 - low, 1.0 + high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def dual_clipped(terms: Tensor, advantages: Tensor, bound: float) -> Tensor:
    """Clipped terms, where A < 0 at most -`bound` * A: -max(min(ratio * A, clip(ratio) * A), bound * A), bound > 1.

    Without it the loss of a token that has become much more likely, though its advantage is negative, is unbounded. Source:
    Ye et al. 2020, "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning" (arXiv 1912.09729),
    equation 5.
    """
    return torch.where(advantages < 0, torch.minimum(terms, -bound * advantages), terms)


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


def kl_estimate(sampled: Tensor, other: Tensor) -> Tensor:
    """An estimate of KL(sampled || other) from each token: exp(d) - 1 - d with d = other - sampled.

    Both are log-probabilities (N,) of tokens that the first policy has generated. The mean over its tokens is unbiased, and
    no term is negative. Source: Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html), estimator k3.
    """
    difference = held(other - sampled)
    return torch.expm1(difference) - difference


def mini_batch_metrics(sums: Tensor, maxima: Tensor, totals: MiniBatchTotals) -> dict[str, float]:
    """The metrics of a mini-batch, from `sums` and `maxima` over all its micro-batches on all replicas.

    `loss` as it is aggregated; means over all trained tokens of `entropy`, `kl_behaviour` (KL(behaviour || current)),
    `clip_fraction_low` and `clip_fraction_high`; `ratio_max`. With a correction: `masked_fraction` and `truncated_fraction`
    of the tokens, `importance_mean`, the mean weight as it is applied. With a reference model: `kl_reference`. Where there
    are tokens which the trainer's own weights have generated: their number `mismatch_tokens`, and how far the rollout's
    log-probabilities are from the trainer's: mean (`mismatch_mean`) and largest (`mismatch_max`) absolute difference in
    nats, KL(rollout || trainer) (`mismatch_kl`), and Pearson's correlation. What cannot be told is left out.
    """
    total = dict(zip(SUMMED, sums.tolist(), strict=True))
    largest = dict(zip(MAXIMA, maxima.tolist(), strict=True))
    metrics = {"loss": total["loss"], "ratio_max": largest["ratio_max"]}
    metrics |= {name: total[name] / max(1, totals.tokens) for name in TOKEN_MEANS}
    if total["importance_tokens"]:
        metrics |= {name: total[name] / total["importance_tokens"] for name in CORRECTION_MEANS}
    if total["reference_tokens"]:
        metrics["kl_reference"] = total["kl_reference"] / total["reference_tokens"]
    if total["mismatch_tokens"]:
        metrics["mismatch_tokens"] = total["mismatch_tokens"]
        metrics["mismatch_max"] = largest["mismatch_max"]
        metrics |= {name: total[name] / total["mismatch_tokens"] for name in ("mismatch_mean", "mismatch_kl")}
        metrics["mismatch_correlation"] = correlation(total["mismatch_tokens"], *(total[name] for name in MOMENTS))
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def correlation(count: float, x: float, y: float, xx: float, yy: float, xy: float) -> float:
    """Pearson's correlation of `count` pairs from the sums of x, y, x^2, y^2 and x * y; NaN where one of them is constant."""
    variances = (xx - x * x / count, yy - y * y / count)
    if not (variances[0] > FLAT * xx and variances[1] > FLAT * yy):
        return math.nan
    return max(-1.0, min(1.0, (xy - x * y / count) / math.sqrt(variances[0] * variances[1])))


@torch.no_grad()
def _measure(
    config: schema.Trainer, batch: TokenBatch, loss: Tensor, anchor: Tensor, importance: Importance | None
) -> tuple[Tensor, Tensor]:
    """The sums of `SUMMED`, float64, and the maxima of `MAXIMA`, float64.

    A clip fraction counts tokens on which that bound of the ratio cuts the gradient off: the lower one where the advantage
    is negative, the upper one where it is positive.
    """
    now, recorded, advantages = batch.logprobs.double(), batch.behaviour.double(), batch.advantages
    ratio = ratio_of(now - anchor.double())
    values = {
        "entropy": batch.entropy.double(),
        "clip_fraction_low": (advantages < 0) & (ratio < 1.0 - config.clip_low),
        "clip_fraction_high": (advantages > 0) & (ratio > 1.0 + config.clip_high),
        "kl_behaviour": kl_estimate(recorded, now),
    }
    if importance is not None:
        weights = importance.weights.double()
        values |= {"importance_mean": weights, "importance_tokens": torch.ones_like(weights)}
        values |= {"masked_fraction": importance.masked, "truncated_fraction": importance.truncated}
    if batch.reference is not None:
        values["kl_reference"] = kl_estimate(now, batch.reference.double())
        values["reference_tokens"] = torch.ones_like(now)
    x, y = recorded[batch.same_version], now[batch.same_version]
    gaps = (x - y).abs()
    values |= {"mismatch_mean": gaps, "mismatch_kl": kl_estimate(x, y), "mismatch_tokens": torch.ones_like(x)}
    values |= zip(MOMENTS, (x, y, x * x, y * y, x * y), strict=True)
    sums = {name: value.sum(dtype=torch.float64) for name, value in values.items()} | {"loss": loss.double()}
    nothing = torch.zeros((), dtype=torch.float64, device=now.device)
    return torch.stack([sums.get(name, nothing) for name in SUMMED]), torch.stack([_largest(ratio), _largest(gaps)])


def _largest(values: Tensor) -> Tensor:
    return values.max() if len(values) else values.new_zeros(())
