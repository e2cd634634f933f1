"""Responses of a paced engine that mean something: those of the torch engine, computed ahead of the time they are told at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from laminar_hpc.config.schema import Config
from laminar_hpc.data.presets import costs_of, response_lengths
from laminar_hpc.protocol.peer import Lease, Manifest
from laminar_hpc.protocol.trajectory import Stop
from laminar_hpc.rollout.api import Request
from laminar_hpc.rollout.paced_tokens import Response, drawn_length
from laminar_hpc.rollout.torch_engine import TorchEngine


class _Generated:
    """A response whose tokens from place `first` on have been computed. It takes `least_steps` decode steps or more."""

    def __init__(self, first: int, least_steps: int) -> None:
        self.stop = Stop.LENGTH
        self._first = first
        self._least_steps = least_steps
        self._tokens: list[int] = []
        self._logprobs: list[float] = []

    @property
    def length(self) -> int:
        return self._first + len(self._tokens)

    @property
    def steps(self) -> int:
        return max(self.length, self._least_steps)

    def extend(self, token: int, logprob: float) -> None:
        self._tokens.append(token)
        self._logprobs.append(logprob)

    def tokens(self, first: int, last: int) -> bytes:
        return np.array(self._tokens[first - self._first : last - self._first], dtype="<i4").tobytes()

    def logprobs(self, first: int, last: int) -> bytes:
        return np.array(self._logprobs[first - self._first : last - self._first], dtype="<f4").tobytes()


class ModelTokens:
    """A `TokenSource` for the model at `model.path`.

    A trajectory's tokens do not depend on the batch, so those that have come are generated to their ends at once, in a
    batch of their own. That takes this machine's time, and where it is not there in time, the engine is late.

    With `paced.lengths`, a response takes as many decode steps, and as much of the KV cache, as one of that distribution, over
    which its tokens are spread evenly: so a small model's short answers take the time of a large one's long ones.
    """

    def __init__(self, config: Config, device: int) -> None:
        """The torch engine of a config that `check_torch` lets in."""
        self._engine = TorchEngine(config, device)
        self._steps = response_lengths(config) if config.paced.lengths else None
        self._most_steps = costs_of(config).kv_cache_tokens - config.rollout.max_prompt_tokens
        self._new: dict[int, _Generated] = {}

    def admit(self, request: Request) -> Stop | None:
        """As in `TokenSource`."""
        stop = self._engine.add(request)
        if stop is None:
            steps = 0 if self._steps is None else drawn_length(self._steps, request.seed, self._most_steps)
            self._new[request.trajectory] = _Generated(len(request.response), steps)
        return stop

    def drop(self, trajectory: int) -> None:
        """As in `TokenSource`."""
        if self._new.pop(trajectory, None) is not None:
            self._engine.abort(trajectory)

    def respond(self) -> Mapping[int, Response]:
        """As in `TokenSource`."""
        new, self._new = self._new, {}
        while sampled := self._engine.step() if new else []:
            for one in sampled:
                new[one.trajectory].extend(one.token, one.logprob)
                if one.stop is not None:
                    new[one.trajectory].stop = one.stop
        return new

    def load(self, version: int, manifest: Manifest, lease: Lease) -> None:
        """As in `TokenSource`."""
        self._engine.load(version, manifest, lease)

    def weights(self, manifest: Manifest) -> Iterator[NDArray[np.uint8]]:
        """As in `TokenSource`."""
        return self._engine.weights(manifest)
