"""Models that vLLM's CPU kernels can run, an engine worker as a process, and what its answers are compared with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from batches import log_softmax  # noqa: E402
from saved_models import SIZES, Saved  # noqa: E402

from laminar_hpc.process.worker import Worker, start_forkserver  # noqa: E402
from laminar_hpc.protocol.peer import (  # noqa: E402
    AddTrajectory,
    EngineOutput,
    EngineUp,
    Lease,
    LoadWeights,
    StartEngine,
    WeightsLoaded,
)
from laminar_hpc.protocol.trajectory import Purpose, TrajectorySpec  # noqa: E402
from laminar_hpc.protocol.wire import AnyRecord  # noqa: E402
from laminar_hpc.rollout.worker import main  # noqa: E402
from laminar_hpc.weights.digest import chunk_digests, image_digest  # noqa: E402

DEADLINE_S = 300.0
"""vLLM starts within 35 s on idle cores; tests run beside others."""

NEAR_TIE = 1e-4
LIMITS = {"engine": "vllm", "eager": True, "slots": 4, "max_prompt_tokens": 80, "max_response_tokens": 20}
WIDE = SIZES | {"hidden_size": 128}  # heads of 32, the smallest that vLLM's attention on a CPU has
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**WIDE, tie_word_embeddings=False, rope_theta=1000.0),
    "qwen2-tied": lambda: transformers.Qwen2Config(**WIDE, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**WIDE, head_dim=64, tie_word_embeddings=True),
}


def digest_of(saved: Saved) -> bytes:
    """The digest of the image with the model's weights."""
    return image_digest(chunk_digests(saved.image, saved.manifest))


def same_until_near_tie(saved: Saved, prompt: list[int], response: list[int], expected: list[int]) -> bool:
    """Whether two greedy responses agree up to the first place where the two best tokens are almost equally likely."""
    for place, (token, other) in enumerate(zip(response, expected, strict=False)):
        if token != other:
            best, second = log_softmax(saved, prompt, expected)[place].topk(2).values.tolist()
            return bool(best - second < NEAR_TIE)
    return len(response) == len(expected)


class EngineProcess:
    """An engine worker in a process of its own, spoken to as a rollout does."""

    def __init__(self, saved: Saved, log: Path, **rollout: Any) -> None:
        start_forkserver()
        config = saved.config(**LIMITS | {"temperature": 0.7, "stream_interval_s": 0.05} | rollout)
        self.log = log
        self.worker = Worker("engine", main, str(log))
        self.worker.send(StartEngine(config.model_dump_json().encode(), saved.manifest))
        self.up = self.hear(EngineUp)

    def hear(self, kind: type[AnyRecord]) -> Any:
        """The next message, which must be of this kind."""
        message = self.worker.channel.receive(DEADLINE_S)
        assert isinstance(message, kind), f"{message}; see {self.log}"
        return message

    def load(self, version: int, saved: Saved) -> WeightsLoaded:
        """Load the model's weights as `version`."""
        self.worker.send(LoadWeights(Lease(version, saved.lease.path, saved.lease.offset)))
        loaded: WeightsLoaded = self.hear(WeightsLoaded)
        return loaded

    def add(self, trajectory: int, prompt: list[int], purpose: Purpose, response: list[int] | None = None) -> None:
        """Begin a trajectory, or go on with one; evaluation is greedy, training has temperature 0.7."""
        spec = TrajectorySpec(trajectory, 0, 0, trajectory, purpose, 500 + trajectory, len(response or []))
        self.worker.send(AddTrajectory(spec, _int32(prompt), _int32(response or [])))

    def generate(self, prompts: list[list[int]], purpose: Purpose) -> list[tuple[list[int], list[float]]]:
        """The tokens of the responses and their log-probabilities, in the order of the prompts."""
        for trajectory, prompt in enumerate(prompts):
            self.add(trajectory, prompt, purpose)
        outputs: list[EngineOutput] = []
        while sum(len(output.ended) for output in outputs) < len(prompts):
            outputs.append(self.hear(EngineOutput))
        tokens: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        for block in (block for output in outputs for block in output.blocks):
            tokens[block.trajectory] += np.frombuffer(block.tokens, "<i4").tolist()
            logprobs[block.trajectory] += np.frombuffer(block.logprobs, "<f4").tolist()
        return list(zip(tokens, logprobs, strict=True))


def _int32(tokens: list[int]) -> bytes:
    return np.array(tokens, dtype="<i4").tobytes()
