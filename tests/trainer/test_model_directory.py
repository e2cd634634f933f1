"""What a model directory must hold, and what is said where it does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from laminar_hpc.errors import ConfigError
from laminar_hpc.trainer.hf import check_model_directory

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 7,
    "hidden_size": 3,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "tie_word_embeddings": True,
    "eos_token_id": 5,
}


def safetensors(entries: dict[str, tuple[str, list[int], int]]) -> bytes:
    """A file as the format's description has it: header length, header, then the tensors' bytes."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, nbytes) in entries.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]}  # type: ignore[assignment]
        offset += nbytes
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(offset)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A sound directory with two shards."""
    root = tmp_path / "model"
    root.mkdir()
    (root / "config.json").write_text(json.dumps(CONFIG))
    (root / "tokenizer.json").write_text("{}")
    (root / "a.safetensors").write_bytes(safetensors({"model.embed_tokens.weight": ("BF16", [7, 3], 42)}))
    (root / "b.safetensors").write_bytes(safetensors({"a": ("F32", [4], 16), "empty": ("F32", [0], 0)}))
    return root


def test_a_sound_directory_is_let_in(directory: Path) -> None:
    check_model_directory(str(directory))


def config(**changes: object) -> Callable[[Path], object]:
    """Writes config.json with these keys changed."""
    return lambda root: (root / "config.json").write_text(json.dumps(CONFIG | changes))


def cut(root: Path) -> None:
    """Takes the last byte off a shard."""
    data = (root / "a.safetensors").read_bytes()
    (root / "a.safetensors").write_bytes(data[:-1])


def no_shards(root: Path) -> None:
    """Takes all shards away."""
    (root / "a.safetensors").unlink()
    (root / "b.safetensors").unlink()


@pytest.mark.parametrize(
    ("breaks", "text"),
    [
        (lambda root: (root / "config.json").unlink(), "has no config.json"),
        (lambda root: (root / "config.json").write_text("{"), "config.json is not valid JSON"),
        (lambda root: (root / "config.json").write_text("[]"), "config.json must hold a JSON object, got list"),
        (lambda root: (root / "config.json").write_bytes(b"\xff\xfe{"), "config.json is not valid JSON"),
        (
            config(architectures=["GPT2LMHeadModel"]),
            "one of LlamaForCausalLM, .*Qwen3ForCausalLM, got \\['GPT2LMHeadModel'\\]",
        ),
        (config(architectures=None), "got None"),
        (config(architectures=5), "got 5"),
        (config(hidden_size="x"), "hidden_size must be a whole number of at least 1, got 'x'"),
        (config(vocab_size=8), r"embed_tokens.weight must have the shape \[8, 3\] .*, got \[7, 3\]"),
        (config(eos_token_id=7), "eos_token_id 7 is no token: vocab_size is 7"),
        (
            lambda root: (root / "model.safetensors.index.json").write_text('{"weight_map": {"x": "c.safetensors"}}'),
            "lacks c",
        ),
        (config(vocab_size="many"), "vocab_size must be a whole number of at least 1, got 'many'"),
        (config(eos_token_id=None), "eos_token_id is in neither"),
        (no_shards, r"has no \*.safetensors file"),
        (cut, "a.safetensors is no safetensors file, or was cut off"),
        (lambda root: (root / "a.safetensors").write_bytes(b""), "a.safetensors is no safetensors file"),
        (lambda root: (root / "a.safetensors").write_bytes(b"\x02" + bytes(7) + b"{]"), "broken safetensors header"),
        (
            lambda root: (root / "a.safetensors").write_bytes(safetensors({"z": ("F7", [1], 4)})),
            "has tensors of unknown type 'F7'",
        ),
        (lambda root: (root / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda root: (root / "tokenizer.json").write_text("nonsense"), "tokenizer.json is not valid JSON"),
        (lambda root: (root / "generation_config.json").write_text("?"), "generation_config.json is not valid JSON"),
    ],
)
def test_each_fault_is_one_line_with_the_path(directory: Path, breaks: Callable[[Path], object], text: str) -> None:
    breaks(directory)
    with pytest.raises(ConfigError, match=text) as raised:
        check_model_directory(str(directory))
    assert str(directory) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere is not a directory"):
        check_model_directory(str(tmp_path / "nowhere"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_directory(directory: Path) -> None:
    directory.chmod(0)
    try:
        with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
            check_model_directory(str(directory))
    finally:
        directory.chmod(0o755)


def test_neither_torch_nor_transformers_is_loaded() -> None:
    code = "import sys, laminar_hpc.trainer.hf; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
