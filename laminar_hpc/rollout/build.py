"""From the engine's name in the config to the engine; only the chosen one is imported."""

from __future__ import annotations

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError
from laminar_hpc.rollout.api import Engine


def build_engine(config: Config, device: int = 0) -> Engine:
    """The engine that `rollout.engine` names, without weights, for the rollout with index `device` on its node."""
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
    raise ConfigError(f"rollout.engine: must be torch or vllm, got {config.rollout.engine}")
