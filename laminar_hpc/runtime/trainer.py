"""The trainer's loop: mini-batches, publications and checkpoints, in the order in which the manager asks for them.

Training runs in a worker process, which is given all mini-batches of a step as their payload comes, or one publication, and
answers each. This rank fetches the payload of the next mini-batches while the worker trains, keeps published weights in
memory that it shares with the worker, and serves them to the master relay while training goes on.
"""

from __future__ import annotations

import contextlib
from collections import deque

from laminar_hpc.errors import EngineError, ProtocolError
from laminar_hpc.mpi.transport import build_transport
from laminar_hpc.policy.balance import replica_of
from laminar_hpc.policy.roles import Role
from laminar_hpc.process.channel import Channel, ChannelClosed
from laminar_hpc.process.worker import Worker
from laminar_hpc.protocol.commands import Checkpoint, Publish, Release, Sample, Train
from laminar_hpc.protocol.events import Published, StateWritten, Trained, TrainerReady
from laminar_hpc.protocol.peer import (
    ChunkRequest,
    Fetch,
    Fetched,
    Layout,
    LeaseReturn,
    Lost,
    Rendezvous,
    SaveState,
    Shard,
    StartTrainer,
    StateSaved,
    TrainedOn,
    TrainerUp,
    TrainOn,
    WeightsWritten,
    WorkerError,
)
from laminar_hpc.protocol.trajectory import Block
from laminar_hpc.protocol.wire import AnyRecord
from laminar_hpc.runtime.memory import TRAINER_SLOTS, check_memory
from laminar_hpc.runtime.rank import LONGEST_NAP_S, MANAGER, TRANSFER_NAP_S, Rank
from laminar_hpc.trainer import worker as trainer_worker
from laminar_hpc.trainer.api import needs_proximal, needs_reference
from laminar_hpc.weights.publish import Publisher, Ready


class TrainerLoop:
    """One trainer rank: a worker, and the share of the weights that it publishes."""

    def __init__(self, rank: Rank) -> None:
        self.done = False
        self.clean = True
        self._rank = rank
        self._worker: Worker | None = None
        self._publisher: Publisher | None = None
        self._worker_up = False
        self._stall_s: dict[int, float] = {}
        self._work: deque[Train | Publish | Checkpoint] = deque()
        self._payload: dict[tuple[int, int], list[list[Block]]] = {}
        self._asked: dict[int, tuple[int, int]] = {}
        self._requests = 0
        self._begun: deque[Train | Publish] = deque()
        """What the worker has been given and has not answered: mini-batches of one step, or a publication."""

    @property
    def _trainers(self) -> list[int]:
        return self._rank.ranks_of(Role.TRAINER)

    def start(self, now: float) -> None:
        """Start the worker."""
        rank = self._rank
        self._worker = Worker("trainer", trainer_worker.main, rank.log_path("worker"))
        config, saves = rank.config.model_dump_json().encode(), rank.settings.checkpoint_every is not None
        self._worker.send(StartTrainer(config, rank.me.index, len(self._trainers), rank.resume, saves))

    def receive(self, source: int, message: AnyRecord, now: float) -> None:
        """Take one message from another rank."""
        match message:
            case Train():
                self._work.append(message)
                self._fetch(message)
            case Publish() | Checkpoint():
                self._work.append(message)
            case Fetched():
                self._payload[self._asked.pop(message.request)] = message.blocks
            case Layout():
                self._lay_out(message)
            case ChunkRequest():
                self._require_publisher().serve(message)
            case LeaseReturn():
                self._require_publisher().returned(message)
            case Lost():
                if self._publisher is not None:
                    self._publisher.forget(message.rank, message.epoch)
            case Release():
                self._require_publisher().release(message.version)
            case Rendezvous():
                self._tell_worker(message)
            case _:
                raise ProtocolError(f"{self._rank.name}: unexpected {type(message).__name__} from rank {source}")

    def turn(self, now: float) -> bool:
        """Hear the worker, give it the next thing to do, move chunks."""
        heard = self._hear_worker()
        began = self._begin_next()
        moving = False
        if self._publisher is not None:
            for ready in self._publisher.poll():
                self._tell_published(ready)
            moving = self._publisher.moved
        return heard or began or moving

    def waiting_for(self) -> str:
        """What this trainer waits for."""
        if not self._worker_up:
            return "its worker to load the model"
        if self._publisher is None:
            return "the layout of the weights"
        if self._begun and not self._collecting:
            return ""
        if not self._work:
            return "a batch from the manager"
        match self._work[0]:
            case Train(step=step, minibatch=minibatch):
                return f"the payload of mini-batch {minibatch} of step {step} from the store"
            case Publish(version=version):
                return f"memory to publish version {version}: relays still fetch older ones"
            case Checkpoint(step=step):
                return f"the end of what comes before the checkpoint of step {step}"

    def phase(self, busy: bool) -> str:
        """Of train, publish, wait: where its worker's time goes."""
        if self._publisher is None:
            return "start"
        if not self._begun or self._collecting:
            return "wait"
        return "train" if isinstance(self._begun[0], Train) else "publish"

    def longest_nap_s(self) -> float:
        """Short while parts of chunks are under way."""
        return TRANSFER_NAP_S if self._publisher is not None and self._publisher.busy else LONGEST_NAP_S

    def channels(self) -> list[Channel]:
        """The worker's."""
        return [self._worker.channel] if self._worker is not None else []

    def close(self) -> None:
        """End the worker and give the published weights' memory back."""
        if self._worker is not None:
            self._worker.kill()
        if self._publisher is not None:
            self._publisher.close()

    @property
    def _collecting(self) -> bool:
        """Whether the worker waits for the rest of a step that it scores before it trains on any of it."""
        config, last = self._rank.config.trainer, self._begun[-1] if self._begun else None
        if not isinstance(last, Train) or last.minibatch + 1 == last.minibatches:
            return False
        return needs_proximal(config, last.minibatches) or needs_reference(config)

    def _require_publisher(self) -> Publisher:
        if self._publisher is None:
            raise ProtocolError(f"{self._rank.name}: asked for weights before the model was loaded")
        return self._publisher

    def _require_worker(self) -> Worker:
        if self._worker is None:
            raise ProtocolError(f"{self._rank.name}: no worker")
        return self._worker

    def _tell_worker(self, message: AnyRecord) -> None:
        """Where the worker has just ended, the next look at it finds out, with its last words."""
        with contextlib.suppress(ChannelClosed):
            self._require_worker().send(message)

    def _own(self, train: Train) -> list[Sample]:
        config = self._rank.config
        replica = replica_of(self._rank.me.index, config.trainer.tensor_parallel, config.replicas)
        return [sample for sample in train.samples if sample.replica == replica]

    def _fetch(self, train: Train) -> None:
        if self._rank.config.timing_only:
            self._payload[train.step, train.minibatch] = []
            return
        self._requests += 1
        self._asked[self._requests] = (train.step, train.minibatch)
        self._rank.mail.send(MANAGER, Fetch(self._rank.world.rank, self._requests, _trajectories(self._own(train))))

    def _begin_next(self) -> bool:
        if not self._work or self._publisher is None:
            return False
        work = self._work[0]
        if self._begun and not _same_step(self._begun[0], work):
            return False
        match work:
            case Train():
                blocks = self._payload.pop((work.step, work.minibatch), None)
                if blocks is None:
                    return False
                own = self._own(work)
                self._tell_worker(
                    TrainOn(
                        step=work.step,
                        minibatch=work.minibatch,
                        minibatches=work.minibatches,
                        trajectories=[sample.trajectory for sample in work.samples],
                        groups=[sample.group for sample in work.samples],
                        rewards=[sample.reward for sample in work.samples],
                        own=_trajectories(own),
                        blocks=blocks,
                        lengths=[sample.tokens for sample in own] if self._rank.config.timing_only else [],
                    )
                )
            case Publish():
                request = self._publisher.begin(work.version)
                if request is None:
                    return False
                self._tell_worker(request)
            case Checkpoint():  # nothing waits for its end: the worker copies its state before it does what comes next
                self._tell_worker(SaveState(work.step, work.directory))
                self._work.popleft()
                return True
        self._work.popleft()
        self._begun.append(work)
        return True

    def _hear_worker(self) -> bool:
        try:
            messages = self._require_worker().receive_all()
        except ChannelClosed as error:
            raise EngineError(f"the trainer's worker has ended; see {self._rank.log_path('worker')}") from error
        for message in messages:
            match message:
                case TrainerUp():
                    self._up(message)
                case Rendezvous():
                    for other in self._trainers[1:]:
                        self._rank.mail.send(other, message)
                case TrainedOn():
                    self._trained(message)
                case WeightsWritten():
                    self._written(message)
                case StateSaved():
                    self._saved(message)
                case WorkerError():
                    raise EngineError(
                        f"the trainer's worker failed: {message.text}; see {self._rank.log_path('worker')}"
                    )
                case _:
                    raise ProtocolError(f"{self._rank.name}: unexpected {type(message).__name__} from its worker")
        return bool(messages)

    def _up(self, message: TrainerUp) -> None:
        rank = self._rank
        self._worker_up = True
        if rank.me.index == 0:
            rank.tell_manager(message.manifest)
        rank.tell_manager(Shard(rank.world.rank, message.tiles))
        rank.tell_manager(TrainerReady(rank=rank.world.rank, incarnation=0, trainer=rank.me.index))

    def _lay_out(self, layout: Layout) -> None:
        rank, verify = self._rank, self._rank.config.weights.verify
        tiles = next(shard.tiles for shard in layout.shards if shard.rank == rank.world.rank)
        check_memory(
            TRAINER_SLOTS * sum(tile.nbytes for tile in tiles), f"{TRAINER_SLOTS} slots of this trainer's shard"
        )
        transport = build_transport(rank.config.weights.transport, rank.world)
        self._publisher = Publisher(transport, layout, rank.mail.send, slots=TRAINER_SLOTS, verify=verify)

    def _trained(self, message: TrainedOn) -> None:
        self._begun.popleft()
        self._rank.note_pace(message.pace)
        self._rank.tell_manager(
            Trained(
                rank=self._rank.world.rank,
                incarnation=0,
                step=message.step,
                minibatch=message.minibatch,
                tokens=message.tokens,
                seconds=message.seconds,
                metrics=message.metrics,
            )
        )

    def _written(self, message: WeightsWritten) -> None:
        self._begun.popleft()
        self._stall_s[message.version] = message.seconds
        self._require_publisher().written(message)

    def _saved(self, message: StateSaved) -> None:
        self._rank.tell_manager(
            StateWritten(
                rank=self._rank.world.rank,
                incarnation=0,
                step=message.step,
                seconds=message.seconds,
                nbytes=message.nbytes,
                error=message.error,
                stall_s=message.stall_s,
            )
        )

    def _tell_published(self, ready: Ready) -> None:
        self._rank.tell_manager(
            Published(
                rank=self._rank.world.rank,
                incarnation=0,
                version=ready.version,
                digests=ready.digests,
                seconds=self._stall_s.pop(ready.version),
            )
        )


def _trajectories(samples: list[Sample]) -> list[int]:
    return [sample.trajectory for sample in samples]


def _same_step(first: Train | Publish, second: Train | Publish | Checkpoint) -> bool:
    """Whether both are mini-batches of one step."""
    return isinstance(first, Train) and isinstance(second, Train) and first.step == second.step
