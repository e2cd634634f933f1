"""What is read from the small files of a model directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from laminar_hpc.config.model_files import read_end_tokens
from laminar_hpc.errors import ConfigError


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, {"eos_token_id": 5}, {5}),
        ({"eos_token_id": [5, 7]}, {"eos_token_id": 9}, {5, 7}),
        ({"eos_token_id": None}, {"eos_token_id": 9}, {9}),
        ({"eos_token_id": []}, {"eos_token_id": 9}, {9}),
        ({}, {"eos_token_id": [9, 0]}, {9, 0}),
        ({"eos_token_id": 5}, None, {5}),
    ],
)
def test_end_tokens_come_from_the_generation_config_first(
    tmp_path: Path, generation: dict[str, object] | None, config: dict[str, object] | None, expected: set[int]
) -> None:
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert read_end_tokens(str(tmp_path)) == expected


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "eos_token_id is in neither generation_config.json nor config.json"),
        (b"{}", "eos_token_id is in neither generation_config.json nor config.json"),
        (b"[", "config.json is not valid JSON"),
        (b"[" * 100_000, "config.json is not valid JSON"),
        (b"\xff\xfe{", "config.json is not valid JSON"),
        (b"[]", "config.json must hold a JSON object, got list"),
        (b'{"eos_token_id": "x"}', "config.json: eos_token_id must be an integer or a list of them, got 'x'"),
        (b'{"eos_token_id": true}', "got True"),
        (b'{"eos_token_id": [1, -1]}', r"got \[1, -1\]"),
    ],
)
def test_a_model_that_could_never_end_is_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=words) as raised:
        read_end_tokens(str(tmp_path))
    assert str(raised.value).startswith(f"model.path: {tmp_path}")
    assert "\n" not in str(raised.value)
