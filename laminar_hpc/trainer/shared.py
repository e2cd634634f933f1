"""What the trainers on torch have in common: where they compute, how a step ends, and weights that are kept aside."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from laminar_hpc.config import schema
from laminar_hpc.trainer.schedule import learning_rate

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's two, by the names that torch and Transformer Engine give them."""


def trainer_device(trainer: int) -> torch.device:
    """Where trainer number `trainer` computes: a GPU of its node if there is one."""
    if torch.cuda.is_available():
        return torch.device("cuda", trainer % torch.cuda.device_count())
    return torch.device("cpu")


class StepCounter:
    """Makes the steps of an optimizer, each at its learning rate, and none where the gradient is not finite."""

    def __init__(self, config: schema.Trainer) -> None:
        self._config = config
        self.steps = 0
        """Steps that were made."""

    def step(self, optimizer: Any, norm: float, update: Callable[[], None]) -> dict[str, float]:
        """Call `update`, which steps, unless `norm`, the gradient's, is not finite; `optimizer` has the groups with the rates.

        Returns `grad_norm` (infinite where it is not finite), `learning_rate`, and `skipped`, 1 where no step was made.
        """
        finite = math.isfinite(norm)
        rate = learning_rate(self._config, self.steps)
        if finite:
            for group in optimizer.param_groups:
                group["lr"] = rate
            update()
            self.steps += 1
        return {"grad_norm": norm if finite else math.inf, "learning_rate": rate, "skipped": float(not finite)}


def prepare_adam(optimizer: Any, steps: int) -> None:
    """Let Adam count on from `steps`, with moments of 0 where it has none yet, which it would make at its first step.

    torch's AdamW counts for each parameter, in a float32 tensor; Transformer Engine's fused Adam once for each group.
    """
    counts_by_parameter = isinstance(optimizer, torch.optim.AdamW)
    for group in optimizer.param_groups:
        if not counts_by_parameter:
            group["step"] = steps
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            for moment in MOMENTS:
                if moment not in state:
                    state[moment] = torch.zeros_like(parameter.detach())
            if counts_by_parameter:
                state["step"] = torch.tensor(float(steps), dtype=torch.float32)


class Reference:
    """The weights as they were when this was made, in the memory of the host, to compute under them later."""

    def __init__(self, weights: Callable[[], Iterable[Tensor]], changed: Callable[[], None] = lambda: None) -> None:
        """`weights` gives the model's, always in the same order; `changed` is called when they have been written to."""
        self._weights = weights
        self._changed = changed
        self._kept = self._copies()

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside the block the model has the reference's weights; its own wait in the memory of the host."""
        own = self._copies()
        self._set(self._kept)
        try:
            yield
        finally:
            self._set(own)

    def _copies(self) -> list[Tensor]:
        return [weight.detach().to("cpu", copy=True) for weight in self._weights()]

    @torch.no_grad()
    def _set(self, values: list[Tensor]) -> None:
        for weight, value in zip(self._weights(), values, strict=True):
            weight.copy_(value)
        self._changed()


def reference_in_place(reference: Reference | None) -> contextlib.AbstractContextManager[None]:
    """`reference.in_place()`, of a trainer that keeps one."""
    assert reference is not None, "a reference model is kept where trainer.kl_coefficient is more than 0"
    return reference.in_place()
