"""The status file: how far a run is and how it ended, for people, the command line and whoever launches it again."""

from __future__ import annotations

import os
import socket
import time

import msgspec

from laminar_hpc.errors import RecordError

FILE_NAME = "status.json"

RUNNING = "running"
STATES = (RUNNING, "finished", "stopped", "requeue", "failed", "stalled", "interrupted")
"""How a run can stand. All but the first are ends; those from finished to stalled are the outcomes of `EndJob`.

"requeue": it is to be resumed: it was asked to stop and has written a checkpoint, or too few nodes are left to go on with.
"""

EXIT_REQUEUE = 75
"""The exit code of a job whose state is "requeue": EX_TEMPFAIL of sysexits.h, come back later."""


MOST_LAG = 0.02
"""What was late by a larger share of its schedule says nothing about the hardware that was emulated."""


class Status(msgspec.Struct, kw_only=True):
    """What the status file says. Moments are Unix times in seconds; None is what is not known yet.

    `reward` and `staleness` are means of the last step, the latter in versions at consumption. The two rates, in tokens/s,
    are those of the last moments: ten seconds of generation, one step of training. `rollouts_busy` is how many rollouts, of
    `rollouts`, had something to generate, as a mean over ten seconds; both stay what they were when the run has ended. `lag` is
    by which share of its schedule emulated work was late, None where nothing is emulated.
    """

    state: str
    reason: str
    attempt: int
    host: str
    pid: int
    started_s: float
    updated_s: float = 0.0
    ended_s: float | None = None
    step: int = 0
    steps: int = 0
    version: int | None = None
    reward: float | None = None
    staleness: float | None = None
    first_accuracy: float | None = None
    last_accuracy: float | None = None
    generation_tokens_per_s: float = 0.0
    training_tokens_per_s: float = 0.0
    rollouts: int = 0
    rollouts_busy: float = 0.0
    lag: float | None = None
    lag_of_worst_rank: float | None = None

    @classmethod
    def blank(cls) -> Status:
        """The status of a run that this process has begun and of which nothing is known yet."""
        return cls(
            state=RUNNING,
            reason="starting",
            attempt=0,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_s=time.time(),
        )

    @property
    def over(self) -> bool:
        """Whether the run says that it has ended."""
        return self.state != RUNNING

    def line(self) -> str:
        """How the run stands, in one line."""
        reward = "-" if self.reward is None else f"{self.reward:.3f}"
        staleness = "-" if self.staleness is None else f"{self.staleness:.2f}"
        return (
            f"step {self.step}/{self.steps}  reward {reward}  generation {self.generation_tokens_per_s:.0f} tok/s  "
            f"training {self.training_tokens_per_s:.0f} tok/s  staleness {staleness}  "
            f"rollouts busy {self.rollouts_busy:.1f} of {self.rollouts}"
        )


def status_path(run_dir: str) -> str:
    """Where the status file of a run is."""
    return os.path.join(run_dir, FILE_NAME)


def write_status(run_dir: str, status: Status) -> None:
    """Replace the status file at once, so that no reader and no kill ever sees half of it. RecordError where it fails.

    How a run ended outlives a crash of its host, too; how far it was may be lost in one, and so costs no sync.
    """
    path = status_path(run_dir)
    part = os.path.join(run_dir, f".{FILE_NAME}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(status), indent=2) + b"\n")
            if status.over:
                file.flush()
                os.fsync(file.fileno())
        os.rename(part, path)
    except OSError as error:
        raise RecordError(f"{path}: cannot be written: {error.strerror}") from error


def read_status(run_dir: str) -> Status | None:
    """The status of the run in `run_dir`, None where there is none yet; RecordError where the file is no status."""
    path = status_path(run_dir)
    try:
        with open(path, "rb") as file:
            status = msgspec.json.decode(file.read(), type=Status)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise RecordError(f"{path}: is no status file: {error}") from error
    if status.state not in STATES:
        raise RecordError(f"{path}: state must be one of {', '.join(STATES)}, got {status.state!r}")
    return status


def was_killed(status: Status) -> bool:
    """Whether the run says that it runs, but its process is gone. Only the host it ran on can tell."""
    if status.over or status.host != socket.gethostname():
        return False
    try:
        os.kill(status.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
