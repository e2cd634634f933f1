"""The torch engine against transformers' own generation and forward pass."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from batches import forward_logprobs, generated, prompts_of_lengths, request, run, tokens  # noqa: E402
from saved_models import CONFIGS, END, SIZES, Saved, config_for, lent  # noqa: E402

from laminar_hpc.errors import ConfigError, EngineError  # noqa: E402
from laminar_hpc.protocol.peer import Manifest, TensorEntry  # noqa: E402
from laminar_hpc.protocol.trajectory import Stop  # noqa: E402
from laminar_hpc.rollout.api import EngineStats, Request  # noqa: E402
from laminar_hpc.rollout.build import build_engine  # noqa: E402
from laminar_hpc.rollout.torch_engine import TorchEngine, engine_device  # noqa: E402

pytestmark = pytest.mark.engine


def make_engine(saved: Saved, **rollout: Any) -> TorchEngine:
    engine = TorchEngine(saved.config(**rollout))
    engine.load(0, saved.manifest, saved.lease)
    return engine


def test_greedy_tokens_are_those_of_generate_with_fewer_slots_than_prompts(saved: Saved) -> None:
    prompts = prompts_of_lengths(1, 7, 24, 3, 12, 24, 2, 9, 18, 5)
    results = run(make_engine(saved), [request(i, prompt, 0.0) for i, prompt in enumerate(prompts)])
    for index, prompt in enumerate(prompts):
        expected = generated(saved, prompt, 20)
        assert tokens(results[index]) == expected
        stops = [one.stop for one in results[index]]
        assert stops[:-1] == [None] * (len(expected) - 1)
        assert stops[-1] is (Stop.END_TOKEN if expected[-1] == END else Stop.LENGTH)
    assert len(set(map(tuple, (tokens(result) for result in results.values())))) > 5  # the models do tell prompts apart


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_agree_with_a_plain_forward_pass(saved: Saved, temperature: float) -> None:
    prompts = prompts_of_lengths(1, 7, 24, 3, 12, 24, 2)
    results = run(make_engine(saved), [request(i, prompt, temperature) for i, prompt in enumerate(prompts)])
    for index, prompt in enumerate(prompts):
        expected = forward_logprobs(saved, prompt, tokens(results[index]))
        assert [one.logprob for one in results[index]] == pytest.approx(expected, abs=1e-5)


def test_logprobs_at_another_temperature_are_those_of_the_policy_sampled_from(llama: Saved) -> None:
    [prompt] = prompts_of_lengths(6)
    [sampled] = run(make_engine(llama), [request(0, prompt, 0.7)]).values()
    expected = forward_logprobs(llama, prompt, tokens(sampled), temperature=0.7)
    assert [one.logprob for one in sampled] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_trajectory_exported_half_way_goes_on_elsewhere_with_the_same_tokens(
    saved: Saved, temperature: float
) -> None:
    prompts = prompts_of_lengths(4, 11, 23)
    requests = [request(i, prompt, temperature) for i, prompt in enumerate(prompts)]
    whole = run(make_engine(saved), requests)
    first = make_engine(saved)
    begun = {each.trajectory: each for each in requests}
    for each in requests:
        first.add(each)
    for _ in range(5):
        for one in first.step():
            if one.stop is not None:
                del begun[one.trajectory]
    assert begun
    halves = {trajectory: first.export(trajectory) for trajectory in begun}
    second = make_engine(saved)
    others = [request(50 + i, prompt, 1.0) for i, prompt in enumerate(prompts_of_lengths(2, 20))]
    resumed = [request(i, begun[i].prompt, temperature, halves[i]) for i in reversed(begun)]
    results = run(second, [others[0], *resumed, others[1]])
    for trajectory, half in halves.items():
        assert len(half) == 5
        assert half + tokens(results[trajectory]) == tokens(whole[trajectory])
        logprobs = [one.logprob for one in whole[trajectory][5:]]
        assert [one.logprob for one in results[trajectory]] == pytest.approx(logprobs, abs=1e-5)


def test_sampled_tokens_do_not_depend_on_the_batch_or_the_order(saved: Saved) -> None:
    prompts = prompts_of_lengths(3, 20, 8, 8, 1, 15, 6)
    requests = [request(i, prompt, 1.0) for i, prompt in enumerate(prompts)]
    together = run(make_engine(saved), requests)
    backwards = run(make_engine(saved, slots=3), requests[::-1])
    engine = make_engine(saved)
    for each in requests:
        alone = run(engine, [each])[each.trajectory]
        assert tokens(alone) == tokens(together[each.trajectory]) == tokens(backwards[each.trajectory])


def test_members_of_a_group_differ_by_their_seed_alone(llama: Saved) -> None:
    prompt, other = prompts_of_lengths(6, 9)
    requests = [Request(0, prompt, [], 7, 1.0), Request(1, other, [], 8, 1.0), Request(2, prompt, [], 8, 1.0)]
    requests += [Request(3, prompt, [], 7, 1.0), Request(4, other, [], 8, 1.0)]
    results = run(make_engine(llama, slots=5), requests)
    assert tokens(results[0]) == tokens(results[3]) != tokens(results[2])
    assert tokens(results[1]) == tokens(results[4]) != tokens(results[2])
    for each in requests:
        expected = forward_logprobs(llama, each.prompt, tokens(results[each.trajectory]))
        assert [one.logprob for one in results[each.trajectory]] == pytest.approx(expected, abs=1e-5)


def test_aborting_one_leaves_the_others_as_they_were(llama: Saved) -> None:
    prompts = prompts_of_lengths(5, 9, 3, 12, 7, 2)
    requests = [request(i, prompt, 0.0) for i, prompt in enumerate(prompts)]
    undisturbed = run(make_engine(llama), requests)
    engine = make_engine(llama)
    for each in requests:
        engine.add(each)
    seen: dict[int, list[int]] = {each.trajectory: [] for each in requests}
    for step in itertools.count(1):
        sampled = engine.step()
        if not sampled:
            break
        for one in sampled:
            seen[one.trajectory].append(one.token)
        if step == 2:
            engine.abort(0)  # runs, in the first row
            engine.abort(5)  # waits
            engine.abort(99)  # is not there
    assert len(seen[0]) == 2
    assert seen[5] == []
    for trajectory in (1, 2, 3, 4):
        assert seen[trajectory] == tokens(undisturbed[trajectory])


def test_stats_count_tokens_rows_and_the_queue(llama: Saved) -> None:
    engine = make_engine(llama, slots=2, max_prompt_tokens=10, max_response_tokens=6)  # 2 * 16 places
    assert engine.kv_capacity_tokens == 32
    assert engine.stats() == EngineStats(0.0, 0, 0)
    for index, prompt in enumerate(prompts_of_lengths(4, 10, 3)):
        engine.add(request(index, prompt, 0.0))
    assert engine.stats() == EngineStats(0.0, 0, 3)
    first = engine.step()
    assert [one.trajectory for one in first] == [0, 1]  # first in, first out
    assert engine.stats() == EngineStats((5 + 11) / 32, 2, 1)
    engine.step()
    assert engine.stats() == EngineStats((6 + 12) / 32, 2, 1)
    engine.abort(0)
    assert engine.stats() == EngineStats(12 / 32, 1, 1)
    assert [one.trajectory for one in engine.step()] == [1, 2]
    assert engine.stats() == EngineStats((13 + 4) / 32, 2, 0)


def test_steps_without_work_do_nothing(llama: Saved) -> None:
    assert make_engine(llama).step() == []


def test_a_response_is_cut_at_the_limit(llama: Saved) -> None:
    engine = make_engine(llama, max_response_tokens=1)
    [prompt] = prompts_of_lengths(4)
    [sampled] = run(engine, [request(0, prompt, 0.0)])[0]
    assert sampled.stop is (Stop.END_TOKEN if sampled.token == END else Stop.LENGTH)
    assert engine.stats() == EngineStats(0.0, 0, 0)


def test_a_response_that_has_ended_already_is_not_taken_in(llama: Saved) -> None:
    engine = make_engine(llama, max_response_tokens=5)
    [prompt] = prompts_of_lengths(4)
    assert engine.add(request(0, prompt, 1.0, [9, END])) is Stop.END_TOKEN
    assert engine.add(request(1, prompt, 1.0, [9, 9, 9, 9, END])) is Stop.END_TOKEN
    assert engine.add(request(2, prompt, 1.0, [9, 9, 9, 9, 9])) is Stop.LENGTH
    assert engine.stats() == EngineStats(0.0, 0, 0)
    assert engine.add(request(3, prompt, 1.0, [9, 9, 9, 9])) is None
    [last] = engine.step()
    assert last.stop is not None


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1] * 25, "trajectory 8 has a prompt of 25 tokens; allowed are 1 to 24 "),
        ([], "trajectory 8 has a prompt of 0 tokens"),
        ([1, 64], "trajectory 8 has tokens from 1 to 64; the model's are 0 to 63"),
        ([-1], "trajectory 8 has tokens from -1 to -1"),
    ],
)
def test_prompts_that_cannot_run_are_refused(llama: Saved, prompt: list[int], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        make_engine(llama).add(request(8, prompt, 0.0))


def test_a_trajectory_cannot_be_there_twice(llama: Saved) -> None:
    engine = make_engine(llama)
    engine.add(request(8, [1], 0.0))
    with pytest.raises(EngineError, match="trajectory 8 is in the engine already"):
        engine.add(request(8, [1], 0.0))
    engine.step()
    with pytest.raises(EngineError, match="trajectory 8 is in the engine already"):
        engine.add(request(8, [1], 0.0))


def test_a_trajectory_that_has_left_may_come_again(llama: Saved) -> None:
    engine = make_engine(llama, max_response_tokens=1)
    for leaves in (lambda: engine.abort(8), lambda: engine.step(), lambda: engine.abort(8)):
        engine.add(request(8, [1], 0.0))
        leaves()
        assert engine.stats() == EngineStats(0.0, 0, 0)


@pytest.mark.parametrize(("gpus", "expected"), [(0, "cpu cpu cpu cpu"), (2, "cuda:0 cuda:1 cuda:0 cuda:1")])
def test_the_rollouts_of_a_node_take_its_gpus_in_turn(
    monkeypatch: pytest.MonkeyPatch, gpus: int, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert " ".join(engine_device(device) for device in range(4)) == expected


def test_exporting_what_is_not_there_is_an_error(llama: Saved) -> None:
    with pytest.raises(EngineError, match="trajectory 3 cannot be exported"):
        make_engine(llama).export(3)


# --- weights --------------------------------------------------------------------------------------------------------


def test_the_weights_in_the_engine_are_the_images_bytes(saved: Saved) -> None:
    engine = make_engine(saved)
    entries = saved.manifest.tensors
    for entry, data in zip(entries, engine.weights(saved.manifest), strict=True):
        assert data.dtype == np.uint8
        assert np.array_equal(data, saved.image[entry.offset : entry.offset + entry.nbytes]), entry.name


def test_bfloat16_weights_are_loaded_bit_for_bit_and_run(tmp_path: Path) -> None:
    saved = Saved(tmp_path, CONFIGS["qwen2-tied"](), seed=4, dtype="bfloat16")
    engine = make_engine(saved)
    joined = b"".join(data.tobytes() for data in engine.weights(saved.manifest))
    state = saved.model.state_dict()
    assert joined == b"".join(state[e.name].view(torch.int16).numpy().tobytes() for e in saved.manifest.tensors)
    [prompt] = prompts_of_lengths(7)
    [sampled] = run(engine, [request(0, prompt, 0.0)]).values()
    expected = forward_logprobs(saved, prompt, tokens(sampled))
    assert [one.logprob for one in sampled] == pytest.approx(expected, abs=0.1)  # bfloat16 has 8 bits


def test_a_second_version_takes_the_place_of_the_first(tmp_path: Path) -> None:
    old = Saved(tmp_path / "old", CONFIGS["qwen3"](), seed=1)
    new = Saved(tmp_path / "new", CONFIGS["qwen3"](), seed=2)
    engine = make_engine(old)
    [prompt] = prompts_of_lengths(9)
    first = tokens(run(engine, [request(0, prompt, 0.0)])[0])
    engine.load(1, new.manifest, new.lease)
    second = tokens(run(engine, [request(0, prompt, 0.0)])[0])
    assert first == generated(old, prompt, 20)
    assert second == generated(new, prompt, 20)
    assert first != second


def test_weights_change_only_between_trajectories(llama: Saved) -> None:
    engine = make_engine(llama)
    engine.add(request(0, [5], 0.0))
    engine.step()
    with pytest.raises(EngineError, match="version 1 cannot be loaded while 1 trajectories run and 0 wait"):
        engine.load(1, llama.manifest, llama.lease)


def test_no_step_without_weights(llama: Saved) -> None:
    engine = TorchEngine(llama.config())
    engine.add(request(0, [5], 0.0))
    with pytest.raises(EngineError, match="before any weights"):
        engine.step()


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
        ({"shape": (32,)}, r"model.embed_tokens.weight is float32 \(64, 32\) in the model, but float32 \(32,\)"),
        ({"shape": (32, 64)}, r"model.embed_tokens.weight .* but float32 \(32, 64\)"),
        ({"dtype": "bfloat16"}, "model.embed_tokens.weight .* but bfloat16"),
        ({"nbytes": 4096}, "model.embed_tokens.weight .* with 4096 bytes"),
        ({"name": "model.embed.weight"}, "the model has no tensor model.embed.weight"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named_and_nothing_is_copied(
    llama: Saved, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    engine = make_engine(llama)
    before = b"".join(data.tobytes() for data in engine.weights(llama.manifest))
    wrong = changed(llama.manifest, "model.embed_tokens.weight", **fields)
    with pytest.raises(EngineError, match=message):
        engine.load(1, wrong, lent(tmp_path / "zeros", np.zeros_like(llama.image)))
    assert b"".join(data.tobytes() for data in engine.weights(llama.manifest)) == before


def test_a_missing_tensor_is_named(llama: Saved) -> None:
    kept = [entry for entry in llama.manifest.tensors if entry.name != "model.norm.weight"]
    manifest = Manifest(kept, llama.manifest.nbytes, llama.manifest.chunk_bytes)
    with pytest.raises(EngineError, match=r"the manifest lacks model\.norm\.weight"):
        make_engine(llama).load(1, manifest, llama.lease)


def test_a_short_image_is_refused(llama: Saved, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mmap length is greater than file size"):
        make_engine(llama).load(1, llama.manifest, lent(tmp_path / "short", llama.image[:-1]))


def test_an_output_layer_in_the_image_of_a_tied_model_is_refused(tmp_path: Path) -> None:
    saved = Saved(tmp_path, CONFIGS["qwen2-tied"](), seed=4)
    extra = TensorEntry("lm_head.weight", (64, 32), "float32", 0, 64 * 32 * 4)
    manifest = Manifest([*saved.manifest.tensors, extra], saved.manifest.nbytes, saved.manifest.chunk_bytes)
    with pytest.raises(EngineError, match=r"the model has no tensor lm_head\.weight"):
        make_engine(saved).load(1, manifest, saved.lease)


# --- the model directory --------------------------------------------------------------------------------------------


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    saved = Saved(tmp_path, CONFIGS["llama"](), seed=12)
    [prompt] = prompts_of_lengths(9)
    unbounded = tokens(run(make_engine(saved), [request(0, prompt, 0.0)])[0])
    ends = [unbounded[2], 61]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    sampled = run(make_engine(saved), [request(0, prompt, 0.0)])[0]
    assert tokens(sampled) == unbounded[: unbounded.index(ends[0]) + 1]
    assert sampled[-1].stop is Stop.END_TOKEN


def test_without_a_generation_config_end_tokens_come_from_the_models_config(tmp_path: Path) -> None:
    saved = Saved(tmp_path, CONFIGS["llama"](), seed=12)
    (tmp_path / "generation_config.json").unlink()
    engine = make_engine(saved)
    assert engine.add(request(0, [5], 0.0, [END])) is Stop.END_TOKEN
    assert engine.add(request(1, [5], 0.0, [END + 1])) is None


def test_the_rotary_frequencies_are_those_of_the_config(tmp_path: Path) -> None:
    """They are in no image; Llama 3's scaling changes them from the default ones."""
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    saved = Saved(tmp_path, transformers.LlamaConfig(**SIZES, rope_parameters=scaling), seed=3)
    prompts = prompts_of_lengths(24, 6)
    results = run(make_engine(saved), [request(i, prompt, 1.0) for i, prompt in enumerate(prompts)])
    for index, prompt in enumerate(prompts):
        expected = forward_logprobs(saved, prompt, tokens(results[index]))
        assert [one.logprob for one in results[index]] == pytest.approx(expected, abs=1e-5)


def test_a_long_prefill_is_cut_into_passes(llama: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = prompts_of_lengths(5, 24, 24, 3, 3, 3)
    requests = [request(i, prompt, 1.0) for i, prompt in enumerate(prompts)]
    at_once = run(make_engine(llama, slots=6), requests)
    monkeypatch.setattr("laminar_hpc.rollout.torch_engine.PREFILL_TOKENS", 10)
    in_passes = run(make_engine(llama, slots=6), requests)
    assert {i: tokens(one) for i, one in at_once.items()} == {i: tokens(one) for i, one in in_passes.items()}


@pytest.mark.parametrize(
    ("hf_config", "rollout", "message"),
    [
        (lambda: transformers.GPT2Config(n_layer=1), {}, "is of type gpt2; the torch engine runs llama, qwen2, qwen3"),
        (CONFIGS["llama"], {"max_prompt_tokens": 120}, "is 140; the model in .* has 128 positions"),
        (
            lambda: transformers.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1),
            {},
            "sliding-window attention",
        ),
        (
            lambda: transformers.LlamaConfig(
                **SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
            ),
            {},
            "rotary embeddings that change",
        ),
    ],
)
def test_models_that_cannot_run_are_refused(
    tmp_path: Path, hf_config: Any, rollout: dict[str, int], message: str
) -> None:
    hf_config().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message):
        build_engine(config_for(str(tmp_path), **rollout))


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: No such file"):
        build_engine(config_for(str(tmp_path)))
