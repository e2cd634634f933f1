"""What the controller is told. Each event is a fact that has happened; none of them asks for anything.

Every event that comes from a rank carries the `rank` and the `incarnation` of its sender: a rank whose worker was
started again has the next incarnation, and what an earlier one still had under way is dropped on arrival.
"""

from __future__ import annotations

import msgspec

from laminar_hpc.protocol.trajectory import Stop, Verdict


class Event(msgspec.Struct, frozen=True, tag=True):
    """Base of all events."""


class RankEvent(Event, frozen=True):
    """An event with a sender."""

    rank: int
    incarnation: int


class TrainerReady(RankEvent, frozen=True):
    """A trainer's worker is up and holds the checkpoint. `trainer` is its place among the trainers, 0 first."""

    trainer: int


class RelayReady(RankEvent, frozen=True):
    """A relay is up and can receive versions. `node` is its node key."""

    node: str


class SpareReady(RankEvent, frozen=True):
    """A spare waits on `node` to take over from a lost relay."""

    node: str


class RankHeard(RankEvent, frozen=True):
    """A rank that was taken for lost has spoken again."""


class RolloutReady(RankEvent, frozen=True):
    """A rollout's engine is up, without weights.

    `relay` is the rank it pulls from; `concurrency` how many trajectories it takes at once, waiting ones included;
    `kv_capacity_tokens` how many tokens its KV cache has room for (0: not known).
    """

    node: str
    relay: int
    concurrency: int
    kv_capacity_tokens: int = 0


class Published(RankEvent, frozen=True):
    """A trainer holds its shard of version `version`, ready to be fetched.

    `digests` has 8 bytes for the part of each chunk that is in the shard, in order (none where verification is off);
    `seconds` is how long the trainer's worker stood still.
    """

    version: int
    digests: bytes
    seconds: float


class RelayHolds(RankEvent, frozen=True):
    """A relay holds version `version` complete and checked, `seconds` after it was told of it.

    `digest` is that of the whole image, "" where verification is off.
    """

    version: int
    seconds: float
    digest: bytes


class LinkStalled(RankEvent, frozen=True):
    """A relay waits for chunks of `version`, and `source`, which it asked for them, has sent none for too long."""

    version: int
    source: int


class Loaded(RankEvent, frozen=True):
    """A rollout's engine has loaded `version`.

    `digest` is that of the weights as they lie in the engine, empty if not asked for.
    """

    version: int
    digest: bytes
    wait_s: float
    load_s: float


class PullRefused(RankEvent, frozen=True):
    """A rollout was to load exactly `version`, and its relay has it no more."""

    version: int


class Progress(msgspec.Struct, frozen=True):
    """How far one trajectory has come: response tokens that have been streamed to the store."""

    trajectory: int
    tokens: int


class Streamed(RankEvent, frozen=True):
    """A rollout has streamed partial responses to the store, and says how full it is.

    `kv_use` is the used share of its KV cache (0 to 1); `running` and `waiting` count trajectories.
    """

    progress: list[Progress]
    kv_use: float
    running: int
    waiting: int


class Finished(RankEvent, frozen=True):
    """A trajectory has ended and was graded; its payload is complete in the store.

    `version` is that of the weights which generated it; `reward` counts only where `verdict` is GRADED. `stop` is None
    where nothing was generated (NO_PROMPT). `score` is the reward without a penalty for length (None: there is none).
    """

    trajectory: int
    version: int
    prompt_tokens: int
    response_tokens: int
    stop: Stop | None
    verdict: Verdict
    reward: float
    score: float | None = None


class HandedOver(RankEvent, frozen=True):
    """The answer to `HandOver`: the rollout has given up these trajectories, and all that it had of them is in the store.

    `move` is the command's; `progress` has the response tokens of each. Those it was asked for and does not name have ended, or
    have not begun yet, and stay.
    """

    move: int
    progress: list[Progress]


class Interrupted(RankEvent, frozen=True):
    """A rollout has let go of these, as asked by `Interrupt`; what has ended before is finished as ever."""

    progress: list[Progress]


class WentToTool(RankEvent, frozen=True):
    """A trajectory waits for a tool's answer and holds no place in the engine."""

    trajectory: int


class CameFromTool(RankEvent, frozen=True):
    """A trajectory goes on with a tool's answer."""

    trajectory: int


class Trained(RankEvent, frozen=True):
    """A trainer has done mini-batch `minibatch` of step `step`.

    `metrics` are those of the whole mini-batch, equal on all trainers.
    """

    step: int
    minibatch: int
    tokens: int
    seconds: float
    metrics: dict[str, float]


class Repeated(RankEvent, frozen=True):
    """A trainer whose worker was started again has done once more what the controller knows already."""

    step: int
    minibatch: int


class StateWritten(RankEvent, frozen=True):
    """A trainer's part of checkpoint `serial`, of `step`, is on the disk: `nbytes` bytes, `seconds` after its worker was asked.

    `error` is "" or the one-line reason why there is none; `stall_s` is how long the worker stood still.
    """

    step: int
    serial: int
    seconds: float
    nbytes: int
    error: str = ""
    stall_s: float = 0.0


class RankLost(RankEvent, frozen=True):
    """The worker or the rank is gone; all it held is lost, what it streamed is in the store.

    `role` is the rank's, where it is gone itself and not its worker alone. A trainer's worker has its own incarnation: how
    often the trainers' workers had been started again. `final`: another worker would fail in the same way.
    """

    reason: str
    role: str = ""
    final: bool = False


class Resumed(Event, frozen=True):
    """This attempt goes on from a checkpoint: `books` is a control.snapshot.Snapshot in MessagePack. The first event, if any.

    `shift_s` leads from the clock of the attempt that wrote it to this one's.
    """

    books: bytes
    shift_s: float


class SnapshotWritten(Event, frozen=True):
    """The books of checkpoint `serial`, of `step`, and the payload, are on disk; where `error` is not "", they are not."""

    step: int
    serial: int
    seconds: float
    nbytes: int
    error: str = ""


class Committed(Event, frozen=True):
    """Checkpoint `serial`, of `step`, is complete, in its place, and will be found; where `error` is not "", it is not."""

    step: int
    serial: int
    error: str = ""


class StopRequested(Event, frozen=True):
    """Somebody outside wants the job to end: a signal, a time limit. `save`: with a checkpoint, to be resumed."""

    reason: str
    save: bool = False


class JobFailed(Event, frozen=True):
    """Whoever drives the controller has seen that the job cannot go on.

    `outcome` is "failed" (a rank has failed or says nothing) or "stalled" (nothing has moved for too long).
    """

    outcome: str
    reason: str


AnyEvent = (
    TrainerReady
    | RelayReady
    | SpareReady
    | RankHeard
    | RolloutReady
    | Published
    | RelayHolds
    | LinkStalled
    | Loaded
    | PullRefused
    | Streamed
    | Finished
    | HandedOver
    | Interrupted
    | WentToTool
    | CameFromTool
    | Trained
    | Repeated
    | StateWritten
    | RankLost
    | Resumed
    | SnapshotWritten
    | Committed
    | StopRequested
    | JobFailed
)
