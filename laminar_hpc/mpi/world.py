"""The ranks of the job, and how this process joins and leaves them.

The rest of the package reaches MPI through `World.mpi`: importing `mpi4py.MPI` anywhere else would initialise it with
settings that this design cannot use. MPI is called from one thread, at level "serialized" (mpi4py's default, "multiple",
deadlocks after a failure), and is never finalised behind one's back, since `MPI_Finalize` can hang.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import time
from types import ModuleType
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from laminar_hpc.errors import ProtocolError

if TYPE_CHECKING:
    from mpi4py import MPI

NODE_VARIABLE = "LAMINAR_NODE"
"""Where a launcher sets it, ranks with the same value are on the same node, whatever memory they share."""

_PAUSE_S = 0.001


class _Place(msgspec.Struct):
    """Where a rank runs: host name, first rank that shares its memory, and the launcher's key for its node."""

    host: str
    first: int
    key: str


class World:
    """All ranks of the job, seen from this one. Made by `open_world`."""

    def __init__(self, mpi: ModuleType, comm: MPI.Intracomm) -> None:
        """Collective over `comm`."""
        comm.Set_errhandler(mpi.ERRORS_RETURN)
        self.mpi = mpi
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.hostname: str = mpi.Get_processor_name()
        self.library: str = mpi.Get_library_version().partition("\0")[0].strip()
        self._nodes = self._gather_nodes()
        _unlink_segments()

    def node_of_rank(self) -> list[str]:
        """The node key of every rank. Rollouts read the image of a relay with the same key."""
        return list(self._nodes)

    def broadcast(self, data: bytes) -> bytes:
        """Rank 0's `data`, on all ranks. Collective: for the start, before the roles' loops begin."""
        length = np.array([len(data)], dtype=np.int64)
        self.comm.Bcast(length, root=0)
        buffer = bytearray(data if self.rank == 0 else int(length[0]))
        self.comm.Bcast([buffer, self.mpi.BYTE], root=0)
        return bytes(buffer)

    def finish(self, clean: bool, timeout_s: float) -> bool:
        """Leave the job: True when MPI is finalised, False when the caller must end the process with `os._exit`.

        With `clean` all ranks have to call it; each waits at most `timeout_s` for the others. If MPI then hangs while it
        finalises, the process ends with exit code 1 and a traceback after `timeout_s` more. Without `clean`, nothing is
        asked of MPI, which may be in any state.
        """
        if not clean or not self._all_arrived(timeout_s):
            return False
        faulthandler.dump_traceback_later(timeout_s, exit=True)
        self.mpi.Finalize()
        faulthandler.cancel_dump_traceback_later()
        return True

    def _all_arrived(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        try:
            barrier = self.comm.Ibarrier()
            while not barrier.Test():
                if time.monotonic() > deadline_s:
                    return False
                time.sleep(_PAUSE_S)
        except self.mpi.Exception:
            return False
        return True

    def _gather_nodes(self) -> list[str]:
        shared = self.comm.Split_type(self.mpi.COMM_TYPE_SHARED, key=self.rank)
        first = np.array([self.rank], dtype=np.int64)
        shared.Bcast(first, root=0)
        shared.Free()
        place = _Place(host=self.hostname, first=int(first[0]), key=os.environ.get(NODE_VARIABLE, ""))
        places = [msgspec.msgpack.decode(data, type=_Place) for data in self._allgather(msgspec.msgpack.encode(place))]
        return [place.key or f"{places[place.first].host}:{place.first}" for place in places]

    def _allgather(self, data: bytes) -> list[bytes]:
        lengths = np.zeros(self.size, dtype=np.int32)
        self.comm.Allgather(np.array([len(data)], dtype=np.int32), lengths)
        ends = np.cumsum(lengths)
        gathered = bytearray(int(ends[-1]))
        starts = ends - lengths
        self.comm.Allgatherv([data, self.mpi.BYTE], [gathered, lengths, starts, self.mpi.BYTE])
        return [bytes(gathered[start:end]) for start, end in zip(starts, ends, strict=True)]


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
