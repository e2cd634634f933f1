"""The trainers' workers after the loss of one: all are started again from a checkpoint, and do again what came after it.

They compute together, so one that is lost stops all others. Nothing of it shows in the books: a trainer's rank keeps what its
worker was asked since the checkpoint, has the new one do it again, and tells only what it had not told before. Groups stay
consumed, published versions stay, rollouts generate meanwhile.
"""

from __future__ import annotations

from laminar_hpc.control.checkpoints import Checkpoints
from laminar_hpc.control.settings import Settings
from laminar_hpc.policy.restarts import WINDOW_S, RestartLimit
from laminar_hpc.protocol.commands import Command, RestartTrainers
from laminar_hpc.protocol.events import RankLost


class Recovery:
    """Decides what follows from the loss of a trainer's worker."""

    def __init__(self, settings: Settings, checkpoints: Checkpoints) -> None:
        self._settings = settings
        self._checkpoints = checkpoints
        self._limit = RestartLimit(settings.worker_restarts)
        self.worker = 0
        """The number of the workers that are listened to."""
        self._waiting: RankLost | None = None

    def lost(self, event: RankLost, now: float) -> list[Command] | str:
        """A worker is lost: what follows, or why the job cannot go on."""
        if event.incarnation < self.worker:
            return []  # all workers are being replaced already
        if self._checkpoints.committing:
            self._waiting = self._waiting or event  # until it is known which checkpoint is the newest one, and stays
            return []
        return self._restart(event, now)

    def committed(self, now: float) -> list[Command] | str:
        """A checkpoint is in its place, or is not: what has waited for that."""
        event, self._waiting = self._waiting, None
        return [] if event is None else self._restart(event, now)

    def _restart(self, event: RankLost, now: float) -> list[Command] | str:
        lost = f"trainer rank {event.rank} lost its worker: {event.reason}"
        if event.final:
            return f"{lost}; another one would fail in the same way"
        if not self._settings.checkpoint_every:
            return f"{lost}; it cannot be replaced, since checkpoint.every is 0"
        delay_s = self._limit.lost(now)
        if delay_s is None:
            most = self._limit.most
            return f"{lost}; that is loss {most + 1} within {WINDOW_S:.0f} s, job.worker_restarts allows {most}"
        self.worker += 1
        begins = "the model" if self._checkpoints.committed is None else f"step {self._checkpoints.committed}"
        reason = f"rank {event.rank} (trainer) has lost its worker, all begin again with {begins}"
        restart = RestartTrainers(reason, self.worker, self._checkpoints.committed, delay_s)
        return [*self._checkpoints.trainers_restart(), restart]
