"""The torch trainer: gradients against the formulas written out, however a mini-batch is cut, and the weight image."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import msgspec  # noqa: E402
from published import assemble, image_of, publish  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from trainer_cases import (  # noqa: E402
    CASES,
    config_for,
    mini_batch,
    reference_gradients,
    reference_logprobs,
    save_model,
)

from laminar_hpc.config.schema import Config  # noqa: E402
from laminar_hpc.errors import ConfigError  # noqa: E402
from laminar_hpc.trainer.api import Sequence  # noqa: E402
from laminar_hpc.trainer.batch import micro_batches  # noqa: E402
from laminar_hpc.trainer.build import build_trainer  # noqa: E402
from laminar_hpc.trainer.hf import load_model  # noqa: E402
from laminar_hpc.trainer.torch_trainer import TorchTrainer  # noqa: E402

pytestmark = pytest.mark.engine

MICRO_BATCHES = {1: 1000, 2: 64, 5: 23}
"""Number of micro-batches of `mini_batch()`: the padded tokens that lead to it."""


def gradients_of(config: Config, sequences: list[Sequence]) -> dict[str, Any]:
    """Gradients of one mini-batch on one rank."""
    trainer = TorchTrainer(config, 0, 1)
    trainer.train(sequences)
    return {name: gradient.clone() for name, gradient in trainer.gradients().items()}


def largest_difference(first: dict[str, Any], second: dict[str, Any]) -> float:
    """Over all numbers of all tensors."""
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("count", MICRO_BATCHES)
def test_gradients_are_those_of_the_formula(model_path: str, aggregation: str, count: int) -> None:
    sequences = mini_batch()
    assert len(micro_batches(sequences, MICRO_BATCHES[count])) == count
    config = config_for(model_path, aggregation=aggregation, clip_high=0.28, micro_batch_tokens=MICRO_BATCHES[count])
    trainer = TorchTrainer(config, 0, 1)
    metrics = trainer.train(sequences)
    model = load_model(model_path, "float32")
    loss, expected = reference_gradients(model, sequences, aggregation, 0.2, 0.28)
    found = {name: gradient.double() for name, gradient in trainer.gradients().items()}
    assert metrics["loss"] == pytest.approx(loss, abs=1e-6)
    assert metrics["clip_fraction_low"] > 0
    assert metrics["clip_fraction_high"] > 0
    assert largest_difference(found, expected) < 1e-6


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_gradients_do_not_depend_on_micro_batches(model_path: str, aggregation: str) -> None:
    found = [
        gradients_of(config_for(model_path, aggregation=aggregation, micro_batch_tokens=limit), mini_batch())
        for limit in MICRO_BATCHES.values()
    ]
    assert largest_difference(found[0], found[1]) < 1e-6
    assert largest_difference(found[0], found[2]) < 1e-6


@pytest.fixture(scope="module")
def two_ranks(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """For each of `CASES` what each of two ranks had at the end: its tensors and its metrics.

    "unbroken" and "resumed" are its weights after four steps without and with a saved state between, "state" is that one.
    """
    program, directory = str(Path(__file__).with_name("data_parallel_rank.py")), tmp_path_factory.mktemp("ranks")
    ranks = [
        subprocess.Popen(
            [sys.executable, program, model_path, str(directory / "meet"), str(directory), str(rank)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        lines = [rank.communicate(timeout=180)[0].splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0]
    found: dict[str, Any] = {
        name: [(load_file(directory / f"{name}-{rank}"), json.loads(lines[rank][place])) for rank in range(2)]
        for place, name in enumerate(CASES)
    }
    for name in ("unbroken", "resumed"):
        found[name] = [load_file(directory / f"{name}-{rank}") for rank in range(2)]
    found["state"] = [load_file(directory / "state" / f"trainer-{rank}.safetensors") for rank in range(2)]
    return found


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_do_what_one_does(model_path: str, two_ranks: dict[str, Any], name: str) -> None:
    (first, first_metrics), (second, second_metrics) = two_ranks[name]
    assert largest_difference(first, second) == 0.0
    assert first_metrics == second_metrics
    trainer = TorchTrainer(config_for(model_path, aggregation=CASES[name][0]), 0, 1)
    metrics = trainer.train(mini_batch())
    summed = {key.removeprefix("gradient."): value for key, value in first.items() if key.startswith("gradient.")}
    assert largest_difference(summed, trainer.gradients()) < 1e-6
    assert first_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-7)


def test_two_ranks_go_on_from_their_parts_of_the_state(model_path: str, two_ranks: dict[str, Any]) -> None:
    unbroken, resumed, state = two_ranks["unbroken"], two_ranks["resumed"], two_ranks["state"]
    assert largest_difference(unbroken[0], load_file_of(model_path, unbroken[0])) > 1e-3
    for rank in range(2):
        assert largest_difference(unbroken[0], unbroken[rank]) == 0.0
        assert largest_difference(unbroken[0], resumed[rank]) == 0.0
    parameters = sum(tensor.numel() for tensor in unbroken[0].values())
    for name in ("weight", "exp_avg", "exp_avg_sq"):
        assert sum(part[name].numel() for part in state) == parameters
        assert abs(state[0][name].numel() - state[1][name].numel()) <= 16


def load_file_of(path: str, tensors: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint's tensors of the same names."""
    model = dict(load_model(path, "float32").named_parameters())
    return {name: model[name].detach() for name in tensors}


def test_padding_does_not_matter(model_path: str) -> None:
    sequences = mini_batch()
    config = config_for(model_path, aggregation="token_mean")
    short = sequences[:3]
    longest = sequences[4]
    filler = Sequence(longest.tokens, longest.behaviour_logprobs, longest.loss_mask, advantage=0.0)
    silent = Sequence(longest.tokens, longest.behaviour_logprobs, np.zeros_like(longest.loss_mask), advantage=1.0)
    alone = gradients_of(config, short)
    padded = gradients_of(config, [*short, silent])  # has no trained token, and pads the others to 16
    assert largest_difference(alone, padded) < 1e-6
    counted = gradients_of(config, [*short, filler])  # its tokens count in the mean, their terms are 0
    tokens = sum(int(sequence.loss_mask.sum()) for sequence in short)
    share = tokens / (tokens + int(filler.loss_mask.sum()))
    assert largest_difference({name: share * g for name, g in alone.items()}, counted) < 1e-6


CORRECTIONS = ("tis_token", "tis_sequence", "icepop", "decoupled")
BOUNDS = {"correction_cap": 1.1, "correction_low": 0.8, "correction_high": 1.3}
"""Tight enough for the ratios of `mini_batch()` to meet them."""


def scored_mini_batch() -> list[Sequence]:
    """The mini-batch, with scores of its start and of a reference that are as far from the model as its behaviour is."""
    rng = np.random.default_rng(8)
    return [
        msgspec.structs.replace(
            s,
            proximal_logprobs=np.where(s.loss_mask, rng.uniform(-5.0, -4.2, len(s.tokens)), 0.0).astype(np.float32),
            reference_logprobs=np.where(s.loss_mask, rng.uniform(-5.0, -4.2, len(s.tokens)), 0.0).astype(np.float32),
        )
        for s in mini_batch()
    ]


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_corrected_gradients_are_those_of_the_formula_however_the_mini_batch_is_cut(
    model_path: str, correction: str
) -> None:
    keys = {"correction": correction, "kl_coefficient": 0.2, "dual_clip": 1.2, **BOUNDS}
    expected_loss, expected = reference_gradients(
        load_model(model_path, "float32"), scored_mini_batch(), "sequence_mean", 0.2, 0.2, **keys
    )
    for limit in MICRO_BATCHES.values():
        trainer = TorchTrainer(config_for(model_path, micro_batch_tokens=limit, **keys), 0, 1)
        metrics = trainer.train(scored_mini_batch())
        found = {name: gradient.double() for name, gradient in trainer.gradients().items()}
        assert metrics["loss"] == pytest.approx(expected_loss, abs=1e-6)
        assert largest_difference(found, expected) < 1e-6
        assert (metrics["masked_fraction"] > 0) is (correction == "icepop")
        assert (metrics["truncated_fraction"] > 0) is correction.startswith("tis")


def test_without_scores_the_weights_come_from_the_same_forward_pass(model_path: str) -> None:
    _, expected = reference_gradients(
        load_model(model_path, "float32"), mini_batch(), "token_mean", 0.2, 0.2, correction="decoupled"
    )
    found = gradients_of(config_for(model_path, aggregation="token_mean", correction="decoupled"), mini_batch())
    assert largest_difference({name: g.double() for name, g in found.items()}, expected) < 1e-6


@pytest.mark.parametrize("limit", MICRO_BATCHES.values())
def test_scores_are_transformers_own(model_path: str, limit: int) -> None:
    config = config_for(model_path, micro_batch_tokens=limit)
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"temperature": 1.7})})
    scores = TorchTrainer(config, 0, 1).score(mini_batch())
    expected = reference_logprobs(load_model(model_path, "float32"), mini_batch(), temperature=1.7)
    for sequence, score, values in zip(mini_batch(), scores, expected, strict=True):
        assert score.dtype == np.float32
        assert score[sequence.loss_mask] == pytest.approx(values.detach().numpy(), abs=1e-5)
        assert not score[~sequence.loss_mask].any()
    assert TorchTrainer(config, 0, 1).score([]) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_stays_the_checkpoint_and_leaves_the_weights_as_they_were(model_path: str, dtype: str) -> None:
    config = config_for(model_path, kl_coefficient=0.1, learning_rate=1e-2)
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    trainer = TorchTrainer(config, 0, 1)
    at_start = trainer.score(mini_batch())
    trainer.train(mini_batch())
    trained = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    masters = trainer._flat.values.clone()
    reference, now = trainer.score(mini_batch(), reference=True), trainer.score(mini_batch())
    for first, kept, moved in zip(at_start, reference, now, strict=True):
        assert np.array_equal(first, kept)
        assert np.abs(first - moved).max() > 1e-3
    assert all(torch.equal(p, trained[name]) for name, p in trainer.model.named_parameters())
    assert torch.equal(trainer._flat.values, masters)


def test_mismatch_is_measured_on_sequences_of_this_version(model_path: str) -> None:
    sequences = [msgspec.structs.replace(s, version=4 + place % 2) for place, s in enumerate(mini_batch())]
    config = config_for(model_path, micro_batch_tokens=MICRO_BATCHES[2])
    metrics = TorchTrainer(config, 0, 1).train(sequences, version=5)
    own = sequences[1::2]
    now = torch.cat(reference_logprobs(load_model(model_path, "float32"), own)).detach().numpy()
    recorded = np.concatenate([s.behaviour_logprobs[s.loss_mask] for s in own]).astype(np.float64)
    assert metrics["mismatch_tokens"] == len(now)
    assert metrics["mismatch_mean"] == pytest.approx(np.abs(now - recorded).mean(), abs=1e-5)
    assert metrics["mismatch_max"] == pytest.approx(np.abs(now - recorded).max(), abs=1e-5)
    assert metrics["mismatch_correlation"] == pytest.approx(np.corrcoef(now, recorded)[0, 1], abs=1e-3)
    assert "mismatch_tokens" not in TorchTrainer(config, 0, 1).train(sequences)


def test_metrics_are_means_over_all_tokens(model_path: str) -> None:
    sequences = mini_batch()
    metrics = TorchTrainer(config_for(model_path, micro_batch_tokens=16), 0, 1).train(sequences)
    model = load_model(model_path, "float32").double()
    entropies, differences = [], []
    for sequence in sequences:
        distribution = torch.log_softmax(
            model(input_ids=torch.tensor(sequence.tokens)[None]).logits[0], dim=-1
        ).detach()
        for place in np.flatnonzero(sequence.loss_mask):
            row = distribution[place - 1]
            entropies.append(float(torch.distributions.Categorical(logits=row).entropy()))
            differences.append(float(row[int(sequence.tokens[place])]) - float(sequence.behaviour_logprobs[place]))
    d = np.array(differences)
    assert metrics["entropy"] == pytest.approx(np.mean(entropies), abs=1e-5)
    assert metrics["kl_behaviour"] == pytest.approx(np.mean(np.exp(d) - 1 - d), rel=1e-5)
    assert metrics["ratio_max"] == pytest.approx(np.exp(d).max(), rel=1e-4)


def test_log_probabilities_are_those_at_the_sampling_temperature(model_path: str) -> None:
    config = config_for(model_path)
    warmer = config.model_copy(update={"rollout": config.rollout.model_copy(update={"temperature": 2.0})})
    entropy = {c.rollout.temperature: TorchTrainer(c, 0, 1).train(mini_batch())["entropy"] for c in (config, warmer)}
    model = load_model(model_path, "float32")
    rows = [
        model(input_ids=torch.tensor(s.tokens)[None]).logits[0][np.flatnonzero(s.loss_mask) - 1].detach() / 2.0
        for s in mini_batch()
    ]
    expected = torch.distributions.Categorical(logits=torch.cat(rows)).entropy().mean()
    assert entropy[2.0] == pytest.approx(float(expected), abs=1e-5)
    assert entropy[2.0] > entropy[1.0]


def test_warmup_and_clipping(model_path: str) -> None:
    config = config_for(model_path, warmup_steps=4, clip_grad_norm=0.01)
    trainer = TorchTrainer(config, 0, 1)
    metrics = [trainer.train(mini_batch()) for _ in range(5)]
    assert [m["learning_rate"] for m in metrics] == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3])
    assert metrics[0]["grad_norm"] > 0.01  # as it was before clipping
    norm = torch.sqrt(sum((g.double() ** 2).sum() for g in trainer.gradients().values()))
    assert float(norm) == pytest.approx(0.01, rel=1e-3)


def test_first_step_is_adams(model_path: str) -> None:
    # the first step of Adam with bias correction: -rate * g / (|g| + 1e-8), without weight decay
    before = {name: p.detach().clone() for name, p in load_model(model_path, "float32").named_parameters()}
    trainer = TorchTrainer(config_for(model_path), 0, 1)
    trainer.train(mini_batch())
    for name, parameter in trainer.model.named_parameters():
        gradient = trainer.gradients()[name]
        expected = before[name] - 1e-3 * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-6)


def test_a_gradient_that_is_not_finite_is_skipped(model_path: str) -> None:
    trainer = TorchTrainer(config_for(model_path), 0, 1)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    good = mini_batch()
    bad = Sequence(good[1].tokens, good[1].behaviour_logprobs * np.float32(np.nan), good[1].loss_mask, advantage=-1.0)
    metrics = trainer.train([*good, bad])
    assert metrics["skipped"] == 1.0
    assert metrics["grad_norm"] == np.inf
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    assert trainer.train(good)["skipped"] == 0.0
    assert not all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())


def test_nothing_to_train_on_makes_no_change(model_path: str) -> None:
    trainer = TorchTrainer(config_for(model_path), 0, 1)
    metrics = trainer.train([])
    assert metrics["loss"] == metrics["grad_norm"] == metrics["entropy"] == 0.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_image_is_the_state_dict(tmp_path: Path, dtype: str, tied: bool) -> None:
    config = config_for(save_model(tmp_path, tied=tied))
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    trainer = build_trainer(config, 0, 1)
    trainer.train(mini_batch())
    manifest = trainer.manifest
    image = image_of(trainer)
    state = trainer.model.state_dict()  # type: ignore[attr-defined]
    with safe_open(tmp_path / "model.safetensors", "pt") as saved:
        names = set(saved.keys())
    assert {entry.name for entry in manifest.tensors} == names
    assert ("lm_head.weight" in names) is not tied
    covered = np.zeros(len(image), dtype=np.bool_)
    for entry in manifest.tensors:
        place = slice(entry.offset, entry.offset + entry.nbytes)
        data = torch.frombuffer(bytearray(image[place].tobytes()), dtype=getattr(torch, dtype)).view(entry.shape)
        assert torch.equal(data, state[entry.name])
        covered[place] = True
    assert not image[~covered].any()


@pytest.mark.parametrize("trainers", [2, 3, 7])
def test_replicas_publish_a_part_each(model_path: str, trainers: int) -> None:
    alone = TorchTrainer(config_for(model_path), 0, 1)
    replicas = [
        TorchTrainer(config_for(model_path, trainers=trainers), trainer, trainers) for trainer in range(trainers)
    ]
    published = [publish(replica) for replica in replicas]
    sizes = [len(data) for _, data in published]
    assert max(sizes) - min(sizes) <= 129  # they are cut at multiples of 64
    assert np.array_equal(assemble(alone.manifest.nbytes, published), image_of(alone))


def test_bfloat16_keeps_small_updates(model_path: str) -> None:
    # an update of 1e-5 is under half a unit in the last place of most bfloat16 weights here; master weights add them up
    config = config_for(model_path, learning_rate=1e-5)
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    trainer = TorchTrainer(config, 0, 1)
    before = trainer.model.base_model.norm.weight.detach().clone()  # all ones: half a unit is 2e-3 below 1
    assert (before == 1).all()
    for _ in range(3):
        trainer.train(mini_batch())
    assert torch.equal(trainer.model.base_model.norm.weight, before)
    masters = [m for m in trainer._flat.masters if m.shape == before.shape and m.dtype == torch.float32]
    last = masters[-1].detach()
    assert float((last - 1).abs().max()) == pytest.approx(3e-5, rel=0.1)


def test_a_checkpoint_without_a_tensor_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = save_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks the tensor model\.norm\.weight"):
        load_model(path, "float32")
