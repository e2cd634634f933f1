"""The tokenizer of a model directory."""

from __future__ import annotations

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


@pytest.mark.parametrize(("content", "words"), [(None, "no such file"), ("{", "not a tokenizer")])
def test_a_directory_that_cannot_be_used_is_named(own_dir: Path, content: str | None, words: str) -> None:
    path = own_dir / "tokenizer.json"
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        Tokenizer(str(own_dir))
    assert str(caught.value).startswith(f"model.path: {path}: {words}")
