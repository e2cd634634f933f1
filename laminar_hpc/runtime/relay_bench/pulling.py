"""How fast a rollout's worker loads from its node's image, beside a plain copy of the same bytes."""

from __future__ import annotations

import numpy as np

from laminar_hpc.errors import EngineError
from laminar_hpc.process.channel import ChannelClosed, wait_any
from laminar_hpc.process.worker import Worker
from laminar_hpc.protocol.peer import BenchDone, BenchTask, WorkerError
from laminar_hpc.record.writer import RecordWriter
from laminar_hpc.runtime.relay_bench import worker
from laminar_hpc.runtime.relay_bench.plan import Plan
from laminar_hpc.weights.image import Image

READERS = (1, 2)
BOUND_S = 120.0


def measure_pulls(plan: Plan, record: RecordWriter, log_path: str) -> None:
    """Pairs of a pull and a plain copy, by one worker and by two at once; needs no MPI."""
    readers = [Worker(f"reader-{index}", worker.pull, log_path) for index in range(max(READERS))]
    image = Image.create(plan.nbytes, 2)
    try:
        buffer = image.begin_fill(0)
        assert buffer is not None, "a new image has room"
        buffer[:] = np.random.default_rng(plan.seed).integers(0, 256, plan.nbytes, dtype=np.uint8)
        image.complete(0)
        _all(readers, BenchTask(0, plan.nbytes))
        lent = BenchTask(0, plan.nbytes, path=image.path, offset=image.offset_of(0))
        own = BenchTask(0, plan.nbytes)
        for count in READERS:
            for turn in range(-1, plan.repetitions):
                tasks = (lent, own) if turn % 2 else (own, lent)
                seconds = {task.path: _all(readers[:count], task) for task in tasks}
                if turn >= 0:
                    record.add(
                        "bench_pulls",
                        readers=count,
                        nbytes=plan.nbytes,
                        repetition=turn,
                        pull_s=seconds[lent.path],
                        copy_s=seconds[own.path],
                    )
    finally:
        for reader in readers:
            reader.kill()
        image.close()


def _all(readers: list[Worker], task: BenchTask) -> float:
    """Have all do it at once; the seconds of the slowest."""
    for reader in readers:
        reader.send(task)
    return max(_one(reader) for reader in readers)


def _one(reader: Worker) -> float:
    wait_any([reader.channel], BOUND_S)
    try:
        message = reader.channel.receive(BOUND_S)
    except ChannelClosed as error:
        raise EngineError(f"{reader.name} has ended") from error
    if isinstance(message, WorkerError):
        raise EngineError(f"{reader.name}: {message.text}")
    if not isinstance(message, BenchDone):
        raise EngineError(f"{reader.name} said {type(message).__name__}")
    return message.seconds
