"""The ranks of the job, and how this process joins and leaves them.

The rest of the package reaches MPI through `World.mpi`: importing `mpi4py.MPI` anywhere else would initialise it with
settings that this design cannot use. MPI is called from one thread, at level "serialized" (mpi4py's default, "multiple",
deadlocks after a failure), and is never finalised behind one's back, since `MPI_Finalize` can hang.

Where MPI goes on after the death of a rank (ULFM, chapter 11 of MPI 5; Open MPI under `mpiexec --with-ft ulfm`), the
world knows who is dead. Elsewhere the launcher ends the job, and no rank ever sees a dead one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import time
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from laminar_hpc.errors import ProtocolError

if TYPE_CHECKING:
    from mpi4py import MPI
    from numpy.typing import NDArray

NODE_VARIABLE = "LAMINAR_NODE"
"""Where a launcher sets it, ranks with the same value are on the same node, whatever memory they share."""

TOPOLOGY_VARIABLE = "SLURM_TOPOLOGY_ADDR"
"""Slurm's path to a node from the top of its network, "core.leaf7.node12": what comes before the last dot is its switch."""

_PAUSE_S = 0.001
_LOOK_S = 0.01  # a look for dead ranks costs about a microsecond, and they are noticed 8 ms after their death at best


class _Place(msgspec.Struct):
    """Where a rank runs: host name, first rank that shares its memory, the launcher's key for its node, and its switch."""

    host: str
    first: int
    key: str
    switch: str


class World:
    """All ranks of the job, seen from this one. Made by `open_world`."""

    def __init__(self, mpi: ModuleType, comm: MPI.Intracomm) -> None:
        """Collective over `comm`."""
        comm.Set_errhandler(mpi.ERRORS_RETURN)
        self.mpi = mpi
        self.comm = comm
        self.transfers: MPI.Intracomm = comm.Dup()
        """The communicator of the weights' bytes: no tag of theirs can meet one of the mail's."""
        self.transfers.Set_errhandler(mpi.ERRORS_RETURN)
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.hostname: str = mpi.Get_processor_name()
        self.library: str = mpi.Get_library_version().partition("\0")[0].strip()
        self.survives_failures: bool = _survives_failures(mpi, comm)
        """Whether the other ranks go on when one dies."""
        self._kept: list[NDArray[np.uint8]] = []
        self._dead: frozenset[int] = frozenset()
        self._next_look_s = 0.0
        self._nodes, self._switches = self._gather_nodes()
        _unlink_segments()

    def node_of_rank(self) -> list[str]:
        """The node key of every rank. Rollouts read the image of a relay with the same key."""
        return list(self._nodes)

    def switch_of_node(self) -> dict[str, str]:
        """The network switch of every node key of which Slurm tells it; nodes at one switch are near each other."""
        return dict(self._switches)

    def broadcast(self, data: bytes) -> bytes:
        """Rank 0's `data`, on all ranks. Collective: for the start, before the roles' loops begin."""
        length = np.array([len(data)], dtype=np.int64)
        self.comm.Bcast(length, root=0)
        buffer = bytearray(data if self.rank == 0 else int(length[0]))
        self.comm.Bcast([buffer, self.mpi.BYTE], root=0)
        return bytes(buffer)

    def dead(self, now: bool = False) -> frozenset[int]:
        """The ranks that MPI has found dead; looks for more at most every 10 ms, or `now`.

        Those found are acknowledged, so that receiving from any rank goes on without them. MPI notices a death only while
        it is called for something else too (mail, transfers). Always empty where the world does not survive failures.
        """
        moment_s = time.monotonic()
        if self.survives_failures and (now or moment_s >= self._next_look_s):
            self._next_look_s = moment_s + _LOOK_S
            found = self._look_for_dead()
            if now or found != self._dead:
                self.comm.Ack_failed()
                self.transfers.Ack_failed()
            self._dead = found
        return self._dead

    def tells_of_death(self, error: MPI.Exception) -> bool:
        """Whether MPI raised `error` since a rank is dead: then the call was void, and nothing else is wrong."""
        mpi = self.mpi
        return self.survives_failures and error.Get_error_class() in (
            mpi.ERR_PROC_FAILED,
            mpi.ERR_PROC_FAILED_PENDING,
            mpi.ERR_REVOKED,
        )

    def keep(self, memory: Iterable[NDArray[np.uint8]]) -> None:
        """Keep what MPI may still read from or write to, until the process ends."""
        self._kept.extend(memory)

    def finish(self, clean: bool, timeout_s: float) -> bool:
        """Leave the job: True when MPI is finalised, False when the caller must end the process with `os._exit`.

        With `clean` all ranks have to call it; each waits at most `timeout_s` for the others. If MPI then hangs while it
        finalises, the process ends with exit code 1 and a traceback after `timeout_s` more. Without `clean`, nothing is
        asked of MPI, which may be in any state. Once a rank is dead, MPI is not finalised: it can hang.
        """
        if not clean or not self._all_arrived(timeout_s):
            return False
        faulthandler.dump_traceback_later(timeout_s, exit=True)
        self.mpi.Finalize()
        faulthandler.cancel_dump_traceback_later()
        return True

    def _all_arrived(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        if self.dead(now=True):
            return False
        try:
            barrier = self.comm.Ibarrier()
            while not barrier.Test():
                if self.dead() or time.monotonic() > deadline_s:
                    return False
                time.sleep(_PAUSE_S)
        except self.mpi.Exception:
            return False
        return True

    def _look_for_dead(self) -> frozenset[int]:
        failed = self.comm.Get_failed()
        try:
            if failed.Get_size() == len(self._dead):
                return self._dead
            everybody = self.comm.Get_group()
            try:
                return frozenset(failed.Translate_ranks(list(range(failed.Get_size())), everybody))
            finally:
                everybody.Free()
        finally:
            failed.Free()

    def _gather_nodes(self) -> tuple[list[str], dict[str, str]]:
        """The node of every rank, and the switch of every node of which it is known."""
        shared = self.comm.Split_type(self.mpi.COMM_TYPE_SHARED, key=self.rank)
        first = np.array([self.rank], dtype=np.int64)
        shared.Bcast(first, root=0)
        shared.Free()
        switch = os.environ.get(TOPOLOGY_VARIABLE, "").rpartition(".")[0]
        place = _Place(self.hostname, int(first[0]), os.environ.get(NODE_VARIABLE, ""), switch)
        places = [msgspec.msgpack.decode(data, type=_Place) for data in self._allgather(msgspec.msgpack.encode(place))]
        nodes = [place.key or f"{places[place.first].host}:{place.first}" for place in places]
        return nodes, {node: place.switch for node, place in zip(nodes, places, strict=True) if place.switch}

    def _allgather(self, data: bytes) -> list[bytes]:
        lengths = np.zeros(self.size, dtype=np.int32)
        self.comm.Allgather(np.array([len(data)], dtype=np.int32), lengths)
        ends = np.cumsum(lengths)
        gathered = bytearray(int(ends[-1]))
        starts = ends - lengths
        self.comm.Allgatherv([data, self.mpi.BYTE], [gathered, lengths, starts, self.mpi.BYTE])
        return [bytes(gathered[start:end]) for start, end in zip(starts, ends, strict=True)]


def _survives_failures(mpi: ModuleType, comm: MPI.Intracomm) -> bool:
    """Whether this is Open MPI under `mpiexec --with-ft ulfm`; its calls answer without it too, but the job ends with a rank."""
    setting = os.environ.get("OMPI_MCA_mpi_ft_enable", "")  # noqa: SIM112 (Open MPI spells it so)
    if setting.lower() not in ("1", "true", "yes", "enabled"):
        return False
    try:
        comm.Get_failed().Free()
    except (mpi.Exception, NotImplementedError):
        return False
    return True


def _unlink_segments() -> None:
    """Take the names of Open MPI's shared-memory segments out of /dev/shm, so that nothing stays behind after a kill.

    To be called when all ranks have initialised MPI: by then each has mapped the segments of all ranks of its node, and
    needs their names no more. Open MPI itself would take them away only in `MPI_Finalize`, and bears that they are gone.
    """
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.split()[-1] for line in maps if "/dev/shm/sm_segment." in line}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def open_world(timeout_s: float = 120.0) -> World:
    """Initialise MPI and meet the other ranks: collective, once in a process.

    A process that is not through after `timeout_s`, because a rank is missing, ends with exit code 1 and a traceback.
    """
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    mpi4py.rc.thread_level = "serialized"
    from mpi4py import MPI

    if MPI.Is_initialized():
        raise ProtocolError(
            "MPI is initialised already; open_world is called once in a process, and nothing else does it"
        )
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    MPI.Init_thread(MPI.THREAD_SERIALIZED)
    world = World(MPI, MPI.COMM_WORLD)
    faulthandler.cancel_dump_traceback_later()
    return world
