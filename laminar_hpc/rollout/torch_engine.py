"""The reference engine: transformers' own model code, decoded in continuous batches over a KV cache with rows.

A running trajectory holds a row. All its tokens but the newest one have their keys and values in the cache; a decode step
feeds the newest tokens of all rows as one batch (B, 1). A trajectory that comes in is fed whole, prompt and what exists of
its response alike. When one leaves, the last row takes its place.

Tokens do not depend on the batch beyond the rounding of its matrix products, which depends on their size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from laminar_hpc.config.model_files import read_end_tokens
from laminar_hpc.config.schema import Config
from laminar_hpc.errors import EngineError
from laminar_hpc.process.memory import KeptMappings
from laminar_hpc.protocol.peer import Lease, Manifest
from laminar_hpc.protocol.trajectory import Stop
from laminar_hpc.rollout.api import EngineStats, Request, Sampled, check_request, stop_of
from laminar_hpc.rollout.hf_model import build_model, fill, stored
from laminar_hpc.rollout.kv_cache import Decode, KVCache, Prefill, Rows
from laminar_hpc.rollout.pinning import pin
from laminar_hpc.rollout.sampling import sample, signed

PREFILL_TOKENS = 8192
"""Tokens, padding included, of one forward pass over new trajectories: bounds its memory, not what a step admits."""


def engine_device(device: int) -> str:
    """Where the rollout with index `device` on its node computes: a GPU of the node, in turn, if there is one."""
    return f"cuda:{device % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"


class _Row:
    """A trajectory in the engine, with its tokens so far."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.response = list(request.response)

    @property
    def tokens(self) -> int:
        return len(self.request.prompt) + len(self.response)


class TorchEngine:
    """`Engine` for Hugging Face models of the Llama, Qwen2 and Qwen3 kind, on a GPU where there is one, else on the CPU.

    A trajectory ends with END_TOKEN after one of the model's end tokens, which is part of the response, and with LENGTH
    after `rollout.max_response_tokens`. `stats().kv_use` is the tokens of the running trajectories, prompts included, over
    rollout.slots * (rollout.max_prompt_tokens + rollout.max_response_tokens).
    """

    def __init__(self, config: Config, device: int = 0) -> None:
        """Build the model, without weights, and the cache, for the rollout with index `device` on its node.

        ConfigError where `model.path` holds no model that can run.
        """
        limits = config.rollout
        self.concurrency = limits.concurrency
        self._device = engine_device(device)
        self._model = build_model(config, self._device)
        self._stop_tokens = read_end_tokens(config.model.path)
        self._limits = limits
        self._places = limits.max_prompt_tokens + limits.max_response_tokens
        self.kv_capacity_tokens = limits.slots * self._places
        self._cache = self._build_cache()
        self._lent = KeptMappings(pin)
        self._version: int | None = None
        self._waiting: deque[_Row] = deque()
        self._running: list[_Row] = []
        self._trajectories: set[int] = set()  # those that wait, and those that run
        self._newest = torch.zeros(limits.slots, dtype=torch.int64, device=self._device)
        self._positions = torch.zeros_like(self._newest)
        self._seeds = torch.zeros_like(self._newest)
        self._temperatures = torch.zeros(limits.slots, dtype=torch.float32, device=self._device)

    def _build_cache(self) -> KVCache:
        config = self._model.config
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return KVCache(
            config.num_hidden_layers,
            self._limits.slots,
            config.num_key_value_heads,
            self._places,
            head_size,
            like=self._model.lm_head.weight,
        )

    def add(self, request: Request) -> Stop | None:
        """As in `Engine`. EngineError also where a token is no token of the model, or the trajectory is here already."""
        who = f"torch engine: trajectory {request.trajectory}"
        if request.trajectory in self._trajectories:
            raise EngineError(f"{who} is in the engine already")
        check_request(who, request, self._limits, self._model.config.vocab_size)
        stop = self._stop_of(request.response)
        if stop is None:
            self._waiting.append(_Row(request))
            self._trajectories.add(request.trajectory)
        return stop

    def abort(self, trajectory: int) -> None:
        """As in `Engine`."""
        if trajectory not in self._trajectories:
            return
        self._trajectories.remove(trajectory)
        self._waiting = deque(row for row in self._waiting if row.request.trajectory != trajectory)
        self._leave([index for index, row in enumerate(self._running) if row.request.trajectory == trajectory])

    def export(self, trajectory: int) -> list[int]:
        """As in `Engine`; EngineError where the trajectory is not in the engine."""
        for row in (*self._running, *self._waiting):
            if row.request.trajectory == trajectory:
                return list(row.response)
        raise EngineError(f"torch engine: trajectory {trajectory} cannot be exported, it is not in the engine")

    def untold(self) -> list[Sampled]:
        """Nothing, ever."""
        return []

    def stats(self) -> EngineStats:
        """As in `Engine`."""
        used = sum(row.tokens for row in self._running)
        return EngineStats(used / self.kv_capacity_tokens, len(self._running), len(self._waiting))

    def load(self, version: int, manifest: Manifest, lease: Lease) -> None:
        """As in `Engine`. EngineError names the tensor that does not fit the model; then nothing has been copied."""
        if self._running or self._waiting:
            raise EngineError(
                f"torch engine: version {version} cannot be loaded while "
                f"{len(self._running)} trajectories run and {len(self._waiting)} wait"
            )
        fill(self._model, manifest, self._lent.view(lease.path, lease.offset, manifest.nbytes))
        self._version = version

    def weights(self, manifest: Manifest) -> Iterator[NDArray[np.uint8]]:
        """As in `Engine`."""
        return stored(self._model, manifest)

    @torch.inference_mode()
    def step(self) -> list[Sampled]:
        """As in `Engine`. Trajectories that get a row in this step get their first new token in it, too."""
        if not self._running and not self._waiting:
            return []
        if self._version is None:
            raise EngineError("torch engine: asked for a step before any weights were loaded")
        logits = [self._decode()] if self._running else []
        while rows := self._next_admitted():
            logits.append(self._prefill(rows))
        count = len(self._running)
        positions = self._positions[:count].add_(1)
        tokens, logprobs = sample(torch.cat(logits), self._seeds[:count], positions, self._temperatures[:count])
        self._newest[:count] = tokens
        sampled = self._collect(tokens.tolist(), logprobs.tolist())
        self._leave([index for index, one in enumerate(sampled) if one.stop is not None])
        return sampled

    def _next_admitted(self) -> list[_Row]:
        """The first waiting trajectories, as many as there are free rows and one forward pass takes; at least one."""
        count, longest = 0, 0
        for row in islice(self._waiting, self._limits.slots - len(self._running)):
            longest = max(longest, row.tokens)
            if count and (count + 1) * longest > PREFILL_TOKENS:
                break
            count += 1
        return [self._waiting.popleft() for _ in range(count)]

    def _prefill(self, rows: list[_Row]) -> torch.Tensor:
        """Give these trajectories the next rows, and return the logits (N, V) after their last tokens.

        Members of a group begin with the same prompt: what is the same is computed once.
        """
        first, end = len(self._running), len(self._running) + len(rows)
        self._running += rows
        sequences = [(*row.request.prompt, *row.response) for row in rows]
        places = {sequence: index for index, sequence in enumerate(dict.fromkeys(sequences))}
        of_row = torch.tensor([places[sequence] for sequence in sequences], device=self._device)
        padded = np.zeros((len(places), max(map(len, sequences))), dtype=np.int64)
        for index, sequence in enumerate(places):
            padded[index, : len(sequence)] = sequence
        self._positions[first:end] = torch.tensor([len(sequence) - 1 for sequence in sequences])
        self._seeds[first:end] = torch.tensor([signed(row.request.seed) for row in rows])
        self._temperatures[first:end] = torch.tensor([row.request.temperature for row in rows])
        tokens = torch.from_numpy(padded).to(self._device)
        positions = torch.arange(tokens.shape[1], device=self._device).expand(tokens.shape)
        hidden = self._hidden(tokens, positions, Prefill(self._cache, first, of_row))
        return self._logits(hidden[of_row, self._positions[first:end]])

    def _decode(self) -> torch.Tensor:
        """Logits (B, V) after the newest tokens of all rows, whose keys and values go into the cache."""
        count = len(self._running)
        positions = self._positions[:count]
        longest = max(row.tokens for row in self._running) - 1
        hidden = self._hidden(self._newest[:count, None], positions[:, None], Decode(self._cache, positions, longest))
        return self._logits(hidden[:, 0])

    def _hidden(self, tokens: torch.Tensor, positions: torch.Tensor, rows: Rows) -> torch.Tensor:
        """The last layer's output (B, T, hidden) for tokens (B, T) at positions (B, T)."""
        output = self._model.base_model(tokens, position_ids=positions, use_cache=False, rows=rows)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model.lm_head(hidden)
        return logits

    def _collect(self, tokens: list[int], logprobs: list[float]) -> list[Sampled]:
        """Append each row's new token to it, and say which rows have ended."""
        sampled = []
        for row, token, logprob in zip(self._running, tokens, logprobs, strict=True):
            row.response.append(token)
            sampled.append(Sampled(row.request.trajectory, token, logprob, self._stop_of(row.response)))
        return sampled

    def _stop_of(self, response: list[int]) -> Stop | None:
        return stop_of(response, self._stop_tokens, self._limits.max_response_tokens)

    def _leave(self, indices: list[int]) -> None:
        """Take these rows out, and move the last ones into the gaps."""
        remaining = len(self._running) - len(indices)
        leaving = set(indices)
        targets = [index for index in indices if index < remaining]
        sources = [index for index in range(remaining, len(self._running)) if index not in leaving]
        if targets:
            self._cache.move(sources, targets, max(self._running[index].tokens for index in sources))
            for state in (self._newest, self._positions, self._seeds, self._temperatures):
                state[targets] = state[sources]
        self._trajectories.difference_update(self._running[index].request.trajectory for index in indices)
        for source, target in zip(sources, targets, strict=True):
            self._running[target] = self._running[source]
        del self._running[remaining:]
