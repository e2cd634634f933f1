"""Sampling whose noise is a function of who, where and what, so that a trajectory has the same tokens in any batch.

A token is drawn by the Gumbel-max trick: the argmax of logits / T + g with independent standard Gumbel g is distributed
as softmax(logits / T) (Gumbel, "Statistical Theory of Extreme Values", 1954; Maddison et al., "A* Sampling", 2014).
The noise of vocabulary index v at position p of a trajectory is counter-based, with SplitMix64 (Steele, Lea and Flood,
"Fast Splittable Pseudorandom Number Generators", OOPSLA 2014; finaliser constants by David Stafford, "Mix13") as the
function from counters to bits: the p-th output of the stream seeded with the trajectory's seed seeds a second stream,
whose (v + 1)-th output is the noise. No state is kept, so nothing has to be exported with a trajectory.
"""

from __future__ import annotations

import torch


def signed(value: int) -> int:
    """`value` modulo 2^64, as the int64 with the same bits."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


_GAMMA = signed(0x9E3779B97F4A7C15)
_MIX = ((30, signed(0xBF58476D1CE4E5B9)), (27, signed(0x94D049BB133111EB)))
_LAST_SHIFT = 31
_UNIFORM_BITS = 40


def splitmix64(seeds: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """The `counters`-th (1 is the first) outputs of SplitMix64 seeded with `seeds`; int64 holding 64 unsigned bits.

    The two broadcast against each other.
    """
    bits = seeds + counters * _GAMMA
    for shift, factor in _MIX:
        bits.bitwise_xor_(_shifted_right(bits, shift)).mul_(factor)
    return bits.bitwise_xor_(_shifted_right(bits, _LAST_SHIFT))


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Standard Gumbel noise, float32 (B, vocabulary), for int64 `seeds` (B,) and `positions` (B,).

    With E exponential, -log(E) is Gumbel. E = -log(1 - u) has its precision where it matters, at the small E that win.
    """
    streams = splitmix64(seeds, positions)
    counters = torch.arange(1, vocabulary + 1, device=seeds.device)
    bits = _shifted_right(splitmix64(streams[:, None], counters), 64 - _UNIFORM_BITS)
    uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-_UNIFORM_BITS)
    uniform.clamp_(max=1.0 - 2.0**-24)  # float32 rounds up to 1 there
    return uniform.neg_().log1p_().neg_().log_().neg_()


def sample(
    logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, temperatures: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each row, and the log-probability that the row's policy gave it.

    `logits` (B, V) of any float type; `seeds`, `positions` (of the token that is drawn) int64 (B,); `temperatures` float32
    (B,). A row with temperature T > 0 draws from softmax(logits / T) and records that log-probability. A row with
    temperature 0 takes the argmax and records log_softmax(logits). Returns int64 (B,) and float32 (B,).
    """
    noisy = temperatures > 0
    scaled = logits.float() / torch.where(noisy, temperatures, 1.0)[:, None]
    scores = scaled
    if bool(noisy.any()):
        scores = scaled + gumbel_noise(seeds, positions, logits.shape[-1]) * noisy[:, None]
    tokens = scores.argmax(dim=-1)
    logprobs = scaled.gather(1, tokens[:, None]).squeeze(1) - scaled.logsumexp(dim=-1)
    return tokens, logprobs


def _shifted_right(bits: torch.Tensor, shift: int) -> torch.Tensor:
    """Logical shift: torch's own one copies the sign."""
    return (bits >> shift).bitwise_and_((1 << (64 - shift)) - 1)
