"""What the Megatron trainer makes of config.json, and what is refused at the door."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError
from laminar_hpc.trainer.architecture import Llama3Scaling, architecture, check_megatron
from laminar_hpc.weights.megatron_layout import placements

KEYS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 7,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "eos_token_id": 1,
}


def safetensors(shapes: dict[str, list[int]]) -> bytes:
    """A file of zeros as the format's description has it: header length, header, then the tensors' bytes."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(offset)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model of zeros in two files with an index."""
    (tmp_path / "config.json").write_text(json.dumps(KEYS))
    write_parts(tmp_path, all_shapes())
    return tmp_path


def write_parts(directory: Path, shapes: dict[str, list[int]]) -> None:
    """Tensors of these shapes, every second one in another file."""
    index = {}
    for part in range(2):
        chosen = {name: shapes[name] for name in sorted(shapes)[part::2]}
        (directory / f"part-{part}.safetensors").write_bytes(safetensors(chosen))
        index |= dict.fromkeys(chosen, f"part-{part}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def config(path: Path, tensor: int = 1, stages: int = 1, engine: str = "megatron") -> Config:
    """A config whose model is cut like this."""
    trainer = {"engine": engine, "tensor_parallel": tensor, "pipeline_parallel": stages}
    job = {"trainers": tensor * stages}
    return Config.model_validate({"run_dir": "unused", "model": {"path": str(path)}, "trainer": trainer, "job": job})


def all_shapes() -> dict[str, list[int]]:
    """What the whole model has."""
    return {p.name: list(p.shape) for p in placements(architecture(KEYS, "").shape, 1, 1)}


def test_a_sound_model_is_let_in(directory: Path) -> None:
    check_megatron(config(directory))
    check_megatron(config(directory, tensor=2, stages=2))


def lacks(name: str) -> Callable[[Path], None]:
    """Takes a tensor out of the checkpoint."""
    return lambda root: write_parts(root, {key: shape for key, shape in all_shapes().items() if key != name})


def reshapes(name: str, shape: list[int]) -> Callable[[Path], None]:
    """Gives a tensor another shape."""
    return lambda root: write_parts(root, all_shapes() | {name: shape})


@pytest.mark.parametrize(
    ("breaks", "text"),
    [
        (
            lacks("model.layers.1.mlp.up_proj.weight"),
            r"lacks the tensor model.layers.1.mlp.up_proj.weight \(1 missing in all\)",
        ),
        (
            reshapes("model.layers.0.self_attn.k_proj.weight", [8, 8]),
            r"k_proj.weight must have the shape \[4, 8\] by config.json, got \[8, 8\]",
        ),
        (reshapes("model.norm.weight", [9]), r"model.norm.weight must have the shape \[8\] by config.json, got \[9\]"),
        (lambda root: (root / "part-1.safetensors").unlink(), "lacks part-1.safetensors, which .* names"),
        (lambda root: (root / "part-0.safetensors").write_bytes(b"x"), "part-0.safetensors is no safetensors file"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_named(directory: Path, breaks: Callable[[Path], None], text: str) -> None:
    breaks(directory)
    with pytest.raises(ConfigError, match=text) as raised:
        check_megatron(config(directory))
    assert str(directory) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("tensor", "stages", "text"),
    [
        (3, 1, "trainer.tensor_parallel must divide the model's num_attention_heads, 4, got 3"),
        (4, 1, "trainer.tensor_parallel must divide the model's num_key_value_heads, 2, got 4"),
        (1, 3, "trainer.pipeline_parallel must divide the model's num_hidden_layers, 2, got 3"),
    ],
)
def test_a_cut_that_leaves_a_rest_is_refused(directory: Path, tensor: int, stages: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_megatron(config(directory, tensor, stages))


def test_other_trainers_are_not_looked_at(tmp_path: Path) -> None:
    check_megatron(config(tmp_path / "nowhere", engine="torch"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "gpt2"}, "has model_type llama, qwen2 and qwen3, got 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu' for the megatron trainer, got 'gelu'"),
        ({"attention_bias": True}, "attention_bias must be False for the megatron trainer, got True"),
        ({"mlp_bias": True}, "mlp_bias must be False"),
        ({"use_sliding_window": True}, "use_sliding_window must be False"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types must be all full_attention"),
        ({"layer_types": 5}, "layer_types must be a list of names, got 5"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, got 'false'"),
        ({"intermediate_size": None}, "intermediate_size must be a whole number of at least 1, got None"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads must divide num_attention_heads \(4\), got 3"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type must be default, linear or llama3"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor must be a number above 0"),
        ({"rope_theta": -1.0}, "rope_theta must be a number above 0, got -1.0"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number above 0, got 'small'"),
    ],
)
def test_what_cannot_be_built_is_named(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=f"^here: .*{text}"):
        architecture(KEYS | changes, "here")


def test_rotary_parameters_are_read_as_old_and_new_files_have_them() -> None:
    new = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    new["original_max_position_embeddings"] = 8192
    old = {key: value for key, value in new.items() if key != "rope_theta"} | {"type": "llama3"}
    expected = architecture(KEYS | {"rope_parameters": new}, "")
    assert expected.rope_base == 5e5
    assert expected.llama3 == Llama3Scaling(8.0, 1.0, 4.0, 8192.0)
    assert architecture(KEYS | {"rope_theta": 5e5, "rope_scaling": old}, "") == expected
    assert architecture(KEYS | {"rope_scaling": {"type": "linear", "factor": 4}}, "").rope_factor == 4.0


def test_families_differ_in_biases_norms_and_head_size() -> None:
    shapes = {kind: architecture(KEYS | {"model_type": kind}, "").shape for kind in ("llama", "qwen2", "qwen3")}
    assert [shapes[kind].qkv_bias for kind in shapes] == [False, True, False]
    assert [shapes[kind].qk_norm for kind in shapes] == [False, False, True]
    assert [shapes[kind].head_size for kind in shapes] == [2, 2, 128]  # Qwen3Config's own default is 128


def test_neither_torch_nor_megatron_is_loaded() -> None:
    code = (
        "import sys, laminar_hpc.trainer.architecture; "
        "print(sorted({'torch', 'transformers', 'megatron'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
