"""The tiny model: its tokenizer, its directory, and a warm start that is short, repeatable and measured exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tokenizers import Tokenizer  # noqa: E402

from laminar_hpc.config.model_files import read_end_tokens  # noqa: E402
from laminar_hpc.errors import ConfigError  # noqa: E402
from laminar_hpc.launch.new_directory import new_directory  # noqa: E402
from laminar_hpc.launch.tiny import make  # noqa: E402
from laminar_hpc.trainer.hf import check_model_directory, load_model  # noqa: E402
from laminar_hpc.trainer.tiny import CHARACTERS, make_tiny_model, new_model  # noqa: E402
from laminar_hpc.trainer.warm_start import Example, WarmStart, held_out_accuracy, warm_start  # noqa: E402

pytestmark = pytest.mark.engine

PAIRS = [(f"copy {a}{b}:", f"{a}{b}") for a in "abcdef" for b in "uvwxyz"]
PLAN = WarmStart(target=0.3, wrong_share=0.5, max_steps=120, batch=32)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has begun to copy two letters."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model(str(path), PAIRS[:30], PAIRS[30:], seed=1, plan=PLAN)
    return path


def test_every_character_is_one_token_and_comes_back(tiny: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    ids = tokenizer.encode(CHARACTERS).ids
    assert len(ids) == len(set(ids)) == len(CHARACTERS)
    assert min(ids) == 3  # after padding, end and unknown
    assert tokenizer.decode(ids) == CHARACTERS
    assert tokenizer.decode([*tokenizer.encode("a  b\n").ids, 1], skip_special_tokens=True) == "a  b\n"
    assert tokenizer.encode("a\u00e9").ids[1] == tokenizer.token_to_id("<unk>")


def test_the_directory_is_sound_and_loads(tiny: Path) -> None:
    check_model_directory(str(tiny))
    assert read_end_tokens(str(tiny)) == {1}
    model = load_model(str(tiny), "float32")
    assert model.config.vocab_size == Tokenizer.from_file(str(tiny / "tokenizer.json")).get_vocab_size()
    assert 150_000 < sum(parameter.numel() for parameter in model.parameters()) < 400_000


def test_the_same_seed_makes_the_same_files(tiny: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    make_tiny_model(str(tmp_path / "again"), PAIRS[:30], PAIRS[30:], seed=1, plan=PLAN)
    make_tiny_model(str(tmp_path / "other"), PAIRS[:30], PAIRS[30:], seed=2, plan=PLAN)
    weights = [(path / "model.safetensors").read_bytes() for path in (tiny, tmp_path / "again", tmp_path / "other")]
    assert weights[0] == weights[1] != weights[2]


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="must be a new or an empty directory"):
        make(str(tmp_path), None, seed=0)
    below = new_directory(str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match="cannot be made: Not a directory"), below as part:
        make_tiny_model(part, PAIRS, PAIRS, seed=0)


def encoded(pairs: list[tuple[str, str]], path: Path) -> list[Example]:
    """The pairs as tokens, each answer with the end token."""
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    return [Example(tokenizer.encode(prompt).ids, [*tokenizer.encode(answer).ids, 1]) for prompt, answer in pairs]


def test_the_warm_start_stops_where_it_is_told(tiny: Path) -> None:
    examples = encoded(PAIRS, tiny)
    torch.set_num_threads(1)
    model: Any = new_model(99, seed=4)
    before = held_out_accuracy(model, examples)
    result = warm_start(model, examples, examples, PLAN, seed=4)
    assert before.sampled < 0.01
    assert result.steps < PLAN.max_steps
    assert result.steps % PLAN.check_every == 0
    assert result.accuracy.sampled >= PLAN.target
    assert result.accuracy == held_out_accuracy(model, examples)
    assert warm_start(model, examples, examples, WarmStart(max_steps=0, target=2.0), seed=0).steps == 0


def test_accuracy_is_that_of_decoding(tiny: Path) -> None:
    model = load_model(str(tiny), "float32")
    examples = encoded(PAIRS, tiny)
    right, probability = 0, 0.0
    for example in examples:
        prompt = torch.tensor([example.prompt])
        out = model.generate(
            prompt, max_new_tokens=len(example.answer), do_sample=False, eos_token_id=None, pad_token_id=0
        )
        right += out[0, len(example.prompt) :].tolist() == example.answer
        logits = model(input_ids=torch.tensor([example.prompt + example.answer])).logits[
            0, len(example.prompt) - 1 : -1
        ]
        chosen = torch.softmax(logits, dim=-1)[range(len(example.answer)), example.answer]
        probability += float(torch.prod(chosen).detach())
    found = held_out_accuracy(model, examples)
    assert found.greedy == right / len(examples)
    assert found.sampled == pytest.approx(probability / len(examples), abs=1e-6)


def test_back_to_front_keeps_the_end_token() -> None:
    assert Example([7], [4, 5, 6, 1]).back_to_front() == Example([7], [6, 5, 4, 1])
    assert Example([7], [4, 1]).back_to_front() == Example([7], [4, 1])
    assert Example([7], [1]).back_to_front() == Example([7], [1])
