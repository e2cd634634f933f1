"""What the torch engine cannot run, said at the door: neither torch nor transformers is imported here."""

from __future__ import annotations

import os

from laminar_hpc.config.model_files import (
    ARCHITECTURES,
    read_flag,
    read_json,
    read_layer_types,
    read_positions,
    read_rope,
)
from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def check_torch(config: Config) -> None:
    """ConfigError where the torch engine is to run, by itself or behind a paced one, and cannot. Reads config.json."""
    if config.rollout.engine not in ("torch", "paced") or config.timing_only:
        return
    path = config.model.path
    file = os.path.join(path, "config.json")
    model, where = read_json(file), f"model.path: {file}"
    kind = str(model.get("model_type"))
    if kind not in ARCHITECTURES:
        raise ConfigError(f"model.path: {path} is of type {kind}; the torch engine runs {', '.join(ARCHITECTURES)}")
    kinds = read_layer_types(model, where)
    if "sliding_attention" in kinds or (not kinds and read_flag(model, "use_sliding_window", where)):
        raise ConfigError(f"model.path: {path} uses sliding-window attention, which the torch engine does not")
    longest, positions = (
        config.rollout.max_prompt_tokens + config.rollout.max_response_tokens,
        read_positions(model, where),
    )
    if longest > positions:
        raise ConfigError(
            f"rollout.max_prompt_tokens + rollout.max_response_tokens is {longest}; the model in {path} has {positions} "
            f"positions"
        )
    if read_rope(model, where)[0] in LENGTH_DEPENDENT_ROPE:
        raise ConfigError(f"model.path: {path} has rotary embeddings that change with the longest sequence of a batch")
