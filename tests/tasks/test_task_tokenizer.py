"""The tokenizer of a model directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.processors import TemplateProcessing

from laminar_hpc.errors import ConfigError
from laminar_hpc.tasks.tokenizer import Tokenizer

PRINTABLE = st.text(st.characters(min_codepoint=32, max_codepoint=126))


@given(text=PRINTABLE)
def test_decoding_undoes_encoding(model_dir: Path, text: str) -> None:
    tokenizer = Tokenizer(str(model_dir))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_left_out_of_the_text(model_dir: Path) -> None:
    tokenizer = Tokenizer(str(model_dir))
    assert tokenizer.decode([0, *tokenizer.encode("ab"), 1, 1]) == "ab"


@pytest.fixture
def own_dir(model_dir: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(model_dir, tmp_path / "model"))


def test_the_post_processor_of_the_tokenizer_is_respected_but_not_its_truncation_and_padding(own_dir: Path) -> None:
    library = LibraryTokenizer.from_file(str(own_dir / "tokenizer.json"))
    library.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    library.enable_truncation(2)
    library.enable_padding(length=8)
    plain = Tokenizer(str(own_dir)).encode("abc")
    library.save(str(own_dir / "tokenizer.json"))
    assert len(plain) == 3
    assert Tokenizer(str(own_dir)).encode("abc") == [1, *plain]


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, {"eos_token_id": 5}, {5}),
        ({"eos_token_id": [5, 7]}, {"eos_token_id": 9}, {5, 7}),
        ({"eos_token_id": None}, {"eos_token_id": 9}, {9}),
        ({}, {"eos_token_id": [9]}, {9}),
    ],
)
def test_end_tokens_come_from_the_generation_config_first(
    own_dir: Path, generation: dict[str, object] | None, config: dict[str, object], expected: set[int]
) -> None:
    if generation is not None:
        (own_dir / "generation_config.json").write_text(json.dumps(generation))
    (own_dir / "config.json").write_text(json.dumps(config))
    assert Tokenizer(str(own_dir)).end_tokens == expected


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", None, ["tokenizer.json", "no such file"]),
        ("tokenizer.json", "{", ["tokenizer.json", "not a tokenizer"]),
        ("config.json", None, ["eos_token_id", "neither"]),
        ("config.json", "{}", ["eos_token_id", "neither"]),
        ("config.json", "[", ["config.json", "not valid JSON"]),
        ("config.json", '{"eos_token_id": "x"}', ["config.json", "eos_token_id must be", "'x'"]),
        ("config.json", '{"eos_token_id": true}', ["config.json", "eos_token_id must be", "True"]),
    ],
)
def test_a_directory_that_cannot_be_used_is_named(
    own_dir: Path, name: str, content: str | None, words: list[str]
) -> None:
    if content is None:
        (own_dir / name).unlink()
    else:
        (own_dir / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        Tokenizer(str(own_dir))
    for word in ["model.path", str(own_dir), *words]:
        assert word in str(caught.value)
