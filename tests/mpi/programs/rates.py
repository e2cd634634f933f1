"""Two ranks: 256 MB in chunks of 4 MB, four asked for at once. Arguments: rounds, transports. Prints GB/s and CPU seconds."""

import resource
import statistics
import sys
import time

import numpy as np

from laminar_hpc.mpi.mail import Mail
from laminar_hpc.mpi.transport import Receive, Transfer, Transport, build_transport
from laminar_hpc.mpi.world import open_world
from laminar_hpc.protocol.peer import ChunkRequest, Goodbye

CHUNK, COUNT, WINDOW = 4 << 20, 64, 4

world = open_world()
mail = Mail(world)
memory = np.ones(CHUNK * COUNT, dtype=np.uint8)
transports = {name: build_transport(name, world) for name in sys.argv[2:]}
for transport in transports.values():
    transport.register(memory)


def chunk(number: int) -> np.ndarray:
    return memory[number * CHUNK : (number + 1) * CHUNK]


def receive_all(transport: Transport) -> None:
    asked: list[Receive] = []
    next_chunk = 0
    while asked or next_chunk < COUNT:
        while len(asked) < WINDOW and next_chunk < COUNT:
            asked.append(transport.receive(1, chunk(next_chunk)))
            mail.send(1, ChunkRequest(rank=0, version=0, chunk=next_chunk, ticket=asked[-1].ticket))
            next_chunk += 1
        mail.poll()
        asked = [receive for receive in asked if not receive.done()]
    mail.send(1, Goodbye(rank=0))


def send_all(transport: Transport) -> None:
    sends: list[Transfer] = []
    over = False
    while sends or not over:
        for _, message in mail.poll():
            if isinstance(message, ChunkRequest):
                sends.append(transport.send(0, message.ticket, chunk(message.chunk)))
            over |= isinstance(message, Goodbye)
        sends = [send for send in sends if not send.done()]


rates: dict[str, list[tuple[float, float]]] = {name: [] for name in transports}
for number in range(int(sys.argv[1]) + 1):
    for name, transport in transports.items():
        world.comm.Barrier()
        begun_s = time.monotonic()
        before = resource.getrusage(resource.RUSAGE_SELF)
        (receive_all if world.rank == 0 else send_all)(transport)
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if number:  # the first one connects and touches the memory
            rates[name].append((memory.nbytes / (time.monotonic() - begun_s) / 1e9, cpu_s))
for name, values in rates.items():
    print(world.rank, name, *(f"{statistics.median(column):.2f}" for column in zip(*values, strict=True)), flush=True)
assert world.finish(clean=True, timeout_s=20.0)
