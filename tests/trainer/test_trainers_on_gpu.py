"""The trainers on a GPU: gradients against the formula on a CPU, and Megatron-core against plain torch."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from published import assemble, image_of  # noqa: E402
from trainer_cases import config_for, mini_batch, reference_gradients, save_model  # noqa: E402

from laminar_hpc.config.schema import Config  # noqa: E402
from laminar_hpc.process.memory import map_for_good  # noqa: E402
from laminar_hpc.trainer.api import TrainingEngine  # noqa: E402
from laminar_hpc.trainer.build import build_trainer  # noqa: E402
from laminar_hpc.trainer.shard import pin  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LOSSES = {"float32": 1e-4, "bfloat16": 2e-2}
WEIGHTS = {"float32": 1e-5, "bfloat16": 1e-3}
"""How far losses, and on average weights, of two trainers may be apart after three steps of 1e-3: the rounding of products.

Single weights may be further apart: Adam makes a whole step of a gradient that is nothing but rounding.
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("qwen2"))


def with_dtype(config: Config, dtype: str) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})


def as_numbers(trainer: TrainingEngine, image: np.ndarray) -> np.ndarray:
    """The published weights as float32, tensor after tensor."""
    tensors = []
    for entry in trainer.manifest.tensors:
        raw = torch.from_numpy(image[entry.offset : entry.offset + entry.nbytes].copy())
        tensors.append(raw.view(getattr(torch, entry.dtype)).float().numpy())
    return np.concatenate(tensors)


def test_gradients_are_those_of_the_formula_on_a_cpu(path: str) -> None:
    from transformers import AutoModelForCausalLM

    config = config_for(path, aggregation="token_mean", clip_high=0.28)
    trainer = build_trainer(config, 0, 1)
    metrics = trainer.train(mini_batch())
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    loss, expected = reference_gradients(model, mini_batch(), "token_mean", 0.2, 0.28)
    assert metrics["loss"] == pytest.approx(float(loss), abs=1e-4)
    gradients = trainer.gradients()  # type: ignore[attr-defined]
    for name, gradient in expected.items():
        assert torch.allclose(gradients[name].cpu().double(), gradient, atol=1e-4), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_megatron_does_what_torch_does(path: str, dtype: str) -> None:
    pytest.importorskip("megatron.core")
    engines = {}
    for name in ("torch", "megatron"):
        config = with_dtype(config_for(path, engine=name, aggregation="token_mean"), dtype)
        trainer = build_trainer(config, 0, 1)
        losses = [trainer.train(mini_batch())["loss"] for _ in range(3)]
        engines[name] = (losses, as_numbers(trainer, image_of(trainer)), trainer.manifest)
    assert engines["megatron"][2] == engines["torch"][2]
    assert engines["megatron"][0] == pytest.approx(engines["torch"][0], abs=LOSSES[dtype])
    assert np.abs(engines["megatron"][1] - engines["torch"][1]).mean() < WEIGHTS[dtype]


@pytest.mark.parametrize("engine", ["torch", "megatron"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_big_enough_model_trains_in_bfloat16(tmp_path: Path, engine: str, recompute: str) -> None:
    """Llama of about 150 million parameters: the loss on one batch falls, and what is published is finite."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if engine == "torch" and recompute != "none":
        pytest.skip("the torch trainer keeps all activations")
    if engine == "megatron":
        pytest.importorskip("megatron.core")
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
    LlamaForCausalLM(LlamaConfig(vocab_size=32_000, num_key_value_heads=4, eos_token_id=1, **sizes)).save_pretrained(
        tmp_path
    )
    keys = {"recompute": recompute} if engine == "megatron" else {}
    config = with_dtype(config_for(str(tmp_path), engine=engine, **keys), "bfloat16")
    trainer = build_trainer(config, 0, 1)
    metrics = [trainer.train(mini_batch()) for _ in range(5)]
    assert all(np.isfinite(list(each.values())).all() for each in metrics)
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    image = image_of(trainer)
    assert np.isfinite(as_numbers(trainer, image)).all()
    assert np.array_equal(image_of(trainer), image)


@pytest.mark.parametrize("engine", ["torch", "megatron"])
def test_what_is_published_is_of_one_moment_though_training_goes_on(path: str, engine: str) -> None:
    if engine == "megatron":
        pytest.importorskip("megatron.core")
    trainer = build_trainer(config_for(path, engine=engine), 0, 1)
    before = image_of(trainer)
    fd = os.memfd_create("shard")
    os.ftruncate(fd, sum(tile.nbytes for tile in trainer.tiles))
    memory = map_for_good(f"/proc/self/fd/{fd}")
    pin(memory)
    assert torch.from_numpy(memory).is_pinned()
    wait = trainer.write_weights(memory)
    trainer.train(mini_batch())
    assert wait is not None
    wait()
    assert np.array_equal(assemble(trainer.manifest.nbytes, [(trainer.tiles, memory)]), before)
    assert not np.array_equal(image_of(trainer), before)
    os.close(fd)
