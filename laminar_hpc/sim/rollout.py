"""A rollout in virtual time: the emulated engine of the paced rollouts, woken only when something changes in it.

    Pull -> loads -> Loaded
    Generate -> Streamed (now and then, and with each end) ... Finished (each)
    HandOver -> Streamed, HandedOver
    Interrupt -> Streamed, Interrupted

Prompts, grading and messages take no time here.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from laminar_hpc.policy.batching import Batch, EndedAt
from laminar_hpc.protocol.commands import Attach, Generate, HandOver, Interrupt, Pull
from laminar_hpc.protocol.events import (
    AnyEvent,
    Finished,
    HandedOver,
    Interrupted,
    Loaded,
    Progress,
    RolloutReady,
    Streamed,
)
from laminar_hpc.protocol.trajectory import TrajectorySpec, Verdict
from laminar_hpc.sim.costs import SimulatedCosts
from laminar_hpc.sim.kernel import Kernel, Timer
from laminar_hpc.sim.recording import PhaseClock, Recorder

INCARNATION = 0

AGAIN_S = 1e-6
"""After how long an engine is looked at again where rounding has kept a step from its end."""


class Limits(msgspec.Struct, frozen=True):
    """What a rollout is told of the config; `tells_progress`: somebody wants to know how far each trajectory has come."""

    concurrency: int
    slots: int
    stream_interval_s: float
    tells_progress: bool


class _Active(msgspec.Struct, eq=False):
    """A trajectory in the engine: its response will have `length` tokens, `told` of which the manager knows."""

    spec: TrajectorySpec
    version: int
    prompt_tokens: int
    length: int
    told: int


class SimulatedRollout:
    """One replica."""

    def __init__(
        self,
        rank: int,
        limits: Limits,
        costs: SimulatedCosts,
        kernel: Kernel,
        tell: Callable[[AnyEvent], None],
        held_by: Callable[[int], int],
        recorder: Recorder | None,
    ) -> None:
        """`tell` reaches the manager; `held_by(relay)` is the newest version that a relay holds."""
        self.rank = rank
        self._limits = limits
        self._costs = costs
        self._kernel = kernel
        self._tell = tell
        self._held_by = held_by
        self._recorder = recorder
        self._phases = PhaseClock(recorder, rank, "start")
        self._batch = Batch(costs.engine, costs.engine.kv_cache_tokens, limits.slots)
        self._active: dict[int, _Active] = {}
        self._relay = -1
        self._loading = False
        self._tell_s = 0.0
        self._wake: Timer | None = None
        self._row_s = 0.0
        self._row_tokens = 0

    def report(self, node: str, relay: int) -> None:
        """The engine is up, on `node`, and pulls from `relay`."""
        self._relay = relay
        self._phases.enter("idle", self._kernel.now)
        self._tell(
            RolloutReady(
                rank=self.rank,
                incarnation=INCARNATION,
                node=node,
                relay=relay,
                concurrency=self._limits.concurrency,
                kv_capacity_tokens=self._costs.engine.kv_cache_tokens,
            )
        )

    def obey(self, command: Generate | HandOver | Interrupt | Pull | Attach) -> None:
        """What the manager asks for."""
        match command:
            case Generate():
                self._generate(command)
            case HandOver():
                progress = self._give_up(command.trajectories)
                self._tell(HandedOver(self.rank, INCARNATION, command.move, progress))
            case Interrupt():
                self._tell(Interrupted(self.rank, INCARNATION, self._give_up(list(self._active))))
            case Pull():
                self._pull()
            case Attach():
                self._relay = command.relay

    def close(self) -> None:
        """The job is over."""
        self._phases.tell(self._kernel.now)

    # --- weights ----------------------------------------------------------------------------------------------------

    def _pull(self) -> None:
        assert not self._active, f"rollout {self.rank} is to load weights while it generates"
        if self._loading:
            return  # the controller asks again where the relay is another one; this load goes on
        self._loading = True
        version = self._held_by(self._relay)
        self._phases.enter("pull", self._kernel.now)
        self._kernel.at(self._kernel.now + self._costs.load_s, lambda: self._loaded(version))

    def _loaded(self, version: int) -> None:
        now, load_s = self._kernel.now, self._costs.load_s
        self._loading = False
        self._phases.enter("idle", now)
        if self._recorder is not None:
            self._recorder.add(
                self.rank, "pulls", version=version, time_s=now, wait_s=0.0, copy_s=0.0, pause_s=load_s, digest=0
            )
        self._tell(Loaded(self.rank, INCARNATION, version, b"", 0.0, load_s))

    # --- trajectories -----------------------------------------------------------------------------------------------

    @property
    def _now_s(self) -> float:
        """Now, in the engine's time."""
        return self._kernel.now / self._costs.scale

    def _generate(self, command: Generate) -> None:
        now = self._kernel.now
        self._end(self._batch.advance(self._now_s))
        if not self._active:
            self._tell_s = now + self._limits.stream_interval_s
            self._row_s = now
            self._phases.enter("generate", now)
        complete = []
        for spec in command.trajectories:
            prompt, length = self._costs.prompt_tokens(spec), self._costs.response_tokens(spec)
            active = _Active(spec, command.version, prompt, length, spec.resume_tokens)
            if spec.resume_tokens >= length:
                complete.append(active)
                continue
            self._active[spec.id] = active
            self._batch.add(spec.id, prompt + spec.resume_tokens, length - spec.resume_tokens, self._now_s)
        self._end(self._batch.advance(self._now_s))
        for active in complete:
            self._finish(active)
        self._rest()

    def _give_up(self, trajectories: list[int]) -> list[Progress]:
        """What has ended by now stays, all else of these is given up, with all its tokens."""
        self._end(self._batch.advance(self._now_s))
        given = [id for id in trajectories if id in self._active]
        progress = [Progress(id, self._generated(self._active[id])) for id in given]
        self._stream(self._news())
        for id in given:
            del self._active[id]
            self._batch.remove(id)
        self._rest()
        return progress

    def _turn(self) -> None:
        """Something is due: an end, another change of the batch, or a word on how far everybody is."""
        self._wake = None
        ended = self._batch.advance(self._now_s)
        self._end(ended)
        if self._kernel.now >= self._tell_s:
            self._tell_s = self._kernel.now + self._limits.stream_interval_s
            if self._active:
                self._stream(self._news())
        self._rest()

    def _rest(self) -> None:
        """Until the next change."""
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        if not self._active:
            if not self._loading:
                self._phases.enter("idle", self._kernel.now)
            return
        due_s = self._batch.due_s * self._costs.scale
        if due_s <= self._kernel.now:
            due_s = self._kernel.now + AGAIN_S
        self._wake = self._kernel.at(min(due_s, self._tell_s), self._turn)

    def _generated(self, active: _Active) -> int:
        return active.length - self._batch.left_tokens(active.spec.id)

    def _news(self) -> list[Progress]:
        """How far all have come, since they last told. Nobody asks while some still wait in the engine: no tail has begun."""
        if not self._limits.tells_progress or self._batch.waiting:
            return []
        progress = []
        for id, left in self._batch.lefts():
            active = self._active[id]
            generated = active.length - left
            if generated > active.told:
                active.told = generated
                progress.append(Progress(id, generated))
        return progress

    def _end(self, ended: list[EndedAt]) -> None:
        if not ended:
            return
        actives = [self._active.pop(end.trajectory) for end in ended]
        self._stream([Progress(active.spec.id, active.length) for active in actives])
        for active in actives:
            self._finish(active)

    def _stream(self, progress: list[Progress]) -> None:
        batch, now = self._batch, self._kernel.now
        kv_use = batch.used_tokens / self._costs.engine.kv_cache_tokens
        self._tell(Streamed(self.rank, INCARNATION, progress, kv_use, batch.running, batch.waiting))
        if self._recorder is not None:
            tokens, self._row_tokens = batch.generated_tokens - self._row_tokens, batch.generated_tokens
            busy_s, self._row_s = now - self._row_s, now
            self._recorder.add(
                self.rank,
                "engine",
                time_s=now,
                kv_use=kv_use,
                running=batch.running,
                waiting=batch.waiting,
                generated_tokens=tokens,
                busy_s=busy_s,
            )

    def _finish(self, active: _Active) -> None:
        self._tell(
            Finished(
                rank=self.rank,
                incarnation=INCARNATION,
                trajectory=active.spec.id,
                version=active.version,
                prompt_tokens=active.prompt_tokens,
                response_tokens=active.length,
                stop=self._costs.stop(active.length),
                verdict=Verdict.GRADED,
                reward=self._costs.reward(active.length),
            )
        )
