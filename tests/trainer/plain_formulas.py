"""The losses written out token by token, in Python's own arithmetic and one scalar of torch a token, from the papers."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from laminar_hpc.config import schema


class PlainSequence(msgspec.Struct):
    """The trained tokens of one sequence: `logprobs` are scalars of torch with a gradient, the others plain numbers."""

    logprobs: list[Any]
    behaviour: list[float]
    proximal: list[float]
    advantage: float
    reference: list[float] | None = None


def plain_loss(sequences: list[PlainSequence], config: schema.Trainer) -> Any:
    """The loss of a mini-batch."""
    tokens = sum(len(sequence.logprobs) for sequence in sequences)
    loss = 0.0
    for sequence in sequences:
        count = len(sequence.logprobs)
        share = 1.0 / tokens if config.aggregation == "token_mean" else 1.0 / (len(sequences) * count)
        ratios = [math.exp(p - b) for p, b in zip(sequence.proximal, sequence.behaviour, strict=True)]
        for place in range(count):
            loss = loss - share * _gain(sequence, place, ratios, config)
            if sequence.reference is not None:
                difference = sequence.reference[place] - sequence.logprobs[place]
                loss = loss + share * config.kl_coefficient * (difference.exp() - 1.0 - difference)
    return loss


def _gain(sequence: PlainSequence, place: int, ratios: list[float], config: schema.Trainer) -> Any:
    anchor, weight = sequence.proximal[place], ratios[place]
    if config.correction == "none":
        anchor, weight = sequence.behaviour[place], 1.0
    elif config.correction == "tis_token":
        weight = min(weight, config.correction_cap)
    elif config.correction == "tis_sequence":
        weight = min(math.prod(ratios), config.correction_cap)
    elif config.correction == "icepop":
        weight = weight if config.correction_low <= weight <= config.correction_high else 0.0
    ratio = (sequence.logprobs[place] - anchor).exp()
    bounded = min(max(float(ratio.detach()), 1.0 - config.clip_low), 1.0 + config.clip_high)
    gain = min(ratio * sequence.advantage, ratio.new_tensor(bounded * sequence.advantage))
    if config.dual_clip and sequence.advantage < 0:
        gain = max(gain, ratio.new_tensor(config.dual_clip * sequence.advantage))
    return weight * gain
