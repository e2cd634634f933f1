"""The bench's own worker processes: a trainer's that only publishes, and a rollout's that only loads."""

from __future__ import annotations

import mmap
import time

import numpy as np
from numpy.typing import NDArray

from laminar_hpc.errors import ProtocolError
from laminar_hpc.process.channel import Channel
from laminar_hpc.process.memory import KeptMappings, WritableMappings
from laminar_hpc.protocol.peer import BenchDone, BenchTask, Shutdown, WeightsWritten, WriteWeights


def publish(channel: Channel) -> None:
    """Serve a trainer's driver. The first `BenchTask` says how many bytes the shard has; it is random ever after.

    `WriteWeights` is a publication; every other `BenchTask` a plain copy of the same bytes to memory of this process.
    """
    shard = _random(_first(channel).nbytes)
    copied = _random(shard.nbytes)
    lent = WritableMappings()
    channel.send(BenchDone(0.0))
    while not isinstance(message := channel.receive(None), Shutdown):
        match message:
            case WriteWeights():
                shard[:: 1 << 16] = message.version % 251  # no two versions are the same
                memory = lent.view(message.path, message.offset, shard.nbytes)
                began_s = time.perf_counter()
                np.copyto(memory, shard)
                channel.send(WeightsWritten(message.version, time.perf_counter() - began_s))
            case BenchTask():
                began_s = time.perf_counter()
                np.copyto(copied, shard)
                channel.send(BenchDone(time.perf_counter() - began_s))
            case _:
                raise ProtocolError(f"bench worker: unexpected {type(message).__name__}")


def pull(channel: Channel) -> None:
    """Serve as a rollout's worker whose engine has `nbytes` bytes, as the first `BenchTask` says.

    A `BenchTask` with a path loads from that memory; one without copies the same number of bytes inside this process.
    """
    engine = _random(_first(channel).nbytes)
    other = _random(engine.nbytes)
    lent = KeptMappings()
    channel.send(BenchDone(0.0))
    while not isinstance(task := channel.receive(None), Shutdown):
        if not isinstance(task, BenchTask):
            raise ProtocolError(f"bench worker: unexpected {type(task).__name__}")
        began_s = time.perf_counter()
        if task.path:
            np.copyto(engine, lent.view(task.path, task.offset, engine.nbytes))
        else:
            np.copyto(engine, other)
        channel.send(BenchDone(time.perf_counter() - began_s))


def _first(channel: Channel) -> BenchTask:
    task = channel.receive(None)
    if not isinstance(task, BenchTask):
        raise ProtocolError(f"bench worker: expected BenchTask, got {type(task).__name__}")
    return task


def _random(nbytes: int) -> NDArray[np.uint8]:
    """Random bytes at the start of a page, as lent memory is.

    Where source and target of a copy lie some bytes apart modulo a page, loads wait for stores that they have nothing to do
    with, and it takes up to three times as long, whoever owns the memory: that is not what is measured here.
    """
    memory = np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=np.uint8)[:nbytes]
    memory[:] = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    return memory
