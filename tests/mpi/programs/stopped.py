"""Two ranks; one is stopped in the middle of transfers, taken for lost, and goes on later. Argument: the transport."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from laminar_hpc.errors import PeerLost
from laminar_hpc.mpi.mail import Mail
from laminar_hpc.mpi.transport import Transfer, build_transport
from laminar_hpc.mpi.world import open_world
from laminar_hpc.protocol.peer import Goodbye, Heartbeat, ProbeRequest, PromptEncoded

SIZE = 3 << 20

world = open_world()
mail = Mail(world)
transport = build_transport(sys.argv[1], world)
other = 1 - world.rank
memory = np.zeros((4, SIZE), dtype=np.uint8)
transport.register(memory.reshape(-1))
deadline_s = time.monotonic() + 40.0
arrived: list[object] = []


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        assert time.monotonic() < deadline_s, f"rank {world.rank} has {arrived}"
        arrived.extend(message for _, message in mail.poll())
        transport.poll()


def next_of(kind: type) -> object:
    until(lambda: any(isinstance(message, kind) for message in arrived))
    return arrived.pop(next(i for i, message in enumerate(arrived) if isinstance(message, kind)))


def ask(row: int) -> Transfer:
    receive = transport.receive(other, memory[row])
    mail.send(other, ProbeRequest(rank=world.rank, nbytes=SIZE, ticket=receive.ticket))
    return receive


def exchange() -> None:
    receive = ask(2)
    memory[3] = 7 + world.rank
    send = transport.send(other, next_of(ProbeRequest).ticket, memory[3])
    until(lambda: send.done() & receive.done())
    assert (memory[2] == 7 + other).all()


exchange()
if world.rank == 1:
    asked = ask(0)
    mail.send(0, Heartbeat(rank=os.getpid(), waiting_for="", since_s=0.0))
    assert mail.flush(10.0)
    os.kill(os.getpid(), signal.SIGSTOP)
    mail.send(0, Goodbye(rank=1))
    memory[1] = 1
    stale = transport.send(0, next_of(ProbeRequest).ticket, memory[1])
    until(stale.done)
    transport.forget(0)
    with contextlib.suppress(PeerLost):  # or it comes after all: what the other rank has given up may still be sent
        until(asked.done)
else:
    pid = next_of(Heartbeat).rank
    until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    memory[0] = 1
    send, receive = transport.send(1, next_of(ProbeRequest).ticket, memory[0]), ask(1)
    mail.send(1, PromptEncoded(trajectory=1, tokens=bytes(SIZE)))
    assert not mail.flush(0.1)
    assert mail.pending
    assert not receive.done()
    assert not send.done()
    mail.forget(1)
    transport.forget(1)
    assert mail.pending == 0
    assert mail.flush(0.0)
    with pytest.raises(PeerLost, match="receiving weights from rank 1, which is gone"):
        receive.done()
    if sys.argv[1] == "nixl":
        with pytest.raises(PeerLost, match="sending weights to rank 1, which is gone"):
            send.done()
    else:
        assert not send.done()  # MPI has taken it on, and will read from its buffer when the other one wakes up
    memory[1] = 9
    os.kill(pid, signal.SIGCONT)
    next_of(Goodbye)
exchange()
mail.send(other, PromptEncoded(trajectory=2, tokens=bytes(SIZE)))
assert mail.pending
until(lambda: any(isinstance(message, PromptEncoded) and message.trajectory == 2 for message in arrived))
if world.rank == 0:
    with pytest.raises(PeerLost, match="sending weights to rank 1, which is gone"):
        until(send.done)
    assert (memory[1] == 9).all()  # what came for the receive that had been given up went elsewhere
assert mail.flush(10.0)
transport.close()
os.write(1, f"{world.rank} ok\n".encode())
assert world.finish(clean=True, timeout_s=20.0)
