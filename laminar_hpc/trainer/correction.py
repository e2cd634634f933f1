"""Corrections for the difference between the policy that generated and the trainer's at the start of a step.

Three policies meet in a loss: the *behaviour* policy, which is what the rollout's engine sampled from and recorded; the
*proximal* policy, the trainer's at the start of the step; and the *current* one, which the gradient goes through. They
differ where weights have moved since (staleness), and where two engines compute the same weights differently. Without a
correction the clipped ratio is current to behaviour. With one it is current to proximal, so that the clip bounds what this
step does and nothing else, and the ratio proximal to behaviour becomes a weight of the token's term. Weights carry no
gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch
from torch import Tensor

from laminar_hpc.config import schema


class Importance(msgspec.Struct, frozen=True):
    """What a correction makes of N tokens: `weights` float32 (N,), and which were `masked` or `truncated`, bool (N,)."""

    weights: Tensor
    masked: Tensor
    truncated: Tensor


LARGEST_EXPONENT = 20.0
"""Of a ratio: e^20 is far beyond every bound that means something. exp overflows float32 from 88.7 on, and an infinity in
the forward pass is NaN in the gradient wherever it is multiplied by 0: by an advantage of 0, or behind a clip."""


def held(difference: Tensor) -> Tensor:
    """A difference of log-probabilities (N,), at most `LARGEST_EXPONENT`; no gradient goes through what is held there.

    Not by clamp, which has no gradient for what is no number either: a step on it must be skipped, and look like that.
    """
    return torch.minimum(difference, difference.new_full((), LARGEST_EXPONENT))


def ratio_of(difference: Tensor) -> Tensor:
    """exp(difference) of log-probabilities (N,), at most e^20."""
    return torch.exp(held(difference))


Weigh = Callable[[Tensor, Tensor, schema.Trainer], Importance]
"""From proximal minus behaviour log-probabilities (N,), the sequence of each token (N,) and the config."""


def truncated_token(difference: Tensor, _sequence: Tensor, config: schema.Trainer) -> Importance:
    """Each token's weight is min(pi_proximal / pi_behaviour, cap).

    Source: Yao, Liu et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
    (fengyao.notion.site/off-policy-rl): truncated importance sampling, TIS, with the cap C = 2 as in their runs.
    """
    return _truncate(ratio_of(difference), config.correction_cap)


def truncated_sequence(difference: Tensor, sequence: Tensor, config: schema.Trainer) -> Importance:
    """Every token's weight is min(product over its sequence's trained tokens of pi_proximal / pi_behaviour, cap).

    The product is the ratio that importance sampling of whole responses asks for; tokens' ratios leave out how likely the
    text before them is. Source: as `truncated_token`; for whole sequences Liu, Li, Fu, Wang, Liu and Shen 2025, "When
    Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch" (richardli.xyz/rl-collapse), where
    it is the sequence-level TIS.
    """
    sequences = int(sequence.max()) + 1 if len(sequence) else 0
    sums = torch.zeros(sequences, dtype=torch.float64, device=difference.device)
    sums.index_add_(0, sequence, difference.double())
    return _truncate(ratio_of(sums)[sequence].to(difference.dtype), config.correction_cap)


def masked_outside(difference: Tensor, _sequence: Tensor, config: schema.Trainer) -> Importance:
    """Each token's weight is k = pi_proximal / pi_behaviour where low <= k <= high, else 0.

    Source: IcePop, by Zhao, Liu, Xu, Guo et al. 2025, "Small Leak Can Sink a Great Ship: Boost RL Training on MoE with
    IcePop!" (ringtech.notion.site/icepop), and Ling Team 2025, "Every Step Evolves: Scaling Reinforcement Learning for
    Trillion-Scale Thinking Model" (Ring-1T, arXiv 2510.18855), section 2.3.2, where k, low and high are k, alpha and beta.
    Low 0.5 and high 5 are IcePop's usual bounds.
    """
    ratio = ratio_of(difference)
    masked = (ratio < config.correction_low) | (ratio > config.correction_high)
    return Importance(torch.where(masked, 0.0, ratio), masked, torch.zeros_like(masked))


def plain(difference: Tensor, _sequence: Tensor, _config: schema.Trainer) -> Importance:
    """Each token's weight is pi_proximal / pi_behaviour, whatever it is.

    Source: the decoupled objective of Fu et al. 2025 (AReaL, arXiv 2505.24298), section 5.2, after Hilton et al. 2022,
    "Batch size-invariance for policy optimization" (arXiv 2110.00641).
    """
    never = torch.zeros_like(difference, dtype=torch.bool)
    return Importance(ratio_of(difference), never, never)


def _truncate(ratio: Tensor, cap: float) -> Importance:
    return Importance(ratio.clamp(max=cap), torch.zeros_like(ratio, dtype=torch.bool), ratio > cap)


CORRECTIONS: dict[str, Weigh | None] = {
    "none": None,
    "tis_token": truncated_token,
    "tis_sequence": truncated_sequence,
    "icepop": masked_outside,
    "decoupled": plain,
}
"""By the name that `trainer.correction` has; None: the clipped ratio is that to the behaviour policy, all weights are 1."""
