"""The engines on a GPU: against transformers on the same GPU, and against the image they were loaded from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from saved_models import CONFIGS, Saved  # noqa: E402

from laminar_hpc.protocol.peer import Lease  # noqa: E402
from laminar_hpc.rollout.api import Engine, Request  # noqa: E402
from laminar_hpc.rollout.build import build_engine  # noqa: E402
from laminar_hpc.weights.digest import digests_of, image_digest  # noqa: E402
from laminar_hpc.weights.image import Image  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

PROMPTS = [[5, 9, 11], [7, 7, 30, 41, 12], [60], [33, 21, 8, 19, 55, 2, 4]]
TOKENS = 24
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.1}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp(request.param), CONFIGS["qwen2-tied"](), seed=21, dtype=request.param)


@pytest.fixture(scope="module", params=["torch", "vllm"])
def engine(request: pytest.FixtureRequest, model: Saved) -> Iterator[Engine]:
    """An engine that holds the model's weights as version 0."""
    if request.param == "vllm":
        pytest.importorskip("vllm")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    config = model.config(
        engine=request.param, max_response_tokens=TOKENS, concurrency=8, slots=8, gpu_memory_share=0.3
    )
    engine = build_engine(config)
    image = Image.create(model.manifest.nbytes, 2)
    slot = image.begin_fill(0)
    assert slot is not None
    slot[: model.manifest.nbytes] = model.image
    image.complete(0)
    engine.load(0, model.manifest, Lease(0, image.path, image.offset_of(0)))
    yield engine
    image.close()


def generated(engine: Engine, requests: list[Request]) -> dict[int, tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of each trajectory, all of them to their ends."""
    results: dict[int, tuple[list[int], list[float]]] = {request.trajectory: ([], []) for request in requests}
    open_ones = {request.trajectory for request in requests if engine.add(request) is None}
    while open_ones:
        for sampled in engine.step():
            tokens, logprobs = results[sampled.trajectory]
            tokens.append(sampled.token)
            logprobs.append(sampled.logprob)
            if sampled.stop is not None:
                open_ones.remove(sampled.trajectory)
    return results


def log_distribution(model: Any, tokens: list[int]) -> Any:
    """Log-probabilities (T, V) of what follows each of the tokens, on the GPU, by transformers."""
    with torch.no_grad():
        logits = model.cuda()(torch.tensor([tokens], device="cuda")).logits[0]
    return torch.log_softmax(logits.float(), -1).cpu()


def test_greedy_tokens_and_their_log_probabilities_are_those_of_transformers(engine: Engine, model: Saved) -> None:
    results = generated(engine, [Request(i, prompt, [], 7 + i, 0.0) for i, prompt in enumerate(PROMPTS)])
    for number, prompt in enumerate(PROMPTS):
        tokens, logprobs = results[number]
        distribution = log_distribution(model.model, prompt + tokens)
        for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True), start=len(prompt) - 1):
            best = float(distribution[place].max())
            assert best - float(distribution[place, token]) < NEAR_TIE[model.dtype]
            assert abs(logprob - float(distribution[place, token])) < NEAR_TIE[model.dtype]


def test_the_weights_inside_are_those_of_the_image(engine: Engine, model: Saved) -> None:
    inside = image_digest(digests_of(engine.weights(model.manifest), model.manifest))
    assert inside == image_digest(digests_of(iter_tensors(model), model.manifest))


def iter_tensors(model: Saved) -> Iterator[Any]:
    for entry in model.manifest.tensors:
        yield np.asarray(model.image[entry.offset : entry.offset + entry.nbytes])


def test_a_trajectory_goes_on_from_what_exists_of_it(engine: Engine) -> None:
    whole = generated(engine, [Request(50, PROMPTS[1], [], 3, 0.0)])[50][0]
    half = whole[: len(whole) // 2]
    rest = generated(engine, [Request(51, PROMPTS[1], half, 3, 0.0)])[51][0]
    agreeing = [a == b for a, b in zip(half + rest, whole, strict=False)]
    assert all(agreeing[: len(half) + 1])


def test_sampled_tokens_carry_the_log_probability_at_their_temperature(engine: Engine, model: Saved) -> None:
    tokens, logprobs = generated(engine, [Request(70, PROMPTS[3], [], 5, 0.7)])[70]
    with torch.no_grad():
        logits = model.model.cuda()(torch.tensor([PROMPTS[3] + tokens], device="cuda")).logits[0].float().cpu()
    distribution = torch.log_softmax(logits / 0.7, -1)
    for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True), start=len(PROMPTS[3]) - 1):
        assert abs(logprob - float(distribution[place, token])) < 2 * NEAR_TIE[model.dtype]
