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
from laminar_hpc.trainer.hf import check_model_directory, tensor_names

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


LAYER = {
    **{f"self_attn.{name}_proj.weight": ("F32", [3, 3], 36) for name in "qkvo"},
    **{f"self_attn.{name}_proj.bias": ("F16", [3], 6) for name in "qkv"},
    **{f"mlp.{name}_proj.weight": ("F32", [2, 3], 24) for name in ("gate", "up")},
    "mlp.down_proj.weight": ("F32", [3, 2], 24),
    "input_layernorm.weight": ("F32", [3], 12),
    "post_attention_layernorm.weight": ("F32", [3], 12),
}
"""The tensors of a layer, and of what lies around the layers but the embedding, as Qwen2ForCausalLM names them."""
REST = {f"model.layers.0.{name}": entry for name, entry in LAYER.items()} | {"model.norm.weight": ("F32", [3], 12)}

TOKENIZER = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 5}}, "added_tokens": [{"id": 6, "content": "<eos>"}]}


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
    (root / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (root / "a.safetensors").write_bytes(safetensors({"model.embed_tokens.weight": ("BF16", [7, 3], 42)}))
    (root / "b.safetensors").write_bytes(safetensors(REST))
    return root


def test_a_sound_directory_is_let_in(directory: Path) -> None:
    check_model_directory(str(directory))


def adds(name: str, dtype: str = "F32", shape: list[int] | None = None) -> Callable[[Path], object]:
    """Stores another tensor, or this one otherwise."""
    tensor = (dtype, shape or [4], 16)
    return lambda root: (root / "b.safetensors").write_bytes(safetensors(REST | {name: tensor}))


@pytest.mark.parametrize(
    "change",
    [
        adds("model.layers.0.self_attn.rotary_emb.inv_freq"),
        adds("model.rotary_emb.inv_freq", "F64"),
        adds("lm_head.weight", shape=[7, 3]),  # though it is tied
        lambda root: (root / "adapter.npz").write_bytes(b"?"),
    ],
)
def test_what_does_no_harm_is_let_in(directory: Path, change: Callable[[Path], object]) -> None:
    change(directory)
    check_model_directory(str(directory))


def test_only_the_files_that_are_loaded_count(directory: Path) -> None:
    embedding = {"model.embed_tokens.weight": ("BF16", [7, 3], 42)}
    (directory / "model.safetensors").write_bytes(safetensors(embedding | REST))
    (directory / "adapter.safetensors").write_bytes(safetensors({"lora_a.weight": ("F32", [4], 16)}))
    check_model_directory(str(directory))


def test_biases_and_norms_are_those_of_the_architecture() -> None:
    def parts(kind: str, **keys: object) -> set[str]:
        names = tensor_names(CONFIG | {"model_type": kind} | keys, "here")
        return {name.removeprefix("model.layers.0.") for name in names if "bias" in name or "self_attn" in name}

    weights = {f"self_attn.{name}_proj.weight" for name in "qkvo"}
    qkv = {f"self_attn.{name}_proj.bias" for name in "qkv"}
    every = qkv | {"self_attn.o_proj.bias"}
    mlp = {f"mlp.{name}_proj.bias" for name in ("gate", "up", "down")}
    norms = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
    assert parts("llama") == weights
    assert parts("llama", attention_bias=True, mlp_bias=True) == weights | every | mlp
    assert parts("qwen2", attention_bias=True, mlp_bias=True) == weights | qkv
    assert parts("qwen3", mlp_bias=True) == weights | norms
    assert parts("qwen3", attention_bias=True) == weights | norms | every


def config(**changes: object) -> Callable[[Path], object]:
    """Writes config.json with these keys changed."""
    return lambda root: (root / "config.json").write_text(json.dumps(CONFIG | changes))


def tokens(model: dict[str, object], *added: int) -> Callable[[Path], object]:
    """Writes a tokenizer."""
    content = {"model": model, "added_tokens": [{"id": number, "content": f"<{number}>"} for number in added]}
    return lambda root: (root / "tokenizer.json").write_text(json.dumps(content))


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
        (config(model_type="llama"), "model_type must be that of Qwen2ForCausalLM, got 'llama'"),
        (config(model_type=[]), "model_type must be that of Qwen2ForCausalLM, got \\[\\]"),
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
            adds("model.norm.weight", "F8_E4M3"),
            "model.norm.weight is F8_E4M3; weights must be F32, BF16, F16",
        ),
        (adds("model.layers.0.mlp.up_proj.weight", "I8"), "up_proj.weight is I8; weights must be"),
        (
            adds("model.layers.0.mlp.up_proj.weight_scale"),
            r"has the tensor model.layers.0.mlp.up_proj.weight_scale, which .* has not \(1 such in all\)",
        ),
        (adds("model.layers.0.self_attn.q_norm.weight"), "has the tensor model.layers.0.self_attn.q_norm.weight"),
        (adds("model.layers.1.input_layernorm.weight"), "has the tensor model.layers.1.input_layernorm.weight"),
        (config(num_hidden_layers=2), r"lacks the tensor model.layers.1.input_layernorm.weight \(12 missing in all\)"),
        (config(tie_word_embeddings=False), r"lacks the tensor lm_head.weight \(1 missing in all\)"),
        (config(tie_word_embeddings="false"), "tie_word_embeddings must be true or false, got 'false'"),
        (config(layer_types=5), "layer_types must be a list of names, got 5"),
        (config(quantization_config={"quant_method": "fp8"}), "has a quantization_config; .* must not be quantized"),
        (lambda root: (root / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda root: (root / "tokenizer.json").write_text("nonsense"), "tokenizer.json is not valid JSON"),
        (lambda root: (root / "tokenizer.json").write_text('{"model": 5}'), "tokenizer.json is no tokenizer"),
        (tokens({"vocab": {"a": 7, "b": 1}}), "tokenizer.json has a token with the id 7; vocab_size of .* is 7"),
        (tokens({"vocab": [["a", -1.5]] * 9}), "has a token with the id 8"),  # a unigram model
        (tokens({"vocab": {"a": 0}}, 9), "has a token with the id 9"),
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
