"""The trainer's worker process: it trains and writes weights, one request after the other, as its driver asks.

With several trainers their workers form one process group of torch.distributed. Where they meet is passed on by the
drivers: the first worker opens a store and says its address, the others are told it.
"""

from __future__ import annotations

import datetime
import time
from typing import TYPE_CHECKING

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import EngineError, ProtocolError
from laminar_hpc.process.channel import Channel
from laminar_hpc.process.memory import map_writable
from laminar_hpc.protocol.peer import (
    Manifest,
    Rendezvous,
    Shutdown,
    StartTrainer,
    TrainedOn,
    TrainerUp,
    TrainOn,
    WeightsWritten,
    WriteWeights,
)
from laminar_hpc.trainer.address import host_address, set_gloo_interface
from laminar_hpc.trainer.api import TrainingEngine
from laminar_hpc.trainer.batch import own_sequences
from laminar_hpc.trainer.build import build_trainer
from laminar_hpc.weights.digest import range_digests
from laminar_hpc.weights.manifest import range_bytes

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


def main(channel: Channel) -> None:
    """Serve a trainer's driver until it says Shutdown or is gone."""
    start = channel.receive(None)
    if not isinstance(start, StartTrainer):
        raise ProtocolError(f"trainer worker: expected StartTrainer, got {type(start).__name__}")
    begun_s = time.monotonic()
    config = Config.model_validate_json(start.config)
    _join(channel, config, start.trainer, start.trainers)
    engine = build_trainer(config, start.trainer, start.trainers)
    channel.send(TrainerUp(engine.manifest, time.monotonic() - begun_s))
    while True:
        message = channel.receive(None)
        match message:
            case TrainOn():
                channel.send(_train(engine, message))
            case WriteWeights():
                channel.send(_write(engine, engine.manifest, message))
            case Shutdown():
                return
            case _:
                raise ProtocolError(f"trainer worker: unexpected {type(message).__name__}")


def _train(engine: TrainingEngine, message: TrainOn) -> TrainedOn:
    begun_s = time.monotonic()
    sequences = own_sequences(message)
    metrics = engine.train(sequences)
    return TrainedOn(
        step=message.step,
        minibatch=message.minibatch,
        tokens=sum(len(sequence.tokens) for sequence in sequences),
        seconds=time.monotonic() - begun_s,
        metrics=metrics,
    )


def _write(engine: TrainingEngine, manifest: Manifest, message: WriteWeights) -> WeightsWritten:
    begun_s = time.monotonic()
    nbytes = range_bytes(manifest, message.first_chunk, message.chunks)
    with map_writable(message.path, message.offset, nbytes) as image:
        engine.write_weights(message.first_chunk, message.chunks, image)
        digests = range_digests(manifest, message.first_chunk, message.chunks, image)
    return WeightsWritten(message.version, digests, time.monotonic() - begun_s)


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
