"""The ranks of all cuts, as one program: libraries are loaded once, then every cut's ranks are forked and work together.

Arguments: the directory with the models, and the one for results; "alone" after them has one trainer do all, without a
fork, which a process that has looked for GPUs cannot make. A rank leaves one file for each case: its tiles and their
bytes before and after training, and its scores; metrics lie beside it as JSON.
"""

from __future__ import annotations

import datetime
import json
import multiprocessing
import sys
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from megatron_cases import CASES, CUTS, Case, Cut, case_config, own_sequences
from numpy.typing import NDArray
from published import publish
from safetensors.numpy import save_file
from trainer_cases import through_a_file

from laminar_hpc.trainer.checkpoint import origin_of
from laminar_hpc.trainer.megatron_trainer import MegatronTrainer

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
    tiles, before = publish(trainer)
    tensors = {"before": before, "scores": joined(trainer.score(sequences))}
    tensors["tiles"] = np.array([msgspec.structs.astuple(tile) for tile in tiles], dtype=np.int64).reshape(-1, 6)
    tensors["nbytes"] = np.array([trainer.manifest.nbytes])
    tensors["parameters"] = np.array([sum(parameter.numel() for parameter in trainer.module.parameters())])
    runs = AttentionRuns(trainer)
    metrics = [trainer.train(sequences, version=3) for _ in range(case.steps)]
    tensors["attention_runs"] = np.array([runs.count])
    tensors["after"] = publish(trainer)[1]
    if case.reference:
        tensors["reference"] = joined(trainer.score(sequences, reference=True))
        tensors["again"] = publish(trainer)[1]
    if case.resume:
        tensors |= go_on(trainer, path, f"{result}.state", cut, case, rank)
    save_file(tensors, result)
    with open(f"{result}.json", "w", encoding="utf-8") as file:
        json.dump(metrics, file)


def go_on(
    trainer: MegatronTrainer, path: str, state: str, cut: Cut, case: Case, rank: int
) -> dict[str, NDArray[np.uint8]]:
    """Train on, and have a fresh trainer do the same from the saved state: what both publish before and after.

    The fresh one lives in the same process, and so in the same groups.
    """
    config = case_config(path, cut, case)
    fresh = MegatronTrainer(config, rank, cut.trainers)
    through_a_file(trainer, fresh, Path(state), origin_of(config, rank, cut.trainers, trainer.manifest))
    tensors = {"loaded": publish(fresh)[1]}
    sequences = own_sequences(case, cut, rank)
    for name, one in (("unbroken", trainer), ("resumed", fresh)):
        for _ in range(case.steps):
            one.train(sequences, version=3)
        tensors[name] = publish(one)[1]
    assert trainer.state().steps == fresh.state().steps == 2 * case.steps
    return tensors


class AttentionRuns:
    """How often the attention of this rank's first layer has been computed."""

    def __init__(self, trainer: MegatronTrainer) -> None:
        self.count = 0
        attention = next(m for name, m in trainer.module.named_modules() if name.endswith("core_attention"))
        attention.register_forward_hook(self._add)

    def _add(self, *_: object) -> None:
        self.count += 1


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
