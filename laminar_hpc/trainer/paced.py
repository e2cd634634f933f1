"""A trainer that takes the time of another one: steps as long as a table of costs says, and weights that mean nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from laminar_hpc.config.schema import Config
from laminar_hpc.data.presets import costs_of
from laminar_hpc.errors import EngineError
from laminar_hpc.protocol.peer import Manifest, Pace
from laminar_hpc.trainer.api import Sequence, TrainerState
from laminar_hpc.weights.manifest import make_manifest
from laminar_hpc.weights.reshard import cut, join, whole_tensor

FORWARD_SHARE = 1 / 3
"""Of a step's time, what a forward pass alone takes: the backward pass has twice its operations."""

NOTHING_LEARNED = {"loss": 0.0, "grad_norm": 0.0, "learning_rate": 0.0, "skipped": 0.0}
"""The metrics of each mini-batch."""


class PacedTrainer:
    """A `TrainingEngine` that computes nothing. With several trainers, each takes the time of its own share.

    The image is one tensor of `paced.image_bytes` bytes, which differ from step to step: all trainers count steps alike.
    """

    def __init__(
        self,
        config: Config,
        trainer: int,
        trainers: int,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Trainer number `trainer` of `trainers`; `now` and `sleep` are in seconds of this machine."""
        self._costs = costs_of(config)
        self._scale = config.paced.time_scale
        self._now, self._sleep = now, sleep
        self._steps = 0
        self._began_s: float | None = None
        self._scored_s = -math.inf
        self._pace = Pace()
        self.manifest: Manifest = make_manifest([("paced", (config.paced.image_bytes,), "uint8")])
        self.tiles = join(cut([whole_tensor(self.manifest.tensors[0])], trainers, trainer))

    def begin(self, began_s: float) -> None:
        """The next mini-batch counts from then on, by `now`: what was done for it since, but for scoring, is part of its time."""
        self._began_s = began_s

    def train(self, sequences: list[Sequence], version: int | None = None) -> dict[str, float]:
        """Let the time of a mini-batch with these sequences go by; nothing is learned, so all metrics are 0."""
        began_s, self._began_s = self._began_s, None
        self._take(self._costs.train_s(_tokens(sequences)), None if began_s is None else max(began_s, self._scored_s))
        self._steps += 1
        return dict(NOTHING_LEARNED)

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """As in `TrainingEngine`: one number, since a file of tensors has to have one."""
        return {"paced": (1,)}

    def state(self) -> TrainerState:
        """As in `TrainingEngine`: how many steps were made."""
        return TrainerState(self._steps, {"paced": np.zeros(1, dtype=np.float32)})

    def load_state(self, state: TrainerState) -> None:
        """As in `TrainingEngine`."""
        self._steps = state.steps

    def score(self, sequences: list[Sequence], reference: bool = False) -> list[NDArray[np.float32]]:
        """Zeros, in the time of a forward pass."""
        self._take(FORWARD_SHARE * self._costs.train_s(_tokens(sequences)))
        self._scored_s = self._now()
        return [np.zeros(len(sequence.tokens), dtype=np.float32) for sequence in sequences]

    def write_weights(self, memory: NDArray[np.uint8]) -> Callable[[], object] | None:
        """Fill `memory` with bytes that no other step has, in the time that the trainer stands still for it.

        What is published before the first step is part of the start, when the machine loads everything: it has no schedule.
        """
        nbytes = sum(tile.nbytes for tile in self.tiles)
        if memory.nbytes != nbytes:
            raise EngineError(f"paced trainer: the shard has {nbytes} bytes, the memory for it {memory.nbytes}")
        began_s = self._now()
        stamp = np.frombuffer(self._steps.to_bytes(8, "little"), dtype=np.uint8)
        memory[:] = np.resize(stamp, nbytes)
        before = self._pace
        self._take(self._costs.publish_s, began_s)
        if self._steps == 0:
            self._pace = before
        return None

    def take_pace(self) -> Pace:
        """How well the schedule was kept since this was last asked."""
        pace, self._pace = self._pace, Pace()
        return pace

    def _take(self, seconds: float, began_s: float | None = None) -> None:
        """Return when so many emulated seconds have gone by since `began_s`, or from now on."""
        scheduled_s = seconds * self._scale
        end_s = (self._now() if began_s is None else began_s) + scheduled_s
        self._sleep(max(0.0, end_s - self._now()))
        late_s = max(0.0, self._now() - end_s)
        self._pace += Pace(scheduled_s, late_s, late_s)


def sequences_of_lengths(lengths: list[int]) -> list[Sequence]:
    """Sequences of so many tokens each that mean nothing, and take no memory."""
    return [
        Sequence(
            tokens=np.broadcast_to(np.int64(0), (length,)),
            behaviour_logprobs=np.broadcast_to(np.float32(0), (length,)),
            loss_mask=np.broadcast_to(np.True_, (length,)),
            advantage=0.0,
        )
        for length in lengths
    ]


def _tokens(sequences: list[Sequence]) -> int:
    return sum(len(sequence.tokens) for sequence in sequences)
