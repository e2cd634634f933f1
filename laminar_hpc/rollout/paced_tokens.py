"""What the responses of a paced engine consist of: tokens that mean nothing, as many as a distribution of lengths says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from laminar_hpc.config.schema import Config
from laminar_hpc.data.presets import response_lengths
from laminar_hpc.policy.costs import Points
from laminar_hpc.policy.keyed import stable_hash
from laminar_hpc.process.memory import KeptMappings
from laminar_hpc.protocol.peer import Lease, Manifest
from laminar_hpc.protocol.trajectory import Stop
from laminar_hpc.rollout.api import Request, check_request

VOCABULARY = 32_768
"""Ids of tokens without meaning are below this."""


class Response(Protocol):
    """A response, all of which is known before any of it is told."""

    @property
    def stop(self) -> Stop:
        """Why it ends."""

    @property
    def length(self) -> int:
        """How many tokens it has, with those that there were already when it came."""

    @property
    def steps(self) -> int:
        """How many decode steps it takes from its first token on: `length`, or more where each token stands for several."""

    def tokens(self, first: int, last: int) -> bytes:
        """Its tokens from place `first` up to `last` (int32, little-endian)."""

    def logprobs(self, first: int, last: int) -> bytes:
        """Their log-probabilities (float32, little-endian)."""


class TokenSource(Protocol):
    """Where a paced engine's responses come from."""

    def admit(self, request: Request) -> Stop | None:
        """Take a request in; as `Engine.add`."""

    def drop(self, trajectory: int) -> None:
        """Forget a request that has been taken in; nothing happens where its response is out already."""

    def respond(self) -> Mapping[int, Response]:
        """The responses to all requests taken in since the last call, by trajectory."""

    def load(self, version: int, manifest: Manifest, lease: Lease) -> None:
        """As `Engine.load`."""

    def weights(self, manifest: Manifest) -> Iterator[NDArray[np.uint8]]:
        """As `Engine.weights`."""


def drawn_length(lengths: Points, seed: int, limit: int) -> int:
    """The length in tokens, from 1 to `limit`, of the response with this seed: a function of it alone."""
    share = stable_hash("response length", seed) / 2**63
    return min(limit, max(1, round(lengths.at(share))))


class _Meaningless:
    """Token p of the response with seed s is (s + p) modulo `VOCABULARY`, so that any rollout goes on with it alike."""

    def __init__(self, seed: int, length: int, limit: int) -> None:
        self.length = self.steps = length
        self.stop = Stop.LENGTH if length >= limit else Stop.END_TOKEN
        self._first_token = seed % VOCABULARY

    def tokens(self, first: int, last: int) -> bytes:
        return ((np.arange(first, last) + self._first_token) % VOCABULARY).astype("<i4").tobytes()

    def logprobs(self, first: int, last: int) -> bytes:
        return bytes(4 * (last - first))


class LengthTokens:
    """A `TokenSource` for pure timing: lengths come from a distribution, tokens from the seed, weights are kept as bytes."""

    def __init__(self, config: Config) -> None:
        self._lengths = response_lengths(config)
        self._limits = config.rollout
        self._limit = config.rollout.max_response_tokens
        self._new: dict[int, Response] = {}
        self._lent = KeptMappings()
        self._image: NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)

    def admit(self, request: Request) -> Stop | None:
        """As in `TokenSource`."""
        check_request(f"paced engine: trajectory {request.trajectory}", request, self._limits, VOCABULARY)
        response = _Meaningless(request.seed, drawn_length(self._lengths, request.seed, self._limit), self._limit)
        if len(request.response) >= response.length:
            return response.stop
        self._new[request.trajectory] = response
        return None

    def drop(self, trajectory: int) -> None:
        """As in `TokenSource`."""
        self._new.pop(trajectory, None)

    def respond(self) -> Mapping[int, Response]:
        """As in `TokenSource`."""
        new, self._new = self._new, {}
        return new

    def load(self, version: int, manifest: Manifest, lease: Lease) -> None:
        """As in `TokenSource`: a copy of the image."""
        self._image = self._lent.view(lease.path, lease.offset, manifest.nbytes).copy()

    def weights(self, manifest: Manifest) -> Iterator[NDArray[np.uint8]]:
        """As in `TokenSource`."""
        for entry in manifest.tensors:
            yield self._image[entry.offset : entry.offset + entry.nbytes]
