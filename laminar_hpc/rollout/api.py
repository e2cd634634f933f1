"""What a rollout's worker asks of an inference engine."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from laminar_hpc.config.schema import Rollout
from laminar_hpc.errors import EngineError
from laminar_hpc.protocol.peer import Lease, Manifest, Pace
from laminar_hpc.protocol.trajectory import Stop


class Request(msgspec.Struct, frozen=True):
    """A trajectory to generate, or to go on with: `response` is what exists of it already."""

    trajectory: int
    prompt: list[int]
    response: list[int]
    seed: int
    temperature: float


class Sampled(msgspec.Struct, frozen=True):
    """One new token of one trajectory, and why it was the last one (None: it was not)."""

    trajectory: int
    token: int
    logprob: float
    stop: Stop | None


class Run(msgspec.Struct, frozen=True):
    """Several new tokens of one trajectory (int32) with their log-probabilities (float32), both little-endian."""

    trajectory: int
    tokens: bytes
    logprobs: bytes
    stop: Stop | None


class EngineStats(msgspec.Struct, frozen=True):
    """How full an engine is: used share of the KV cache (0 to 1), trajectories decoded, trajectories without a place yet.

    `pace`: how well an engine that emulates another one has kept to its schedule since it was built.
    """

    kv_use: float
    running: int
    waiting: int
    pace: Pace | None = None


class Engine(Protocol):
    """An inference engine that is driven one step at a time, by one thread.

    A trajectory's tokens are a function of the weights, its prompt, its seed and the position alone: not of what else is
    in the batch, and not of where it was begun (an engine may draw other noise from where a trajectory came in; VllmEngine
    does). The log-probability recorded with a token is that of the policy it was sampled from: softmax(logits / T) at
    temperature T > 0. Greedy tokens (T = 0) carry that of softmax(logits).
    """

    concurrency: int
    """How many trajectories may be in the engine, waiting ones included."""

    kv_capacity_tokens: int
    """How many tokens the KV cache has room for."""

    def add(self, request: Request) -> Stop | None:
        """Take a trajectory in; it waits until the KV cache has room. EngineError where it can never fit.

        Where its response has ended already, the engine does not take it in, and returns why it ended.
        """

    def abort(self, trajectory: int) -> None:
        """Drop a trajectory; one that is not there is no error."""

    def export(self, trajectory: int) -> list[int]:
        """The response tokens so far of a trajectory in the engine, with which `add` elsewhere goes on."""

    def step(self) -> Sequence[Sampled | Run]:
        """One decode step: a new token for every running trajectory. Empty when there is none.

        An engine that emulates another one (PacedEngine) may make several or none in a call, and tell of them in runs.
        """

    def untold(self) -> Sequence[Sampled | Run]:
        """What it has generated and kept back until now. Most engines tell everything at once, and have nothing."""

    def stats(self) -> EngineStats:
        """How full the engine is now."""

    def load(self, version: int, manifest: Manifest, lease: Lease) -> None:
        """Copy all weights out of the image that is lent (`manifest.nbytes` long). Only between trajectories.

        The weights may lie in other processes, so an engine is told where the image is, and maps it there itself.
        """

    def weights(self, manifest: Manifest) -> Iterator[NDArray[np.uint8]]:
        """The bytes of every tensor as it lies in the engine, in the manifest's order: for digests of what was loaded.

        Each array is good until the next one is asked for.
        """


def stop_of(response: Sequence[int], ends: Collection[int], limit: int) -> Stop | None:
    """Why a response has ended, if it has: its last token is one of the model's `ends`, or it has `limit` tokens."""
    if response and response[-1] in ends:
        return Stop.END_TOKEN
    return Stop.LENGTH if len(response) >= limit else None


def check_request(who: str, request: Request, limits: Rollout, vocabulary: int) -> None:
    """EngineError where the prompt has too many tokens or none, or a token is none of the model's; it begins with `who`."""
    if not 1 <= len(request.prompt) <= limits.max_prompt_tokens:
        raise EngineError(
            f"{who} has a prompt of {len(request.prompt)} tokens; "
            f"allowed are 1 to {limits.max_prompt_tokens} (rollout.max_prompt_tokens)"
        )
    tokens = request.prompt + request.response
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        raise EngineError(
            f"{who} has tokens from {min(tokens)} to {max(tokens)}; the model's are 0 to {vocabulary - 1}"
        )
