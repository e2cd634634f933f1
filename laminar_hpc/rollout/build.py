"""From the engine's name in the config to the engine; only the chosen one is imported."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError
from laminar_hpc.rollout.api import Engine

if TYPE_CHECKING:
    from laminar_hpc.rollout.paced_tokens import TokenSource


def build_engine(config: Config, device: int = 0, wait: Callable[[float], object] = time.sleep) -> Engine:
    """The engine that `rollout.engine` names, without weights, for the rollout with index `device` on its node.

    `wait` is what an emulated engine does with time that it has left, in seconds; it may return sooner.
    """
    if config.rollout.engine == "torch":
        from laminar_hpc.rollout.torch_setup import check_torch

        check_torch(config)
        from laminar_hpc.rollout.torch_engine import TorchEngine

        return TorchEngine(config, device)
    if config.rollout.engine == "vllm":
        from laminar_hpc.rollout.vllm_setup import check_vllm, prepare_process

        check_vllm(config)
        prepare_process(config, device)
        from laminar_hpc.rollout.vllm_engine import VllmEngine

        return VllmEngine(config)
    if config.rollout.engine == "paced":
        from laminar_hpc.data.presets import check_paced

        check_paced(config)
        from laminar_hpc.rollout.paced import PacedEngine, RealTime

        return PacedEngine(config, _token_source(config, device), RealTime(wait))
    raise ConfigError(f"rollout.engine: must be torch, vllm or paced, got {config.rollout.engine}")


def _token_source(config: Config, device: int) -> TokenSource:
    if config.timing_only:
        from laminar_hpc.rollout.paced_tokens import LengthTokens

        return LengthTokens(config)
    from laminar_hpc.rollout.torch_setup import check_torch

    check_torch(config)
    from laminar_hpc.rollout.paced_model import ModelTokens

    return ModelTokens(config, device)
