"""The record of a simulated run: the files that the ranks of the job would write, from one process.

The clock's zero is the Unix epoch, so that two simulations of one config and seed write the same bytes.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from laminar_hpc.config.schema import Config
from laminar_hpc.control.settings import Settings
from laminar_hpc.policy.roles import Placement, Role
from laminar_hpc.protocol.commands import AnyCommand, EndJob
from laminar_hpc.protocol.events import AnyEvent
from laminar_hpc.record import provenance
from laminar_hpc.record.manager import ManagerRecord
from laminar_hpc.record.paths import RunPaths
from laminar_hpc.record.writer import RecordWriter

CLOCK_ZERO_UNIX_S = 0.0


class Recorder(Protocol):
    """Takes what a simulation has to say."""

    def event(self, event: AnyEvent, now: float) -> None:
        """An event that is about to be decided on."""

    def commands(self, commands: list[AnyCommand], now: float) -> None:
        """The commands that it led to."""

    def add(self, rank: int, table: str, **fields: Any) -> None:
        """A row of a rank's own table."""

    def ended(self, ending: EndJob, now: float) -> None:
        """The job is over."""


class FileRecorder:
    """Writes a run's files: one for each rank."""

    def __init__(self, config: Config, settings: Settings, placements: list[Placement]) -> None:
        """In the run directory of the config, which has been made."""
        paths = RunPaths(config.run_dir)
        metadata = provenance.gather(config, msgspec.json.encode(settings).decode(), CLOCK_ZERO_UNIX_S)
        self._writers = [
            RecordWriter(
                paths.record(settings.attempt, rank, placement.role.value),
                placement.role.value,
                rank,
                settings.attempt,
                metadata,
                config.record.flush_s,
            )
            for rank, placement in enumerate(placements)
        ]
        manager = next(rank for rank, placement in enumerate(placements) if placement.role is Role.MANAGER)
        self._manager = ManagerRecord(self._writers[manager], config, settings.attempt)
        self._manager.image_nbytes = config.paced.image_bytes

    def event(self, event: AnyEvent, now: float) -> None:
        """As in `Recorder`."""
        self._manager.event(event, now)

    def commands(self, commands: list[AnyCommand], now: float) -> None:
        """As in `Recorder`."""
        self._manager.commands(commands, now)

    def add(self, rank: int, table: str, **fields: Any) -> None:
        """As in `Recorder`."""
        self._writers[rank].add(table, **fields)

    def ended(self, ending: EndJob, now: float) -> None:
        """As in `Recorder`; the files are complete and closed."""
        self._manager.ended(ending, now)
        for writer in self._writers:
            writer.close(CLOCK_ZERO_UNIX_S + now)


class PhaseClock:
    """What a rank spends its time on, told when it changes."""

    def __init__(self, recorder: Recorder | None, rank: int, phase: str) -> None:
        self._recorder = recorder
        self._rank = rank
        self._phase = phase
        self._since_s = 0.0

    def enter(self, phase: str, now: float) -> None:
        """From `now` on the rank is in `phase` (record.schema.PHASES of its role)."""
        if phase != self._phase:
            self.tell(now)
            self._phase = phase

    def tell(self, now: float) -> None:
        """Put the time since the last row on record."""
        seconds, self._since_s = now - self._since_s, now
        if self._recorder is not None and seconds > 0.0:
            self._recorder.add(self._rank, "phases", time_s=now, phase=self._phase, seconds=seconds)
