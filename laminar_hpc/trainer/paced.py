"""Trainers that take the time of another one: steps as long as a table of costs says, of a real engine, or of none."""

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
from laminar_hpc.trainer.api import Sequence, TrainerState, TrainingEngine
from laminar_hpc.weights.manifest import make_manifest
from laminar_hpc.weights.reshard import cut, join, whole_tensor

FORWARD_SHARE = 1 / 3
"""Of a step's time, what a forward pass alone takes: the backward pass has twice its operations."""

NOTHING_LEARNED = {"loss": 0.0, "grad_norm": 0.0, "learning_rate": 0.0, "skipped": 0.0}
"""The metrics of each mini-batch."""


class Schedule:
    """When a trainer's work ends in emulated time: what is done sooner is waited for, what is late is counted."""

    def __init__(self, config: Config, now: Callable[[], float], sleep: Callable[[float], object]) -> None:
        """`now` and `sleep` are in seconds of this machine."""
        self._costs = costs_of(config)
        self._scale = config.paced.time_scale
        self._now, self._sleep = now, sleep
        self._began_s: float | None = None
        self._scored_s = -math.inf
        self._pace = Pace()

    def begin(self, began_s: float) -> None:
        """The next mini-batch counts from then on, by `now`: what was done for it since, but for scoring, is part of its time."""
        self._began_s = began_s

    def trained(self, sequences: list[Sequence], called_s: float) -> None:
        """A mini-batch that was asked for at `called_s` is done: return when its time has gone by."""
        began_s, self._began_s = self._began_s, None
        began_s = called_s if began_s is None else max(began_s, self._scored_s)
        self._end(self._costs.train_s(_tokens(sequences)), began_s)

    def scored(self, sequences: list[Sequence], called_s: float) -> None:
        """The same for a forward pass."""
        self._end(FORWARD_SHARE * self._costs.train_s(_tokens(sequences)), called_s)
        self._scored_s = self._now()

    def published(self, called_s: float, first: bool) -> None:
        """The same for a publication.

        The first one is part of the start, when the machine loads everything: it has no schedule.
        """
        before = self._pace
        self._end(self._costs.published_s, called_s)
        if first:
            self._pace = before

    def take_pace(self) -> Pace:
        """How well the schedule was kept since this was last asked."""
        pace, self._pace = self._pace, Pace()
        return pace

    def _end(self, seconds: float, began_s: float) -> None:
        """Return when so many emulated seconds have gone by since `began_s`."""
        scheduled_s = seconds * self._scale
        end_s = began_s + scheduled_s
        self._sleep(max(0.0, end_s - self._now()))
        late_s = max(0.0, self._now() - end_s)
        self._pace += Pace(scheduled_s, late_s, late_s)


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
        self.schedule = Schedule(config, now, sleep)
        self._now = now
        self._steps = 0
        self.manifest: Manifest = make_manifest([("paced", (config.paced.image_bytes,), "uint8")])
        self.tiles = join(cut([whole_tensor(self.manifest.tensors[0])], trainers, trainer))

    def train(self, sequences: list[Sequence], version: int | None = None) -> dict[str, float]:
        """Let the time of a mini-batch with these sequences go by; nothing is learned, so all metrics are 0."""
        self.schedule.trained(sequences, self._now())
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
        self.schedule.scored(sequences, self._now())
        return [np.zeros(len(sequence.tokens), dtype=np.float32) for sequence in sequences]

    def write_weights(self, memory: NDArray[np.uint8]) -> Callable[[], object] | None:
        """Fill `memory` with bytes that no other step has, in the time that the trainer stands still for it."""
        nbytes = sum(tile.nbytes for tile in self.tiles)
        if memory.nbytes != nbytes:
            raise EngineError(f"paced trainer: the shard has {nbytes} bytes, the memory for it {memory.nbytes}")
        began_s = self._now()
        stamp = np.frombuffer(self._steps.to_bytes(8, "little"), dtype=np.uint8)
        memory[:] = np.resize(stamp, nbytes)
        self.schedule.published(began_s, first=self._steps == 0)
        return None


class TimedTrainer:
    """Another `TrainingEngine`, which learns, in the time of an emulated one; where it takes longer itself, it is late."""

    def __init__(
        self,
        engine: TrainingEngine,
        config: Config,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """`now` and `sleep` are in seconds of this machine."""
        self.schedule = Schedule(config, now, sleep)
        self._engine = engine
        self._now = now
        self._published = False
        self.manifest = engine.manifest
        self.tiles = engine.tiles

    def train(self, sequences: list[Sequence], version: int | None = None) -> dict[str, float]:
        """As in `TrainingEngine`."""
        called_s = self._now()
        metrics = self._engine.train(sequences, version)
        self.schedule.trained(sequences, called_s)
        return metrics

    def score(self, sequences: list[Sequence], reference: bool = False) -> list[NDArray[np.float32]]:
        """As in `TrainingEngine`."""
        called_s = self._now()
        scores = self._engine.score(sequences, reference)
        self.schedule.scored(sequences, called_s)
        return scores

    def write_weights(self, memory: NDArray[np.uint8]) -> Callable[[], object] | None:
        """As in `TrainingEngine`."""
        called_s = self._now()
        wait = self._engine.write_weights(memory)
        self.schedule.published(called_s, first=not self._published)
        self._published = True
        return wait

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """As in `TrainingEngine`."""
        return self._engine.state_shapes

    def state(self) -> TrainerState:
        """As in `TrainingEngine`."""
        return self._engine.state()

    def load_state(self, state: TrainerState) -> None:
        """As in `TrainingEngine`."""
        self._engine.load_state(state)


Paced = PacedTrainer | TimedTrainer


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
