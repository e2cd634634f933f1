"""The Megatron trainer against transformers and against the torch trainer, for three kinds of models and eight cuts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from megatron_cases import (  # noqa: E402
    CASES,
    CUTS,
    MODELS,
    Case,
    Cut,
    case_config,
    case_sequences,
    own_sequences,
    save_models,
)
from published import assemble, image_of  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

from laminar_hpc.protocol.peer import Manifest, Tile  # noqa: E402
from laminar_hpc.trainer.hf import load_model, model_manifest  # noqa: E402
from laminar_hpc.trainer.torch_trainer import TorchTrainer  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.megatron]

EVERYWHERE = [pytest.param(name, cut, id=f"{name}-{cut.name}") for name in MODELS for cut in CUTS]
RECOMPUTING = [
    pytest.param(name, cut, id=f"{name}-{cut.name}")
    for name in ("full_recompute", "selective_recompute")
    for cut in CASES[name].cuts
]

RESUMING = [
    pytest.param(name, cut, id=f"{name}-{cut.name}") for name, case in CASES.items() if case.resume for cut in case.cuts
]


class Outcome:
    """What the ranks of one cut left of a case."""

    def __init__(self, directory: Path, name: str, cut: Cut) -> None:
        files = [directory / f"{cut.name}-{name}-{rank}" for rank in range(cut.trainers)]
        self.tensors = [load_file(file) for file in files]
        self.metrics = [json.loads(file.with_name(f"{file.name}.json").read_text()) for file in files]

    def image(self, moment: str) -> NDArray[np.uint8]:
        """What all trainers published, put together."""
        published = [([Tile(*row) for row in t["tiles"].tolist()], t[moment]) for t in self.tensors]
        return assemble(int(self.tensors[0]["nbytes"][0]), published)


class Single:
    """The torch trainer on all sequences, in one process."""

    def __init__(self, models: Path, name: str) -> None:
        case = CASES[name]
        config = case_config(str(models / case.model), Cut(1, 1, 1), case)
        trainer_keys = config.trainer.model_copy(update={"engine": "torch"})
        self.trainer = TorchTrainer(config.model_copy(update={"trainer": trainer_keys}), 0, 1)
        self.manifest: Manifest = self.trainer.manifest
        self.before = self._image()
        sequences = case_sequences(case)
        self.metrics = [self.trainer.train(sequences, version=3) for _ in range(case.steps)]
        self.after = self._image()

    def _image(self) -> NDArray[np.uint8]:
        return image_of(self.trainer)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random models."""
    torch.set_num_threads(1)
    directory: Path = tmp_path_factory.mktemp("megatron-models")
    save_models(directory)
    return directory


@pytest.fixture(scope="module")
def results(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with what all ranks of all cuts have left."""
    program, directory = Path(__file__).with_name("megatron_ranks.py"), tmp_path_factory.mktemp("megatron-ranks")
    command = [sys.executable, str(program), str(models), str(directory)]
    on_cpu = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=1200, check=True, env=on_cpu)
    ended_well = json.loads(done.stdout.splitlines()[-1])
    assert ended_well == {cut.name: True for cut in CUTS}
    return Path(directory)


@pytest.fixture(scope="module")
def on_gpu(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with what one trainer on a GPU has left."""
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    program, directory = Path(__file__).with_name("megatron_ranks.py"), tmp_path_factory.mktemp("megatron-gpu")
    command = [sys.executable, str(program), str(models), str(directory), "alone"]
    subprocess.run(command, timeout=600, check=True)
    return Path(directory)


@pytest.fixture(scope="module")
def singles(models: Path) -> dict[str, Single]:
    """The torch trainer's results, each made when it is first asked for."""

    class Made(dict[str, Single]):
        def __missing__(self, name: str) -> Single:
            self[name] = Single(models, name)
            return self[name]

    return Made()


def reference_scores(models: Path, case: Case, cut: Cut, trainer: int) -> NDArray[np.float32]:
    """Log-probabilities by transformers, one sequence after the other, for the sequences of a trainer's replica."""
    model = load_model(str(models / case.model), "float32")
    scores = [np.zeros(0, dtype=np.float32)]
    for sequence in own_sequences(case, cut, trainer):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(sequence.tokens)[None], use_cache=False).logits[0]
        logprobs = torch.log_softmax(logits, dim=-1)
        score = np.zeros(len(sequence.tokens), dtype=np.float32)
        for place in np.flatnonzero(sequence.loss_mask):
            score[place] = logprobs[place - 1, int(sequence.tokens[place])]
        scores.append(score)
    return np.concatenate(scores)


@pytest.mark.parametrize(("name", "cut"), EVERYWHERE)
def test_log_probabilities_are_those_of_transformers(models: Path, results: Path, name: str, cut: Cut) -> None:
    outcome = Outcome(results, name, cut)
    for trainer in range(cut.trainers):
        expected = reference_scores(models, CASES[name], cut, trainer)
        assert np.abs(expected).max() > 1
        assert np.abs(outcome.tensors[trainer]["scores"] - expected).max() < 1e-4


@pytest.mark.parametrize(("name", "cut"), EVERYWHERE)
def test_the_image_is_that_of_the_checkpoint(singles: dict[str, Single], results: Path, name: str, cut: Cut) -> None:
    assert np.array_equal(Outcome(results, name, cut).image("before"), singles[name].before)


@pytest.mark.parametrize(("name", "cut"), EVERYWHERE)
def test_a_step_is_that_of_the_torch_trainer(singles: dict[str, Single], results: Path, name: str, cut: Cut) -> None:
    outcome, single = Outcome(results, name, cut), singles[name]
    assert all(metrics == outcome.metrics[0] for metrics in outcome.metrics)
    assert outcome.metrics[0][0]["loss"] == pytest.approx(single.metrics[0]["loss"], abs=1e-5)
    assert outcome.metrics[0][0] == pytest.approx(single.metrics[0], rel=1e-4, abs=1e-6)
    assert single.metrics[0]["grad_norm"] > 0.5  # it is clipped
    before, after = single.before.view(np.float32), outcome.image("after").view(np.float32)
    assert np.abs(after - before).max() > 1e-4
    assert np.abs(after - single.after.view(np.float32)).max() < 1e-5


def test_a_replica_without_sequences_takes_part(singles: dict[str, Single], results: Path) -> None:
    (cut,) = CASES["one_idle"].cuts
    outcome, single = Outcome(results, "one_idle", cut), singles["one_idle"]
    assert [len(tensors["scores"]) > 0 for tensors in outcome.tensors] == [True, False, True, False]
    assert all(metrics == outcome.metrics[0] for metrics in outcome.metrics)
    assert outcome.metrics[0][0] == pytest.approx(single.metrics[0], rel=1e-4, abs=1e-6)
    difference = outcome.image("after").view(np.float32) - single.after.view(np.float32)
    assert np.abs(difference).max() < 1e-5


@pytest.mark.parametrize("cut", CASES["broken"].cuts, ids=lambda cut: cut.name)
def test_a_gradient_that_is_not_finite_makes_no_step_anywhere(results: Path, cut: Cut) -> None:
    outcome = Outcome(results, "broken", cut)
    assert [metrics[0]["skipped"] for metrics in outcome.metrics] == [1.0] * cut.trainers
    assert np.array_equal(outcome.image("before"), outcome.image("after"))


@pytest.mark.parametrize(("name", "cut"), RECOMPUTING)
def test_recomputation_changes_nothing(results: Path, name: str, cut: Cut) -> None:
    kept, recomputed = Outcome(results, CASES[name].model, cut), Outcome(results, name, cut)
    runs = [int(outcome.tensors[0]["attention_runs"][0]) for outcome in (kept, recomputed)]
    assert runs[0] > 1
    assert runs[1] == 2 * runs[0]
    assert recomputed.metrics[0][0] == pytest.approx(kept.metrics[0][0], rel=1e-6)
    assert np.array_equal(recomputed.image("after"), kept.image("after"))


def test_the_reference_stays_what_the_checkpoint_was(models: Path, results: Path) -> None:
    case = CASES["reference"]
    (cut,) = case.cuts
    outcome = Outcome(results, "reference", cut)
    expected = reference_scores(models, case, cut, 0)
    for tensors in outcome.tensors:
        assert np.abs(tensors["reference"] - expected).max() < 1e-4
        assert np.array_equal(tensors["reference"], tensors["scores"])
    assert np.array_equal(outcome.image("again"), outcome.image("after"))
    assert not np.array_equal(outcome.image("after"), outcome.image("before"))


@pytest.mark.parametrize("cut", CASES["bfloat16"].cuts, ids=lambda cut: cut.name)
def test_bfloat16_rounds_float32_masters(singles: dict[str, Single], results: Path, cut: Cut) -> None:
    outcome, single = Outcome(results, "bfloat16", cut), singles["bfloat16"]
    assert np.array_equal(outcome.image("before"), single.before)
    after = bfloat16(outcome.image("after"))
    # two steps of at most 1.5e-3 each; masters agree to that, and rounding to 8 bits adds at most 2^-8 of a weight below 2
    assert np.abs(after - bfloat16(single.after)).max() < 3e-3 + 2.0**-7
    assert outcome.metrics[0][0]["loss"] == pytest.approx(single.metrics[0]["loss"], abs=2e-2)


@pytest.mark.parametrize(("name", "cut"), RESUMING)
def test_training_goes_on_from_a_state_as_if_it_had_never_stopped(results: Path, name: str, cut: Cut) -> None:
    outcome = Outcome(results, name, cut)
    assert np.array_equal(outcome.image("loaded"), outcome.image("after"))
    assert not np.array_equal(outcome.image("unbroken"), outcome.image("after"))
    assert np.array_equal(outcome.image("resumed"), outcome.image("unbroken"))


@pytest.mark.parametrize(("name", "cut"), RESUMING)
def test_each_number_of_the_state_is_in_one_of_the_replicas_files(results: Path, name: str, cut: Cut) -> None:
    # master weights and both moments of every parameter of this tensor rank and stage, cut over the replicas
    outcome = Outcome(results, name, cut)
    found: dict[int, int] = {}
    for trainer in range(cut.trainers):
        state = load_file(results / f"{cut.name}-{name}-{trainer}.state" / f"trainer-{trainer}.safetensors")
        place = trainer if cut.replicas == 1 else trainer - cut.replica(trainer) * cut.tensor
        found[place] = found.get(place, 0) + sum(tensor.size for tensor in state.values())
    expected = [3 * int(tensors["parameters"][0]) for tensors in outcome.tensors]
    assert [found[place] for place in sorted(found)] == [expected[place] for place in sorted(found)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*MODELS, "bfloat16"])
def test_one_gpu_does_what_the_torch_trainer_does(
    models: Path, on_gpu: Path, singles: dict[str, Single], name: str
) -> None:
    cut = Cut(1, 1, 1)
    outcome, single = Outcome(on_gpu, name, cut), singles[name]
    coarse = name == "bfloat16"
    assert np.array_equal(outcome.image("before"), single.before)
    expected = reference_scores(models, CASES[name], cut, 0)
    assert np.abs(outcome.tensors[0]["scores"] - expected).max() < (0.1 if coarse else 1e-3)
    assert outcome.metrics[0][0]["loss"] == pytest.approx(single.metrics[0]["loss"], abs=2e-2 if coarse else 1e-3)
    read = bfloat16 if coarse else (lambda image: image.view(np.float32))
    moved = np.abs(read(outcome.image("after")) - read(outcome.image("before")))
    assert np.abs(read(outcome.image("after")) - read(single.after)).mean() < 0.1 * moved.mean()


def bfloat16(image: NDArray[np.uint8]) -> NDArray[np.float32]:
    """A bfloat16 is the upper half of a float32."""
    return (image.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def test_the_manifest_is_that_of_the_transformers_model(models: Path, singles: dict[str, Single]) -> None:
    for name in MODELS:
        assert singles[name].manifest == model_manifest(load_model(str(models / name), "float32"))
