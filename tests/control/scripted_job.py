"""A job whose every event a test writes down itself: rank 1 is the trainer, 2 the relay, 3 and up the rollouts."""

from __future__ import annotations

from typing import Any, TypeVar

from laminar_hpc.control.controller import Controller, Settings
from laminar_hpc.protocol.commands import Command, Generate
from laminar_hpc.protocol.events import (
    Event,
    Finished,
    HandedOver,
    Loaded,
    Progress,
    Published,
    PullRefused,
    RankLost,
    RelayHolds,
    RelayReady,
    RolloutReady,
    Streamed,
    Trained,
    TrainerReady,
)
from laminar_hpc.protocol.trajectory import Stop, Verdict

TRAINER, RELAY, A, B = 1, 2, 3, 4
DIGESTS = b"digests."

AnyCommand = TypeVar("AnyCommand", bound=Command)


def only(commands: list[Command], kind: type[AnyCommand]) -> list[AnyCommand]:
    """The commands of one kind."""
    return [command for command in commands if isinstance(command, kind)]


def kinds(commands: list[Command]) -> list[str]:
    """The names of the commands, in order."""
    return [type(command).__name__ for command in commands]


def ids(generate: Generate) -> list[int]:
    return [spec.id for spec in generate.trajectories]


class ScriptedJob:
    """A controller with a clock that a test moves, and one method for each thing that a rank says."""

    def __init__(self, concurrency: int = 4, kv_capacity_tokens: int = 0, **changes: Any) -> None:
        """One trainer, one relay, two rollouts; steps of two groups of two, unless `changes` says otherwise."""
        fields = {
            "mode": "laminar",
            "steps": 3,
            "prompts": 2,
            "group_size": 2,
            "train_prompts": 50,
            "trainers": 1,
            "relays": 1,
            "rollouts": 2,
            **changes,
        }
        self.settings = Settings(**fields)
        self.controller = Controller(self.settings)
        self.concurrency = concurrency
        self.kv_capacity_tokens = kv_capacity_tokens
        self.now = 0.0
        self.incarnation = dict.fromkeys(range(3, 3 + self.settings.rollouts), 0)

    def tell(self, event: Event) -> list[Command]:
        return self.controller.handle(event, self.now)

    def ranks_report(self) -> list[Command]:
        """Trainer, relay and rollouts report, in this order."""
        commands = self.tell(TrainerReady(TRAINER, 0, 0))
        commands += self.tell(RelayReady(RELAY, 0, "x"))
        for rank in self.incarnation:
            commands += self.ready(rank)
        return commands

    def start(self) -> dict[int, list[Generate]]:
        """All ranks report and every rollout loads version 0, in rank order; what each was given to generate then."""
        self.ranks_report()
        self.spread(0)
        return {rank: only(self.loaded(rank, 0), Generate) for rank in self.incarnation}

    def ready(self, rank: int) -> list[Command]:
        return self.tell(
            RolloutReady(rank, self.incarnation[rank], "x", RELAY, self.concurrency, self.kv_capacity_tokens)
        )

    def spread(self, version: int) -> list[Command]:
        """The trainer publishes a version and the relay gets it."""
        commands = self.published(version)
        return commands + self.relay_holds(version)

    def published(self, version: int) -> list[Command]:
        return self.tell(Published(TRAINER, 0, version, DIGESTS, 0.1))

    def relay_holds(self, version: int) -> list[Command]:
        return self.tell(RelayHolds(RELAY, 0, version, 0.1, b"image 8."))

    def loaded(self, rank: int, version: int) -> list[Command]:
        return self.tell(Loaded(rank, self.incarnation[rank], version, b"", 0.0, 0.1))

    def finish(
        self,
        rank: int,
        trajectory: int,
        version: int,
        verdict: Verdict = Verdict.GRADED,
        reward: float = 1.0,
        tokens: int = 10,
        score: float | None = None,
    ) -> list[Command]:
        stop, incarnation = Stop.END_TOKEN, self.incarnation[rank]
        return self.tell(Finished(rank, incarnation, trajectory, version, 5, tokens, stop, verdict, reward, score))

    def finish_all(self, rank: int, generate: Generate) -> list[Command]:
        """All trajectories of a command finish, in order."""
        commands = []
        for spec in generate.trajectories:
            commands += self.finish(rank, spec.id, generate.version)
        return commands

    def trained(self, step: int, minibatch: int = 0) -> list[Command]:
        return self.tell(Trained(TRAINER, 0, step, minibatch, 100, 2.0, {"loss": 0.5}))

    def train_and_spread(self, step: int) -> list[Command]:
        """The trainer does a step of one mini-batch and its version reaches the relay."""
        commands = self.trained(step)
        return commands + self.spread(step)

    def streamed(
        self, rank: int, *progress: tuple[int, int], kv_use: float = 0.5, running: int | None = None, waiting: int = 0
    ) -> list[Command]:
        items = [Progress(trajectory, tokens) for trajectory, tokens in progress]
        count = len(items) if running is None else running
        return self.tell(Streamed(rank, self.incarnation[rank], items, kv_use, count, waiting))

    def handed_over(self, rank: int, move: int, *progress: tuple[int, int]) -> list[Command]:
        items = [Progress(trajectory, tokens) for trajectory, tokens in progress]
        return self.tell(HandedOver(rank, self.incarnation[rank], move, items))

    def refused(self, rank: int, version: int) -> list[Command]:
        return self.tell(PullRefused(rank, self.incarnation[rank], version))

    def lose(self, rank: int, role: str = "") -> list[Command]:
        """The rollout's engine is lost, or its rank; what this job says for it from now on is of its next incarnation."""
        commands = self.tell(RankLost(rank, self.incarnation[rank], "killed", role))
        self.incarnation[rank] += 1
        return commands
