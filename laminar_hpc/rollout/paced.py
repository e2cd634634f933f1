"""An engine that takes the time of another one: an emulated GPU, for the real job at a scale that there is no hardware for.

Who runs, who waits and when each decode step ends is worked out by policy/batching.py, in seconds of the emulated hardware;
`paced.time_scale` says how many seconds of this machine each of them is. What the emulated engine would be at is waited for,
without a CPU. Between two changes of its batch nothing is done, however many decode steps that is: a call of `step` waits
until the next one, or for a message to the worker, and tells then of all that has ended; of all others it tells every
`rollout.stream_interval_s`.

What comes late on this machine is not made up for by what follows, and moves no later step: the schedule goes on as it would
have, and each end, and each load, counts by how much later than scheduled it was told (`stats().pace`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from laminar_hpc.config.schema import Config
from laminar_hpc.data.presets import costs_of
from laminar_hpc.errors import EngineError
from laminar_hpc.policy.batching import Batch, EndedAt
from laminar_hpc.protocol.peer import Lease, Manifest, Pace
from laminar_hpc.protocol.trajectory import Stop
from laminar_hpc.rollout.api import EngineStats, Request, Run
from laminar_hpc.rollout.paced_tokens import Response, TokenSource


class Time(Protocol):
    """A clock, and two ways to let it go on."""

    def now(self) -> float:
        """Seconds since some moment."""

    def wait(self, seconds: float) -> object:
        """Return after so long, or sooner where there is something else to do."""

    def sleep(self, seconds: float) -> object:
        """Return after so long."""


class RealTime:
    """This machine's clock."""

    def __init__(self, wait: Callable[[float], object]) -> None:
        self.now = time.monotonic
        self.sleep = time.sleep
        self.wait = wait


class _Active(msgspec.Struct, eq=False):
    """A trajectory in the engine: its response, None until that is known, and how many tokens of it have been told."""

    request: Request
    response: Response | None
    told: int


class PacedEngine:
    """`Engine` in emulated time. Its KV cache has the table's tokens, its batch at most `rollout.slots` trajectories.

    `stats().kv_use` counts prompts and responses of those that run.
    """

    def __init__(self, config: Config, source: TokenSource, clock: Time) -> None:
        """The engine of a config that `check_paced` lets in."""
        self.concurrency = config.rollout.concurrency
        self._costs = costs_of(config)
        self.kv_capacity_tokens = self._costs.kv_cache_tokens
        self._scale = config.paced.time_scale
        self._interval_s = config.rollout.stream_interval_s
        self._source = source
        self._time = clock
        self._origin_s = clock.now()
        self._batch = Batch(self._costs, self._costs.kv_cache_tokens, config.rollout.slots)
        self._active: dict[int, _Active] = {}
        self._steps_done: dict[int, int] = {}
        """Of those that were taken out, and may come back: a token's decode steps are not made twice."""
        self._version: int | None = None
        self._tell_s = 0.0
        self._pace = Pace()

    def add(self, request: Request) -> Stop | None:
        """As in `Engine`; EngineError also where the trajectory is here already."""
        if request.trajectory in self._active:
            raise EngineError(f"paced engine: trajectory {request.trajectory} is in the engine already")
        stop = self._source.admit(request)
        if stop is None:
            if not self._active:
                self._tell_s = self._time.now() + self._interval_s
            self._active[request.trajectory] = _Active(request, None, len(request.response))
        return stop

    def abort(self, trajectory: int) -> None:
        """As in `Engine`."""
        active = self._active.pop(trajectory, None)
        if active is not None:
            if active.response is not None:
                self._steps_done[trajectory] = active.response.steps - self._batch.left_tokens(trajectory)
            self._source.drop(trajectory)
            self._batch.remove(trajectory)

    def export(self, trajectory: int) -> list[int]:
        """As in `Engine`, with what has not been told yet; EngineError where the trajectory is not in the engine."""
        active = self._active.get(trajectory)
        if active is None:
            raise EngineError(f"paced engine: trajectory {trajectory} cannot be exported, it is not in the engine")
        response = list(active.request.response)
        if active.response is not None:
            new = active.response.tokens(len(response), self._generated(trajectory, active.response))
            response += np.frombuffer(new, dtype="<i4").tolist()
        return response

    def step(self) -> list[Run]:
        """As in `Engine`: wait for the next change, and tell what has ended, and now and then how far all others are."""
        if not self._active:
            return []
        if self._version is None:
            raise EngineError("paced engine: asked for a step before any weights were loaded")
        ended = self._advance()
        now = self._time.now()
        change_s = min(self._origin_s + self._batch.due_s * self._scale, self._tell_s)
        if not ended and change_s > now:
            self._time.wait(change_s - now)
            ended = self._advance()
        return self._tell(ended)

    def stats(self) -> EngineStats:
        """As in `Engine`."""
        new = len(self._active) - self._batch.running - self._batch.waiting
        use = self._batch.used_tokens / self._costs.kv_cache_tokens
        return EngineStats(use, self._batch.running, self._batch.waiting + new, self._pace)

    def load(self, version: int, manifest: Manifest, lease: Lease) -> None:
        """As in `Engine`, in the time that the table says."""
        if self._active:
            raise EngineError(
                f"paced engine: version {version} cannot be loaded while {len(self._active)} trajectories are here"
            )
        began_s, scheduled_s = self._time.now(), self._costs.load_s * self._scale
        self._source.load(version, manifest, lease)
        self._time.sleep(max(0.0, began_s + scheduled_s - self._time.now()))
        self._version = version
        self._note(scheduled_s, self._time.now() - began_s - scheduled_s)

    def weights(self, manifest: Manifest) -> Iterator[NDArray[np.uint8]]:
        """As in `Engine`."""
        return self._source.weights(manifest)

    def _advance(self) -> list[EndedAt]:
        """Make all steps that have ended by now, and take in those that have come; who has ended."""
        now_s = (self._time.now() - self._origin_s) / self._scale
        ended = self._batch.advance(now_s)
        for trajectory, response in self._source.respond().items():
            active = self._active[trajectory]
            active.response = response
            request = active.request
            done = -(-len(request.response) * response.steps // response.length)
            done = max(done, min(self._steps_done.pop(trajectory, 0), response.steps - 1))
            self._batch.add(trajectory, len(request.prompt) + done, response.steps - done, now_s)
        return ended + self._batch.advance(now_s)

    def _generated(self, trajectory: int, response: Response) -> int:
        """Tokens of the response after the last whole step."""
        done = response.steps - self._batch.left_tokens(trajectory)
        return done * response.length // response.steps

    def _tell(self, ended: list[EndedAt]) -> list[Run]:
        now = self._time.now()
        runs: list[Run] = []
        for end in ended:
            active = self._active.pop(end.trajectory)
            assert active.response is not None
            runs.append(_run(active, active.response, active.response.length, active.response.stop))
            due_s = self._origin_s + end.ended_s * self._scale
            self._note((end.ended_s - end.came_s) * self._scale, now - due_s)
        if now >= self._tell_s:
            self._tell_s = now + self._interval_s
            runs += self.untold()
        return runs

    def untold(self) -> list[Run]:
        """As in `Engine`."""
        runs = []
        for trajectory, active in self._active.items():
            if active.response is None:
                continue
            generated = self._generated(trajectory, active.response)
            if generated > active.told:
                runs.append(_run(active, active.response, generated, None))
        return runs

    def _note(self, scheduled_s: float, late_s: float) -> None:
        late_s = max(0.0, late_s)
        self._pace += Pace(scheduled_s, late_s, late_s)


def _run(active: _Active, response: Response, end: int, stop: Stop | None) -> Run:
    """The tokens up to place `end` that have not been told."""
    first, active.told = active.told, end
    return Run(active.request.trajectory, response.tokens(first, end), response.logprobs(first, end), stop)
