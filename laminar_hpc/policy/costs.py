"""What a step, a prefill, a training step and a load cost on hardware that is not there: the tables of an emulated GPU."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

import msgspec


class Points(msgspec.Struct, frozen=True):
    """A function given by points: `xs` never fall (two that are equal make a jump), `ys` has one value for each of them."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    def at(self, x: float) -> float:
        """The value at `x`: linear between points, the first value before them, and on by the last slope behind them."""
        if x <= self.xs[0] or len(self.xs) == 1:
            return self.ys[0]
        right = min(bisect_left(self.xs, x), len(self.xs) - 1)
        left = right - 1
        if self.xs[left] == self.xs[right]:
            return self.ys[right]
        share = (x - self.xs[left]) / (self.xs[right] - self.xs[left])
        return self.ys[left] + share * (self.ys[right] - self.ys[left])


def wrong_with(xs: Sequence[float], ys: Sequence[float]) -> str:
    """What keeps these points from being `Points` that rise, without negative numbers; "" where nothing does."""
    if not xs or len(xs) != len(ys):
        return f"must have at least one point, of two numbers each, got {len(xs)} and {len(ys)} numbers"
    if not all(map(math.isfinite, (*xs, *ys))) or min(*xs, *ys) < 0:
        return "must have finite numbers of at least 0"
    for values in (xs, ys):
        for before, after in pairwise(values):
            if after < before:
                return f"must rise from point to point, got {before:g} and then {after:g}"
    return ""


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """The costs of one inference engine and of the trainer beside it; seconds are those of the real hardware.

    A decode step of a batch takes decode(batch) + step_overhead_s: `decode` is what a figure of the bare model shows, and the
    overhead what scheduling, sampling and the rest of a serving loop add to it.
    """

    decode: Points
    """Batch to seconds of a decode step."""
    step_overhead_s: float
    prefill_call_s: float
    """Of each step that has something to prefill."""
    prefill_token_s: float
    kv_cache_tokens: int
    """Tokens that the engine's KV cache has room for."""
    train_call_s: float
    """Of each mini-batch."""
    train_token_s: float
    """Of each token, prompts included, that one trainer of the job trains on."""
    publish_s: float
    """How long a trainer stands still to publish its weights."""
    load_s: float
    """How long an engine stands still to load weights."""
    switch_s: float = 0.0
    """How long all stand still in each step where trainers and engines share GPUs: from generating to training, and back."""

    @property
    def published_s(self) -> float:
        """How long a trainer stands still between two steps."""
        return self.publish_s + self.switch_s

    def step_s(self, batch: int) -> float:
        """Seconds of a decode step of `batch` trajectories, at least 1."""
        return self.decode.at(batch) + self.step_overhead_s

    def prefill_s(self, tokens: int) -> float:
        """Seconds to compute the keys and values of so many tokens, those of several trajectories together; 0 for none."""
        return self.prefill_call_s + self.prefill_token_s * tokens if tokens else 0.0

    def train_s(self, tokens: int) -> float:
        """Seconds of a mini-batch of which a trainer has so many tokens."""
        return self.train_call_s + self.train_token_s * tokens
