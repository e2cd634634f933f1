"""The engine worker: the process in which a rollout's inference engine runs, driven over a channel.

It answers each message in the order of arrival, makes one decode step after another while it holds trajectories, and
tells what it has generated every `rollout.stream_interval_s`, or at once when a trajectory ends or is given up: then its last
tokens too, so that nothing is generated twice. Idle, it sleeps in the channel.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable

import msgspec
import numpy as np

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import EngineError, ProtocolError
from laminar_hpc.process.channel import Channel, wait_any
from laminar_hpc.process.memory import still_lent
from laminar_hpc.protocol.peer import (
    AbortTrajectories,
    AddTrajectory,
    Ended,
    EngineOutput,
    EngineUp,
    LoadWeights,
    Manifest,
    Pace,
    Shutdown,
    StartEngine,
    WeightsLoaded,
)
from laminar_hpc.protocol.trajectory import Block, Purpose, Source
from laminar_hpc.protocol.wire import AnyRecord
from laminar_hpc.rollout.api import Engine, Request, Run, Sampled
from laminar_hpc.rollout.build import build_engine
from laminar_hpc.weights.digest import digests_of, image_digest


def main(channel: Channel) -> None:
    """Run an engine for the driver at the other end of `channel`, until `Shutdown`; the first message is `StartEngine`."""
    start = channel.receive(None)
    if isinstance(start, Shutdown):
        return
    if not isinstance(start, StartEngine):
        raise ProtocolError(f"engine worker: the first message must be StartEngine, got {type(start).__name__}")
    began_s = time.perf_counter()
    config = Config.model_validate_json(start.config)
    engine = _engine_with_threads(config, start.device, lambda seconds: wait_any([channel], seconds))
    worker = EngineWorker(config, start.manifest, engine)
    channel.send(EngineUp(engine.concurrency, time.perf_counter() - began_s, engine.kv_capacity_tokens))
    while True:
        message = channel.receive(None if worker.idle else 0.0)
        while message is not None:
            if isinstance(message, Shutdown):
                return
            answer = worker.handle(message)
            if answer is not None:
                channel.send(answer)
            message = channel.receive()
        worker.step()
        if worker.has_news(time.perf_counter()):
            channel.send(worker.take_output(time.perf_counter()))


def _engine_with_threads(config: Config, device: int, wait: Callable[[float], object]) -> Engine:
    if not config.timing_only:
        import torch

        torch.set_num_threads(config.job.threads)
    return build_engine(config, device, wait)


class _Untold(msgspec.Struct):
    """Tokens of one trajectory since the last output; the first of them has place `offset` in the trajectory."""

    offset: int
    tokens: array[int]
    logprobs: array[float]

    @classmethod
    def none_yet(cls, offset: int) -> _Untold:
        return cls(offset, array("i"), array("f"))


class EngineWorker:
    """An engine, and what it has generated but not told yet."""

    def __init__(self, config: Config, manifest: Manifest, engine: Engine) -> None:
        self.engine = engine
        self._config = config
        self._manifest = manifest
        self._version: int | None = None
        self._untold: dict[int, _Untold] = {}  # of every trajectory whose end, or leave, has not been told
        self._ended: list[Ended] = []
        self._released: list[int] | None = None  # what was given up since; None: nobody asked
        self._busy_s = 0.0
        self._pace = Pace()
        self._told_s = time.perf_counter()

    @property
    def idle(self) -> bool:
        """Whether nothing is left to generate or to tell."""
        return not (self._untold or self._ended or self._released is not None)

    def handle(self, message: AnyRecord) -> WeightsLoaded | None:
        """Do what the driver asks, and return the answer if there is one."""
        match message:
            case AddTrajectory():
                self._add(message)
            case AbortTrajectories():
                self._abort(message.trajectories)
            case LoadWeights():
                return self._load(message)
            case _:
                raise ProtocolError(f"engine worker: unexpected {type(message).__name__} from its driver")
        return None

    def step(self) -> None:
        """One decode step, if there is anything to decode."""
        began_s = time.perf_counter()
        self._note(self.engine.step())
        self._busy_s += time.perf_counter() - began_s

    def _note(self, news: Iterable[Sampled | Run]) -> None:
        for sampled in news:
            untold = self._untold[sampled.trajectory]
            if isinstance(sampled, Run):
                untold.tokens.frombytes(sampled.tokens)
                untold.logprobs.frombytes(sampled.logprobs)
            else:
                untold.tokens.append(sampled.token)
                untold.logprobs.append(sampled.logprob)
            if sampled.stop is not None:
                self._ended.append(Ended(sampled.trajectory, sampled.stop))

    def has_news(self, now_s: float) -> bool:
        """Whether an output is due: something ended or was to be given up, or the interval is over while there is work."""
        if self._ended or self._released is not None:
            return True
        return bool(self._untold) and now_s - self._told_s >= self._config.rollout.stream_interval_s

    def take_output(self, now_s: float) -> EngineOutput:
        """All that has not been told, a block for each trajectory with new tokens; it counts as told from now on."""
        blocks = [self._block(trajectory, untold) for trajectory, untold in self._untold.items() if untold.tokens]
        stats = self.engine.stats()
        pace = None if stats.pace is None else stats.pace.since(self._pace)
        output = EngineOutput(
            blocks, self._ended, stats.kv_use, stats.running, stats.waiting, self._busy_s, self._released, pace
        )
        self._pace = stats.pace or self._pace
        for gone in (*(ended.trajectory for ended in self._ended), *(self._released or ())):
            del self._untold[gone]
        for untold in self._untold.values():
            untold.offset += len(untold.tokens)
            del untold.tokens[:], untold.logprobs[:]
        self._ended = []
        self._released = None
        self._busy_s = 0.0
        self._told_s = now_s
        return output

    def _block(self, trajectory: int, untold: _Untold) -> Block:
        return Block(
            trajectory,
            untold.offset,
            Source.MODEL,
            self._version,
            untold.tokens.tobytes(),
            untold.logprobs.tobytes(),
        )

    def _add(self, message: AddTrajectory) -> None:
        spec = message.spec
        prompt = np.frombuffer(message.prompt, dtype="<i4").tolist()
        response = np.frombuffer(message.response, dtype="<i4").tolist()
        evaluated = spec.purpose is Purpose.EVALUATION
        temperature = (self._config.evaluation if evaluated else self._config.rollout).temperature
        stop = self.engine.add(Request(spec.id, prompt, response, spec.seed, temperature))
        self._untold[spec.id] = _Untold.none_yet(len(prompt) + len(response))
        if stop is not None:
            self._ended.append(Ended(spec.id, stop))

    def _abort(self, trajectories: list[int]) -> None:
        self._note(self.engine.untold())
        ended = {one.trajectory for one in self._ended}
        released = self._released or []
        for trajectory in trajectories:
            if trajectory in self._untold and trajectory not in ended and trajectory not in released:
                self.engine.abort(trajectory)
                released.append(trajectory)
        self._released = released

    def _load(self, message: LoadWeights) -> WeightsLoaded:
        began_s = time.perf_counter()
        lease = message.lease
        self.engine.load(lease.version, self._manifest, lease)
        if not still_lent(lease.path, lease.stamp_offset, lease.stamp):
            raise EngineError(f"the weights of version {lease.version} were written over while they were loaded")
        self._version = lease.version
        digest = b""
        if self._config.weights.verify:
            digest = image_digest(digests_of(self.engine.weights(self._manifest), self._manifest))
        return WeightsLoaded(lease.version, digest, time.perf_counter() - began_s)
