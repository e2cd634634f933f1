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


class Paced(Message, frozen=True):
    """What a rank's emulated engine or trainer has kept to its schedule since the last such message."""

    rank: int
    pace: Pace


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

    Chunks are `chunk_bytes` long, the last one shorter. Where that is 0 it is not chosen yet, and all is one chunk.
    """

    tensors: list[TensorEntry]
    nbytes: int
    chunk_bytes: int

    @property
    def chunks(self) -> int:
        """Number of chunks (at least 1, also for an empty image)."""
        return max(1, -(-self.nbytes // self.chunk_bytes)) if self.chunk_bytes else 1

    def chunk_range(self, chunk: int) -> tuple[int, int]:
        """First byte and byte after the last one of chunk `chunk`."""
        size = self.chunk_bytes or self.nbytes
        return chunk * size, min(self.nbytes, (chunk + 1) * size)


class Tile(msgspec.Struct, frozen=True):
    """Bytes of the image in runs: `runs` runs of `run_bytes` bytes, the first at `offset`, each `stride` bytes after the last.

    Numbered from 0 in this order, the holder has `nbytes` of them from `first` on, and has them contiguous. A whole
    tensor, or rows of it, is one run; columns of a matrix have a run in each row.
    """

    offset: int
    run_bytes: int
    runs: int
    stride: int
    first: int
    nbytes: int


class Shard(Message, frozen=True):
    """What trainer `rank` publishes of every version: the bytes of `tiles`, one tile after the other.

    The tiles are in the image's order and do not interleave: each ends, in the image, before the next one begins. So what
    lies in one chunk of the image is contiguous in the shard too (weights/reshard.py).
    """

    rank: int
    tiles: list[Tile]


class Layout(Message, frozen=True):
    """From the manager to all ranks, once every trainer has its model: the image, its chunks, and who publishes what of it."""

    manifest: Manifest
    shards: list[Shard]


class Rendezvous(Message, frozen=True):
    """Where the trainers' workers meet: the address of the first one's store. `worker`: how often they were started again."""

    host: str
    port: int
    worker: int = 0


class ChunkRequest(Message, frozen=True):
    """`rank` asks a relay for a chunk, or a trainer for its part of one; it has posted the receive, which `ticket` describes.

    The ticket is the transport's: it says how the sender finds the receiver's memory. `epoch` is that of the last loss that
    concerned the two (`Lost`, `Readmitted`), 0 at first.
    """

    rank: int
    version: int
    chunk: int
    ticket: bytes
    epoch: int = 0


class ChunkSent(Message, frozen=True):
    """The answer to a request, together with the bytes: the chunk's digest ("" where verification is off)."""

    rank: int
    version: int
    chunk: int
    digest: bytes


class ChunkGone(Message, frozen=True):
    """The answer to a request that `rank` will never serve: it has not got that version any more, or has given it up."""

    rank: int
    version: int
    chunk: int


class Lost(Message, frozen=True):
    """From the manager: `rank` counts as gone. Whatever it had borrowed, asked for or was being sent is void.

    `epoch` counts losses: what `rank` asks for after this one carries it, and what it had asked for before does not.
    """

    rank: int
    epoch: int


class StartOver(Message, frozen=True):
    """A rollout was taken for lost, since it had said nothing for too long: it begins anew, as another incarnation.

    `epoch` is that of its loss: what it asks of relays from now on carries it.
    """

    epoch: int


class Readmitted(Message, frozen=True):
    """From the manager to a relay that was taken for lost and speaks again: begin anew, empty, as `incarnation`."""

    incarnation: int
    epoch: int


class MeasureLink(Message, frozen=True):
    """From the manager to a relay: measure the link from relay `source`."""

    source: int


class ProbeRequest(Message, frozen=True):
    """A relay asks another one for `nbytes` bytes of no meaning, to measure the link; the receive is posted (`ticket`)."""

    rank: int
    nbytes: int
    ticket: bytes


class LinkMeasured(Message, frozen=True):
    """What a relay measured: a transfer of n bytes from `source` takes `startup_s + n * byte_s` seconds."""

    rank: int
    source: int
    startup_s: float
    byte_s: float


class LeaseRequest(Message, frozen=True):
    """A rollout asks a relay for the newest image, `version` at least; `request` comes back with the answer.

    `epoch` is that of the rollout's own last loss (`StartOver`), 0 at first. `exactly`: for `version` and no other, at once; the
    answer is `LeaseRefused` where the relay has not got it.
    """

    rank: int
    version: int
    request: int = 0
    epoch: int = 0
    exactly: bool = False


class LeaseRefused(Message, frozen=True):
    """The relay has not got the version that was asked for exactly, in this `request`."""

    version: int
    request: int


class Lease(Message, frozen=True):
    """A relay lends the image of `version`: the bytes from `offset` on in the memory at `path`, not written until given back.

    A rollout on another node cannot map that memory; it asks for the chunks instead, and gives the lease back when it has
    them all. `request` is that of the `LeaseRequest` which this answers. The eight bytes at `stamp_offset` are the number
    `stamp` for as long as the image has not been written over; 0 and 0 where it never is.
    """

    version: int
    path: str
    offset: int
    request: int = 0
    stamp_offset: int = 0
    stamp: int = 0


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
    """The engine is built and waits for weights. `kv_capacity_tokens` is the room of its KV cache (0: not known)."""

    concurrency: int
    seconds: float
    kv_capacity_tokens: int = 0


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
    """Give these up, those that have ended excepted; the next `EngineOutput` has their last tokens and names them."""

    trajectories: list[int]


class Pace(msgspec.Struct, frozen=True):
    """How well emulated work has kept to its schedule, in seconds of this machine.

    `scheduled_s` is how long trajectories, loads and training steps were to take, one after the other; `late_s` by how much
    later each was done than that, altogether; `worst_s` the most for one of them.
    """

    scheduled_s: float = 0.0
    late_s: float = 0.0
    worst_s: float = 0.0

    def __add__(self, other: Pace) -> Pace:
        """Of both together."""
        return Pace(self.scheduled_s + other.scheduled_s, self.late_s + other.late_s, max(self.worst_s, other.worst_s))

    def since(self, earlier: Pace) -> Pace:
        """What came after `earlier`, the worst of all of it."""
        return Pace(self.scheduled_s - earlier.scheduled_s, self.late_s - earlier.late_s, self.worst_s)


class Ended(msgspec.Struct, frozen=True):
    """A trajectory whose generation has ended."""

    trajectory: int
    stop: Stop


class EngineOutput(Message, frozen=True):
    """What the engine has generated since the last such message, and how full it is; `pace` of an emulated one since then.

    `released` are trajectories that it has given up; None where it was not asked to.
    """

    blocks: list[Block]
    ended: list[Ended]
    kv_use: float
    running: int
    waiting: int
    busy_s: float
    released: list[int] | None = None
    pace: Pace | None = None


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


class Resume(msgspec.Struct, frozen=True):
    """Where the trainers' states after `step` are: a directory that each of them has written its own to."""

    directory: str
    step: int


class StartTrainer(Message, frozen=True):
    """First message to a trainer worker: the resolved config as JSON, and its place among the trainers.

    With `resume` it goes on from there, else it begins with the checkpoint at `model.path`. Where it `saves`, memory for the copy
    of its state is made ready at the start.
    """

    config: bytes
    trainer: int
    trainers: int
    resume: Resume | None = None
    saves: bool = False


class TrainerUp(Message, frozen=True):
    """The trainer holds the checkpoint. The manifest is the same on all trainers; `tiles` are what this one publishes.

    The manifest's `chunk_bytes` is 0: it is chosen when the links are measured (`Layout`). A copy of the trainer's state, for
    `SaveState`, takes `state_bytes` of the host's memory.
    """

    manifest: Manifest
    tiles: list[Tile]
    seconds: float
    state_bytes: int = 0


class TrainOn(Message, frozen=True):
    """Train on a mini-batch: all its samples (for advantages), and the blocks of this trainer's own ones.

    Where tokens have no meaning, their number is all there is: `lengths` (prompt and response) in place of `blocks`. `version`
    is that of the weights as they are then (None: they have been trained since they were published).
    """

    step: int
    minibatch: int
    minibatches: int
    trajectories: list[int]
    groups: list[int]
    rewards: list[float]
    own: list[int]
    blocks: list[list[Block]]
    lengths: list[int] = []
    version: int | None = None


class TrainedOn(Message, frozen=True):
    """A mini-batch is done; `pace` of an emulated trainer since the last one."""

    step: int
    minibatch: int
    tokens: int
    seconds: float
    metrics: dict[str, float]
    pace: Pace | None = None


class WriteWeights(Message, frozen=True):
    """Copy the shard, all its tiles, to `offset` of the memory at `path`."""

    version: int
    path: str
    offset: int


class WeightsWritten(Message, frozen=True):
    """The shard is written; `seconds` is how long the worker stood still for it."""

    version: int
    seconds: float


class SaveState(Message, frozen=True):
    """Write the trainer's state as it is now, after `step`, to a file in `directory`, and train on meanwhile.

    That is a part of checkpoint `serial`.
    """

    step: int
    serial: int
    directory: str


class StateSaved(Message, frozen=True):
    """The state after `step` is on the disk, `nbytes` bytes, `seconds` after it was asked for; `stall_s` the worker stood still.

    `error` is "" or the one-line reason why there is no such file. One state is written at a time: another one asked for
    meanwhile is such an error.
    """

    step: int
    serial: int
    seconds: float
    nbytes: int
    error: str = ""
    stall_s: float = 0.0


class WorkerError(Message, frozen=True):
    """A worker cannot go on: one line for people, the traceback is in its log. `final`: nor could another in its place."""

    text: str
    final: bool = False


class BenchTask(Message, frozen=True):
    """A bench asks one of its workers to do, once, what that worker is there to measure, with `nbytes` bytes.

    `turn` counts the tasks; `parties` is how many take part; `path` and `offset` name lent memory, as in `Lease`.
    """

    turn: int
    nbytes: int
    parties: int = 1
    path: str = ""
    offset: int = 0


class BenchDone(Message, frozen=True):
    """The task took so long."""

    seconds: float


class Shutdown(Message, frozen=True):
    """A worker, or a rank, ends. `clean`: all ranks leave together; else one is gone, and none waits for the others."""

    clean: bool = True


AnyMessage = (
    Heartbeat
    | ManagerAlive
    | Goodbye
    | Paced
    | Failure
    | Append
    | Fetch
    | Fetched
    | Manifest
    | Shard
    | Layout
    | Rendezvous
    | ChunkRequest
    | ChunkSent
    | ChunkGone
    | Lost
    | StartOver
    | Readmitted
    | MeasureLink
    | ProbeRequest
    | LinkMeasured
    | LeaseRequest
    | Lease
    | LeaseRefused
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
    | SaveState
    | StateSaved
    | WorkerError
    | BenchTask
    | BenchDone
    | Shutdown
)
