"""torch.distributed's broadcast over gloo by itself: what a user would otherwise send weights to CPU hosts with.

A worker process, one on each rank that takes part, that meets the others over a store and then broadcasts the same bytes
from the first of them to the next few as often as its driver asks. It lives here because torch does.
"""

from __future__ import annotations

import datetime
import time

import msgspec
import torch
import torch.distributed as dist

from laminar_hpc.errors import EngineError, ProtocolError
from laminar_hpc.process.channel import Channel
from laminar_hpc.protocol.peer import BenchDone, BenchTask, Rendezvous, Shutdown, StartTrainer
from laminar_hpc.trainer.address import host_address, set_gloo_interface

PATIENCE = datetime.timedelta(seconds=300)
"""How long one of them waits for the others."""


def main(channel: Channel) -> None:
    """Serve until the driver says Shutdown or is gone.

    `StartTrainer` comes first, with this one's place, their number, and as its config a JSON list: the numbers of parties
    that broadcasts will have. Each `BenchTask` is one broadcast of its `nbytes` to the first `parties` of them. EngineError
    where one of the bytes that are looked at is not what the first one sent.
    """
    start = channel.receive(None)
    if not isinstance(start, StartTrainer):
        raise ProtocolError(f"gloo: expected StartTrainer, got {type(start).__name__}")
    torch.set_num_threads(1)
    _join(channel, start.trainer, start.trainers)
    sizes: list[int] = msgspec.json.decode(start.config, type=list[int])
    groups = {parties: dist.new_group(list(range(parties)), timeout=PATIENCE) for parties in sizes}
    channel.send(BenchDone(0.0))
    buffer = torch.zeros(0, dtype=torch.uint8)
    while not isinstance(task := channel.receive(None), Shutdown):
        if not isinstance(task, BenchTask):
            raise ProtocolError(f"gloo: unexpected {type(task).__name__}")
        if buffer.numel() != task.nbytes:
            buffer = torch.zeros(task.nbytes, dtype=torch.uint8)
        mark = task.turn % 251 + 1
        if start.trainer == 0:
            buffer[:: max(1, task.nbytes // 64)] = mark
        began_s = time.perf_counter()
        dist.broadcast(buffer, src=0, group=groups[task.parties])
        seconds = time.perf_counter() - began_s
        if not bool((buffer[:: max(1, task.nbytes // 64)] == mark).all()):
            raise EngineError(f"gloo: the bytes of broadcast {task.turn} did not arrive")
        channel.send(BenchDone(seconds))


def _join(channel: Channel, place: int, parties: int) -> None:
    """Meet the others: the first opens the store and says where, the others are told."""
    if place == 0:
        host = host_address()
        store = dist.TCPStore(host, 0, parties, is_master=True, timeout=PATIENCE, wait_for_workers=False)  # type: ignore[attr-defined]
        channel.send(Rendezvous(host, store.port))
    else:
        where = channel.receive(None)
        if not isinstance(where, Rendezvous):
            raise ProtocolError(f"gloo: expected Rendezvous, got {type(where).__name__}")
        store = dist.TCPStore(where.host, where.port, parties, is_master=False, timeout=PATIENCE)  # type: ignore[attr-defined]
    set_gloo_interface()
    dist.init_process_group("gloo", store=store, rank=place, world_size=parties, timeout=PATIENCE)
