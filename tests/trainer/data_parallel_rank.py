"""One of several data-parallel trainers, as a program: trains on its part of the mini-batch and saves what came of it.

Arguments: the model's directory, the rendezvous file, the output file, its place, and its sequences as "0,3,5" (or "-").
"""

from __future__ import annotations

import datetime
import json
import sys

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from trainer_cases import config_for, mini_batch

from laminar_hpc.trainer.torch_trainer import TorchTrainer


def main(path: str, meeting: str, output: str, rank: int, own: list[int], aggregation: str) -> None:
    """Train once and save gradients and weights; metrics go to standard output."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=timeout)
    trainer = TorchTrainer(config_for(path, aggregation=aggregation), rank, 2)
    sequences = mini_batch()
    metrics = trainer.train([sequences[index] for index in own])
    tensors = {f"gradient.{name}": gradient.clone() for name, gradient in trainer.gradients().items()}
    tensors |= {f"weight.{name}": p.detach().clone() for name, p in trainer.model.named_parameters()}
    save_file(tensors, output)
    print(json.dumps(metrics))
    dist.destroy_process_group()


if __name__ == "__main__":
    indices = [] if sys.argv[5] == "-" else [int(index) for index in sys.argv[5].split(",")]
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), indices, sys.argv[6])
