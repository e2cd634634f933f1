"""What a trainer's worker asks of a training engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from laminar_hpc.config import schema
from laminar_hpc.protocol.peer import Manifest, Tile


class Sequence(msgspec.Struct, frozen=True):
    """One trajectory to train on. All arrays are as long as the trajectory, T tokens, prompt included.

    `tokens` int64 (T,); `behaviour_logprobs` float32 (T,): log-probability that the generating policy gave each token, 0
    where it did not generate it; `loss_mask` bool (T,): the tokens trained on; `advantage` is the same for all of them.
    `version` is that of the weights which generated it (None: several, or unknown). `proximal_logprobs` and
    `reference_logprobs`, float32 (T,): what `TrainingEngine.score` gave at the start of the step, where it was asked.
    """

    tokens: NDArray[np.int64]
    behaviour_logprobs: NDArray[np.float32]
    loss_mask: NDArray[np.bool_]
    advantage: float
    version: int | None = None
    proximal_logprobs: NDArray[np.float32] | None = None
    reference_logprobs: NDArray[np.float32] | None = None


class TrainerState(msgspec.Struct, frozen=True):
    """What a trainer trains on from as if it had never stopped, beside its config and the model at `model.path`.

    `steps` is how many steps its optimizer has made: the place in the schedule of the learning rate, and Adam's own count.
    `tensors`, float32, are its part of the master weights and of Adam's moments. They are complete once `wait` has returned,
    which another thread may call (None: they are).

    All else follows. Weights of another type are the master weights rounded; the reference model is that at `model.path`, and
    is loaded from there again; log-probabilities from before a step's first update live no longer than the step; nothing
    in training is random. A count of steps in a row that trained nothing begins anew.
    """

    steps: int
    tensors: Mapping[str, NDArray[np.float32]]
    wait: Callable[[], object] | None = None


class MiniBatchTotals(msgspec.Struct, frozen=True):
    """What a loss is divided by, over all trainers: it makes gradients independent of how a mini-batch is cut."""

    sequences: int
    tokens: int


def needs_proximal(config: schema.Trainer, minibatches: int) -> bool:
    """Whether a step of so many mini-batches needs log-probabilities from before its first update.

    With one mini-batch those from before the update are those of the forward pass that the gradient comes from.
    """
    return config.correction != "none" and minibatches > 1


def needs_reference(config: schema.Trainer) -> bool:
    """Whether a step needs log-probabilities under the reference model."""
    return config.kl_coefficient > 0


class TrainingEngine(Protocol):
    """A training engine; one instance per trainer rank.

    All are called in the same order. Trainers of one replica (its tensor and pipeline shards) are given the same
    sequences, replicas each their own share.
    """

    @property
    def manifest(self) -> Manifest:
        """Layout of the weight image, the same on all trainers, its chunks not chosen yet."""

    @property
    def tiles(self) -> list[Tile]:
        """What of the image this trainer publishes: all trainers together each byte of every tensor once."""

    def train(self, sequences: list[Sequence], version: int | None = None) -> dict[str, float]:
        """One optimizer step on a mini-batch, of which this trainer has these sequences (there may be none).

        `version` is that of the weights as they are (None: they have been trained since they were published): tokens that
        were generated under it tell how far the engines' log-probabilities are apart. Returns the metrics of the whole
        mini-batch, equal on all trainers.
        """

    def score(self, sequences: list[Sequence], reference: bool = False) -> list[NDArray[np.float32]]:
        """Log-probabilities of the tokens of each sequence, float32 (T,), 0 outside its loss mask; equal in a replica.

        Under the weights as they are, or with `reference` under those of the checkpoint that training began with. They
        are those of softmax(logits / rollout.temperature), as the rollouts record them.
        """

    def write_weights(self, memory: NDArray[np.uint8]) -> Callable[[], object] | None:
        """Copy the bytes of `tiles`, one tile after the other, as the weights are now; `memory` is as long as they are.

        It needs no other trainer. None where the copy is complete; else what waits until it is, and may be called by
        another thread while the engine trains on.
        """

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of this trainer's tensors of `state`: all trainers together have all of the state, most of it once."""

    def state(self) -> TrainerState:
        """A copy in memory of the host of the state as it is now, between two calls of `train`; it needs no other trainer.

        The next call writes over it.
        """

    def load_state(self, state: TrainerState) -> None:
        """Go on from `state`, with tensors of `state_shapes`; all trainers call it together, each with its own."""
