"""All ranks of a job as a list of moves that they could make now: each move is an event for the controller.

The ranks honour the protocol as real ones do (a trainer works in order, relays are those of fake_relays.py, a rollout loads
what the relay that it is attached to holds), and which of them moves next is the caller's choice.
"""

from __future__ import annotations

from collections import deque
from random import Random

import msgspec
from fake_relays import CHUNKS, FakeRelays, Move

from laminar_hpc.control.controller import Controller, Settings
from laminar_hpc.control.snapshot import Snapshot
from laminar_hpc.policy.balance import replica_of
from laminar_hpc.protocol.commands import (
    Abandon,
    Attach,
    Checkpoint,
    Command,
    Commit,
    Generate,
    HandOver,
    Interrupt,
    Publish,
    Pull,
    Release,
    RestartTrainers,
    Train,
)
from laminar_hpc.protocol.events import (
    CameFromTool,
    Committed,
    Event,
    Finished,
    HandedOver,
    Interrupted,
    Loaded,
    Progress,
    Published,
    PullRefused,
    RankLost,
    RolloutReady,
    SnapshotWritten,
    StateWritten,
    Streamed,
    Trained,
    TrainerReady,
    WentToTool,
)
from laminar_hpc.protocol.trajectory import Stop, TrajectorySpec, Verdict

KV_CAPACITY_TOKENS = 200
"""Of each rollout's engine: room for ten to twenty of the trajectories here."""


class TrainerRank(msgspec.Struct, eq=False):
    rank: int
    index: int
    ready: bool = False
    queue: deque[Train | Publish | Checkpoint] = msgspec.field(default_factory=deque)
    kept: set[int] = set()


class Task(msgspec.Struct, eq=False):
    spec: TrajectorySpec
    version: int
    tokens: int
    at_tool: bool = False


class RolloutRank(msgspec.Struct, eq=False):
    """`wanted` is what the last `Pull` named, until it is here; `lent` is lent by the relay and `copied` from its node.

    An `Attach` ends a `Pull`, but not the load of what is in this node's memory already. A `Pull` for what is here needs
    nothing, and one that comes in the middle of a load waits for its end.
    """

    rank: int
    node: str
    relay: int
    concurrency: int
    incarnation: int = 0
    ready: bool = False
    gone: bool = False
    version: int = -1
    wanted: int | None = None
    exactly: bool = False
    lent: int | None = None
    copied: bool = False
    tasks: dict[int, Task] = {}
    asked: deque[HandOver | Interrupt] = msgspec.field(default_factory=deque)

    def attach(self, relay: int) -> None:
        self.relay, self.wanted = relay, None
        if not self.copied:
            self.lent = None

    def pull(self, version: int, exactly: bool) -> None:
        if version > self.version:
            self.wanted, self.exactly = version, exactly

    def loaded(self) -> int:
        """What has been lent is in the engine."""
        assert self.lent is not None
        assert self.lent > self.version, "versions never go back"
        self.version, self.lent, self.copied = self.lent, None, False
        if self.wanted is not None and self.wanted <= self.version:
            self.wanted = None
        return self.version


class FakeCluster:
    """Ranks of a job around one controller; `failing` is the share of responses whose grading fails.

    `books` has what the controller said of itself when a checkpoint was asked for, by serial, and `committed` what of that
    would be found by another attempt; `full_disk` is the share of parts that cannot be written.
    """

    def __init__(
        self, settings: Settings, random: Random, *, concurrency: int = 8, failing: float = 0.0, spares: int = 0
    ) -> None:
        self.settings = settings
        self.random = random
        self.failing = failing
        self.controller = Controller(settings)
        self.now = 0.0
        self.events: list[tuple[float, Event]] = []
        self.commands: list[list[Command]] = []
        first_relay = 1 + settings.trainers
        first_rollout = first_relay + settings.relays * (1 + spares)
        self.trainers = [TrainerRank(1 + index, index) for index in range(settings.trainers)]
        self.relays = FakeRelays(random, self._kept, first_relay, settings.relays, spares)
        homes = [self.relays.all[place % settings.relays] for place in range(settings.rollouts)]
        self.rollouts = [
            RolloutRank(first_rollout + place, home.node, home.rank, concurrency) for place, home in enumerate(homes)
        ]
        self._by_rank = {one.rank: one for one in self.rollouts}
        self.ghosts: list[Event] = []
        self.full_disk = 0.0
        self.books: dict[int, bytes] = {}
        self.committed: bytes | None = None
        self.worker = 0
        self._to_write: deque[Checkpoint | Commit] = deque()

    def _kept(self, version: int) -> bool:
        return all(version in trainer.kept for trainer in self.trainers)

    def send(self, event: Event) -> list[Command]:
        """Hand one event to the controller, and its commands to the ranks."""
        self.now += 0.5
        commands = self.controller.handle(event, self.now)
        self.events.append((self.now, event))
        self.commands.append(commands)
        for command in commands:
            self._obey(command)
        return commands

    def _obey(self, command: Command) -> None:
        match command:
            case Checkpoint():
                self.books[command.serial] = self.controller.snapshot()[0]
                self._to_write.append(command)
                for trainer in self.trainers:
                    trainer.queue.append(command)
            case Commit():
                self._to_write.append(command)
            case Abandon():
                del self.books[command.serial]
            case RestartTrainers():
                self.worker = command.worker
                for trainer in self.trainers:
                    for given_up in [each for each in trainer.queue if isinstance(each, Checkpoint)]:
                        trainer.queue.remove(given_up)
                        self.ghosts.append(self._state_written(trainer, given_up))
                saved = None if self.committed is None else msgspec.msgpack.decode(self.committed, type=Snapshot).step
                assert command.step == saved, "the newest checkpoint is what they begin with"
            case Train() | Publish():
                for trainer in self.trainers:
                    trainer.queue.append(command)
            case Release():
                for trainer in self.trainers:
                    trainer.kept.remove(command.version)
            case Attach():
                self._by_rank[command.rank].attach(command.relay)
            case Pull():
                rollout = self._by_rank[command.rank]
                if rollout.incarnation == command.incarnation:
                    rollout.pull(command.version, command.exactly)
            case HandOver() | Interrupt():
                rollout = self._by_rank[command.rank]
                if rollout.incarnation == command.incarnation:
                    rollout.asked.append(command)
            case Generate():
                rollout = self._by_rank[command.rank]
                if rollout.incarnation == command.incarnation:
                    for spec in command.trajectories:
                        rollout.tasks[spec.id] = Task(spec, command.version, spec.resume_tokens)
            case _:
                self.relays.obey(command)

    # --- what ranks can do ------------------------------------------------------------------------------------------

    def moves(self) -> list[Move]:
        """Everything that brings the job forward, in a fixed order; empty when all ranks wait."""
        moves: list[Move] = []
        for trainer in self.trainers:
            if not trainer.ready or trainer.queue:
                moves.append(lambda trainer=trainer: self._trainer(trainer))
        if self._to_write:
            moves.append(self._write)
        moves += self.relays.moves()
        for rollout in self.rollouts:
            if rollout.gone:
                continue
            if not rollout.ready:
                moves.append(lambda rollout=rollout: self.come(rollout))
            elif rollout.lent is not None or (rollout.wanted is not None and self._can_lend(rollout, rollout.wanted)):
                moves.append(lambda rollout=rollout: self._load(rollout))
            if rollout.asked:
                moves.append(lambda rollout=rollout: self._hand_over(rollout))
            moves += [lambda rollout=rollout, task=task: self.finish(rollout, task) for task in rollout.tasks.values()]
        return moves

    def _trainer(self, trainer: TrainerRank) -> Event:
        if not trainer.ready:
            trainer.ready = True
            return TrainerReady(trainer.rank, 0, trainer.index)
        command = trainer.queue.popleft()
        if isinstance(command, Checkpoint):
            return self._state_written(trainer, command)
        if isinstance(command, Publish):
            assert len(trainer.kept) <= 2, f"trainer {trainer.rank} has no slot for version {command.version}"
            trainer.kept.add(command.version)
            digests = bytes([command.version % 256, trainer.index]) * 4 * CHUNKS
            return Published(trainer.rank, 0, command.version, digests, 0.25)
        settings = self.settings
        replicas = settings.replicas or settings.trainers
        own = replica_of(trainer.index, settings.trainers // replicas, replicas)
        tokens = sum(sample.tokens for sample in command.samples if sample.replica == own)
        metrics = {"loss": float(command.step), "minibatch": float(command.minibatch)}
        return Trained(trainer.rank, 0, command.step, command.minibatch, tokens, 2.0, metrics)

    def _state_written(self, trainer: TrainerRank, command: Checkpoint) -> Event:
        return StateWritten(trainer.rank, 0, command.step, command.serial, 1.0, 100, self._disk())

    def _write(self) -> Event:
        """The manager's own files."""
        command = self._to_write.popleft()
        if isinstance(command, Checkpoint):
            return SnapshotWritten(command.step, command.serial, 1.0, 100, self._disk())
        error = self._disk()
        if not error:
            self.committed = self.books[command.serial]
        return Committed(command.step, command.serial, error)

    def _disk(self) -> str:
        return "No space left on device" if self.random.random() < self.full_disk else ""

    def come(self, rollout: RolloutRank) -> Event:
        """A rollout reports."""
        rollout.ready = True
        return RolloutReady(
            rollout.rank, rollout.incarnation, rollout.node, rollout.relay, rollout.concurrency, KV_CAPACITY_TOKENS
        )

    def _can_lend(self, rollout: RolloutRank, version: int) -> bool:
        relay = self.relays.by_rank[rollout.relay]
        if relay.process != "up" or relay.lost:
            return False
        return rollout.exactly or max(relay.held, default=-1) >= version

    def _load(self, rollout: RolloutRank) -> Event | None:
        """One of three things: the relay lends, a copy from another node ends, the engine has loaded."""
        relay = self.relays.by_rank[rollout.relay]
        if rollout.lent is None and rollout.exactly:
            wanted = rollout.wanted
            if wanted not in relay.held or self.random.random() < 0.3:  # its slot may have been needed
                rollout.wanted = None
                return PullRefused(rollout.rank, rollout.incarnation, wanted)
        if rollout.lent is None:
            rollout.lent = rollout.wanted if rollout.exactly else max(relay.held)
            rollout.copied = relay.node == rollout.node
            return None
        if not rollout.copied:
            rollout.copied = relay.process == "up"
            return None
        return Loaded(rollout.rank, rollout.incarnation, rollout.loaded(), b"", 0.0, 0.1)

    def finish(self, rollout: RolloutRank, task: Task) -> Event:
        """A trajectory ends."""
        del rollout.tasks[task.spec.id]
        return self._finished(rollout, task)

    def _finished(self, rollout: RolloutRank, task: Task) -> Event:
        verdict = Verdict.GRADED
        if self.random.random() < self.failing:
            verdict = self.random.choice([Verdict.RAISED, Verdict.DEADLINE])
        score, penalty = self.random.choice([0.0, 0.5, 1.0]), self.random.choice([0.0, 0.0, 0.5])
        return Finished(
            rollout.rank,
            rollout.incarnation,
            task.spec.id,
            task.version,
            5 + task.spec.prompt % 3,
            task.tokens + self.random.randint(1, 9),
            self.random.choice([Stop.END_TOKEN, Stop.LENGTH]),
            verdict,
            score - penalty,
            score if penalty else None,
        )

    def _hand_over(self, rollout: RolloutRank) -> Event:
        """It gives up what it was asked for, but for what has ended and is being graded."""
        command = rollout.asked.popleft()
        progress = []
        for id in command.trajectories if isinstance(command, HandOver) else list(rollout.tasks):
            if id in rollout.tasks and self.random.random() < 0.9:
                task = rollout.tasks.pop(id)
                progress.append(Progress(id, task.tokens + self.random.randint(0, 3)))
        if isinstance(command, Interrupt):
            return Interrupted(rollout.rank, rollout.incarnation, progress)
        return HandedOver(rollout.rank, rollout.incarnation, command.move, progress)

    # --- what else may happen ---------------------------------------------------------------------------------------

    def stream(self, rollout: RolloutRank) -> Event:
        """A rollout streams some of its trajectories."""
        progress = []
        for task in rollout.tasks.values():
            if self.random.random() < 0.5:
                task.tokens += self.random.randint(1, 4)
                progress.append(Progress(task.spec.id, task.tokens))
        used = sum(5 + task.tokens for task in rollout.tasks.values())
        waiting = self.random.choice([0, 0, 0, 1])
        kv_use = min(1.0, used / KV_CAPACITY_TOKENS)
        return Streamed(rollout.rank, rollout.incarnation, progress, kv_use, len(rollout.tasks), waiting)

    def use_tool(self, rollout: RolloutRank, task: Task) -> Event:
        """A trajectory goes to its tool, or comes from it."""
        task.at_tool = not task.at_tool
        kind = WentToTool if task.at_tool else CameFromTool
        return kind(rollout.rank, rollout.incarnation, task.spec.id)

    def unheard(self) -> list[RolloutRank]:
        """Rollouts that have never reported, if there is at least one other that is not gone."""
        there = [rollout for rollout in self.rollouts if not rollout.gone]
        return [one for one in there if not one.ready and one.incarnation == 0] if len(there) > 1 else []

    def lose_worker(self) -> RankLost | None:
        """A trainer's worker is lost, as often as is allowed: its rank hides that, but for what it says."""
        trainer = self.random.choice(self.trainers)
        if not trainer.ready or not self.settings.checkpoint_every or self.worker == self.settings.worker_restarts:
            return None
        return RankLost(trainer.rank, self.worker, "killed")

    def vanish(self, rollout: RolloutRank) -> RankLost:
        """A rollout's process ends before it has reported; a report may still be on its way."""
        self.ghosts.append(self.come(rollout))
        rollout.ready, rollout.gone = False, True
        return RankLost(rollout.rank, 0, "its process is gone", "rollout")

    def take_for_lost(self, rollout: RolloutRank) -> RankLost:
        """A rollout whose engine is on its way says nothing any more; it may speak again."""
        return RankLost(rollout.rank, rollout.incarnation - 1, "silent", "rollout")

    def crash(self, rollout: RolloutRank) -> RankLost:
        """A rollout's engine is lost, or its rank is taken for lost; what it was about to say may still arrive."""
        lost = RankLost(rollout.rank, rollout.incarnation, "killed", "rollout" if self.random.random() < 0.2 else "")
        self.ghosts += [self._finished(rollout, task) for task in rollout.tasks.values()]
        if rollout.lent is not None and rollout.copied:
            self.ghosts.append(Loaded(rollout.rank, rollout.incarnation, rollout.loaded(), b"", 0.0, 0.1))
        if rollout.asked:
            self.ghosts.append(self._hand_over(rollout))
        if rollout.tasks:
            self.ghosts.append(self.stream(rollout))
        rollout.ready = rollout.copied = False
        rollout.wanted = rollout.lent = None
        rollout.version = -1
        rollout.tasks = {}
        rollout.asked.clear()
        rollout.incarnation += 1
        return lost
