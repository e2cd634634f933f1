"""What a manager writes down: every event and command for replay, and the rows that follow from them."""

from __future__ import annotations

import msgspec

from laminar_hpc.config.schema import Config
from laminar_hpc.protocol.commands import (
    Abandon,
    AnyCommand,
    Checkpoint,
    EndJob,
    Generate,
    Publish,
    Release,
    ReportEvaluation,
    ReportMove,
    ReportStep,
    Settle,
)
from laminar_hpc.protocol.events import (
    AnyEvent,
    Committed,
    Published,
    RankLost,
    RelayHolds,
    SnapshotWritten,
    StateWritten,
)
from laminar_hpc.protocol.trajectory import Block
from laminar_hpc.protocol.wire import encode
from laminar_hpc.record.relay_events import RelayEvents
from laminar_hpc.record.schema import METRICS
from laminar_hpc.record.writer import RecordWriter


class _Publication(msgspec.Struct):
    """A version that is announced: what its row will say. `stalls_s` has how long each trainer stood still for it."""

    step: int
    time_s: float | None = None
    stalls_s: dict[int, float] = {}


class _Checkpoint(msgspec.Struct):
    """A checkpoint that is being made: what its row will say."""

    begun_s: float
    stall_s: float = 0.0
    nbytes: int = 0


class ManagerRecord:
    """Turns the manager's events and commands into rows of its file."""

    def __init__(self, writer: RecordWriter, config: Config, attempt: int) -> None:
        self.image_nbytes = 0
        self._writer = writer
        self._keep_events = config.record.events
        self._attempt = attempt
        self._events = 0
        self._handed_out: set[int] = set()
        self._relay_events = RelayEvents()
        self._trainers = config.job.trainers
        self._publications: dict[int, _Publication] = {}
        self._checkpoints: dict[int, _Checkpoint] = {}

    def event(self, event: AnyEvent, now: float) -> None:
        """An event that is about to be decided on."""
        if self._keep_events:
            self._writer.add_stream("events", now, encode(event))
        self._events += 1
        row = self._relay_events.event(event)
        if row is not None:
            self._writer.add("relay_events", time_s=now, **row)
        match event:
            case Published():
                self._published(event, now)
            case RelayHolds():
                self._publication(event.version, event.digest)
            case StateWritten() | SnapshotWritten():
                self._part_written(event)
            case Committed(error=""):
                self._checkpoint(event.step, event.serial, now, "complete")
            case RankLost():
                self._writer.add("failures", time_s=now, rank=event.rank, text=event.reason)
            case _:
                pass

    def commands(self, commands: list[AnyCommand], now: float) -> None:
        """The commands that the last event led to."""
        for command in commands:
            if self._keep_events:
                self._writer.add_stream("commands", now, encode(command), cause=self._events - 1)
            row = self._relay_events.command(command)
            if row is not None:
                self._writer.add("relay_events", time_s=now, **row)
            match command:
                case Generate():
                    self._hand_out(command, now)
                case Publish():
                    self._publications[command.version] = _Publication(command.step)
                case Checkpoint():
                    self._checkpoints[command.serial] = _Checkpoint(now)
                case Abandon():
                    self._checkpoint(command.step, command.serial, now, "given up", command.reason)
                case Release():
                    self._publication(command.version, b"")
                case Settle():
                    for trajectory in command.trajectories:
                        self._writer.add("trajectories", **msgspec.structs.asdict(trajectory))
                    for group in command.groups:
                        self._handed_out.discard(group.group)
                        self._writer.add("groups", **msgspec.structs.asdict(group))
                case ReportStep():
                    self._step(command)
                case ReportMove():
                    self._writer.add("moves", **msgspec.structs.asdict(command))
                case ReportEvaluation():
                    self._evaluation(command, now)
                case _:
                    pass

    def ended(self, command: EndJob, now: float) -> None:
        """The job is over; an end that is no success is a row among the failures.

        The file is complete from here on: the launcher may kill all ranks as soon as the first one has left.
        """
        for version in list(self._publications):
            self._publication(version, b"")
        if command.outcome != "finished":
            self._writer.add("failures", time_s=now, rank=None, text=f"{command.outcome}: {command.reason}")
        self.flush()

    def flush(self) -> None:
        """Before a checkpoint counts: what goes on from it has all that led to it on record, also after a kill."""
        self._writer.flush()

    def tokens(self, blocks: list[Block]) -> None:
        """The tokens of a trajectory that is about to be dropped."""
        for block in blocks:
            self._writer.add_block(block)

    def waits(self, now: float, rank: int, waiting_for: str, since_s: float) -> None:
        """A rank that waited when the job stalled."""
        self._writer.add("waits", time_s=now, rank=rank, waiting_for=waiting_for, since_s=since_s)

    def _hand_out(self, command: Generate, now: float) -> None:
        for spec in command.trajectories:
            if spec.group not in self._handed_out:
                self._handed_out.add(spec.group)
                self._writer.add(
                    "hand_outs", group=spec.group, prompt=spec.prompt, purpose=spec.purpose.value, handed_out_s=now
                )

    def _published(self, event: Published, now: float) -> None:
        publication = self._publications.get(event.version)
        if publication is None or event.rank in publication.stalls_s:
            return
        publication.stalls_s[event.rank] = event.seconds
        if len(publication.stalls_s) == self._trainers:
            publication.time_s = now

    def _publication(self, version: int, digest: bytes) -> None:
        """The row of a version, when the first relay holds it, or it turns out that none will; where it was published."""
        publication = self._publications.get(version)
        if publication is None or publication.time_s is None:
            return
        del self._publications[version]
        self._writer.add(
            "publications",
            version=version,
            attempt=self._attempt,
            step=publication.step,
            time_s=publication.time_s,
            digest=int.from_bytes(digest, "little"),
            nbytes=self.image_nbytes,
            stall_s=max(publication.stalls_s.values()),
        )

    def _part_written(self, event: StateWritten | SnapshotWritten) -> None:
        checkpoint = self._checkpoints.get(event.serial)
        if checkpoint is None:
            return
        checkpoint.nbytes += event.nbytes
        if isinstance(event, StateWritten):
            checkpoint.stall_s = max(checkpoint.stall_s, event.stall_s)

    def _checkpoint(self, step: int, serial: int, now: float, what: str, reason: str = "") -> None:
        checkpoint = self._checkpoints.pop(serial, None)
        if checkpoint is not None:
            fields = msgspec.structs.asdict(checkpoint)
            self._writer.add("checkpoints", step=step, time_s=now, what=what, reason=reason, **fields)

    def _step(self, report: ReportStep) -> None:
        fields = msgspec.structs.asdict(report)
        del fields["reason"], fields["metrics"]
        self._writer.add("steps", **fields, **{name: report.metrics.get(name) for name in METRICS})
        for name in report.metrics.keys() - METRICS.keys():
            self._writer.add("step_metrics", step=report.step, name=name, value=report.metrics[name])

    def _evaluation(self, report: ReportEvaluation, now: float) -> None:
        fields = msgspec.structs.asdict(report)
        del fields["reason"]
        self._writer.add("evaluations", time_s=now, **fields)
