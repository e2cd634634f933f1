"""What a trainer's worker asks of a training engine."""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from laminar_hpc.protocol.peer import Manifest


class Sequence(msgspec.Struct, frozen=True):
    """One trajectory to train on. All arrays are as long as the trajectory, T tokens, prompt included.

    `tokens` int64 (T,); `behaviour_logprobs` float32 (T,): log-probability that the generating policy gave each token, 0
    where it did not generate it; `loss_mask` bool (T,): the tokens trained on; `advantage` is the same for all of them.
    """

    tokens: NDArray[np.int64]
    behaviour_logprobs: NDArray[np.float32]
    loss_mask: NDArray[np.bool_]
    advantage: float


class MiniBatchTotals(msgspec.Struct, frozen=True):
    """What a loss is divided by, over all trainers: it makes gradients independent of how a mini-batch is cut."""

    sequences: int
    tokens: int


class TrainingEngine(Protocol):
    """A training engine; one instance per trainer rank, all called in the same order with their own share."""

    @property
    def manifest(self) -> Manifest:
        """Layout of the weight image, the same on all trainers."""

    def train(self, sequences: list[Sequence]) -> dict[str, float]:
        """One optimizer step on a mini-batch, of which this trainer has these sequences (there may be none).

        Returns the metrics of the whole mini-batch, equal on all trainers.
        """

    def write_weights(self, first_chunk: int, chunks: int, image: NDArray[np.uint8]) -> None:
        """Copy these chunks of the image as the weights are now; `image` is as long as the chunks together."""
