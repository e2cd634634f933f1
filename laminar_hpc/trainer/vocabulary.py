"""Log-probabilities and entropy over a vocabulary that is cut over tensor ranks: no rank ever has all logits.

Three small all-reduces over the tokens do it: of the largest logit, of the sums of the softmax, and of what only the rank
that has the token knows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NEVER = -1e30
"""A logit without probability, and finite, so that zero times it is zero."""


def token_logprobs(logits: Tensor, tokens: Tensor, first: int, vocabulary: int, group: Any) -> tuple[Tensor, Tensor]:
    """Log-probability of each of `tokens` (N,), and the entropy of each row in nats, without gradient; both float32 (N,).

    `logits` (N, V) are this rank's part of the vocabulary, from token `first` on; those from `vocabulary` on are padding
    and get no probability. `group` has the ranks with the other parts (None: there are none). All ranks get the same.
    """
    padding = first + logits.shape[1] - vocabulary
    logits = logits.float()
    if padding > 0:
        mask = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
        mask[max(0, logits.shape[1] - padding) :] = True
        logits = logits.masked_fill(mask, NEVER)
    result: tuple[Tensor, Tensor] = _TokenLogprobs.apply(logits, tokens - first, group)  # type: ignore[no-untyped-call]
    return result


class _TokenLogprobs(torch.autograd.Function):
    """log p = x_t - log sum exp x; its gradient for logit j is [j = t] - p_j; the entropy is log sum exp x - sum p x."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, places: Tensor, group: Any) -> tuple[Tensor, Tensor]:
        largest = logits.max(dim=1).values
        _reduce(largest, group, dist.ReduceOp.MAX)
        shifted = logits - largest[:, None]
        probabilities = shifted.exp()
        own = (places >= 0) & (places < logits.shape[1])
        chosen = shifted.gather(1, torch.where(own, places, 0)[:, None])[:, 0]
        sums = torch.stack(
            [probabilities.sum(dim=1), (probabilities * shifted).sum(dim=1), torch.where(own, chosen, 0.0)]
        )
        _reduce(sums, group, dist.ReduceOp.SUM)
        total, weighted, target = sums
        normalizer = total.log()
        probabilities.div_(total[:, None])
        ctx.save_for_backward(probabilities, places, own)
        entropy = normalizer - weighted / total
        ctx.mark_non_differentiable(entropy)
        return target - normalizer, entropy

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        probabilities, places, own = ctx.saved_tensors
        result = probabilities * -gradient[:, None]
        rows = own.nonzero()[:, 0]
        result[rows, places[rows]] += gradient[rows]
        return result, None, None


def _reduce(tensor: Tensor, group: Any, operation: Any) -> None:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=operation, group=group)
