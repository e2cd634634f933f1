"""Megatron-core on a machine without CUDA: the one place where its hard-wired torch.cuda calls are redirected.

Where CUDA is available, nothing here does anything. What is redirected, and why:

- `torch.cuda.current_device()` names the device of parameters, buffers, gradient buffers and received activations. It
  raises without CUDA; here it is the CPU.
- `torch.cuda.synchronize()` follows each exchange of activation shapes between stages; there is no stream to wait for.
- `device="cuda"` is written out in the schedules (token count), the optimizer (loss scale, buffers of the gradient norm) and
  the default causal mask.
- The state of the CUDA random generator is saved and restored around activation recomputation, to repeat dropout. There is
  no such generator, and no dropout.
- The optimizer sorts parameters by the name of their tensor type, "torch.cuda.FloatTensor" or "torch.cuda.BFloat16Tensor",
  and refuses any other.

torch itself stays as it is: Megatron's modules get a stand-in for the name `torch` that they have imported, and parameters
a method of their own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

CREATORS = ("arange", "empty", "full", "ones", "tensor", "zeros")
"""Functions of torch that Megatron calls with device="cuda"."""

CPU = torch.device("cpu")


def redirect_cuda() -> None:
    """Let the modules of megatron.core that are loaded by now compute on the CPU; nothing to do where CUDA is."""
    if torch.cuda.is_available():
        return
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = _TORCH  # type: ignore[attr-defined]
    random: Any = sys.modules["megatron.core.tensor_parallel.random"]
    random._get_cuda_rng_state = _no_state
    random._set_cuda_rng_state = _keep_no_state


def name_types_as_cuda(module: nn.Module) -> None:
    """Let each parameter call its type by the name that the optimizer knows; nothing to do where CUDA is."""
    if torch.cuda.is_available():
        return
    for parameter in module.parameters():
        name = Tensor.type(parameter).replace("torch.", "torch.cuda.")
        parameter.type = functools.partial(_return, name)  # type: ignore[method-assign]


class _StandIn(ModuleType):
    """A module with some names of its own, and all others from `original`."""

    def __init__(self, original: ModuleType, **own: Any) -> None:
        super().__init__(original.__name__)
        self.__dict__.update(own, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _on_cpu(create: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(create)
    def created(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = CPU
        return create(*args, **kwargs)

    return created


def _return(value: Any, *_: Any) -> Any:
    return value


def _no_state(*_: Any, **__: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _keep_no_state(*_: Any, **__: Any) -> None:
    pass


_CUDA = _StandIn(torch.cuda, current_device=lambda: CPU, synchronize=lambda *_: None)
_TORCH = _StandIn(torch, cuda=_CUDA, **{name: _on_cpu(getattr(torch, name)) for name in CREATORS})
