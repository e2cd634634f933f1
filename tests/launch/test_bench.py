"""What both sides of `laminar bench trainer` are given."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from laminar_hpc.config.schema import Config
from laminar_hpc.launch.bench import random_mini_batch
from laminar_hpc.protocol.trajectory import Source

MODEL = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}


@pytest.mark.parametrize(("vocabulary", "prompt", "response"), [(5, 1, 1), (100_000, 9, 20)])
def test_tokens_are_the_models_and_no_trajectory_is_without_a_prompt_or_a_response(
    tmp_path: Path, vocabulary: int, prompt: int, response: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"vocab_size": vocabulary}))
    config = Config.model_validate(
        {
            "run_dir": "unused",
            "model": {"path": str(tmp_path)},
            "batch": {"prompts": 8, "group_size": 4},
            "rollout": {"max_prompt_tokens": prompt, "max_response_tokens": response},
        }
    )
    message = random_mini_batch(config, 0)
    assert message == random_mini_batch(config, 0)
    assert len(message.blocks) == len(message.own) == 32
    tokens = []
    for first, second in message.blocks:
        assert (first.source, first.offset, second.source, second.offset) == (
            Source.PROMPT,
            0,
            Source.MODEL,
            first.count,
        )
        assert max(1, prompt // 2) <= first.count <= prompt
        assert max(1, response // 2) <= second.count <= response
        assert len(second.logprobs) == len(second.tokens)
        tokens.append(np.frombuffer(first.tokens + second.tokens, "<i4"))
    drawn = np.concatenate(tokens)
    assert drawn.min() >= 0
    assert vocabulary // 2 < drawn.max() < vocabulary  # 64 draws or more stay under half of it once in 2^64
