"""Megatron's gradient buffers and its distributed optimizer around a shard of a model."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from laminar_hpc.config import schema
from laminar_hpc.trainer.api import TrainerState
from laminar_hpc.trainer.host_copy import StateCopy
from laminar_hpc.trainer.megatron_cpu import name_types_as_cuda
from laminar_hpc.trainer.shared import MOMENTS, StepCounter, prepare_adam


class ShardOptimizer:
    """AdamW on a shard; its state, and float32 master weights, are cut over the replicas."""

    def __init__(self, config: schema.Trainer, settings: TransformerConfig, module: nn.Module) -> None:
        """`module` has its weights already: master weights are copied from them here."""
        self._config = config
        self._steps = StepCounter(config)
        name_types_as_cuda(module)
        reduction = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        self.model = DistributedDataParallel(settings, reduction, module)
        """The module with its gradient buffers, as Megatron's schedules expect it."""
        options = OptimizerConfig(
            optimizer="adam",
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            adam_beta1=config.adam_beta1,
            adam_beta2=config.adam_beta2,
            adam_eps=1e-8,
            bf16=settings.bf16,
            params_dtype=settings.params_dtype,
            use_distributed_optimizer=True,
            clip_grad=0.0,  # it is clipped here, where it is known to be finite
        )
        self._optimizer: Any = get_megatron_optimizer(options, [self.model], use_gloo_process_groups=False)
        for group in self._optimizer.param_groups:  # matrices decay, biases and norms do not
            group["weight_decay"] = config.weight_decay * group["wd_mult"]
        for part in self._optimizer.chained_optimizers:
            prepare_adam(part.optimizer, 0)
        self._copy = StateCopy(self._state_tensors(module))

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of `weight.P`, `exp_avg.P` and `exp_avg_sq.P` for each parameter P that this trainer has a run of: (its length,)."""
        return self._copy.shapes

    def state(self) -> TrainerState:
        """A copy of this trainer's part of master weights and moments; the next call writes over it."""
        return self._copy.take(self._steps.steps)

    @torch.no_grad()
    def load_state(self, state: TrainerState) -> None:
        """Go on from `state`; all trainers together: each replica has a part of what the others' weights are made of."""
        self._copy.protect()
        self._copy.put(state.tensors)
        self._steps.steps = state.steps
        for part in self._optimizer.chained_optimizers:
            prepare_adam(part.optimizer, state.steps)
            part._copy_main_params_to_model_params()
        self.model.start_param_sync()

    def zero_gradients(self) -> None:
        """Before a mini-batch."""
        self.model.zero_grad_buffer()
        self._optimizer.zero_grad()

    def reduce_gradients(self) -> None:
        """Sum the gradients of all replicas, of the parts that tensor ranks have computed of one norm, and of tied weights."""
        finalize_model_grads([self.model])

    @torch.no_grad()
    def step(self) -> dict[str, float]:
        """One step with the gradients as they are, the same decision on all trainers.

        Returns `grad_norm` over all shards before clipping, `learning_rate` and `skipped`, 1 where the gradient was not
        finite and no step was made.
        """
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())

        def update() -> None:
            self._copy.protect()
            self._clip(norm)
            self._optimizer.step_with_ready_grads()

        return self._steps.step(self._optimizer, norm, update)

    def _state_tensors(self, module: nn.Module) -> dict[str, Tensor]:
        """The runs of the optimizer, each a part of a parameter of `module` that the cut over the replicas has given it."""
        found = {}
        for name, parameter in module.named_parameters():
            for part in self._optimizer.chained_optimizers:
                if parameter in part.model_param_group_index_map:
                    group, place = part.model_param_group_index_map[parameter]
                    master = part.optimizer.param_groups[group]["params"][place]
                    found[f"weight.{name}"] = master
                    found |= {f"{moment}.{name}": part.optimizer.state[master][moment] for moment in MOMENTS}
        return found

    def _clip(self, norm: float) -> None:
        limit = self._config.clip_grad_norm
        scale = limit / (norm + 1e-6)
        if limit > 0.0 and scale < 1.0:
            gradients = [parameter.grad for parameter in self._optimizer.get_parameters() if parameter.grad is not None]
            torch._foreach_mul_(gradients, scale)
