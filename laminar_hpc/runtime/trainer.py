"""The trainer's loop: mini-batches, publications and checkpoints, in the order in which the manager asks for them.

Training runs in a worker process, which is given all mini-batches of a step as their payload comes, or one publication, and
answers each. This rank fetches the payload of the next mini-batches while the worker trains, keeps published weights in
memory that it shares with the worker, and serves them to the master relay while training goes on.

Where the worker is lost, the manager has all trainers start theirs again, from a checkpoint; what they are asked to do again
is in the journal.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import NamedTuple

from laminar_hpc.errors import EngineError, ProtocolError
from laminar_hpc.mpi.transport import Transport, build_transport
from laminar_hpc.policy.balance import replica_of
from laminar_hpc.policy.roles import Role
from laminar_hpc.process.channel import Channel, ChannelClosed
from laminar_hpc.process.worker import Worker
from laminar_hpc.protocol.commands import Checkpoint, Publish, Release, RestartTrainers, Sample, Train
from laminar_hpc.protocol.events import Published, RankLost, Repeated, StateWritten, Trained, TrainerReady
from laminar_hpc.protocol.peer import (
    ChunkRequest,
    Fetch,
    Fetched,
    Layout,
    LeaseReturn,
    Lost,
    Rendezvous,
    Resume,
    SaveState,
    Shard,
    StartTrainer,
    StateSaved,
    TrainedOn,
    TrainerUp,
    TrainOn,
    WeightsWritten,
    WorkerError,
    WriteWeights,
)
from laminar_hpc.protocol.trajectory import Block
from laminar_hpc.protocol.wire import AnyRecord
from laminar_hpc.runtime.journal import Asked, Journal
from laminar_hpc.runtime.memory import TRAINER_SLOTS, check_memory, has_room
from laminar_hpc.runtime.rank import LONGEST_NAP_S, MANAGER, TRANSFER_NAP_S, Rank
from laminar_hpc.trainer import worker as trainer_worker
from laminar_hpc.trainer.api import needs_proximal, needs_reference
from laminar_hpc.weights.publish import Publisher, Ready


class _Start(NamedTuple):
    """A worker that is to be started."""

    at_s: float
    resume: Resume | None


class TrainerLoop:
    """One trainer rank: a worker, and the share of the weights that it publishes."""

    def __init__(self, rank: Rank) -> None:
        self.done = False
        self.clean = True
        self._rank = rank
        self._worker: Worker | None = None
        self._starts = 0
        """How often the trainers' workers have been started again."""
        self._next_start: _Start | None = None
        self._meeting: Rendezvous | None = None
        self._worker_up = False
        self._heard_s = 0.0
        """When the worker last said something, or was first asked for what it has not answered."""
        self._publisher: Publisher | None = None
        self._transport: Transport | None = None
        self._stall_s: dict[int, float] = {}
        self._work: deque[Train | Publish | Checkpoint] = deque()
        self._payload: dict[tuple[int, int], list[list[Block]]] = {}
        self._asked: dict[int, tuple[int, int]] = {}
        self._requests = 0
        self._begun: deque[Asked] = deque()
        """What the worker has been given and has not answered: mini-batches of one step, or a publication."""
        self._again: deque[Asked] = deque()
        """What a worker that was started again has to be given before anything else."""
        self._version: int | None = None
        """That of the worker's weights, once it has done what it was given (None: they will have been trained since)."""
        resume = rank.resume
        self._journal = Journal(rank.config.checkpoint.every > 0, None if resume is None else resume.step)

    @property
    def _trainers(self) -> list[int]:
        return self._rank.ranks_of(Role.TRAINER)

    def start(self, now: float) -> None:
        """Start the worker."""
        self._start_worker(self._rank.resume, now)

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
                self._meeting = message  # it may come before the word to start the worker that it is for
                self._pass_meeting_on()
            case RestartTrainers():
                self._restart(message, now)
            case _:
                raise ProtocolError(f"{self._rank.name}: unexpected {type(message).__name__} from rank {source}")

    def turn(self, now: float) -> bool:
        """Hear the worker, give it the next thing to do, move chunks."""
        if self._next_start is not None and now >= self._next_start.at_s:
            self._start_worker(self._next_start.resume, now)
        heard = self._hear_worker(now)
        began = self._begin_next(now)
        moving = False
        if self._publisher is not None:
            for ready in self._publisher.poll():
                self._tell_published(ready)
            moving = self._publisher.moved
        return heard or began or moving

    def waiting_for(self) -> str:
        """What this trainer waits for."""
        if self._worker is None:
            return "the word to start its worker again"
        if not self._worker_up:
            return "its worker to load the model"
        if self._publisher is None:
            return "the layout of the weights"
        if self._begun and not self._collecting:
            return ""
        if self._again or not self._work:
            return "a batch from the manager"
        match self._work[0]:
            case Train() as train if self._scores(train.minibatches) and not self._is_whole(train):
                return f"the other mini-batches of step {train.step} from the manager"
            case Train(step=step, minibatch=minibatch):
                return f"the payload of mini-batch {minibatch} of step {step} from the store"
            case Publish(version=version):
                assert self._publisher is not None
                return self._publisher.waiting_for(version)
            case Checkpoint(step=step):
                return f"the end of what comes before the checkpoint of step {step}"

    def phase(self, busy: bool) -> str:
        """Of start, train, repeat, publish, wait: where its worker's time goes."""
        if self._publisher is None or not self._worker_up:
            return "start"
        if not self._begun or self._collecting:
            return "wait"
        if isinstance(self._begun[0].work, WriteWeights):
            return "publish"
        return "repeat" if self._begun[0].told else "train"

    def longest_nap_s(self) -> float:
        """Short while parts of chunks are under way."""
        return TRANSFER_NAP_S if self._publisher is not None and self._publisher.busy else LONGEST_NAP_S

    def channels(self) -> list[Channel]:
        """The worker's."""
        return [self._worker.channel] if self._worker is not None else []

    def close(self) -> None:
        """End the worker and give the published weights' memory back."""
        self._end_worker()
        if self._publisher is not None:
            self._publisher.close()
        if self._transport is not None:
            self._transport.close()

    @property
    def _collecting(self) -> bool:
        """Whether the worker waits for the rest of a step that it scores before it trains on any of it."""
        last = self._begun[-1].work if self._begun else None
        return isinstance(last, TrainOn) and last.minibatch + 1 < last.minibatches and self._scores(last.minibatches)

    def _scores(self, minibatches: int) -> bool:
        """Whether the worker scores a step of so many mini-batches, all of it, before it trains on any."""
        config = self._rank.config.trainer
        return needs_proximal(config, minibatches) or needs_reference(config)

    def _is_whole(self, train: Train) -> bool:
        """Whether all mini-batches of the step have been asked for; they may come as their groups are generated."""
        given = sum(isinstance(work, Train) and work.step == train.step for work in self._work)
        return train.minibatch + given == train.minibatches

    def _require_publisher(self) -> Publisher:
        if self._publisher is None:
            raise ProtocolError(f"{self._rank.name}: asked for weights before the model was loaded")
        return self._publisher

    def _tell_worker(self, message: AnyRecord) -> None:
        """Where the worker has just ended, the next look at it finds out, with its last words."""
        if self._worker is not None:
            with contextlib.suppress(ChannelClosed):
                self._worker.send(message)

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

    def _begin_next(self, now: float) -> bool:
        """Give the worker the next thing to do, if it is its time; whether anything was given."""
        if not self._worker_up or self._publisher is None or not (self._again or self._work):
            return False
        work = self._again[0].work if self._again else self._work[0]
        if self._begun and not _same_step(self._begun[0].work, work):
            return False
        if isinstance(
            work, Checkpoint
        ):  # nothing waits for its end: the worker copies its state before what comes next
            self._journal.save(work.step, work.committed)
            self._tell_worker(SaveState(work.step, work.serial, work.directory))
            self._work.popleft()
            return True
        if self._again:
            asked = self._again.popleft()
        else:
            request = self._request(work, self._publisher, now)
            if request is None:
                return False
            self._work.popleft()
            asked = self._journal.ask(request)
        if not self._begun:
            self._heard_s = now
        self._begun.append(asked)
        self._tell_worker(asked.work)
        return True

    def _request(self, work: AnyRecord, publisher: Publisher, now: float) -> TrainOn | WriteWeights | None:
        """What the worker is told; None while the payload is not there, or no memory to write to."""
        if isinstance(work, Publish):
            request = publisher.begin(work.version, now)
            if request is not None:
                self._version = work.version
            return request
        assert isinstance(work, Train), type(work).__name__
        if self._scores(work.minibatches) and not self._is_whole(work):
            return None  # the worker would wait for the rest
        blocks = self._payload.pop((work.step, work.minibatch), None)
        return None if blocks is None else self._train_on(work, blocks)

    def _train_on(self, work: Train, blocks: list[list[Block]]) -> TrainOn:
        own = self._own(work)
        version, self._version = self._version, None
        return TrainOn(
            step=work.step,
            minibatch=work.minibatch,
            minibatches=work.minibatches,
            trajectories=[sample.trajectory for sample in work.samples],
            groups=[sample.group for sample in work.samples],
            rewards=[sample.reward for sample in work.samples],
            own=_trajectories(own),
            blocks=blocks,
            lengths=[sample.tokens for sample in own] if self._rank.config.timing_only else [],
            version=version,
        )

    # --- the worker's process ---------------------------------------------------------------------------------------

    def _start_worker(self, resume: Resume | None, now: float) -> None:
        rank = self._rank
        self._next_start, self._heard_s = None, now
        self._worker = Worker("trainer", trainer_worker.main, rank.log_path("worker"))
        config, saves = rank.config.model_dump_json().encode(), rank.settings.checkpoint_every is not None
        self._tell_worker(StartTrainer(config, rank.me.index, len(self._trainers), resume, saves))
        self._pass_meeting_on()

    def _pass_meeting_on(self) -> None:
        """Tell the worker where the workers meet, if that is known for this one."""
        if self._worker is not None and self._meeting is not None and self._meeting.worker == self._starts:
            self._tell_worker(self._meeting)
            self._meeting = None

    def _restart(self, command: RestartTrainers, now: float) -> None:
        """Another worker does again what this one had done since the checkpoint that it begins with."""
        self._end_worker()
        self._starts = command.worker
        resume = None if command.step is None else Resume(command.directory, command.step)
        self._again = deque(self._journal.since(command.step))
        self._work = deque(work for work in self._work if not isinstance(work, Checkpoint))  # given up with the worker
        self._next_start = _Start(now + command.delay_s, resume)

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.kill()
        self._worker, self._worker_up = None, False
        self._begun.clear()

    def _lost_worker(self, reason: str, final: bool = False) -> None:
        """The manager decides what follows; where the first worker never came up, the job ends."""
        reason = f"{reason}; see {self._rank.log_path('worker')}"
        if self._publisher is None and not self._starts:
            raise EngineError(reason)
        self._end_worker()
        self._rank.tell_manager(RankLost(self._rank.world.rank, self._starts, reason, final=final))

    def _hear_worker(self, now: float) -> bool:
        if self._worker is None:
            return False
        try:
            messages = self._worker.receive_all()
        except ChannelClosed:
            self._lost_worker("the trainer's worker has ended")
            return True
        for message in messages:
            if isinstance(message, WorkerError):
                self._lost_worker(f"the trainer's worker failed: {message.text}", message.final)
                return True
            self._hear(message)
        if messages:
            self._heard_s = now
        else:
            self._watch_worker(now)
        return bool(messages)

    def _watch_worker(self, now: float) -> None:
        """A worker that has something to do and says nothing for too long counts as lost."""
        job, silent_s = self._rank.config.job, now - self._heard_s
        if not self._worker_up:
            if self._starts and silent_s > job.start_timeout_s:
                self._lost_worker(f"the trainer's worker did not come up within {silent_s:.0f} s (job.start_timeout_s)")
        elif self._begun and not self._collecting and silent_s > self._rank.config.trainer.timeout_s:
            self._lost_worker(
                f"the trainer's worker has trained for {silent_s:.0f} s without an answer (trainer.timeout_s)"
            )

    def _hear(self, message: AnyRecord) -> None:
        match message:
            case TrainerUp():
                self._up(message)
            case Rendezvous():
                for other in self._trainers[1:]:
                    self._rank.mail.send(other, Rendezvous(message.host, message.port, self._starts))
            case TrainedOn():
                self._trained(message)
            case WeightsWritten():
                self._written(message)
            case StateSaved():
                self._saved(message)
            case _:
                raise ProtocolError(f"{self._rank.name}: unexpected {type(message).__name__} from its worker")

    def _up(self, message: TrainerUp) -> None:
        rank = self._rank
        self._worker_up = True
        if self._starts:
            return
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
        self._transport = build_transport(rank.config.weights.transport, rank.world)
        self._publisher = Publisher(
            self._transport, layout, rank.mail.send, slots=TRAINER_SLOTS, verify=verify, has_room=has_room
        )

    def _trained(self, message: TrainedOn) -> None:
        asked = self._begun.popleft()
        self._rank.note_pace(message.pace)
        if asked.told:
            self._rank.tell_manager(Repeated(self._rank.world.rank, 0, message.step, message.minibatch))
            return
        asked.told = True
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
        self._begun.popleft().told = True
        self._stall_s[message.version] = message.seconds
        self._require_publisher().written(message)

    def _saved(self, message: StateSaved) -> None:
        self._rank.tell_manager(
            StateWritten(
                rank=self._rank.world.rank,
                incarnation=0,
                step=message.step,
                serial=message.serial,
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


def _same_step(first: AnyRecord, second: AnyRecord) -> bool:
    """Whether both are mini-batches of one step."""
    return isinstance(first, TrainOn) and isinstance(second, Train | TrainOn) and first.step == second.step
