"""Two ranks: transfers of no, few and many bytes, crossed tags, a wrong length, one taken back; tags apart from mail."""

import time

import numpy as np
import pytest

from laminar_hpc.errors import ProtocolError
from laminar_hpc.mpi.mail import Mail
from laminar_hpc.mpi.transport import Transfer, build_transport
from laminar_hpc.mpi.world import open_world
from laminar_hpc.protocol.peer import ManagerAlive

world = open_world()
transport = build_transport("mpi", world)
mail = Mail(world)
other = 1 - world.rank
deadline_s = time.monotonic() + 40.0


def finish(transfer: Transfer) -> None:
    while not transfer.done():
        assert time.monotonic() < deadline_s
    assert transfer.done()


def meet() -> None:
    """Both ranks have come here: mail that overtakes nothing."""
    mail.send(other, ManagerAlive())
    while not mail.poll():
        assert time.monotonic() < deadline_s


SIZES = [0, 1, 3, 4096, 3_000_001]
memory = np.zeros(sum(SIZES), dtype=np.uint8)
ends = np.cumsum(SIZES)
parts = [memory[end - size : end] for end, size in zip(ends, SIZES, strict=True)]
receives = [transport.receive(other, tag, part) for tag, part in enumerate(parts)]
meet()
sends = [
    transport.send(other, tag, np.full(SIZES[tag], 10 * tag + world.rank + 1, dtype=np.uint8))
    for tag in reversed(range(len(SIZES)))
]
for transfer in [*sends, *receives]:
    finish(transfer)
for tag, part in enumerate(parts):
    assert (part == 10 * tag + other + 1).all(), tag

# Shorter than expected: the receiver says so.
if world.rank == 0:
    short = transport.receive(other, 5, np.zeros(5, dtype=np.uint8))
    with pytest.raises(ProtocolError, match="receiving weights from rank 1 failed: 3 bytes came, 5 were expected"):
        finish(short)
else:
    finish(transport.send(other, 5, np.zeros(3, dtype=np.uint8)))

taken_back = transport.receive(other, 6, np.zeros(8, dtype=np.uint8))
assert taken_back.cancel()
assert taken_back.done()

for call, message in [
    (lambda: transport.send(other, -1, memory), "in 0 to 16383, got -1"),
    (lambda: transport.receive(other, transport.tags, memory), "got 16384"),
    (lambda: transport.send(99, 0, memory), "sending weights to rank 99 failed"),
    (
        lambda: transport.send(other, 0, np.broadcast_to(memory[:1], 1 << 31)),
        "at most 2147483647 bytes, got 2147483648",
    ),
]:
    with pytest.raises(ProtocolError, match=message):
        call()
meet()
print(world.rank, "ok", flush=True)
assert world.finish(clean=True, timeout_s=20.0)
