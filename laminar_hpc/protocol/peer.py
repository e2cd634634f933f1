"""Messages between ranks, and between a driver and its worker, that need no decision and so never reach the controller."""

from __future__ import annotations

import msgspec

from laminar_hpc.protocol.events import Streamed
from laminar_hpc.protocol.trajectory import Block, Stop, TrajectorySpec


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages that are neither event nor command."""


# --- any rank <-> manager -------------------------------------------------------------------------------------------


class Heartbeat(Message, frozen=True):
    """A rank is alive. `waiting_for` names what it waits for ("" when it works), `since_s` for how long."""

    rank: int
    waiting_for: str
    since_s: float


class ManagerAlive(Message, frozen=True):
    """The manager is alive; a rank that hears nothing for the configured time ends itself."""


class Goodbye(Message, frozen=True):
    """A rank has closed its record and its worker and is about to leave."""

    rank: int


class Failure(Message, frozen=True):
    """A rank cannot go on; the job has to end. `text` is one line."""

    rank: int
    role: str
    text: str


# --- payload plane: rollouts and trainers <-> store -----------------------------------------------------------------


class Append(Message, frozen=True):
    """Blocks for the store, from `rank` in its `incarnation`; dropped where another owner holds the trajectory.

    `streamed` is the event that tells the controller of them, in the same message so that neither comes without the other.
    """

    rank: int
    incarnation: int
    blocks: list[Block]
    streamed: Streamed | None = None


class Fetch(Message, frozen=True):
    """Ask the store for all blocks of these trajectories; `request` comes back with the answer."""

    rank: int
    request: int
    trajectories: list[int]


class Fetched(Message, frozen=True):
    """The store's answer: the blocks of each trajectory, in the order asked for."""

    request: int
    blocks: list[list[Block]]


# --- weights plane: trainers, relays, rollouts ----------------------------------------------------------------------

DIGEST_BYTES = 8
"""Bytes of a chunk's digest, and of an image's."""


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor in the image."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


class Manifest(Message, frozen=True):
    """The layout of a weight image: tensors in canonical order, each at its byte offset.

    Chunks are `chunk_bytes` long, the last one shorter.
    """

    tensors: list[TensorEntry]
    nbytes: int
    chunk_bytes: int

    @property
    def chunks(self) -> int:
        """Number of chunks (at least 1, also for an empty image)."""
        return max(1, -(-self.nbytes // self.chunk_bytes))

    def chunk_range(self, chunk: int) -> tuple[int, int]:
        """First byte and byte after the last one of chunk `chunk`."""
        return chunk * self.chunk_bytes, min(self.nbytes, (chunk + 1) * self.chunk_bytes)


class Rendezvous(Message, frozen=True):
    """Where the trainers' workers meet: the address of the first one's store."""

    host: str
    port: int


class ChunkRequest(Message, frozen=True):
    """A relay asks the one before it (or a trainer) for a chunk, and has posted the receive for it under `tag`."""

    rank: int
    version: int
    chunk: int
    tag: int


class LeaseRequest(Message, frozen=True):
    """A rollout asks its relay for the newest image, `version` at least."""

    rank: int
    version: int


class Lease(Message, frozen=True):
    """A relay lends the image of `version`: the bytes from `offset` on in the memory at `path`, not written until given back."""

    version: int
    path: str
    offset: int


class LeaseReturn(Message, frozen=True):
    """The rollout has loaded the version and gives the lease back."""

    rank: int
    version: int


# --- a rollout's driver <-> its engine worker -----------------------------------------------------------------------


class StartEngine(Message, frozen=True):
    """First message to an engine worker: the resolved config as JSON, the image's layout, and its index on its node."""

    config: bytes
    manifest: Manifest
    device: int = 0


class EngineUp(Message, frozen=True):
    """The engine is built and waits for weights."""

    concurrency: int
    seconds: float


class LoadWeights(Message, frozen=True):
    """Load the image described by `lease`."""

    lease: Lease


class WeightsLoaded(Message, frozen=True):
    """The engine holds `version`. `digest` is taken from the engine's own weights (empty when verification is off)."""

    version: int
    digest: bytes
    seconds: float


class AddTrajectory(Message, frozen=True):
    """Generate this trajectory: prompt tokens, then those response tokens that exist already (int32 bytes)."""

    spec: TrajectorySpec
    prompt: bytes
    response: bytes = b""


class AbortTrajectories(Message, frozen=True):
    """Drop these."""

    trajectories: list[int]


class Ended(msgspec.Struct, frozen=True):
    """A trajectory whose generation has ended."""

    trajectory: int
    stop: Stop


class EngineOutput(Message, frozen=True):
    """What the engine has generated since the last such message, and how full it is."""

    blocks: list[Block]
    ended: list[Ended]
    kv_use: float
    running: int
    waiting: int
    busy_s: float


# --- a driver <-> its task worker -----------------------------------------------------------------------------------


class StartTask(Message, frozen=True):
    """First message to a task worker: the resolved config as JSON."""

    config: bytes


class TaskUp(Message, frozen=True):
    """The task is ready: how many training and held-out prompts there are."""

    prompts: int
    held_out: int


class EncodePrompt(Message, frozen=True):
    """Ask for the tokens of prompt `prompt`."""

    trajectory: int
    prompt: int
    purpose: str


class PromptEncoded(Message, frozen=True):
    """The prompt's tokens (int32 bytes). `error` is "" or the one-line reason why there are none."""

    trajectory: int
    tokens: bytes
    error: str = ""


class Grade(Message, frozen=True):
    """Ask for the reward of a response (int32 bytes, without the end token)."""

    trajectory: int
    prompt: int
    purpose: str
    response: bytes


class Graded(Message, frozen=True):
    """The reward. `error` is "" or the one-line reason why there is none, `late` whether that is the deadline.

    `score` is what the task gave for the answer itself, before a penalty for length (None: there is none, it is the reward).
    """

    trajectory: int
    reward: float
    error: str
    late: bool = False
    score: float | None = None


# --- a trainer's driver <-> its worker ------------------------------------------------------------------------------


class StartTrainer(Message, frozen=True):
    """First message to a trainer worker: the resolved config as JSON, and its place among the trainers."""

    config: bytes
    trainer: int
    trainers: int


class TrainerUp(Message, frozen=True):
    """The trainer holds the checkpoint. The manifest is the same on all trainers."""

    manifest: Manifest
    seconds: float


class TrainOn(Message, frozen=True):
    """Train on a mini-batch: all its samples (for advantages), and the blocks of this trainer's own ones."""

    step: int
    minibatch: int
    minibatches: int
    trajectories: list[int]
    groups: list[int]
    rewards: list[float]
    own: list[int]
    blocks: list[list[Block]]


class TrainedOn(Message, frozen=True):
    """A mini-batch is done."""

    step: int
    minibatch: int
    tokens: int
    seconds: float
    metrics: dict[str, float]


class WriteWeights(Message, frozen=True):
    """Copy chunks `first_chunk` to `first_chunk + chunks` of the image to `offset` of the memory at `path`."""

    version: int
    path: str
    offset: int
    first_chunk: int
    chunks: int


class WeightsWritten(Message, frozen=True):
    """The share is written; `DIGEST_BYTES` of digest a chunk."""

    version: int
    digests: bytes
    seconds: float


class WorkerError(Message, frozen=True):
    """A worker cannot go on: one line for people, the traceback is in its log."""

    text: str


class Shutdown(Message, frozen=True):
    """A worker, or a rank, ends. `clean`: all ranks leave together; else one is gone, and none waits for the others."""

    clean: bool = True


AnyMessage = (
    Heartbeat
    | ManagerAlive
    | Goodbye
    | Failure
    | Append
    | Fetch
    | Fetched
    | Manifest
    | Rendezvous
    | ChunkRequest
    | LeaseRequest
    | Lease
    | LeaseReturn
    | StartEngine
    | EngineUp
    | LoadWeights
    | WeightsLoaded
    | AddTrajectory
    | AbortTrajectories
    | EngineOutput
    | StartTask
    | TaskUp
    | EncodePrompt
    | PromptEncoded
    | Grade
    | Graded
    | StartTrainer
    | TrainerUp
    | TrainOn
    | TrainedOn
    | WriteWeights
    | WeightsWritten
    | WorkerError
    | Shutdown
)
