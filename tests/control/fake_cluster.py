"""All ranks of a job as a list of moves that they could make now: each move is an event for the controller.

The ranks honour the protocol as real ones do (a trainer works in order, a relay waits for the one before it, a rollout
loads what its relay holds), and which of them moves next is the caller's choice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random

import msgspec

from laminar_hpc.control.controller import Controller, Settings
from laminar_hpc.policy.balance import replica_of
from laminar_hpc.protocol.commands import Broadcast, Command, Generate, Publish, Pull, Train
from laminar_hpc.protocol.events import (
    CameFromTool,
    Event,
    Finished,
    Loaded,
    Progress,
    Published,
    RankLost,
    RelayHolds,
    RelayReady,
    RolloutReady,
    Streamed,
    Trained,
    TrainerReady,
    WentToTool,
)
from laminar_hpc.protocol.trajectory import Stop, TrajectorySpec, Verdict

CHUNKS = 3
Move = Callable[[], Event]


class TrainerRank(msgspec.Struct, eq=False):
    rank: int
    index: int
    ready: bool = False
    queue: deque[Train | Publish] = msgspec.field(default_factory=deque)


class RelayRank(msgspec.Struct, eq=False):
    rank: int
    ready: bool = False
    queue: deque[Broadcast] = msgspec.field(default_factory=deque)
    held: list[int] = []


class Task(msgspec.Struct, eq=False):
    spec: TrajectorySpec
    version: int
    tokens: int
    at_tool: bool = False


class RolloutRank(msgspec.Struct, eq=False):
    rank: int
    relay: RelayRank
    concurrency: int
    incarnation: int = 0
    ready: bool = False
    loading: bool = False
    tasks: dict[int, Task] = {}


class FakeCluster:
    """Ranks of a job around one controller; `failing` is the share of responses whose grading fails."""

    def __init__(self, settings: Settings, random: Random, *, concurrency: int = 8, failing: float = 0.0) -> None:
        self.settings = settings
        self.random = random
        self.failing = failing
        self.controller = Controller(settings)
        self.now = 0.0
        self.events: list[tuple[float, Event]] = []
        self.commands: list[list[Command]] = []
        first_relay = 1 + settings.trainers
        first_rollout = first_relay + settings.relays
        self.trainers = [TrainerRank(1 + index, index) for index in range(settings.trainers)]
        self.relays = [RelayRank(rank) for rank in range(first_relay, first_rollout)]
        self.rollouts = [
            RolloutRank(first_rollout + place, self.relays[place % settings.relays], concurrency)
            for place in range(settings.rollouts)
        ]
        self._by_rank = {one.rank: one for one in self.rollouts}
        self.ghosts: list[Event] = []

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
            case Train() | Publish():
                for trainer in self.trainers:
                    trainer.queue.append(command)
            case Broadcast():
                for relay in self.relays:
                    relay.queue.append(command)
            case Pull():
                rollout = self._by_rank[command.rank]
                if rollout.incarnation == command.incarnation:
                    rollout.loading = True
            case Generate():
                rollout = self._by_rank[command.rank]
                if rollout.incarnation == command.incarnation:
                    for spec in command.trajectories:
                        rollout.tasks[spec.id] = Task(spec, command.version, spec.resume_tokens)
            case _:
                pass

    # --- what ranks can do ------------------------------------------------------------------------------------------

    def moves(self) -> list[Move]:
        """Everything that brings the job forward, in a fixed order; empty when all ranks wait."""
        moves: list[Move] = []
        for trainer in self.trainers:
            if not trainer.ready or trainer.queue:
                moves.append(lambda trainer=trainer: self._trainer(trainer))
        for place, relay in enumerate(self.relays):
            before = self.relays[place - 1].held if place else None
            if not relay.ready or (relay.queue and (before is None or relay.queue[0].version in before)):
                moves.append(lambda relay=relay: self._relay(relay))
        for rollout in self.rollouts:
            if not rollout.ready:
                moves.append(lambda rollout=rollout: self.come(rollout))
            elif rollout.loading:
                moves.append(lambda rollout=rollout: self._load(rollout))
            moves += [lambda rollout=rollout, task=task: self.finish(rollout, task) for task in rollout.tasks.values()]
        return moves

    def _trainer(self, trainer: TrainerRank) -> Event:
        if not trainer.ready:
            trainer.ready = True
            return TrainerReady(trainer.rank, 0, trainer.index)
        command = trainer.queue.popleft()
        if isinstance(command, Publish):
            share = bytes([command.version % 256, trainer.index]) * 4 * CHUNKS
            return Published(trainer.rank, 0, command.version, trainer.index * CHUNKS, share, 0.25)
        settings = self.settings
        replicas = settings.replicas or settings.trainers
        own = replica_of(trainer.index, settings.trainers // replicas, replicas)
        tokens = sum(sample.tokens for sample in command.samples if sample.replica == own)
        metrics = {"loss": float(command.step), "minibatch": float(command.minibatch)}
        return Trained(trainer.rank, 0, command.step, command.minibatch, tokens, 2.0, metrics)

    def _relay(self, relay: RelayRank) -> Event:
        if not relay.ready:
            relay.ready = True
            return RelayReady(relay.rank, 0, f"node{relay.rank}")
        version = relay.queue.popleft().version
        relay.held.append(version)
        return RelayHolds(relay.rank, 0, version, 0.1)

    def come(self, rollout: RolloutRank) -> Event:
        """A rollout reports."""
        rollout.ready = True
        return RolloutReady(
            rollout.rank, rollout.incarnation, f"node{rollout.relay.rank}", rollout.relay.rank, rollout.concurrency
        )

    def _load(self, rollout: RolloutRank) -> Event:
        rollout.loading = False
        return Loaded(rollout.rank, rollout.incarnation, max(rollout.relay.held), b"", 0.0, 0.1)

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

    # --- what else may happen ---------------------------------------------------------------------------------------

    def stream(self, rollout: RolloutRank) -> Event:
        """A rollout streams some of its trajectories."""
        progress = []
        for task in rollout.tasks.values():
            if self.random.random() < 0.5:
                task.tokens += self.random.randint(1, 4)
                progress.append(Progress(task.spec.id, task.tokens))
        return Streamed(rollout.rank, rollout.incarnation, progress, 0.5, len(rollout.tasks), 0)

    def use_tool(self, rollout: RolloutRank, task: Task) -> Event:
        """A trajectory goes to its tool, or comes from it."""
        task.at_tool = not task.at_tool
        kind = WentToTool if task.at_tool else CameFromTool
        return kind(rollout.rank, rollout.incarnation, task.spec.id)

    def crash(self, rollout: RolloutRank) -> RankLost:
        """A rollout is lost; what it was about to say may still arrive."""
        lost = RankLost(rollout.rank, rollout.incarnation, "killed")
        self.ghosts += [self._finished(rollout, task) for task in rollout.tasks.values()]
        if rollout.loading:
            self.ghosts.append(self._load(rollout))
        if rollout.tasks:
            self.ghosts.append(self.stream(rollout))
        rollout.ready = rollout.loading = False
        rollout.tasks = {}
        rollout.incarnation += 1
        return lost
