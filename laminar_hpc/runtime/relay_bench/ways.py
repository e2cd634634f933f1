"""What the relays are compared with: the other ways to get the trainer's bytes to every relay, timed by one clock.

Rank 0 calls for a way with a note; then all ranks that take part meet, do it, and those that receive tell rank 0 when they
have everything. Its time is from the meeting to the last of these.
"""

from __future__ import annotations

import contextlib
import os
import time
from enum import IntEnum

import msgspec
import numpy as np

from laminar_hpc.errors import EngineError
from laminar_hpc.mpi.bare import BARE, Notes, Party, copy, ping_pong
from laminar_hpc.mpi.world import World
from laminar_hpc.process.channel import ChannelClosed, wait_any
from laminar_hpc.process.worker import Worker
from laminar_hpc.protocol.peer import BenchTask, Rendezvous, StartTrainer, WorkerError
from laminar_hpc.protocol.wire import AnyRecord
from laminar_hpc.record.schema import BENCH_WAYS
from laminar_hpc.runtime.relay_bench.plan import Plan

TRAINER, FIRST_RELAY = 1, 2
"""Ranks. Rank 0 plays the manager."""

PING_BYTES = (1, 1 << 16, 1 << 18, 1 << 19, 1 << 20, 1 << 21, 1 << 22)
PINGS = 7

PATIENCE_S = 300.0


class Order(IntEnum):
    """What rank 0 asks for in a note; the numbers that follow are named here."""

    WAY = 1
    """way (its place in BENCH_WAYS), relays, turn, chunks"""
    PING = 2
    GLOO = 3
    """Start the worker for it."""
    COPY = 4
    """A plain copy in the trainer's worker; the answer is its seconds."""
    WATCH = 5
    """version: a relay answers when the next chunk of it is there."""
    DIE = 6
    STOP = 7


class Ways:
    """One rank's part in the other ways."""

    def __init__(self, world: World, notes: Notes, plan: Plan, log_path: str) -> None:
        """Collective."""
        self._world = world
        self._notes = notes
        self._plan = plan
        self._log_path = log_path
        self._parties: dict[int, Party] = {}
        """By number of relays: rank 0, the trainer and the relays (`_timed`), and the same without rank 0."""
        self._timed: dict[int, Party] = {}
        for relays in sorted({*plan.relays, min(2, max(plan.relays))}):
            ranks = [TRAINER, *range(FIRST_RELAY, FIRST_RELAY + relays)]
            if world.rank in (0, *ranks):
                self._timed[relays] = Party(world, [0, *ranks])
            if world.rank in ranks:
                self._parties[relays] = Party(world, ranks)
        self._buffer = np.zeros(0, dtype=np.uint8)
        self._gloo: Worker | None = None
        self._path = os.path.join(plan.files, f"laminar-bench-{plan.seed}.weights")

    # --- rank 0 -----------------------------------------------------------------------------------------------------

    def measure(self, way: str, relays: int, turn: int, chunks: int) -> float:
        """Have the others do it once; the seconds it took."""
        for rank in range(TRAINER, FIRST_RELAY + relays):
            self._notes.send(rank, Order.WAY, BENCH_WAYS.index(way), relays, turn, chunks)
        party = self._timed[relays]
        party.meet()
        began_s = time.perf_counter()
        receivers = [FIRST_RELAY + 1] if way == "copy" else range(FIRST_RELAY, FIRST_RELAY + relays)
        party.hear_from(receivers)
        return time.perf_counter() - began_s

    # --- the others -------------------------------------------------------------------------------------------------

    def take_part(self, way: str, relays: int, turn: int, chunks: int) -> None:
        """This rank's part of one round; EngineError where the bytes that have come are wrong."""
        party, timed = self._parties[relays], self._timed[relays]
        if self._buffer.nbytes != self._plan.nbytes:
            self._buffer = np.zeros(self._plan.nbytes, dtype=np.uint8)
        marks = self._buffer[:: max(1, self._plan.nbytes // 64)]
        root = 1 if way == "copy" else 0
        if party.place == root:
            marks[:] = turn % 251 + 1
        timed.meet()
        self._do(way, party, turn, chunks)
        receives = party.place == 2 if way == "copy" else party.place > 0
        if not receives:
            return
        timed.tell_root()
        if way != "gloo" and not bool((marks == turn % 251 + 1).all()):
            raise EngineError(f"rank {self._world.rank}: the bytes of {way}, turn {turn}, are not those that were sent")

    def start_gloo(self) -> None:
        """Start this rank's worker for gloo."""
        from laminar_hpc.trainer import gloo_bare

        sizes = msgspec.json.encode([1 + relays for relays in self._plan.relays])
        self._gloo = Worker("gloo", gloo_bare.main, self._log_path)
        self._gloo.send(StartTrainer(sizes, self._world.rank - TRAINER, 1 + max(self._plan.relays)))

    def gloo_address(self) -> Rendezvous:
        """Where the trainer's worker waits for the others."""
        where = self._hear_gloo()
        assert isinstance(where, Rendezvous), type(where).__name__
        return where

    def join_gloo(self, where: Rendezvous | None) -> None:
        """Return when all workers have met; the trainer's knows where, the others' are told."""
        assert self._gloo is not None
        if where is not None:
            self._gloo.send(where)
        self._hear_gloo()

    def ping(self) -> list[tuple[int, float]]:
        """Times between the first two relays; on the first one alone."""
        return ping_pong(self._parties[min(2, max(self._plan.relays))], 1, 2, PING_BYTES, PINGS)

    def close(self) -> None:
        """End the worker, and remove the file."""
        if self._world.rank == TRAINER:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
        if self._gloo is not None:
            self._gloo.kill()
            self._gloo = None

    def _do(self, way: str, party: Party, turn: int, chunks: int) -> None:
        if way in BARE:
            BARE[way](party, self._buffer, chunks)
        elif way == "copy":
            copy(party, self._buffer, 1, 2)
        elif way == "gloo":
            assert self._gloo is not None
            self._gloo.send(BenchTask(turn, self._plan.nbytes, len(party.ranks)))
            self._hear_gloo()
        elif way == "file":
            self._by_file(party, turn)

    def _hear_gloo(self) -> AnyRecord:
        """The next message of the worker; EngineError where none comes."""
        assert self._gloo is not None
        deadline_s = time.monotonic() + PATIENCE_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            wait_any([self._gloo.channel], left_s)
            try:
                message = self._gloo.channel.receive()
            except ChannelClosed as error:
                raise EngineError(
                    f"rank {self._world.rank}: the gloo worker has ended; see {self._log_path}"
                ) from error
            if isinstance(message, WorkerError):
                raise EngineError(f"rank {self._world.rank}: gloo: {message.text}")
            if message is not None:
                return message
        raise EngineError(f"rank {self._world.rank}: gloo said nothing for {PATIENCE_S:g} s")

    def _by_file(self, party: Party, turn: int) -> None:
        if party.place == 0:
            with open(self._path, "wb") as file:
                file.write(self._buffer.data)
                file.flush()
                os.fsync(file.fileno())
        party.meet()
        if party.place:
            with open(self._path, "rb", buffering=0) as file:
                view, done = self._buffer.data, 0
                while done < self._buffer.nbytes and (count := file.readinto(view[done:])):
                    done += count
