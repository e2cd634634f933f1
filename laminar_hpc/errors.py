"""The errors that this package raises on purpose.

Input errors stop a run at the door (exit code 2, one line); the others carry rank, role, event and id, since their
message is often all that is left of a job.
"""

from __future__ import annotations


class LaminarError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(LaminarError):
    """A config, an input file or a rank count that cannot run; the message names the key or line and what is allowed."""


class ProtocolError(LaminarError):
    """A broken rule between ranks; the message names rank, role, event and trajectory."""


class PeerLost(LaminarError):
    """A transfer that cannot end, since the rank at its other end is gone; `rank` is that one."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(text)
        self.rank = rank


class EngineError(LaminarError):
    """An engine or trainer that cannot do what it was asked; the message names the engine and the request."""


class FinalError(EngineError):
    """What an engine or trainer could not do would fail in the same way were it started again."""


class RecordError(LaminarError):
    """A record file that is missing, unreadable or of another schema version; the message names the file."""
