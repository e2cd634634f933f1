"""The trainer's worker process: it trains and writes weights, one request after the other, as its driver asks.

Where a loss needs log-probabilities from before a step's first update, the step's mini-batches are collected and scored
first, and then trained on one by one.

Weights are copied to memory that the driver lends. Where a GPU copies them by itself, a thread waits for it and says so,
before the answer to whatever the driver has asked for next. A state is copied at once and written to disk in a thread of
its own, however long that takes.

With several trainers their workers form one process group of torch.distributed. Where they meet is passed on by the
drivers: the first worker opens a store and says its address, the others are told it.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import EngineError, FinalError, ProtocolError
from laminar_hpc.process.channel import Channel
from laminar_hpc.process.memory import WritableMappings
from laminar_hpc.protocol.peer import (
    Rendezvous,
    SaveState,
    Shutdown,
    StartTrainer,
    TrainedOn,
    TrainerUp,
    TrainOn,
    WeightsWritten,
    WriteWeights,
)
from laminar_hpc.trainer.address import host_address, set_gloo_interface
from laminar_hpc.trainer.api import Sequence, TrainingEngine, needs_proximal, needs_reference
from laminar_hpc.trainer.batch import own_sequences
from laminar_hpc.trainer.build import build_trainer
from laminar_hpc.trainer.paced import Paced, sequences_of_lengths

SKIPPED_STEPS = 10
"""So many steps in a row whose gradients are not finite, or all steps of a shorter run, and the trainer gives up.

One can come from a batch; weights that have become infinite never train again.
"""

STATE_BYTES = 4
"""Of each number of a trainer's state."""

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from laminar_hpc.trainer.saver import StateSaver


def main(channel: Channel) -> None:
    """Serve a trainer's driver until it says Shutdown or is gone."""
    start = channel.receive(None)
    if not isinstance(start, StartTrainer):
        raise ProtocolError(f"trainer worker: expected StartTrainer, got {type(start).__name__}")
    from laminar_hpc.trainer.checkpoint import origin_of, read_state
    from laminar_hpc.trainer.saver import StateSaver

    begun_s = time.monotonic()
    config = Config.model_validate_json(start.config)
    if not config.timing_only:
        _join(channel, config, start.trainer, start.trainers)
    engine = build_trainer(config, start.trainer, start.trainers)
    origin = origin_of(config, start.trainer, start.trainers, engine.manifest)
    if start.resume is not None:
        engine.load_state(read_state(start.resume.directory, start.resume.step, origin, engine.state_shapes))
    if start.saves:
        engine.state()  # into fresh memory, which takes ten times as long as any later copy
    state_bytes = sum(STATE_BYTES * math.prod(shape) for shape in engine.state_shapes.values())
    channel.send(TrainerUp(engine.manifest, engine.tiles, time.monotonic() - begun_s, state_bytes))
    _Service(channel, config, engine, StateSaver(engine, origin, channel.send)).run()


class Patience:
    """Counts the mini-batches in a row that nothing was trained on."""

    def __init__(self, steps: int) -> None:
        """`steps` is how many the whole run has."""
        self._steps = min(SKIPPED_STEPS, steps)
        self._skipped = 0

    def note(self, message: TrainOn, metrics: dict[str, float]) -> None:
        """A mini-batch is done; FinalError where that makes `SKIPPED_STEPS`."""
        self._skipped = self._skipped + 1 if metrics["skipped"] else 0
        if self._skipped >= self._steps * message.minibatches:
            raise FinalError(
                f"trainer worker: nothing was trained in {self._steps} steps up to step {message.step}: no gradient was "
                f"finite"
            )


class _Service:
    """Requests of the driver, one after the other; a step that is scored first is collected whole."""

    def __init__(self, channel: Channel, config: Config, engine: TrainingEngine, saver: StateSaver) -> None:
        self._channel = channel
        self._saver = saver
        self._config = config
        self._engine = engine
        self._shard_bytes = sum(tile.nbytes for tile in engine.tiles)
        self._memory = WritableMappings(self._pin)
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="copy")
        self._copy: Future[None] | None = None
        self._patience = Patience(config.control.steps)

    def run(self) -> None:
        """Until the driver says Shutdown or is gone."""
        while True:
            message = self._channel.receive(None)
            match message:
                case TrainOn():
                    self._train(message)
                case WriteWeights():
                    self._write(message)
                case SaveState():
                    self._saver.save(message)
                case Shutdown():
                    self._await_copy()
                    self._saver.finish()
                    return
                case _:
                    raise ProtocolError(f"trainer worker: unexpected {type(message).__name__}")

    def _train(self, first: TrainOn) -> None:
        """Train on a mini-batch, or on a whole step where that has to be scored before it is trained on."""
        trainer = self._config.trainer
        proximal, reference = needs_proximal(trainer, first.minibatches), needs_reference(trainer)
        messages = self._collect(first) if proximal or reference else [first]
        begun_s = time.monotonic()
        batches = [self._sequences(message) for message in messages]
        if proximal:
            batches = [self._score(sequences, "proximal_logprobs") for sequences in batches]
        if reference:
            batches = [self._score(sequences, "reference_logprobs") for sequences in batches]
        for message, sequences in zip(messages, batches, strict=True):
            if isinstance(self._engine, Paced):
                self._engine.schedule.begin(begun_s)
            metrics = self._engine.train(sequences, message.version)
            self._await_copy()
            ended_s = time.monotonic()
            tokens = sum(len(sequence.tokens) for sequence in sequences)
            pace = self._engine.schedule.take_pace() if isinstance(self._engine, Paced) else None
            self._channel.send(TrainedOn(message.step, message.minibatch, tokens, ended_s - begun_s, metrics, pace))
            begun_s = ended_s
            self._patience.note(message, metrics)

    def _sequences(self, message: TrainOn) -> list[Sequence]:
        return sequences_of_lengths(message.lengths) if self._config.timing_only else own_sequences(message)

    def _collect(self, first: TrainOn) -> list[TrainOn]:
        """All mini-batches of the step that `first` begins."""
        messages = [first]
        while len(messages) < first.minibatches:
            message = self._channel.receive(self._config.job.stall_timeout_s)
            if message is None:
                raise EngineError(
                    f"trainer worker: mini-batch {len(messages)} of step {first.step} has not come within "
                    f"job.stall_timeout_s = {self._config.job.stall_timeout_s:g} s"
                )
            if not isinstance(message, TrainOn) or (message.step, message.minibatch) != (first.step, len(messages)):
                raise ProtocolError(
                    f"trainer worker: expected mini-batch {len(messages)} of step {first.step}, got "
                    f"{type(message).__name__}"
                )
            messages.append(message)
        return messages

    def _score(self, sequences: list[Sequence], field: str) -> list[Sequence]:
        scores = self._engine.score(sequences, reference=field == "reference_logprobs")
        return [
            msgspec.structs.replace(sequence, **{field: score})
            for sequence, score in zip(sequences, scores, strict=True)
        ]

    def _write(self, message: WriteWeights) -> None:
        """Begin to copy the weights as they are now; the driver hears of it when they are there."""
        self._await_copy()
        memory = self._memory.view(message.path, message.offset, self._shard_bytes)
        begun_s = time.monotonic()
        wait = self._engine.write_weights(memory)
        written = WeightsWritten(message.version, time.monotonic() - begun_s)
        if wait is None:
            self._channel.send(written)
        else:
            self._copy = self._waiter.submit(self._say_written, wait, written)

    def _pin(self, memory: NDArray[np.uint8]) -> None:
        if not self._config.timing_only:
            from laminar_hpc.trainer.shard import pin

            pin(memory)

    def _say_written(self, wait: Callable[[], object], written: WeightsWritten) -> None:
        wait()
        self._channel.send(written)

    def _await_copy(self) -> None:
        """The last copy is there, and the driver has been told."""
        if self._copy is not None:
            self._copy.result()
            self._copy = None


def _join(channel: Channel, config: Config, trainer: int, trainers: int) -> None:
    """Set the number of threads, and meet the other trainers' workers within `job.start_timeout_s`.

    From then on a trainer may wait for the others, whose shares may be larger, for `job.stall_timeout_s`.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(config.job.threads)
    if trainers == 1:
        return
    store = _open_store(channel, config.job.start_timeout_s, trainer, trainers)
    patience = datetime.timedelta(seconds=config.job.stall_timeout_s)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    set_gloo_interface()
    dist.init_process_group(backend, store=store, rank=trainer, world_size=trainers, timeout=patience)


def _open_store(channel: Channel, timeout_s: float, trainer: int, trainers: int) -> Store:
    """The store of the first trainer's worker, with all of them there; each wait is bounded by `timeout_s`."""
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=timeout_s)
    if trainer == 0:
        host = host_address()
        store = dist.TCPStore(host, 0, trainers, is_master=True, timeout=timeout, wait_for_workers=False)  # type: ignore[attr-defined]
        channel.send(Rendezvous(host, store.port))
    else:
        place = channel.receive(timeout_s)
        if not isinstance(place, Rendezvous):
            raise ProtocolError(
                f"trainer worker {trainer}: no word of where the trainers meet within job.start_timeout_s = "
                f"{timeout_s:g} s"
            )
        store = dist.TCPStore(place.host, place.port, trainers, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    store.set(_key(trainer), "")
    for other in range(trainers):
        try:
            store.wait([_key(other)], timeout)
        except dist.DistStoreError as error:
            raise EngineError(
                f"trainer worker {trainer}: trainer {other} has not come to the meeting within job.start_timeout_s = "
                f"{timeout_s:g} s"
            ) from error
    return store


def _key(trainer: int) -> str:
    return f"trainer {trainer} is here"
