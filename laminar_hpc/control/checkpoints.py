"""Checkpoints: when one is begun, when it counts, and how a job that is asked to stop ends with one.

    none -> WRITING (`Checkpoint` is out: trainers and the books' keeper each write their part)
         -> COMMITTING (all parts are there, `Commit` is out) -> none (`Committed`: it is the newest one)
         -> none (`Abandon`: a part could not be written; the job goes on)

Invariants: one checkpoint at a time; one whose turn has come while another is written is left out, and the next one is made
when its turn comes. None is begun twice for one step, but where the trainers' workers were lost meanwhile. Each has a serial,
which its parts carry: what comes late of one that was given up is void. A step is committed once every part of its
checkpoint, or of a later one, is on disk.
"""

from __future__ import annotations

from laminar_hpc.protocol.commands import Abandon, Checkpoint, Command, Commit
from laminar_hpc.protocol.events import Committed, SnapshotWritten, StateWritten


class Checkpoints:
    """The checkpoint that is being made, and the newest one that is."""

    def __init__(self, trainers: int) -> None:
        self._trainers = trainers
        self._begun = 0
        self._writing: int | None = None
        self._have_state: set[int] = set()
        self._have_books = False
        self._committing = False
        self.committed: int | None = None
        """The step of the newest checkpoint that counts (None: there is none)."""
        self.tried: int | None = None
        """The step of the last one that was begun (None: none was, or its writers are gone)."""
        self.failed = ""
        """Why the last one that was begun could not be made ("": it could, or is still being made)."""

    @property
    def busy(self) -> bool:
        """Whether one is being made."""
        return self._writing is not None

    @property
    def committing(self) -> bool:
        """Whether all parts of one are written, and it is being put into its place."""
        return self._committing

    def waits(self, ranks: list[int]) -> list[str]:
        """Whom the present one waits for; `ranks` are the trainers' in the order of their places."""
        if self._writing is None:
            return []
        what = f"the checkpoint of step {self._writing}"
        if self._committing:
            return [f"{what} waits for the manager to move it into place"]
        missing = [f"trainer rank {rank}" for index, rank in enumerate(ranks) if index not in self._have_state]
        missing += [] if self._have_books else ["the manager's own part"]
        return [f"{what} waits for {', '.join(missing)}"]

    def begin(self, step: int, reason: str) -> list[Command]:
        """Make one of the job as it is now, after `step`; nothing where one is being made, or was begun for it already."""
        if self.busy or step in (self.committed, self.tried):
            return []
        self._writing = self.tried = step
        self._begun += 1
        self._have_state, self._have_books = set(), False
        self.failed = ""
        return [Checkpoint(reason, step, self._serial, self.committed)]

    def state_written(self, event: StateWritten, trainer: int) -> list[Command]:
        """Trainer number `trainer` has written its part, or could not."""
        if not self._is_of_the_present_one(event):
            return []
        if event.error:
            return self._abandon(f"rank {event.rank} (trainer) could not write its part: {event.error}")
        self._have_state.add(trainer)
        return self._commit()

    def snapshot_written(self, event: SnapshotWritten) -> list[Command]:
        """The books and the payload are written, or could not be."""
        if not self._is_of_the_present_one(event):
            return []
        if event.error:
            return self._abandon(f"the manager could not write its part: {event.error}")
        self._have_books = True
        return self._commit()

    def committed_now(self, event: Committed) -> list[Command]:
        """The checkpoint is in its place, or could not be put there."""
        if not self._is_of_the_present_one(event) or not self._committing:
            return []
        self._committing = False
        if event.error:
            return self._abandon(f"it could not be put into place: {event.error}")
        self.committed, self._writing = event.step, None
        return []

    def trainers_restart(self) -> list[Command]:
        """The trainers' workers are gone, and with them the parts that they had not written."""
        if self._writing is None or self._committing:
            return []
        self.tried = None  # a job that is to stop with it makes it again
        return self._abandon("the trainers' workers are started again")

    @property
    def _serial(self) -> int:
        """That of the one begun last."""
        return self._begun - 1

    def _is_of_the_present_one(self, event: StateWritten | SnapshotWritten | Committed) -> bool:
        return self._writing is not None and event.serial == self._serial

    def _commit(self) -> list[Command]:
        if len(self._have_state) < self._trainers or not self._have_books or self._committing:
            return []
        assert self._writing is not None, "parts belong to a checkpoint that is being made"
        self._committing = True
        reason = f"all {self._trainers} trainers and the manager have written their parts"
        return [Commit(reason, self._writing, self._serial)]

    def _abandon(self, why: str) -> list[Command]:
        assert self._writing is not None, "what failed was being made"
        step, self._writing, self.failed = self._writing, None, why
        return [Abandon(why, step, self._serial)]
