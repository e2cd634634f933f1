"""The rollout's loop: prompts in, responses out, each under one weight version.

The engine runs in a worker process, prompts and grading in another; this rank passes between them, the store and the
manager, and decides nothing. A trajectory's way: encode its prompt (or fetch what the store has of it) -> generate,
streaming what there is to the store -> grade -> finished; or, until its generation has ended, handed over to another rollout.
"""

from __future__ import annotations

import contextlib

from laminar_hpc.errors import EngineError, ProtocolError
from laminar_hpc.policy.restarts import WINDOW_S, RestartLimit
from laminar_hpc.process.channel import Channel, ChannelClosed
from laminar_hpc.process.worker import Worker
from laminar_hpc.protocol.commands import Attach, Generate, HandOver, Interrupt, Pull
from laminar_hpc.protocol.events import (
    Finished,
    HandedOver,
    Interrupted,
    Loaded,
    Progress,
    PullRefused,
    RankLost,
    RolloutReady,
    Streamed,
)
from laminar_hpc.protocol.peer import (
    AbortTrajectories,
    AddTrajectory,
    Append,
    ChunkGone,
    ChunkSent,
    EngineOutput,
    EngineUp,
    Fetch,
    Fetched,
    Layout,
    Lease,
    LeaseRefused,
    LoadWeights,
    Lost,
    StartEngine,
    StartOver,
    WeightsLoaded,
    WorkerError,
)
from laminar_hpc.protocol.trajectory import Block, Purpose, Source, Stop, TrajectorySpec, Verdict
from laminar_hpc.protocol.wire import AnyRecord
from laminar_hpc.rollout import worker as engine_worker
from laminar_hpc.runtime.rank import LONGEST_NAP_S, MANAGER, TRANSFER_NAP_S, Rank
from laminar_hpc.runtime.weights import WeightsDesk
from laminar_hpc.tasks.grader import Grader, Outcome


class _Active:
    """A trajectory in this rollout, until it is finished."""

    def __init__(self, spec: TrajectorySpec, version: int) -> None:
        self.spec = spec
        self.version = version
        self.prompt = b""
        self.response: list[bytes] = []
        self.response_tokens = 0
        self.stop: Stop | None = None

    def extend(self, tokens: bytes) -> None:
        """Response tokens (int32) have been generated, or were there already."""
        self.response.append(tokens)
        self.response_tokens += len(tokens) // 4


class RolloutLoop:
    """One replica: an engine worker and a task worker."""

    def __init__(self, rank: Rank) -> None:
        self.done = False
        self.clean = True
        self._rank = rank
        self._config = rank.config.model_dump_json().encode()
        self._incarnation = 0
        self._engine: Worker | None = None
        self._engine_up = False
        self._engine_heard_s = 0.0
        self._start_engine_at: float | None = None
        self._limit = RestartLimit(rank.config.job.worker_restarts)
        self._layout: Layout | None = None
        self._grader = Grader(rank.config, rank.log_path("task"))
        self._active: dict[int, _Active] = {}
        self._encoding: dict[tuple[Purpose, int], list[int]] = {}
        self._fetching: dict[int, list[int]] = {}
        self._giving: HandOver | Interrupt | None = None  # for which the engine was asked to give trajectories up
        self._requests = 0
        if rank.me.relay_rank is None:
            raise ProtocolError(f"{rank.name}: no relay on this node")
        self._device = rank.place_on_node()
        self._weights = WeightsDesk(rank, rank.me.relay_rank)

    def start(self, now: float) -> None:
        """Start the task worker; the engine waits for the manifest."""
        self._grader.start(now)

    def receive(self, source: int, message: AnyRecord, now: float) -> None:
        """Take one message from another rank."""
        match message:
            case Layout():
                self._layout = message
                self._weights.lay_out(message)
                self._start_engine_at = now
            case Generate():
                self._generate(message, now)
            case HandOver():
                self._give_up(message, message.trajectories, now)
            case Interrupt():
                self._give_up(message, list(self._active), now)
            case Pull():
                if message.incarnation == self._incarnation:
                    self._engine_heard_s = now
                    self._weights.request(message.version, message.exactly, now)
            case Lease():
                self._weights.lent(source, message, now)
            case LeaseRefused():
                if self._weights.declined(message):
                    self._rank.tell_manager(PullRefused(self._rank.world.rank, self._incarnation, message.version))
            case ChunkSent():
                self._weights.sent(message)
            case ChunkGone():
                self._weights.refused(message)
            case Attach():
                self._weights.attach(message)
            case Lost():
                self._weights.forget(message.rank, message.epoch)
            case Fetched():
                self._resume(message)
            case StartOver():
                if self._engine is not None:  # else it begins anew already
                    self._lost_engine("its rank was taken for lost, and begins anew", now, counts=False)
                self._weights.start_over(message.epoch)
            case _:
                raise ProtocolError(f"{self._rank.name}: unexpected {type(message).__name__} from rank {source}")

    def turn(self, now: float) -> bool:
        """Pass on what the workers have said, and start the engine when it is due."""
        outcomes = self._grader.poll(now)
        for outcome in outcomes:
            self._answered(outcome)
        lease = self._weights.poll(now)
        if lease is not None:
            self._engine_heard_s = now
            self._tell_engine(LoadWeights(lease))
        heard = self._hear_engine(now)
        self._watch_engine(now)
        if self._start_engine_at is not None and now >= self._start_engine_at:
            self._start_engine(now)
        return heard or bool(outcomes) or lease is not None or self._weights.moved

    def waiting_for(self) -> str:
        """What this rollout waits for."""
        if not self._engine_up:
            return "the layout of the weights" if self._layout is None else "its engine to start"
        if self._weights.pulling:
            return self._weights.waiting_for or "its engine to load weights"
        if self._fetching:
            asked = sum(len(trajectories) for trajectories in self._fetching.values())
            return f"what rank {MANAGER} (manager) has of {asked} trajectories that go on here"
        if self._grader.waiting_for():
            return self._grader.waiting_for()
        return "" if self._active else "prompts from the manager"

    def phase(self, busy: bool) -> str:
        """Of start, generate, pull, grade, idle: where its time goes."""
        if not self._engine_up:
            return "start"
        if self._weights.pulling:
            return "pull"
        if any(active.stop is None for active in self._active.values()):
            return "generate"
        return "grade" if self._active else "idle"

    def longest_nap_s(self) -> float:
        """Short while chunks are under way to this rank."""
        return TRANSFER_NAP_S if self._weights.fetching else LONGEST_NAP_S

    def channels(self) -> list[Channel]:
        """The engine's and the task worker's."""
        channels = self._grader.channels()
        if self._engine is not None:
            channels.append(self._engine.channel)
        return channels

    def close(self) -> None:
        """End both workers."""
        self._grader.stop()
        if self._engine is not None:
            self._engine.kill()
        self._weights.close()

    # --- messages from other ranks ----------------------------------------------------------------------------------

    def _generate(self, command: Generate, now: float) -> None:
        if command.incarnation != self._incarnation:
            return  # for an engine that is no more; the manager has been told that it was lost
        self._engine_heard_s = now
        resumed = []
        for spec in command.trajectories:
            self._active[spec.id] = _Active(spec, command.version)
            if spec.resume_tokens:
                resumed.append(spec.id)
            else:
                self._encode(spec)
        if resumed:
            self._requests += 1
            self._fetching[self._requests] = resumed
            self._rank.mail.send(MANAGER, Fetch(self._rank.world.rank, self._requests, resumed))

    def _give_up(self, command: HandOver | Interrupt, trajectories: list[int], now: float) -> None:
        """The engine gives up what it has of these, and tells their last tokens; what has not reached it yet, stays."""
        if command.incarnation != self._incarnation:
            return
        self._engine_heard_s = now
        self._giving = command
        self._tell_engine(AbortTrajectories(trajectories))

    def _given_up(self, released: list[int]) -> None:
        """What the engine has given up is forgotten here, and named to the manager."""
        if self._giving is None:
            raise ProtocolError(f"{self._rank.name}: its engine has given up trajectories that nobody asked for")
        command, self._giving = self._giving, None
        progress = [Progress(trajectory, self._active.pop(trajectory).response_tokens) for trajectory in released]
        rank, incarnation = self._rank.world.rank, self._incarnation
        if isinstance(command, HandOver):
            self._rank.tell_manager(HandedOver(rank, incarnation, command.move, progress))
        else:
            self._rank.tell_manager(Interrupted(rank, incarnation, progress))

    def _encode(self, spec: TrajectorySpec) -> None:
        """Ask for the prompt's tokens, once for all members of a group."""
        waiting = self._encoding.setdefault((spec.purpose, spec.prompt), [])
        if not waiting:
            self._grader.encode(spec.id, spec.purpose, spec.prompt)
        waiting.append(spec.id)

    def _resume(self, message: Fetched) -> None:
        asked = self._fetching.pop(message.request, None)
        if asked is None:
            return  # asked for by an engine that is no more
        for trajectory, blocks in zip(asked, message.blocks, strict=True):
            active = self._active[trajectory]
            active.prompt = b"".join(block.tokens for block in blocks if block.source is Source.PROMPT)
            for block in blocks:
                if block.source is not Source.PROMPT:
                    active.extend(block.tokens)
            self._add(active)

    # --- what the workers say ---------------------------------------------------------------------------------------

    def _hear_engine(self, now: float) -> bool:
        if self._engine is None:
            return False
        try:
            messages = self._engine.receive_all()
        except ChannelClosed:
            self._lost_engine("its engine's process has ended", now)
            return True
        if messages:
            self._engine_heard_s = now
        for message in messages:
            match message:
                case EngineUp():
                    self._engine_up = True
                    self._say_ready(message)
                case EngineOutput():
                    self._stream(message, now)
                case WeightsLoaded():
                    self._loaded(message, now)
                case WorkerError():
                    self._lost_engine(message.text, now)
                    return True
                case _:
                    raise ProtocolError(f"{self._rank.name}: unexpected {type(message).__name__} from its engine")
        return bool(messages)

    def _say_ready(self, engine: EngineUp) -> None:
        me = self._rank.me
        self._rank.tell_manager(
            RolloutReady(
                rank=self._rank.world.rank,
                incarnation=self._incarnation,
                node=me.node,
                relay=self._weights.relay,
                concurrency=engine.concurrency,
                kv_capacity_tokens=engine.kv_capacity_tokens,
            )
        )

    def _stream(self, output: EngineOutput, now: float) -> None:
        rank, incarnation = self._rank.world.rank, self._incarnation
        blocks = [block for block in output.blocks if block.trajectory in self._active]
        progress = []
        for block in blocks:
            active = self._active[block.trajectory]
            active.extend(block.tokens)
            progress.append(Progress(block.trajectory, active.response_tokens))
        streamed = Streamed(
            rank=rank,
            incarnation=incarnation,
            progress=progress,
            kv_use=output.kv_use,
            running=output.running,
            waiting=output.waiting,
        )
        self._rank.tell_manager(Append(rank, incarnation, blocks, streamed))
        self._rank.note_pace(output.pace)
        if self._rank.record is not None:
            self._rank.record.add(
                "engine",
                time_s=now,
                kv_use=output.kv_use,
                running=output.running,
                waiting=output.waiting,
                generated_tokens=sum(block.count for block in blocks),
                busy_s=output.busy_s,
            )
        for ended in output.ended:
            active_or_none = self._active.get(ended.trajectory)
            if active_or_none is not None:
                active_or_none.stop = ended.stop
                spec = active_or_none.spec
                self._grader.grade(spec.id, spec.purpose, spec.prompt, b"".join(active_or_none.response))
        if output.released is not None:
            self._given_up(output.released)

    def _loaded(self, message: WeightsLoaded, now: float) -> None:
        rank = self._rank
        pull = self._weights.loaded()
        if pull is None:
            return
        rank.tell_manager(
            Loaded(
                rank=rank.world.rank,
                incarnation=self._incarnation,
                version=message.version,
                digest=message.digest,
                wait_s=pull.wait_s,
                load_s=message.seconds,
            )
        )
        if rank.record is not None:
            rank.record.add(
                "pulls",
                version=message.version,
                time_s=now,
                wait_s=pull.wait_s,
                copy_s=pull.copy_s,
                pause_s=message.seconds,
                digest=int.from_bytes(message.digest, "little"),
            )

    def _answered(self, outcome: Outcome) -> None:
        """The task worker has made a prompt, or could not, or has graded a response, or could not."""
        first = self._active[outcome.trajectory]
        prompt = (first.spec.purpose, first.spec.prompt)
        if outcome.tokens is not None:
            actives = [self._active[trajectory] for trajectory in self._encoding.pop(prompt)]
            blocks = [Block(active.spec.id, 0, Source.PROMPT, None, outcome.tokens) for active in actives]
            self._rank.tell_manager(Append(self._rank.world.rank, self._incarnation, blocks))
            for active in actives:
                active.prompt = outcome.tokens
                self._add(active)
        elif outcome.verdict is Verdict.NO_PROMPT:
            for trajectory in self._encoding.pop(prompt):
                self._finish(trajectory, Verdict.NO_PROMPT, 0.0)
        else:
            assert outcome.verdict is not None
            self._finish(outcome.trajectory, outcome.verdict, outcome.reward, outcome.score)

    def _finish(self, trajectory: int, verdict: Verdict, reward: float, score: float | None = None) -> None:
        active = self._active.pop(trajectory)
        self._rank.tell_manager(
            Finished(
                rank=self._rank.world.rank,
                incarnation=self._incarnation,
                trajectory=trajectory,
                version=active.version,
                prompt_tokens=len(active.prompt) // 4,
                response_tokens=active.response_tokens,
                stop=active.stop,
                verdict=verdict,
                reward=reward,
                score=score,
            )
        )

    def _add(self, active: _Active) -> None:
        self._tell_engine(AddTrajectory(active.spec, active.prompt, b"".join(active.response)))

    # --- the engine's process ---------------------------------------------------------------------------------------

    def _start_engine(self, now: float) -> None:
        assert self._layout is not None
        self._start_engine_at = None
        self._engine_heard_s = now
        self._engine = Worker("engine", engine_worker.main, self._rank.log_path("engine"))
        self._tell_engine(StartEngine(self._config, self._layout.manifest, self._device))

    def _tell_engine(self, message: AnyRecord) -> None:
        """Where the engine's process has just ended, the next look at it finds out, with its last words."""
        if self._engine is not None:
            with contextlib.suppress(ChannelClosed):
                self._engine.send(message)

    def _watch_engine(self, now: float) -> None:
        """An engine that has something to do and says nothing for too long counts as lost."""
        if self._engine is None:
            return
        silent_s = now - self._engine_heard_s
        generating = any(active.prompt and active.stop is None for active in self._active.values())
        if not self._engine_up:
            bound_s, what = self._rank.config.job.start_timeout_s, "did not come up"
        elif generating or self._weights.loading or self._giving is not None:
            bound_s, what = self._rank.config.rollout.timeout_s, "said nothing, with work to do,"
        else:
            return
        if silent_s > bound_s:
            self._lost_engine(f"its engine {what} for {silent_s:.0f} s", now)

    def _lost_engine(self, reason: str, now: float, counts: bool = True) -> None:
        """Start the engine again, as the next incarnation: all it held is lost, the store has what it streamed.

        `counts`: the loss is one of those of which only so many are allowed.
        """
        rank = self._rank
        if self._engine is not None:
            self._engine.kill()
            self._engine = None
        delay_s = self._limit.lost(now) if counts else 0.0
        if delay_s is None:
            raise EngineError(
                f"the engine was lost {self._limit.most + 1} times within {WINDOW_S:.0f} s; the last time: {reason}; "
                f"see {rank.log_path('engine')}"
            )
        rank.tell_manager(RankLost(rank=rank.world.rank, incarnation=self._incarnation, reason=reason))
        self._incarnation += 1
        self._engine_up = False
        self._start_engine_at = now + delay_s
        self._active.clear()
        self._encoding.clear()
        self._fetching.clear()
        self._giving = None
        self._weights.drop()
        self._grader.forget_all()
