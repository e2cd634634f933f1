"""A model directory with a character tokenizer but no weights, and configs that point to it."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from laminar_hpc.config.schema import Config
from laminar_hpc.process.worker import start_forkserver

END = 1

MakeConfig = Callable[..., Config]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json and tokenizer.json: every printable character is one token, 1 is the end token."""
    directory = tmp_path_factory.mktemp("model")
    special = ["<pad>", "<eos>", "<unk>"]
    tokenizer = Tokenizer(
        WordLevel({token: index for index, token in enumerate([*special, *string.printable])}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": END}))
    return directory


@pytest.fixture
def make_config(model_dir: Path, tmp_path: Path) -> MakeConfig:
    """Builds a config from the keys that matter to the test: make_config(task={...}, evaluation={...})."""

    def make(**sections: dict[str, Any]) -> Config:
        data = {"evaluation": {"prompts": 5}, **sections}
        return Config.model_validate({"run_dir": str(tmp_path / "run"), "model": {"path": str(model_dir)}, **data})

    return make


@pytest.fixture(scope="session")
def forkserver() -> None:
    """The process that workers come from."""
    start_forkserver()
