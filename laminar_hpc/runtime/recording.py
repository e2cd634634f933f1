"""The record file of a rank of the MPI job."""

from __future__ import annotations

import time

import msgspec

from laminar_hpc.record import provenance
from laminar_hpc.record.writer import RecordWriter
from laminar_hpc.runtime.rank import Rank


def open_record(rank: Rank) -> RecordWriter:
    """This rank's record file, with what every file says about the run."""
    config = rank.config
    settings = msgspec.json.encode(rank.settings).decode()
    metadata = provenance.gather(config, settings, clock_zero_unix_s=time.time() - rank.now())
    role, number = rank.me.role.value, rank.world.rank
    path = rank.paths.record(rank.attempt, number, role)
    return RecordWriter(path, role, number, rank.attempt, metadata, config.record.flush_s)
