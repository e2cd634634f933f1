"""What every transport keeps to. Arguments: its name, and the chapter (the names in CHAPTERS).

The ranks exchange tickets by mail, as the package does. A chapter ends on all ranks or on none.
"""

import sys
import time
from collections.abc import Callable, Iterable

import numpy as np
import pytest

from laminar_hpc.errors import PeerLost, ProtocolError
from laminar_hpc.mpi.mail import Mail
from laminar_hpc.mpi.transport import Receive, Transfer, build_transport
from laminar_hpc.mpi.world import open_world
from laminar_hpc.protocol.peer import Heartbeat, ProbeRequest

name, chapter = sys.argv[1:]
world = open_world()
mail = Mail(world)
transport = build_transport(name, world)
others = [rank for rank in range(world.size) if rank != world.rank]
deadline_s = time.monotonic() + 40.0
memory = np.zeros(80 << 20, dtype=np.uint8)
transport.register(memory)
next_byte = 0
arrived: list[tuple[int, object]] = []
under_way: list[Transfer] = []


def take(nbytes: int) -> np.ndarray:
    """Memory of its own, at an odd address for most."""
    global next_byte
    next_byte += nbytes + 1
    return memory[next_byte - nbytes - 1 : next_byte - 1]


def pattern(sender: int, receiver: int, number: int, nbytes: int) -> np.ndarray:
    """Bytes that no other transfer has."""
    return (np.arange(nbytes, dtype=np.uint32) * 7 + 101 * sender + 37 * receiver + 11 * number + 1).astype(np.uint8)


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        assert time.monotonic() < deadline_s, f"rank {world.rank} waits in {chapter}"
        arrived.extend(mail.poll())
        transport.poll()
        for transfer in under_way:
            transfer.done()


def finish(transfers: Iterable[Transfer]) -> None:
    for transfer in transfers:
        until(transfer.done)
        assert transfer.done()


def hand_over(rank: int, receive: Receive, nbytes: int = 0) -> None:
    mail.send(rank, ProbeRequest(rank=world.rank, nbytes=nbytes, ticket=receive.ticket))


def next_ticket(rank: int) -> bytes:
    """The next ticket that `rank` has handed over."""

    def position() -> int | None:
        return next((i for i, (r, m) in enumerate(arrived) if r == rank and isinstance(m, ProbeRequest)), None)

    until(lambda: position() is not None)
    return arrived.pop(position())[1].ticket


def meet() -> None:
    """All ranks have come here."""
    for rank in others:
        mail.send(rank, Heartbeat(rank=world.rank, waiting_for="", since_s=0.0))

    def signs() -> list[int]:
        return [i for i, (_, m) in enumerate(arrived) if isinstance(m, Heartbeat)]

    until(lambda: {arrived[i][0] for i in signs()} >= set(others))
    for rank in others:
        arrived.pop(next(i for i in signs() if arrived[i][0] == rank))


def exchange(sizes: list[int], rank: int) -> None:
    """`sizes` from this rank to `rank`, and the same from there, all at once."""
    parts = [take(size) for size in sizes]
    receives = [transport.receive(rank, part) for part in parts]
    for receive in receives:
        hand_over(rank, receive)
    sources = [take(size) for size in sizes]
    sends = []
    for number, (size, source) in enumerate(zip(sizes, sources, strict=True)):
        source[:] = pattern(world.rank, rank, number, size)
        sends.append(transport.send(rank, next_ticket(rank), source))
    under_way.extend([*sends, *receives])
    finish(under_way)
    under_way.clear()
    for number, (size, part) in enumerate(zip(sizes, parts, strict=True)):
        np.testing.assert_array_equal(part, pattern(rank, world.rank, number, size))


def whole() -> None:
    """Nothing, a byte, odd lengths, and many bytes."""
    for rank in others:
        for size in [1, 0, 3, 4097, 1_000_003]:
            exchange([size], rank)
    big = memory[5 : 5 + (64 << 20)]
    if world.rank == 0:
        receive = transport.receive(1, big)
        hand_over(1, receive)
        finish([receive])
        np.testing.assert_array_equal(big, pattern(1, 0, 64, big.nbytes))
    elif world.rank == 1:
        big[:] = pattern(1, 0, 64, big.nbytes)
        finish([transport.send(0, next_ticket(0), big)])


def many() -> None:
    """Many at once, in both directions, with every other rank."""
    for rank in others:
        exchange([1 + 40_000 * (number % 5) for number in range(48)], rank)


def wrong() -> None:
    """What cannot be is said at once."""
    rank = world.rank ^ 1
    receive = transport.receive(rank, take(5))
    hand_over(rank, receive)
    ticket = next_ticket(rank)
    with pytest.raises(ProtocolError, match=f"sending weights to rank {rank} failed: it waits for 5 bytes, not 3"):
        transport.send(rank, ticket, take(3))
    with pytest.raises(ProtocolError, match=f"rank {world.rank}: rank {rank} gave a ticket that is none"):
        transport.send(rank, b"", take(3))
    under_way.append(receive)
    send = transport.send(rank, ticket, take(5))
    finish([send, receive])
    under_way.clear()


def cancel() -> None:
    """Receives are given up before anything is sent for them: nothing is written, and the senders are done all the same."""
    rank = world.rank ^ 1
    for size in (0, 9, 300_001):
        part = take(size)
        receive = transport.receive(rank, part)
        hand_over(rank, receive)
        ticket = next_ticket(rank)
        assert not receive.done()
        until(receive.cancel)
        meet()
        until(receive.done)
        source = take(size)
        source[:] = 1
        finish([transport.send(rank, ticket, source)])
        meet()
        assert not part.any()
    exchange([17, 200_000], rank)
    late = transport.receive(rank, take(8))
    hand_over(rank, late)
    finish([transport.send(rank, next_ticket(rank), take(8)), late])
    assert late.cancel()
    assert late.done()


def forget() -> None:
    """Transfers with a rank that counts as gone end in PeerLost, sends perhaps when it comes back; others do not mind."""
    rank = world.rank ^ 1
    whole = transport.receive(rank, take(4))
    hand_over(rank, whole)
    finish([transport.send(rank, next_ticket(rank), take(4)), whole])
    part = take(100_000)
    receive = transport.receive(rank, part)
    never_asked = transport.receive(rank, take(10))
    hand_over(rank, receive)
    ticket = next_ticket(rank)
    meet()
    transport.forget(rank)
    assert whole.done()
    for transfer in (receive, never_asked):
        for _ in range(2):
            with pytest.raises(
                PeerLost, match=rf"rank {world.rank}: receiving weights from rank {rank}, which is gone"
            ) as raised:
                until(transfer.done)
            assert raised.value.rank == rank
        assert transfer.cancel()
    meet()
    source = take(100_000)
    source[:] = 1
    stale = transport.send(rank, ticket, source)  # what a rank does that wakes up and does not know yet
    meet()
    exchange([50_000, 3], rank)
    assert not part.any()
    finish([stale])
    unheard = transport.receive(rank, take(3_000_000))
    hand_over(rank, unheard)
    ticket = next_ticket(rank)
    if world.rank == 0:
        send = transport.send(rank, ticket, take(3_000_000))
        transport.forget(rank)
    meet()
    transport.forget(rank)
    ended_or_lost(unheard)
    meet()
    if world.rank == 0:
        with pytest.raises(PeerLost, match=f"rank 0: sending weights to rank {rank}, which is gone"):
            until(send.done)
    meet()
    exchange([50_000, 3], rank)


def ended_or_lost(transfer: Transfer) -> None:
    try:
        until(transfer.done)
    except PeerLost:
        return


def ring() -> None:
    """A chain: each rank receives from the one before it what it sends on, a part at a time, while it sends."""
    before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    size, count = 100_001, 12
    image = take(size * count)
    if world.rank == 0:
        image[:] = np.concatenate([pattern(0, 0, number, size) for number in range(count)])
    parts = [image[size * number : size * (number + 1)] for number in range(count)]
    sends: list[Transfer] = []
    for part in parts:
        if world.rank > 0:
            receive = transport.receive(before, part)
            hand_over(before, receive)
            finish([receive])
        if after > 0:
            sends.append(transport.send(after, next_ticket(after), part))
            under_way.append(sends[-1])
    finish(sends)
    np.testing.assert_array_equal(image, np.concatenate([pattern(0, 0, number, size) for number in range(count)]))


def outside() -> None:
    """Memory that was never registered is refused by a transport that needs to know it, with the reason; else it does."""
    if name == "nixl":
        with pytest.raises(ProtocolError, match=f"rank {world.rank}: 8 bytes at .* lie in no registered memory"):
            transport.receive(others[0], np.zeros(8, dtype=np.uint8))
    more = np.zeros(1 << 16, dtype=np.uint8)
    transport.register(more)  # after the first transfers, as when an image comes later than the world
    for number in range(2):
        receive = transport.receive(others[0], more[number : 5000 + number])
        hand_over(others[0], receive)
        source = take(5000)
        source[:] = pattern(world.rank, others[0], number, 5000)
        under_way[:] = [transport.send(others[0], next_ticket(others[0]), source), receive]
        finish(under_way)
        np.testing.assert_array_equal(more[number : 5000 + number], pattern(others[0], world.rank, number, 5000))
        meet()


CHAPTERS: dict[str, Callable[[], None]] = {
    function.__name__: function for function in (whole, many, wrong, cancel, forget, ring, outside)
}
CHAPTERS[chapter]()
meet()
under_way.clear()
transport.close()
meet()
print(world.rank, "ok", flush=True)
mail.flush(5.0)
assert world.finish(clean=True, timeout_s=20.0)
