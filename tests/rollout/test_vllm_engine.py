"""vLLM in this process: what it generates against transformers, and its weights against the image's bytes."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("vllm")

from batches import forward_logprobs, generated, prompts_of_lengths, request, run, tokens  # noqa: E402
from saved_models import END, Saved, lent  # noqa: E402
from vllm_cases import (  # noqa: E402
    LIMITS,
    MODELS,
    digest_of,
    same_until_near_tie,
)

from laminar_hpc.errors import EngineError  # noqa: E402
from laminar_hpc.protocol.peer import Manifest, TensorEntry  # noqa: E402
from laminar_hpc.protocol.trajectory import Stop  # noqa: E402
from laminar_hpc.rollout.api import EngineStats, Request  # noqa: E402
from laminar_hpc.rollout.build import build_engine  # noqa: E402
from laminar_hpc.weights.digest import digests_of, image_digest  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.engine]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("wide-llama"), MODELS["llama"](), seed=21)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Other weights of the same model."""
    return Saved(tmp_path_factory.mktemp("other-llama"), MODELS["llama"](), seed=22)


@pytest.fixture(scope="module")
def shared(llama: Saved) -> Iterator[Any]:
    """One engine for all tests of this module: it takes 20 s to start."""
    variables = dict(os.environ)
    yield build_engine(llama.config(**LIMITS))
    os.environ.clear()
    os.environ.update(variables)


@pytest.fixture
def engine(shared: Any, llama: Saved) -> Any:
    """The engine, empty, with the llama's weights."""
    for trajectory in range(100):
        shared.abort(trajectory)
    shared.load(0, llama.manifest, llama.lease)
    return shared


def test_greedy_tokens_are_those_of_generate(engine: Any, llama: Saved) -> None:
    prompts = prompts_of_lengths(1, 7, 24, 3, 12, 80, 2, 9)
    results = run(engine, [request(i, prompt, 0.0) for i, prompt in enumerate(prompts)])
    for index, prompt in enumerate(prompts):
        expected = generated(llama, prompt, 20)
        assert same_until_near_tie(llama, prompt, tokens(results[index]), expected)
        stops = [one.stop for one in results[index]]
        assert stops[:-1] == [None] * (len(stops) - 1)
        assert stops[-1] is (Stop.END_TOKEN if results[index][-1].token == END else Stop.LENGTH)
    assert (
        len(set(map(tuple, (tokens(result) for result in results.values())))) > 5
    )  # the model does tell prompts apart


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_logprobs_are_those_of_the_policy_sampled_from(engine: Any, llama: Saved, temperature: float) -> None:
    prompts = prompts_of_lengths(1, 7, 24, 3, 12, 80)
    results = run(engine, [request(i, prompt, temperature) for i, prompt in enumerate(prompts)])
    for index, prompt in enumerate(prompts):
        expected = forward_logprobs(llama, prompt, tokens(results[index]), temperature or 1.0)
        assert [one.logprob for one in results[index]] == pytest.approx(expected, abs=1e-4)


def test_greedy_and_sampled_trajectories_share_a_batch(engine: Any, llama: Saved) -> None:
    prompts = prompts_of_lengths(5, 9, 14, 3)
    temperatures = [0.0, 0.7, 0.0, 1.0]
    results = run(engine, [request(i, p, t) for i, (p, t) in enumerate(zip(prompts, temperatures, strict=True))])
    for index, (prompt, temperature) in enumerate(zip(prompts, temperatures, strict=True)):
        expected = forward_logprobs(llama, prompt, tokens(results[index]), temperature or 1.0)
        assert [one.logprob for one in results[index]] == pytest.approx(expected, abs=1e-4)
        if temperature == 0.0:
            assert same_until_near_tie(llama, prompt, tokens(results[index]), generated(llama, prompt, 20))


def test_members_of_a_group_differ_by_their_seed_alone(engine: Any) -> None:
    [prompt] = prompts_of_lengths(9)
    results = run(engine, [Request(i, prompt, [], seed, 1.0) for i, seed in enumerate((7, 8, 7))])
    assert tokens(results[0]) == tokens(results[2]) != tokens(results[1])


def test_a_trajectory_goes_on_after_it_was_dropped_half_way(engine: Any, llama: Saved) -> None:
    prompts = prompts_of_lengths(4, 11, 60)
    requests = [request(i, prompt, 0.0) for i, prompt in enumerate(prompts)]
    whole = run(engine, requests)
    begun = {each.trajectory: each for each in requests}
    for each in requests:
        engine.add(each)
    for _ in range(5):
        for one in engine.step():
            if one.stop is not None:
                del begun[one.trajectory]
    assert begun
    halves = {trajectory: engine.export(trajectory) for trajectory in begun}
    for trajectory in begun:
        engine.abort(trajectory)
    assert engine.step() == []
    engine.load(1, llama.manifest, llama.lease)  # nothing of the first half is left in the cache
    results = run(engine, [request(i, prompts[i], 0.0, half) for i, half in halves.items()])
    for i, half in halves.items():
        assert len(half) >= 4  # a step that reads a long prompt gives the others a token, too
        assert same_until_near_tie(llama, prompts[i], half + tokens(results[i]), tokens(whole[i]))


def test_one_that_goes_on_draws_fresh_noise_of_the_same_policy(engine: Any, llama: Saved) -> None:
    [prompt] = prompts_of_lengths(6)
    [first] = run(engine, [request(0, prompt, 1.0)]).values()
    half = [token for token in tokens(first)[:5] if token != END]
    [again] = run(engine, [request(0, prompt, 1.0, half)]).values()
    [once_more] = run(engine, [request(0, prompt, 1.0, half)]).values()
    assert tokens(again) == tokens(once_more)
    expected = forward_logprobs(llama, prompt, half + tokens(again))[len(half) :]
    assert [one.logprob for one in again] == pytest.approx(expected, abs=1e-4)


def test_responses_that_have_ended_are_not_taken_in_and_others_end_at_the_limit(engine: Any) -> None:
    [prompt] = prompts_of_lengths(4)
    assert engine.add(request(0, prompt, 1.0, [9, END])) is Stop.END_TOKEN
    assert engine.add(request(1, prompt, 1.0, [9] * 20)) is Stop.LENGTH
    assert engine.stats() == EngineStats(0.0, 0, 0)
    assert engine.add(request(2, prompt, 1.0, [9] * 19)) is None
    [last] = engine.step()
    assert last.stop is (Stop.END_TOKEN if last.token == END else Stop.LENGTH)
    assert engine.step() == []


def test_stats_follow_the_batch(engine: Any) -> None:
    assert engine.stats() == EngineStats(0.0, 0, 0)
    assert 400 <= engine.kv_capacity_tokens < 600  # 4 of 100 tokens, in blocks of 32, and one that vLLM keeps
    for index, prompt in enumerate(prompts_of_lengths(40, 40, 40, 40, 40, 40)):
        engine.add(request(index, prompt, 1.0))
    assert engine.stats() == EngineStats(0.0, 0, 6)
    while engine.stats().running < 4:  # `slots`
        engine.step()
    full = engine.stats()
    assert full.running + full.waiting <= 6
    assert 0.3 < full.kv_use <= 1.0  # 40 of 100 tokens each, in blocks of 32
    for index in range(6):
        engine.abort(index)
    assert engine.stats() == EngineStats(0.0, 0, 0)


def test_new_weights_change_the_outputs_and_drop_the_prefix_cache(engine: Any, llama: Saved, other: Saved) -> None:
    [prompt] = prompts_of_lengths(80)  # whole blocks of it stay in the cache
    seen = []
    for version, saved in enumerate((llama, other, llama)):
        engine.load(version, saved.manifest, saved.lease)
        [sampled] = run(engine, [request(0, prompt, 0.0)]).values()
        expected = forward_logprobs(saved, prompt, tokens(sampled))
        assert [one.logprob for one in sampled] == pytest.approx(expected, abs=1e-4)
        assert same_until_near_tie(saved, prompt, tokens(sampled), generated(saved, prompt, 20))
        seen.append(tokens(sampled))
    assert seen[0] == seen[2] != seen[1]


def test_the_weights_in_the_engine_are_the_images_bytes(engine: Any, llama: Saved, other: Saved) -> None:
    for version, saved in enumerate((llama, other)):
        engine.load(version, saved.manifest, saved.lease)
        for entry, data in zip(saved.manifest.tensors, engine.weights(saved.manifest), strict=True):
            assert np.array_equal(data, saved.image[entry.offset : entry.offset + entry.nbytes]), entry.name
        assert image_digest(digests_of(engine.weights(saved.manifest), saved.manifest)) == digest_of(saved)
    assert digest_of(llama) != digest_of(other)


def test_loading_again_and_again_takes_no_more_memory(engine: Any, llama: Saved, other: Saved) -> None:
    def load() -> int:
        for version, saved in enumerate((llama, other) * 10):
            engine.load(version, saved.manifest, saved.lease)
            assert sum(data.nbytes for data in engine.weights(saved.manifest)) > 0
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB

    before = load()
    assert load() - before < 10 * llama.manifest.nbytes / 1024  # of 20 copies


def test_a_packed_weight_that_is_not_that_of_the_parameters_is_found(engine: Any, llama: Saved) -> None:
    worker = engine._engine.model_executor.driver_worker.worker
    model = worker.get_model()
    layer = model.model.layers[1].mlp.down_proj
    before = layer.weight.data.clone()
    layer.weight.data[:, :] += 1e-3  # the packed copy stays behind
    with pytest.raises(EngineError, match=r"packed weight of model\.layers\.1\.mlp\.down_proj"):
        next(iter(engine.weights(llama.manifest)))
    layer.weight.data.copy_(before)
    next(iter(engine.weights(llama.manifest)))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1] * 81, "trajectory 8 has a prompt of 81 tokens; allowed are 1 to 80 "),
        ([], "trajectory 8 has a prompt of 0 tokens"),
        ([1, 64], "trajectory 8 has tokens from 1 to 64; the model's are 0 to 63"),
    ],
)
def test_prompts_that_cannot_run_are_refused(engine: Any, prompt: list[int], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        engine.add(request(8, prompt, 0.0))


def test_a_trajectory_cannot_be_there_twice_and_weights_change_only_between_them(engine: Any, llama: Saved) -> None:
    engine.add(request(8, [1], 0.0))
    with pytest.raises(EngineError, match="trajectory 8 is in the engine already"):
        engine.add(request(8, [1], 0.0))
    with pytest.raises(EngineError, match="version 1 cannot be loaded while 1 trajectories are here"):
        engine.load(1, llama.manifest, llama.lease)
    engine.abort(8)
    engine.abort(8)
    engine.add(request(8, [1], 0.0))
    engine.abort(8)
    with pytest.raises(EngineError, match="trajectory 8 cannot be exported"):
        engine.export(8)


def changed(manifest: Manifest, tensor: str, **fields: Any) -> Manifest:
    """The manifest with some fields of one tensor changed."""
    tensors = []
    for entry in manifest.tensors:
        values = {key: getattr(entry, key) for key in ("name", "shape", "dtype", "offset", "nbytes")}
        tensors.append(TensorEntry(**(values | fields)) if entry.name == tensor else entry)
    return Manifest(tensors, manifest.nbytes, manifest.chunk_bytes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shape": (64, 64)}, r"k_proj.weight is float32 \(64, 128\) in the model, but float32 \(64, 64\)"),
        ({"dtype": "bfloat16"}, "k_proj.weight .* but bfloat16"),
        ({"name": "model.layers.0.self_attn.kk.weight"}, r"the model has no tensor model\.layers\.0\.self_attn\.kk"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named_and_nothing_is_copied(
    engine: Any, llama: Saved, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    wrong = changed(llama.manifest, "model.layers.0.self_attn.k_proj.weight", **fields)
    with pytest.raises(EngineError, match=message):
        engine.load(1, wrong, lent(tmp_path / "zeros", np.zeros_like(llama.image)))
    assert image_digest(digests_of(engine.weights(llama.manifest), llama.manifest)) == digest_of(llama)


def test_a_missing_tensor_and_a_short_image_are_named(engine: Any, llama: Saved, tmp_path: Path) -> None:
    kept = [entry for entry in llama.manifest.tensors if entry.name != "model.norm.weight"]
    manifest = Manifest(kept, llama.manifest.nbytes, llama.manifest.chunk_bytes)
    with pytest.raises(EngineError, match=r"the manifest lacks model\.norm\.weight"):
        engine.load(1, manifest, llama.lease)
    with pytest.raises(EngineError, match="load of version 1: ValueError: mmap length is greater than file size"):
        engine.load(1, llama.manifest, lent(tmp_path / "short", llama.image[:-1]))
