"""One of two data-parallel trainers, as a program: trains on its part of the mini-batch and saves what came of it.

Arguments: the model's directory, the rendezvous file, the output directory, its place. Each case of `CASES` is trained by a
new trainer; gradients and weights go to one file a case, metrics to standard output, one line a case. Then training goes on
from a saved state.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from trainer_cases import CASES, config_for, mini_batch, through_a_file

from laminar_hpc.trainer.checkpoint import origin_of
from laminar_hpc.trainer.torch_trainer import TorchTrainer


def main(path: str, meeting: str, output: str, rank: int) -> None:
    """Train once for each case."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=timeout)
    sequences = mini_batch()
    for name, (aggregation, parts) in CASES.items():
        trainer = TorchTrainer(config_for(path, aggregation=aggregation), rank, 2)
        metrics = trainer.train([sequences[index] for index in parts[rank]])
        tensors = {f"gradient.{name}": gradient.clone() for name, gradient in trainer.gradients().items()}
        tensors |= {f"weight.{name}": p.detach().clone() for name, p in trainer.model.named_parameters()}
        save_file(tensors, f"{output}/{name}-{rank}")
        print(json.dumps(metrics))
    go_on(path, output, rank)
    dist.destroy_process_group()


def go_on(path: str, output: str, rank: int) -> None:
    """Save the weights after four steps, and those of a fresh trainer that has begun with the state after two."""
    config, sequences = config_for(path, warmup_steps=4, weight_decay=0.1), mini_batch()[rank::2]
    trainer, fresh = TorchTrainer(config, rank, 2), TorchTrainer(config, rank, 2)
    for _ in range(2):
        trainer.train(sequences)
    origin = origin_of(config, rank, 2, trainer.manifest)
    through_a_file(trainer, fresh, Path(output) / "state", origin)
    dist.barrier()  # both files are there
    for name, one in (("unbroken", trainer), ("resumed", fresh)):
        for _ in range(2):
            one.train(sequences)
        save_file({key: p.detach().clone() for key, p in one.model.named_parameters()}, f"{output}/{name}-{rank}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
