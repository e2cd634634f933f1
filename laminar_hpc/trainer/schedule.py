"""The learning rate of a step."""

from __future__ import annotations

from laminar_hpc.config import schema


def learning_rate(config: schema.Trainer, steps: int) -> float:
    """The learning rate after `steps` steps: it rises evenly over `warmup_steps`, the first of which is not 0, then stays."""
    return config.learning_rate * min(1.0, (steps + 1) / max(1, config.warmup_steps))
