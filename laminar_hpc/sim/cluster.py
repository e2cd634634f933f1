"""All ranks of a job in virtual time, around the controller that the MPI job has: events to it, its commands to them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

from laminar_hpc.config.schema import Config
from laminar_hpc.control.controller import Controller
from laminar_hpc.control.settings import Settings
from laminar_hpc.errors import ProtocolError
from laminar_hpc.policy.balance import replica_of
from laminar_hpc.policy.roles import Placement, Role
from laminar_hpc.protocol.commands import (
    AnyCommand,
    Attach,
    Broadcast,
    Drop,
    EndJob,
    Generate,
    HandOver,
    Interrupt,
    Publish,
    Pull,
    Release,
    ReportEvaluation,
    ReportMove,
    ReportStep,
    Settle,
    Train,
)
from laminar_hpc.protocol.events import AnyEvent
from laminar_hpc.sim.costs import SimulatedCosts
from laminar_hpc.sim.kernel import Kernel
from laminar_hpc.sim.recording import PhaseClock, Recorder
from laminar_hpc.sim.relays import SimulatedRelays
from laminar_hpc.sim.rollout import Limits, SimulatedRollout
from laminar_hpc.sim.trainer import SimulatedTrainer

MANAGER = 0


class Cluster:
    """A job that has not started. Nothing fails in it, and there are no checkpoints."""

    def __init__(
        self,
        config: Config,
        settings: Settings,
        placements: list[Placement],
        kernel: Kernel,
        recorder: Recorder | None = None,
        watch: Callable[[AnyCommand], object] = lambda _command: None,
    ) -> None:
        """`watch` is shown every command."""
        self.controller = Controller(settings)
        self.ending: EndJob | None = None
        self._kernel = kernel
        self._recorder = recorder
        self._watch = watch
        self._placements = placements
        self._phases = PhaseClock(recorder, MANAGER, "work")
        costs = SimulatedCosts(config)
        repacks = settings.pipeline.repack and settings.repack.enabled
        limits = Limits(
            config.rollout.concurrency, config.rollout.slots, config.rollout.stream_interval_s, tells_progress=repacks
        )
        relays = {rank: placement.node for rank, placement in self._of(Role.RELAY)}
        trainer_nodes = {placement.node for _, placement in self._of(Role.TRAINER)}
        self._relays = SimulatedRelays(relays, trainer_nodes, costs, kernel, self._post, recorder)
        self._trainers = [
            SimulatedTrainer(
                rank,
                placement.index,
                replica_of(placement.index, config.trainer.tensor_parallel, config.replicas),
                costs,
                kernel,
                self._post,
                recorder,
            )
            for rank, placement in self._of(Role.TRAINER)
        ]
        self._rollouts = {
            rank: SimulatedRollout(rank, limits, costs, kernel, self._post, self._relays.held, recorder)
            for rank, _ in self._of(Role.ROLLOUT)
        }

    def start(self) -> None:
        """All ranks report."""
        self._relays.report()
        for trainer in self._trainers:
            trainer.report()
        for rank, placement in self._of(Role.ROLLOUT):
            assert placement.relay_rank is not None
            self._rollouts[rank].report(placement.node, placement.relay_rank)

    def _of(self, role: Role) -> list[tuple[int, Placement]]:
        return [(rank, placement) for rank, placement in enumerate(self._placements) if placement.role is role]

    def _post(self, event: AnyEvent) -> None:
        """A rank tells the manager."""
        sender = getattr(event, "rank", MANAGER)
        self._kernel.send(("to manager", sender), lambda: self._decide(event))

    def _decide(self, event: AnyEvent) -> None:
        if self.ending is not None:
            return
        now = self._kernel.now
        if self._recorder is not None:
            self._recorder.event(event, now)
        commands = cast(list[AnyCommand], self.controller.handle(event, now))
        if self._recorder is not None:
            self._recorder.commands(commands, now)
        for command in commands:
            self._watch(command)
            self._carry_out(command)

    def _carry_out(self, command: AnyCommand) -> None:
        match command:
            case Generate() | HandOver() | Interrupt() | Pull() | Attach():
                rollout = self._rollouts[command.rank]
                self._kernel.send(rollout.rank, lambda: rollout.obey(command))
            case Train() | Publish():
                for trainer in self._trainers:
                    self._kernel.send(trainer.rank, partial(trainer.obey, command))
            case Broadcast() | Drop():
                self._kernel.send("relays", lambda: self._relays.obey(command))
            case EndJob():
                self._end(command)
            case Release() | Settle() | ReportStep() | ReportMove() | ReportEvaluation():
                pass  # for memory that nobody has here, and for the record
            case _:
                raise ProtocolError(f"the simulator has no {type(command).__name__}: nothing fails in it")

    def _end(self, command: EndJob) -> None:
        self.ending = command
        self._kernel.stop()
        self._relays.close()
        for trainer in self._trainers:
            trainer.close()
        for rollout in self._rollouts.values():
            rollout.close()
        self._phases.tell(self._kernel.now)
        if self._recorder is not None:
            self._recorder.ended(command, self._kernel.now)
