"""All parameters of a model as one run of float32 numbers, and their gradients as another one.

One bucket makes one all-reduce, one norm and one check for finite numbers. A float32 model lives in the bucket itself; a
model of another type has its master weights there, which small updates need, and takes a rounded copy after each step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from laminar_hpc.trainer.shared import MOMENTS

NORM_RUN = 1 << 16
"""Numbers whose squares are summed in one go: on a CPU torch adds float32 up one by one, and over millions of them what a
small term adds is rounded away; the norm of a model's gradients would be off by a percent."""


class FlatParameters:
    """The trainable parameters of `model`, in their order, as views of `values` and `gradients`, float32 (N,)."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        count = sum(parameter.numel() for parameter in self._parameters)
        device = self._parameters[0].device
        self.values = torch.empty(count, dtype=torch.float32, device=device)
        self.gradients = torch.zeros(count, dtype=torch.float32, device=device)
        self.masters: list[nn.Parameter] = []
        first = 0
        for parameter in self._parameters:
            end = first + parameter.numel()
            self._adopt(parameter, slice(first, end))
            first = end

    def _adopt(self, parameter: nn.Parameter, place: slice) -> None:
        value = self.values[place].view(parameter.shape)
        value.copy_(parameter.detach())
        if parameter.dtype == torch.float32:
            parameter.data = value
            master = parameter
        else:
            master = nn.Parameter(value)
        master.grad = self.gradients[place].view(parameter.shape)
        self.masters.append(master)

    def collect_gradients(self) -> None:
        """Add what one backward pass has left at the parameters to `gradients`; nothing to do where they are one."""
        for parameter, master in zip(self._parameters, self.masters, strict=True):
            if parameter is not master and parameter.grad is not None:
                assert master.grad is not None
                master.grad.add_(parameter.grad)
                parameter.grad = None

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """The norm of all gradients, float32 (); they are scaled down to `max_norm` where it is larger (0: never)."""
        end = len(self.gradients) // NORM_RUN * NORM_RUN
        runs = torch.linalg.vector_norm(self.gradients[:end].view(-1, NORM_RUN), dim=1)
        rest = torch.linalg.vector_norm(self.gradients[end:])
        norm: Tensor = torch.linalg.vector_norm(torch.cat([runs, rest[None]]))
        if max_norm > 0.0:
            self.gradients.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    @torch.no_grad()
    def spread_values(self) -> None:
        """Round the master weights to the model's own type; nothing to do where they are one."""
        for parameter, master in zip(self._parameters, self.masters, strict=True):
            if parameter is not master:
                parameter.copy_(master)

    def lay_moments(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Give Adam its moments, 0, in runs like `values`; the runs, float32 (N,), by Adam's names of them."""
        runs = {moment: torch.zeros_like(self.values) for moment in MOMENTS}
        first = 0
        for master in self.masters:
            end = first + master.numel()
            for moment, run in runs.items():
                optimizer.state[master][moment] = run[first:end].view(master.shape)
            first = end
        return runs

    def groups(self, weight_decay: float) -> list[dict[str, object]]:
        """Parameter groups for an optimizer: matrices decay, biases and norms do not."""
        matrices = [master for master in self.masters if master.ndim >= 2]
        vectors = [master for master in self.masters if master.ndim < 2]
        return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
