"""The ranks of all cuts, as one program: libraries are loaded once, then every cut's ranks are forked and work together.

Arguments: the directory with the models, and the one for results; "alone" after them has one trainer do all, without a
fork, which a process that has looked for GPUs cannot make. A rank leaves one file for each case: its share of the
image before and after training, and its scores; metrics lie beside it as JSON.
"""

from __future__ import annotations

import datetime
import json
import multiprocessing
import sys
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

import numpy as np
import torch
import torch.distributed as dist
from megatron_cases import CASES, CUTS, Case, Cut, case_config, own_sequences
from numpy.typing import NDArray
from safetensors.numpy import save_file

from laminar_hpc.trainer.megatron_trainer import MegatronTrainer
from laminar_hpc.weights.manifest import range_bytes
from laminar_hpc.weights.reshard import share

DEADLINE_S = 300.0
"""For all cases of one cut."""


def run_rank(models: str, output: str, cut: Cut, rank: int) -> None:
    """All cases of this cut."""
    torch.set_num_threads(1)
    if cut.trainers > 1:  # else the trainer sees to it
        timeout = datetime.timedelta(seconds=120)
        meeting = f"file://{output}/meet-{cut.name}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=cut.trainers, timeout=timeout)
    for name, case in CASES.items():
        if cut in case.cuts:
            run_case(f"{models}/{case.model}", f"{output}/{cut.name}-{name}-{rank}", cut, case, rank)
    dist.barrier()


def run_case(path: str, result: str, cut: Cut, case: Case, rank: int) -> None:
    """Write, score, train, write, score."""
    trainer = MegatronTrainer(case_config(path, cut, case), rank, cut.trainers)
    sequences = own_sequences(case, cut, rank)
    tensors = {"before": image_share(trainer, cut, rank), "scores": joined(trainer.score(sequences))}
    runs = AttentionRuns(trainer)
    metrics = [trainer.train(sequences, version=3) for _ in range(case.steps)]
    tensors["attention_runs"] = np.array([runs.count])
    tensors["after"] = image_share(trainer, cut, rank)
    if case.reference:
        tensors["reference"] = joined(trainer.score(sequences, reference=True))
        tensors["again"] = image_share(trainer, cut, rank)
    save_file(tensors, result)
    with open(f"{result}.json", "w", encoding="utf-8") as file:
        json.dump(metrics, file)


class AttentionRuns:
    """How often the attention of this rank's first layer has been computed."""

    def __init__(self, trainer: MegatronTrainer) -> None:
        self.count = 0
        attention = next(m for name, m in trainer.module.named_modules() if name.endswith("core_attention"))
        attention.register_forward_hook(self._add)

    def _add(self, *_: object) -> None:
        self.count += 1


def image_share(trainer: MegatronTrainer, cut: Cut, rank: int) -> NDArray[np.uint8]:
    """What this rank publishes, into memory that held something else."""
    first, chunks = share(trainer.manifest.chunks, cut.trainers, rank)
    image = np.full(range_bytes(trainer.manifest, first, chunks), 0xAB, dtype=np.uint8)
    trainer.write_weights(first, chunks, image)
    return image


def joined(scores: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    """One after the other."""
    return np.concatenate([np.zeros(0, dtype=np.float32), *scores])


def run_cut(models: str, output: str, cut: Cut) -> bool:
    """Whether all ranks came to their end."""
    context = multiprocessing.get_context("fork")
    ranks: list[BaseProcess] = [
        context.Process(target=run_rank, args=(models, output, cut, rank)) for rank in range(cut.trainers)
    ]
    for process in ranks:
        process.start()
    waiting = {process.sentinel: process for process in ranks}
    try:
        while waiting:
            ended = wait(list(waiting), DEADLINE_S)
            failed = [waiting.pop(sentinel) for sentinel in ended if _failed(waiting[sentinel])]
            if failed or not ended:
                return False
            for sentinel in ended:
                del waiting[sentinel]
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return True


def _failed(process: BaseProcess) -> bool:
    process.join()
    return process.exitcode != 0


if __name__ == "__main__":
    if sys.argv[3:] == ["alone"]:
        run_rank(sys.argv[1], sys.argv[2], Cut(1, 1, 1), 0)
    else:
        print(json.dumps({cut.name: run_cut(sys.argv[1], sys.argv[2], cut) for cut in CUTS}))
