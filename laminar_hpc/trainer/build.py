"""The training engine that the config names; only that one is imported."""

from __future__ import annotations

import importlib.util

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError
from laminar_hpc.trainer.api import TrainingEngine


def build_trainer(config: Config, trainer: int, trainers: int) -> TrainingEngine:
    """The engine of `config.trainer.engine` for trainer number `trainer` of `trainers`, in emulated time if that is asked for."""
    engine = _build(config, trainer, trainers)
    if config.timed_trainer:
        from laminar_hpc.trainer.paced import TimedTrainer

        return TimedTrainer(engine, config)
    return engine


def _build(config: Config, trainer: int, trainers: int) -> TrainingEngine:
    if config.trainer.engine == "torch":
        from laminar_hpc.trainer.torch_trainer import TorchTrainer

        return TorchTrainer(config, trainer, trainers)
    if config.trainer.engine == "megatron":
        if importlib.util.find_spec("megatron") is None:
            raise ConfigError("megatron-core is not installed; trainer.engine = 'megatron' needs the extra [megatron]")
        from laminar_hpc.trainer.megatron_trainer import MegatronTrainer

        return MegatronTrainer(config, trainer, trainers)
    if config.trainer.engine == "paced":
        from laminar_hpc.trainer.paced import PacedTrainer

        return PacedTrainer(config, trainer, trainers)
    raise ConfigError(f"trainer.engine must be torch, megatron or paced, got {config.trainer.engine!r}")
