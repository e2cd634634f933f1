"""Four ranks in the middle of transfers, of which the last is to be killed. Arguments: transport, sender | receiver.

Ranks 0 to 2 send in a ring, COUNT chunks each; rank 3 sends to rank 0 without end, or receives from it. Rank 3 prints its
process id once it is under way. The others print when they found it dead, and `whole` when every chunk of the ring has
come as it was sent and nothing has written to what had been given back.
"""

import os
import sys
import time
from collections import deque

import numpy as np

from laminar_hpc.errors import PeerLost
from laminar_hpc.mpi.mail import Mail
from laminar_hpc.mpi.transport import Receive, Transfer, build_transport
from laminar_hpc.mpi.world import open_world
from laminar_hpc.protocol.peer import ChunkRequest, Goodbye

CHUNK, WINDOW, COUNT, VICTIM, MARK = 4 << 20, 4, 30, 3, 0xAA

world = open_world()
mail = Mail(world)
transport = build_transport(sys.argv[1], world)
victim_sends = sys.argv[2] == "sender"
me = world.rank
deadline_s = time.monotonic() + 50.0
given_back: list[np.ndarray] = []  # buffers of transfers that were lost, marked


def source_of(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).integers(0, 256, CHUNK + 4096, dtype=np.uint8)


def chunk_of(source: np.ndarray, number: int) -> np.ndarray:
    return source[number % 4096 : number % 4096 + CHUNK]


class Incoming:
    """Chunks from one rank, `WINDOW` of them asked for at once."""

    def __init__(self, sender: int, count: int | None) -> None:
        self.sender, self.count = sender, count
        self.expected = source_of(sender)
        self.memory = np.zeros(WINDOW * CHUNK, dtype=np.uint8)
        transport.register(self.memory)
        self.asked: deque[tuple[int, Receive, np.ndarray]] = deque()
        self.next, self.lost = 0, False

    @property
    def over(self) -> bool:
        return not self.asked and (self.lost or self.next == self.count)

    def poll(self) -> None:
        while len(self.asked) < WINDOW and self.next != self.count and not self.lost:
            buffer = self.memory[self.next % WINDOW * CHUNK :][:CHUNK]
            receive = transport.receive(self.sender, buffer)
            mail.send(self.sender, ChunkRequest(rank=me, version=0, chunk=self.next, ticket=receive.ticket))
            self.asked.append((self.next, receive, buffer))
            self.next += 1
        while self.asked:
            number, receive, buffer = self.asked[0]
            try:
                if not receive.done():
                    return
                assert np.array_equal(buffer, chunk_of(self.expected, number)), f"rank {me}: chunk {number} is torn"
            except PeerLost as error:
                say_lost(error)
                self.lost = True
                buffer[:] = MARK
                given_back.append(buffer)
            self.asked.popleft()


class Outgoing:
    """Answers to requests for this rank's chunks."""

    def __init__(self) -> None:
        self.source = source_of(me)
        transport.register(self.source)
        self.sends: list[Transfer] = []
        self.sent = 0

    def ask(self, request: ChunkRequest) -> None:
        self.sends.append(transport.send(request.rank, request.ticket, chunk_of(self.source, request.chunk)))

    def poll(self) -> None:
        still = []
        for send in self.sends:
            try:
                if not send.done():
                    still.append(send)
                    continue
            except PeerLost as error:
                say_lost(error)
            self.sent += 1
        self.sends = still


def say_lost(error: PeerLost) -> None:
    assert error.rank == VICTIM, error
    say("PeerLost")


def say(what: str) -> None:
    os.write(1, f"{what} {me} {time.monotonic():.6f}\n".encode())


outgoing = Outgoing()
incoming = [] if me == VICTIM else [Incoming((me + 2) % 3, COUNT)]
if victim_sends and me == 0:
    incoming.append(Incoming(VICTIM, None))
if not victim_sends and me == VICTIM:
    incoming.append(Incoming(0, None))

named = False
heard: set[int] = set()
said = False
while not (named and all(flow.over for flow in incoming) and not outgoing.sends and heard >= {0, 1, 2}):
    assert time.monotonic() < deadline_s, f"rank {me} waits: {named} {[flow.next for flow in incoming]} {heard}"
    for rank, message in mail.poll():
        if isinstance(message, ChunkRequest):
            outgoing.ask(message)
        elif isinstance(message, Goodbye):
            heard.add(rank)
    for flow in incoming:
        flow.poll()
    outgoing.poll()
    for rank in mail.lost():
        assert rank == VICTIM
        say("named")
        named = True
        transport.forget(rank)
    if me == VICTIM and not said and (outgoing.sent > 2 or any(flow.next > WINDOW + 2 for flow in incoming)):
        said = True
        os.write(1, f"victim {os.getpid()}\n".encode())
    if named and not heard & {me} and all(flow.over for flow in incoming):
        for rank in range(3):
            mail.send(rank, Goodbye(rank=me))
mail.send(VICTIM, Goodbye(rank=me))  # vanishes
assert mail.flush(5.0)
assert all((buffer == MARK).all() for buffer in given_back), f"rank {me}: a lost transfer has written later"
transport.close()
assert not world.finish(clean=True, timeout_s=5.0)
say("whole")
os._exit(0)
