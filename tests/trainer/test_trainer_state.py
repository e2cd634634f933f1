"""The torch trainer's state: training that goes on from it is training that never stopped, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import msgspec  # noqa: E402
from published import image_of  # noqa: E402
from trainer_cases import config_for, mini_batch, through_a_file  # noqa: E402

from laminar_hpc.config.schema import Config  # noqa: E402
from laminar_hpc.trainer.api import TrainerState  # noqa: E402
from laminar_hpc.trainer.checkpoint import origin_of  # noqa: E402
from laminar_hpc.trainer.torch_trainer import TorchTrainer  # noqa: E402

pytestmark = pytest.mark.engine

KEYS = {"warmup_steps": 4, "weight_decay": 0.1, "clip_grad_norm": 0.5, "micro_batch_tokens": 64}
"""Four steps are all within the rise of the learning rate, and all is at work that a step depends on."""


def config_of(path: str, dtype: str = "float32", **trainer: Any) -> Config:
    config = config_for(path, **KEYS, **trainer)
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})


def scored(trainer: TorchTrainer) -> list[Any]:
    """The mini-batch with log-probabilities under the reference model, where there is one."""
    return [
        msgspec.structs.replace(sequence, reference_logprobs=score)
        for sequence, score in zip(mini_batch(), trainer.score(mini_batch(), reference=True), strict=True)
    ]


def same(first: TrainerState, second: TrainerState) -> bool:
    """Whether all is equal to the last bit."""
    return (
        first.steps == second.steps
        and first.tensors.keys() == second.tensors.keys()
        and all(np.array_equal(tensor, second.tensors[name]) for name, tensor in first.tensors.items())
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_goes_on_as_if_it_had_never_stopped(model_path: str, tmp_path: Path, dtype: str) -> None:
    config = config_of(model_path, dtype)
    trainer = TorchTrainer(config, 0, 1)
    for _ in range(2):
        trainer.train(mini_batch())
    fresh = TorchTrainer(config, 0, 1)
    through_a_file(trainer, fresh, tmp_path, origin_of(config, 0, 1, trainer.manifest))
    assert np.array_equal(image_of(fresh), image_of(trainer))
    metrics = [[one.train(mini_batch()) for _ in range(2)] for one in (trainer, fresh)]
    assert metrics[0] == metrics[1]
    assert [m["learning_rate"] for m in metrics[1]] == [0.75e-3, 1e-3]
    assert np.array_equal(image_of(fresh), image_of(trainer))
    assert same(fresh.state(), trainer.state())


def test_weights_alone_would_not_do(model_path: str, tmp_path: Path) -> None:
    config = config_of(model_path)
    trainer, fresh, half = (TorchTrainer(config, 0, 1) for _ in range(3))
    for _ in range(2):
        trainer.train(mini_batch())
    through_a_file(trainer, fresh, tmp_path, origin_of(config, 0, 1, trainer.manifest))
    state = fresh.state()
    zeros = {name: np.zeros_like(state.tensors[name]) for name in ("exp_avg", "exp_avg_sq")}
    half.load_state(TrainerState(state.steps, {"weight": state.tensors["weight"], **zeros}))
    assert np.array_equal(image_of(half), image_of(trainer))
    for one in (fresh, half):
        one.train(mini_batch())
    difference = np.abs(image_of(fresh).view("<f4") - image_of(half).view("<f4")).max()
    assert difference > 1e-4  # a step is 0.75e-3 at most: what the moments remember is a good part of it


def test_the_state_is_a_copy_of_the_moment_and_saving_changes_nothing(model_path: str) -> None:
    trainer, other = (TorchTrainer(config_of(model_path), 0, 1) for _ in range(2))
    trainer.train(mini_batch())
    state = trainer.state()
    kept = {name: tensor.copy() for name, tensor in state.tensors.items()}
    trainer.train(mini_batch())
    assert same(state, TrainerState(1, kept))
    memory = {name: tensor.ctypes.data for name, tensor in state.tensors.items()}
    again = trainer.state()
    assert {name: tensor.ctypes.data for name, tensor in again.tensors.items()} == memory
    assert again.steps == 2
    assert not any(np.array_equal(again.tensors[name], tensor) for name, tensor in kept.items())
    for _ in range(2):
        other.train(mini_batch())
    assert np.array_equal(image_of(trainer), image_of(other))


def test_adams_moments_are_those_of_its_definition(model_path: str) -> None:
    # Kingma and Ba (arXiv 1412.6980), algorithm 1: m = (1 - beta1) g and v = (1 - beta2) g^2 after the first step
    trainer = TorchTrainer(config_for(model_path), 0, 1)
    trainer.train(mini_batch())
    gradients = torch.cat([gradient.reshape(-1) for gradient in trainer.gradients().values()]).double().numpy()
    tensors = trainer.state().tensors
    assert np.abs(gradients).max() > 1e-3
    assert tensors["exp_avg"] == pytest.approx((1 - 0.9) * gradients, rel=1e-4, abs=1e-9)
    assert tensors["exp_avg_sq"] == pytest.approx((1 - 0.95) * gradients**2, rel=1e-4, abs=1e-12)


def test_before_the_first_step_there_is_a_state_too(model_path: str, tmp_path: Path) -> None:
    config = config_of(model_path)
    trainer, fresh = TorchTrainer(config, 0, 1), TorchTrainer(config, 0, 1)
    through_a_file(trainer, fresh, tmp_path, origin_of(config, 0, 1, trainer.manifest))
    for one in (trainer, fresh):
        one.train(mini_batch())
    assert np.array_equal(image_of(fresh), image_of(trainer))


def test_a_step_that_was_skipped_does_not_count(model_path: str) -> None:
    trainer = TorchTrainer(config_of(model_path), 0, 1)
    broken = [msgspec.structs.replace(sequence, advantage=float("nan")) for sequence in mini_batch()]
    assert trainer.train(broken)["skipped"] == 1.0
    assert trainer.state().steps == 0
    trainer.train(mini_batch())
    assert trainer.state().steps == 1


def test_the_reference_model_is_that_of_the_checkpoint_after_resuming_too(model_path: str, tmp_path: Path) -> None:
    config = config_of(model_path, kl_coefficient=0.1)
    trainer = TorchTrainer(config, 0, 1)
    at_start = trainer.score(mini_batch())
    for _ in range(2):
        trainer.train(scored(trainer))
    fresh = TorchTrainer(config, 0, 1)
    through_a_file(trainer, fresh, tmp_path, origin_of(config, 0, 1, trainer.manifest))
    for first, reference, now in zip(
        at_start, fresh.score(mini_batch(), reference=True), fresh.score(mini_batch()), strict=True
    ):
        assert np.array_equal(first, reference)
        assert not np.array_equal(first, now)
    for one in (trainer, fresh):
        one.train(scored(one))
    assert np.array_equal(image_of(fresh), image_of(trainer))
