"""The process groups of a Megatron trainer: made once in a process, for one way to cut the model."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state as state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import EngineError
from laminar_hpc.trainer.address import set_gloo_interface
from laminar_hpc.trainer.megatron_cpu import redirect_cuda
from laminar_hpc.trainer.megatron_weights import Seat
from laminar_hpc.trainer.shared import trainer_device


class Groups(msgspec.Struct, frozen=True):
    """The groups that this trainer is in; None where it would be alone in one."""

    tensor: Any
    """Those with the other parts of each matrix."""
    tensor_rank: int
    data: Any
    """Those with the same part in the other replicas."""
    stages: Any
    """Those with the same part of the other stages."""
    last_stage: int
    """The trainer of the last stage in `stages`."""
    reports: bool
    """Whether this trainer speaks for its replica: the first tensor rank of the last stage."""


def own_device(trainer: int) -> torch.device:
    """The device of trainer number `trainer`, made the current one where it is a GPU."""
    device = trainer_device(trainer)
    if device.type == "cuda":
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron orders its kernels by it
        torch.cuda.set_device(device)
    return device


def join_groups(config: Config, seat: Seat, trainers: int) -> Groups:
    """Make the groups, with those of all other trainers; within `job.stall_timeout_s` each wait.

    A single trainer gets a process group of its own, which needs no network. EngineError where this process has groups for
    another cut already.
    """
    if not dist.is_initialized():
        set_gloo_interface()
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    if dist.get_world_size() != trainers:
        raise EngineError(f"megatron trainer: the process group has {dist.get_world_size()} members, not {trainers}")

    redirect_cuda()
    grid = seat.grid
    if not state.model_parallel_is_initialized():
        state.initialize_model_parallel(
            grid.tensor,
            grid.stages,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=config.job.stall_timeout_s / 60,
        )
        model_parallel_cuda_manual_seed(config.job.seed, inference_rng_tracker=True)  # nothing here is random
    cut = (state.get_tensor_model_parallel_world_size(), state.get_pipeline_model_parallel_world_size())
    if cut != (grid.tensor, grid.stages):
        raise EngineError(
            f"megatron trainer: this process has groups for {cut[0]} tensor ranks and {cut[1]} stages, not for "
            f"{grid.tensor} and {grid.stages}"
        )
    dist.barrier(group=state.get_model_parallel_group())  # NCCL: its first use must be by all members
    return Groups(
        tensor=state.get_tensor_model_parallel_group() if grid.tensor > 1 else None,
        tensor_rank=seat.rank,
        data=state.get_data_parallel_group(),
        stages=state.get_pipeline_model_parallel_group() if grid.stages > 1 else None,
        last_stage=grid.trainer(seat.rank, seat.replica, grid.stages - 1),
        reports=seat.rank == 0 and seat.stage == grid.stages - 1,
    )
