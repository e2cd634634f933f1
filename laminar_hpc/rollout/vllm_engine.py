"""vLLM as an engine: its scheduler and its sampler, driven one step at a time, in this process.

vLLM's engine core runs here, without a process of its own. With one GPU, or on a CPU, its worker does too; with several
shards each is a process that vLLM starts. To be imported after `vllm_setup.prepare_process`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.metrics.loggers import StatLoggerBase

from laminar_hpc.config.model_files import read_end_tokens
from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError, EngineError
from laminar_hpc.policy.keyed import stable_hash
from laminar_hpc.process.memory import map_readonly
from laminar_hpc.protocol.peer import Lease, Manifest
from laminar_hpc.protocol.trajectory import Stop
from laminar_hpc.rollout.api import EngineStats, Request, Sampled, check_request, stop_of
from laminar_hpc.rollout.vllm_setup import (
    BACKEND,
    engine_arguments,
    has_gpus,
    unlink_shared_memory,
)

CACHE_RESETS = 4
"""How often a load tries to drop the prefix cache: a batch that was in flight when its trajectories left still holds blocks."""

STOPS = {"stop": Stop.END_TOKEN, "length": Stop.LENGTH}
"""vLLM's reasons why a response has ended, of those that can occur here."""


class _Trajectory:
    """A trajectory in the engine, with its response so far; `key` is its name inside vLLM."""

    def __init__(self, request: Request, key: str) -> None:
        self.request = request
        self.key = key
        self.response = list(request.response)


class _LatestStats(StatLoggerBase):  # type: ignore[misc]
    """What vLLM's scheduler said about itself after the newest step."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        del vllm_config, engine_index
        self.kv_use = 0.0
        self.running = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        """Keep the newest ones; called by vLLM in each step."""
        del iteration_stats, args, kwargs
        if scheduler_stats is not None:
            self.kv_use = scheduler_stats.kv_cache_usage
            self.running = scheduler_stats.num_running_reqs

    def log_engine_initialized(self) -> None:
        """Nothing to log."""


class VllmEngine:
    """`Engine` on vLLM, for the models that this package trains.

    A trajectory ends with END_TOKEN after one of the model's end tokens, which is part of the response, and with LENGTH
    after `rollout.max_response_tokens`. The noise of a trajectory is keyed by its seed and by the number of response tokens
    that it came in with: one that goes on elsewhere draws fresh noise, so sampled tokens, unlike greedy ones, are not those
    of a trajectory that was never moved. Numbers of a batch depend on its size in their last digits.

    `stats()` are those that vLLM gave after the newest step; trajectories that came in since then count as waiting.
    """

    def __init__(self, config: Config) -> None:
        """Start vLLM without weights. ConfigError where `model.path` or a limit is none that it can run."""
        self.concurrency = config.rollout.concurrency
        self._limits = config.rollout
        self._ends = read_end_tokens(config.model.path)
        self._stats = _LatestStats(None)
        self._engine = self._start(config)
        cache = self._engine.vllm_config.cache_config
        self.kv_capacity_tokens = cache.num_gpu_blocks * cache.block_size
        self._vocabulary = self._engine.model_config.get_vocab_size()
        self._layout: Manifest | None = None
        self._version: int | None = None
        self._added = 0
        self._trajectories: dict[int, _Trajectory] = {}
        self._by_key: dict[str, _Trajectory] = {}

    def _start(self, config: Config) -> LLMEngine:
        transfer = WeightTransferConfig(backend=BACKEND)
        try:
            arguments = EngineArgs(**engine_arguments(config, has_gpus()), weight_transfer_config=transfer)
            vllm_config = arguments.create_engine_config(UsageContext.LLM_CLASS)
        except ValueError as error:
            raise ConfigError(f"rollout.engine: vllm refuses the config: {' '.join(str(error).split())}") from error
        with self._errors("start"):
            engine = LLMEngine.from_vllm_config(
                vllm_config, UsageContext.LLM_CLASS, stat_loggers=[lambda *_: self._stats]
            )
        if config.rollout.tensor_parallel > 1:
            with self._errors("start"):
                unlink_shared_memory()
                engine.collective_rpc("unlink_shared_memory", timeout=config.rollout.timeout_s)
        return engine

    def add(self, request: Request) -> Stop | None:
        """As in `Engine`. EngineError also where a token is no token of the model, or the trajectory is here already."""
        who = f"vllm engine: trajectory {request.trajectory}"
        if request.trajectory in self._trajectories:
            raise EngineError(f"{who} is in the engine already")
        check_request(who, request, self._limits, self._vocabulary)
        stop = stop_of(request.response, self._ends, self._limits.max_response_tokens)
        if stop is None:
            self._added += 1
            trajectory = _Trajectory(request, f"{request.trajectory}-{self._added}")
            with self._errors(f"trajectory {request.trajectory}"):
                self._engine.add_request(
                    trajectory.key, tokens_input(request.prompt + request.response), self._parameters(request)
                )
            self._trajectories[request.trajectory] = self._by_key[trajectory.key] = trajectory
        return stop

    def _parameters(self, request: Request) -> SamplingParams:
        return SamplingParams(
            temperature=request.temperature,
            seed=stable_hash(request.seed, len(request.response)),
            max_tokens=self._limits.max_response_tokens - len(request.response),
            stop_token_ids=sorted(self._ends),
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    def abort(self, trajectory: int) -> None:
        """As in `Engine`."""
        leaving = self._trajectories.pop(trajectory, None)
        if leaving is not None:
            del self._by_key[leaving.key]
            with self._errors(f"trajectory {trajectory}"):
                self._engine.abort_request([leaving.key])

    def export(self, trajectory: int) -> list[int]:
        """As in `Engine`; EngineError where the trajectory is not in the engine."""
        if trajectory not in self._trajectories:
            raise EngineError(f"vllm engine: trajectory {trajectory} cannot be exported, it is not in the engine")
        return list(self._trajectories[trajectory].response)

    def step(self) -> list[Sampled]:
        """As in `Engine`. A step that only reads prompts, or fills vLLM's pipeline, is followed by the next one at once."""
        if self._trajectories and self._version is None:
            raise EngineError("vllm engine: asked for a step before any weights were loaded")
        sampled: list[Sampled] = []
        while self._trajectories and not sampled:
            with self._errors("step"):
                outputs = self._engine.step()
            for output in outputs:
                sampled += self._collect(output)
        return sampled

    def _collect(self, output: Any) -> Iterator[Sampled]:
        """The new tokens in what vLLM says of one trajectory; it leaves when it has ended."""
        trajectory = self._by_key.get(output.request_id)
        if trajectory is None:
            return  # dropped while the batch was under way
        number, [completion] = trajectory.request.trajectory, output.outputs
        stop = None
        if completion.finish_reason is not None:
            if completion.finish_reason not in STOPS:
                raise EngineError(f"vllm engine: trajectory {number} was ended by vLLM: {completion.finish_reason}")
            stop = STOPS[completion.finish_reason]
            del self._trajectories[number], self._by_key[trajectory.key]
        tokens = list(completion.token_ids)
        trajectory.response += tokens
        flat = completion.logprobs  # a position's first entry is the sampled token's
        logprobs = [flat.logprobs[start] for start in flat.start_indices[-len(tokens) :]]
        stops = [None] * (len(tokens) - 1) + [stop]
        for token, logprob, its_stop in zip(tokens, logprobs, stops, strict=True):
            yield Sampled(number, token, logprob, its_stop)

    def untold(self) -> list[Sampled]:
        """Nothing, ever."""
        return []

    def stats(self) -> EngineStats:
        """As in `Engine`, after the newest step."""
        count = len(self._trajectories)
        running = min(self._stats.running, count)
        return EngineStats(self._stats.kv_use if count else 0.0, running, count - running)

    def load(self, version: int, manifest: Manifest, lease: Lease) -> None:
        """As in `Engine`. EngineError names the tensor that does not fit the model; then nothing has been copied."""
        if self._trajectories:
            raise EngineError(
                f"vllm engine: version {version} cannot be loaded while {len(self._trajectories)} trajectories are here"
            )
        with self._errors(f"load of version {version}"):
            with map_readonly(lease.path, lease.offset, manifest.nbytes):
                pass  # refused here, in words, where it is too short
            if manifest is not self._layout:
                tensors = [(each.name, each.shape, each.dtype, each.offset, each.nbytes) for each in manifest.tensors]
                self._call("init_weight_transfer_engine", {"tensors": tensors})
                self._layout = manifest
            self._version = None
            self._call("start_weight_update")
            self._call("update_weights", {"path": lease.path, "offset": lease.offset, "nbytes": manifest.nbytes})
            self._call("finish_weight_update")
            self._drop_prefix_cache()
        self._version = version

    def _drop_prefix_cache(self) -> None:
        for _ in range(CACHE_RESETS):
            if self._engine.reset_prefix_cache():
                return
            self._engine.step()
        raise EngineError("vllm engine: the prefix cache cannot be dropped, blocks of it are in use")

    def weights(self, manifest: Manifest) -> Iterator[NDArray[np.uint8]]:
        """As in `Engine`: read from the parameters of all shards, tensor by tensor, and joined in memory that they share.

        On a CPU the multiplications read packed copies; that these are of the same weights is checked on some columns of
        each. EngineError where they are not, or where shards that have the same part hold different bytes.
        """
        with self._errors("read the weights"):
            self._call("check_packed_weights")
            largest = max((entry.nbytes for entry in manifest.tensors), default=0)
            memory = os.memfd_create("laminar-weights", os.MFD_CLOEXEC)
            try:
                os.ftruncate(memory, largest)
                path = f"/proc/{os.getpid()}/fd/{memory}"  # ends with this process, whatever ends it
                with map_readonly(path, 0, largest) as joined:
                    for entry in manifest.tensors:
                        self._check_replicas(entry.name, self._call("write_weight_to", entry.name, path))
                        yield joined[: entry.nbytes]
            finally:
                os.close(memory)

    def _check_replicas(self, name: str, parts: list[tuple[int, bytes]]) -> None:
        digests: dict[int, bytes] = {}
        for shard, (start, digest) in enumerate(parts):
            if digests.setdefault(start, digest) != digest:
                raise EngineError(f"vllm engine: shard {shard} holds another {name} than the shards before it")

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method in every worker of vLLM, and wait for all answers, `rollout.timeout_s` at most."""
        answers: list[Any] = self._engine.collective_rpc(method, timeout=self._limits.timeout_s, args=arguments)
        return answers

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Whatever goes wrong inside vLLM, a dead worker included, is an EngineError that says at what."""
        try:
            yield
        except (EngineError, ConfigError):
            raise
        except Exception as error:
            text = " ".join(str(error).split()) or "no reason given"
            raise EngineError(f"vllm engine: {what}: {type(error).__name__}: {text}") from error
