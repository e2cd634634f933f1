"""What a user would otherwise broadcast weights with, in plain MPI: the measure of what the relays do with the same bytes.

Besides, what a bench needs of MPI: communicators of some of the ranks, a ping-pong, and small notes between rank 0 and the
others on a communicator of their own, apart from the mail.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from laminar_hpc.mpi.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

Bytes = NDArray[np.uint8]

NOTE_NUMBERS = 8
"""How many numbers a note has; those that are not given are 0."""

_NOTE_TAG = 2
_PING_TAG = 3
_CHUNK_TAG = 4
_PAUSE_S = 0.0005


class Notes:
    """A few numbers (float64, which holds every int up to 2^53) at a time, from rank 0 to another rank or back.

    A rank that is gone is neither waited for nor complained about.
    """

    def __init__(self, world: World) -> None:
        """Collective."""
        self._world = world
        self._comm = world.comm.Dup()
        self._comm.Set_errhandler(world.mpi.ERRORS_RETURN)
        self._outgoing: list[tuple[MPI.Request, NDArray[np.float64]]] = []

    def send(self, rank: int, *numbers: float) -> None:
        """Send a note without waiting."""
        note = np.zeros(NOTE_NUMBERS)
        note[: len(numbers)] = numbers
        with contextlib.suppress(self._world.mpi.Exception):
            self._outgoing = [(request, kept) for request, kept in self._outgoing if not request.Test()]
            self._outgoing.append((self._comm.Isend(note, dest=rank, tag=_NOTE_TAG), note))

    def poll(self, rank: int) -> list[float] | None:
        """The next note from `rank`; None where none has arrived."""
        try:
            if not self._comm.Iprobe(source=rank, tag=_NOTE_TAG):
                return None
            note = np.zeros(NOTE_NUMBERS)
            self._comm.Recv(note, source=rank, tag=_NOTE_TAG)
        except self._world.mpi.Exception:
            return None
        numbers: list[float] = note.tolist()
        return numbers


class Party:
    """Some of the ranks, in the order in which they are given; the first is the root of what they do together."""

    def __init__(self, world: World, ranks: list[int]) -> None:
        """Collective over `ranks`, and over them alone."""
        group = world.comm.Get_group().Incl(ranks)
        self.comm = world.comm.Create_group(group, tag=len(ranks))
        self.ranks = ranks
        self.place: int = self.comm.Get_rank()
        self.mpi = world.mpi

    def meet(self) -> None:
        """Return when all are here."""
        pause_until(self.comm.Ibarrier().Test)

    def tell_root(self) -> None:
        """Tell the root that this rank's part is done."""
        self.comm.Send([np.zeros(1, dtype=np.uint8), self.mpi.BYTE], dest=0, tag=_NOTE_TAG)

    def hear_from(self, places: Iterable[int]) -> None:
        """On the root: return when these have told it so."""
        for place in places:
            request = self.comm.Irecv([np.zeros(1, dtype=np.uint8), self.mpi.BYTE], source=place, tag=_NOTE_TAG)
            pause_until(request.Test)


def bcast(party: Party, buffer: Bytes, _chunks: int) -> None:
    """MPI_Bcast, in whatever way this MPI does it."""
    party.comm.Bcast([buffer, party.mpi.BYTE], root=0)


def star(party: Party, buffer: Bytes, _chunks: int) -> None:
    """The root sends everything to everyone, all sends at once."""
    comm, byte = party.comm, party.mpi.BYTE
    if party.place:
        comm.Recv([buffer, byte], source=0, tag=_CHUNK_TAG)
    else:
        others = range(1, len(party.ranks))
        party.mpi.Request.Waitall([comm.Isend([buffer, byte], dest=other, tag=_CHUNK_TAG) for other in others])


def chain(party: Party, buffer: Bytes, chunks: int) -> None:
    """Each rank waits for a chunk, begins to send it on, and waits for the next one."""
    comm, byte = party.comm, party.mpi.BYTE
    before, after = party.place - 1, party.place + 1
    bounds = [buffer.nbytes * chunk // chunks for chunk in range(chunks + 1)]
    sends = []
    for low, high in itertools.pairwise(bounds):
        if before >= 0:
            comm.Recv([buffer[low:high], byte], source=before, tag=_CHUNK_TAG)
        if after < len(party.ranks):
            sends.append(comm.Isend([buffer[low:high], byte], dest=after, tag=_CHUNK_TAG))
    party.mpi.Request.Waitall(sends)


BARE: dict[str, Callable[[Party, Bytes, int], None]] = {"bcast": bcast, "star": star, "chain": chain}
"""By name. Each is called by all ranks of the party and returns on a rank when its part is done."""


def copy(party: Party, buffer: Bytes, source: int, dest: int) -> None:
    """One copy from one rank of the party (its place in it) to another; the others do nothing."""
    if party.place == source:
        party.comm.Send([buffer, party.mpi.BYTE], dest=dest, tag=_CHUNK_TAG)
    elif party.place == dest:
        party.comm.Recv([buffer, party.mpi.BYTE], source=source, tag=_CHUNK_TAG)


def ping_pong(party: Party, source: int, dest: int, sizes: Iterable[int], repetitions: int) -> list[tuple[int, float]]:
    """Half the times of round trips between two places of the party: (bytes, seconds), on `source` alone.

    The sizes take turns, so that what else goes on on the link meets them all alike. The first round, which opens the
    connection, does not count.
    """
    timed: list[tuple[int, float]] = []
    sizes = list(sizes)
    buffer = np.ones(max(sizes), dtype=np.uint8)
    if party.place not in (source, dest):
        return timed
    other = dest if party.place == source else source
    for repetition in range(repetitions + 1):
        for size in sizes:
            part = [buffer[:size], party.mpi.BYTE]
            began_s = time.perf_counter()
            if party.place == source:
                party.comm.Send(part, dest=other, tag=_PING_TAG)
            party.comm.Recv(part, source=other, tag=_PING_TAG)
            if party.place == dest:
                party.comm.Send(part, dest=other, tag=_PING_TAG)
            elif repetition:
                timed.append((size, (time.perf_counter() - began_s) / 2))
    return timed


def pause_until(done: Callable[[], bool]) -> None:
    """Wait for something of MPI's, and leave the cores to others meanwhile."""
    while not done():
        time.sleep(_PAUSE_S)
