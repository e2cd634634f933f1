"""The paced engine with a model's tokens: those of the torch engine, told in emulated time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from batches import prompts_of_lengths, request, run, tokens  # noqa: E402
from paced_runs import VirtualTime, joined  # noqa: E402
from saved_models import Saved  # noqa: E402

from laminar_hpc.config.schema import Config  # noqa: E402
from laminar_hpc.errors import ConfigError  # noqa: E402
from laminar_hpc.protocol.trajectory import Stop  # noqa: E402
from laminar_hpc.rollout.api import Run  # noqa: E402
from laminar_hpc.rollout.build import build_engine  # noqa: E402
from laminar_hpc.rollout.paced import PacedEngine  # noqa: E402
from laminar_hpc.rollout.paced_model import ModelTokens  # noqa: E402
from laminar_hpc.rollout.torch_engine import TorchEngine  # noqa: E402
from laminar_hpc.weights.digest import digests_of  # noqa: E402

pytestmark = pytest.mark.engine

PROMPTS = (4, 11, 23, 7, 15)


def config_of(saved: Saved, **paced: object) -> Config:
    limits = {"slots": 3, "max_prompt_tokens": 24, "max_response_tokens": 20, "engine": "paced"}
    values = {"tokens": "model", "decode": [[1, 1.0], [2, 2.0]], "step_overhead_s": 0.0, "time_scale": 1.0, **paced}
    return Config.model_validate(
        {"run_dir": "unused", "model": {"path": saved.path}, "rollout": limits, "paced": values}
    )


def engine_of(saved: Saved, time: VirtualTime, **paced: object) -> PacedEngine:
    config = config_of(saved, **paced)
    engine = PacedEngine(config, ModelTokens(config, 0), time)
    engine.load(0, saved.manifest, saved.lease)
    return engine


def everything(engine: PacedEngine) -> list[Run]:
    told: list[Run] = []
    while engine.stats().running + engine.stats().waiting:
        told += engine.step()
    return told


def test_tokens_and_logprobs_are_those_of_the_torch_engine(llama: Saved) -> None:
    requests = [request(i, prompt, 1.0) for i, prompt in enumerate(prompts_of_lengths(*PROMPTS))]
    plain = TorchEngine(llama.config())
    plain.load(0, llama.manifest, llama.lease)
    expected = run(plain, requests)
    engine = engine_of(llama, VirtualTime())
    for each in requests:
        assert engine.add(each) is None
    told = everything(engine)
    for trajectory, sampled in expected.items():
        assert joined(told, trajectory) == np.array(tokens(sampled), dtype="<i4").tobytes()
        logprobs = b"".join(one.logprobs for one in told if one.trajectory == trajectory)
        assert np.frombuffer(logprobs, "<f4") == pytest.approx([one.logprob for one in sampled], abs=1e-5)
        assert [one.stop for one in told if one.trajectory == trajectory and one.stop] == [sampled[-1].stop]


def test_it_goes_on_elsewhere_with_the_same_tokens(llama: Saved) -> None:
    [prompt] = prompts_of_lengths(9)
    whole = joined_whole = None
    engine = engine_of(llama, VirtualTime())
    engine.add(request(0, prompt, 1.0))
    told = everything(engine)
    whole = np.frombuffer(joined(told, 0), "<i4").tolist()
    assert len(whole) > 3
    joined_whole = whole[:3]
    other = engine_of(llama, VirtualTime())
    other.add(request(0, prompt, 1.0, joined_whole))
    assert other.export(0) == joined_whole
    rest = everything(other)
    assert joined_whole + np.frombuffer(joined(rest, 0), "<i4").tolist() == whole
    assert other.add(request(0, prompt, 1.0, whole)) in (Stop.LENGTH, Stop.END_TOKEN)


def test_short_responses_take_as_long_as_long_ones_and_are_told_evenly(llama: Saved, tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("tokens,cdf\n400,0\n400,1\n")
    [prompt] = prompts_of_lengths(9)
    time = VirtualTime()
    engine = engine_of(llama, time, lengths=str(lengths), prefill_token_s=0.0)
    begin_s = time.now()
    engine.add(request(0, prompt, 1.0))
    told = engine.step()
    time.now_s = begin_s + 200.0
    told += engine.step()
    half = engine.export(0)
    told += everything(engine)
    assert time.now() == pytest.approx(begin_s + 400.0)  # a decode step of one takes a second
    whole = np.frombuffer(joined(told, 0), "<i4").tolist()
    assert half == whole[: len(half)]
    assert abs(len(half) - len(whole) / 2) <= 1
    other_time = VirtualTime()
    other = engine_of(llama, other_time, lengths=str(lengths), prefill_token_s=0.0)
    begin_s = other_time.now()
    other.add(request(0, prompt, 1.0, half))
    rest = np.frombuffer(joined(everything(other), 0), "<i4").tolist()
    assert half + rest == whole
    steps_done = -(-len(half) * 400 // len(whole))
    assert other_time.now() == pytest.approx(begin_s + 400.0 - steps_done)


def test_what_is_interrupted_again_and_again_goes_on_where_it_was(llama: Saved, tmp_path: Path) -> None:
    """Each of its tokens takes 20 decode steps or more, and it is taken out and put back every 7."""
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("tokens,cdf\n400,0\n400,1\n")
    [prompt] = prompts_of_lengths(9)
    time = VirtualTime()
    engine = engine_of(llama, time, lengths=str(lengths), prefill_token_s=0.0)
    begin_s, tokens_so_far, rounds = time.now(), list[int](), 0
    while time.now() < begin_s + 400.0 - 7.0:
        assert engine.add(request(0, prompt, 1.0, tokens_so_far)) is None
        until_s = time.now() + 7.0
        while time.now() < until_s:
            engine.step()
        tokens_so_far = engine.export(0)
        engine.abort(0)
        rounds += 1
    engine.add(request(0, prompt, 1.0, tokens_so_far))
    everything(engine)
    assert rounds > 50
    assert time.now() <= begin_s + 400.0 + rounds  # the step that was under way each time


def test_one_that_goes_before_it_began_may_come_again(llama: Saved) -> None:
    [prompt] = prompts_of_lengths(9)
    engine = engine_of(llama, VirtualTime())
    for _ in range(2):
        engine.add(request(0, prompt, 0.0))
        engine.abort(0)
    engine.add(request(0, prompt, 0.0))
    assert len(joined(everything(engine), 0)) > 0
    assert digests_of(engine.weights(llama.manifest), llama.manifest) == digests_of(
        [llama.image[e.offset : e.offset + e.nbytes] for e in llama.manifest.tensors], llama.manifest
    )


def test_a_model_that_the_torch_engine_cannot_run_is_refused_here_too(llama: Saved) -> None:
    config = config_of(llama)
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_response_tokens": 1000})})
    with pytest.raises(ConfigError, match=r"max_response_tokens is 1024; the model in .* has 128 positions"):
        build_engine(config)
