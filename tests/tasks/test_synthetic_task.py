"""Prompts without meaning: their lengths, their tokens, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError
from laminar_hpc.protocol.trajectory import Purpose
from laminar_hpc.tasks.build import build_task, build_tokenizer, check_task, prompt_counts
from laminar_hpc.tasks.encoding import encode_prompt


def config_of(parameters: dict[str, Any] | None = None, seed: int = 0, every: int = 10) -> Config:
    return Config.model_validate(
        {
            "run_dir": "unused",
            "job": {"seed": seed},
            "task": {"name": "synthetic", "parameters": parameters or {}, "prompts": 5000},
            "rollout": {"engine": "paced", "max_prompt_tokens": 512},
            "trainer": {"engine": "paced"},
            "evaluation": {"every": every, "prompts": 30},
        }
    )


def lengths(config: Config, count: int = 2000) -> list[int]:
    task, tokenizer = build_task(config), build_tokenizer(config)
    return [len(encode_prompt(tokenizer, task, Purpose.TRAIN, index, 512)) for index in range(count)]


def test_lengths_are_even_over_their_logarithms() -> None:
    found = sorted(lengths(config_of({"min_tokens": 8, "max_tokens": 512})))
    assert 8 <= found[0] <= 9
    assert 500 <= found[-1] <= 512
    assert math.log2(found[1000]) == pytest.approx(6.0, abs=0.2)  # half way between 3 and 9


def test_prompts_are_functions_of_the_seed_and_the_number() -> None:
    task = build_task(config_of())
    texts = [task.text(Purpose.TRAIN, index) for index in range(200)]
    assert texts == [build_task(config_of()).text(Purpose.TRAIN, index) for index in range(200)]
    assert len(set(texts)) == 200
    assert texts != [build_task(config_of(seed=1)).text(Purpose.TRAIN, index) for index in range(200)]
    assert task.text(Purpose.EVALUATION, 0) != texts[0]


def test_every_token_is_a_character_and_back() -> None:
    tokenizer = build_tokenizer(config_of())
    tokens = list(range(32_768))
    assert tokenizer.encode(tokenizer.decode(tokens)) == tokens
    assert len(tokenizer.decode([0xD800, 0xDFFF, 0xE000])) == 3
    task = build_task(config_of())
    assert (task.grade(Purpose.TRAIN, 0, "ab"), task.grade(Purpose.TRAIN, 0, "abc")) == (1.0, 0.0)
    assert task.grade(Purpose.TRAIN, 0, task.solution(Purpose.TRAIN, 0)) == 1.0


def test_the_counts_are_those_of_the_config() -> None:
    assert check_task(config_of()) == prompt_counts(config_of()) == (5000, 30)
    assert check_task(config_of(every=0)) == (5000, 0)


@pytest.mark.parametrize(
    ("parameters", "word"),
    [
        ({"longest": 5}, "unknown key longest"),
        ({"min_tokens": 0}, "got 0 and 256"),
        ({"min_tokens": 9, "max_tokens": 8}, "got 9 and 8"),
        ({"max_tokens": 513}, r"max_prompt_tokens \(512\), got 32 and 513"),
        ({"max_tokens": "many"}, "got 32 and 'many'"),
    ],
)
def test_wrong_parameters_are_named(parameters: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=f"task.parameters: .*{word}"):
        build_task(config_of(parameters))
