"""Megatron-core by itself: the measure of what the trainer's worker around it costs.

A worker process like the trainer's, driven by the same messages, in which nothing is done but Megatron's schedule over the
same padded micro-batches, the cross-entropy of the same tokens, and the optimizer's step: no advantages, no ratio, no
entropy, no metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ProtocolError
from laminar_hpc.process.channel import Channel
from laminar_hpc.protocol.peer import StartTrainer, TrainedOn, TrainerUp, TrainOn
from laminar_hpc.trainer.architecture import read_architecture
from laminar_hpc.trainer.batch import PaddedBatch, assemble, micro_batches, pad
from laminar_hpc.trainer.megatron_groups import join_groups, own_device
from laminar_hpc.trainer.megatron_model import Shard, transformer_config, uses_transformer_engine
from laminar_hpc.trainer.megatron_optimizer import ShardOptimizer
from laminar_hpc.trainer.megatron_weights import Seat, fill
from laminar_hpc.weights.manifest import make_manifest
from laminar_hpc.weights.megatron_layout import Grid, placements


def main(channel: Channel) -> None:
    """Serve until the driver is gone; the first message is `StartTrainer`, for one trainer alone."""
    start = channel.receive(None)
    if not isinstance(start, StartTrainer) or start.trainers != 1:
        raise ProtocolError("bare megatron: the first message must be StartTrainer, for one trainer")
    began_s = time.perf_counter()
    config = Config.model_validate_json(start.config)
    torch.set_num_threads(config.job.threads)
    optimizer, device = _build(config)
    channel.send(TrainerUp(make_manifest([]), [], time.perf_counter() - began_s))
    while True:
        message = channel.receive(None)
        if not isinstance(message, TrainOn):
            raise ProtocolError(f"bare megatron: unexpected {type(message).__name__}")
        channel.send(_train(config, optimizer, device, message))


def _build(config: Config) -> tuple[ShardOptimizer, torch.device]:
    architecture = read_architecture(config.model.path)
    device = own_device(0)
    seat = Seat(Grid(1, 1, 1), 0)
    join_groups(config, seat, 1)
    layout = placements(architecture.shape, 1, 1, fused_norms=uses_transformer_engine())
    settings = transformer_config(architecture, getattr(torch, config.model.dtype), config.trainer.recompute)
    module = Shard(architecture, settings).to(device)
    fill(module, layout, seat, config.model.path)
    return ShardOptimizer(config.trainer, settings, module), device


def _train(config: Config, optimizer: ShardOptimizer, device: torch.device, message: TrainOn) -> TrainedOn:
    began_s = time.perf_counter()
    own = zip(message.own, message.blocks, strict=True)
    sequences = [assemble(trajectory, blocks, 0.0) for trajectory, blocks in own]
    batches = [pad(part) for part in micro_batches(sequences, config.trainer.micro_batch_tokens)]
    tokens = sum(int(batch.loss_mask.sum()) for batch in batches)

    def forward(queue: Iterator[PaddedBatch], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        batch = next(queue)
        mask = torch.from_numpy(batch.loss_mask).to(device)
        inputs = torch.from_numpy(batch.tokens).to(device)

        def loss_of(logits: Tensor) -> tuple[Tensor, Tensor, Any]:
            loss = vocab_parallel_cross_entropy(logits[None].float(), inputs[mask][None]).sum() / tokens
            return loss, torch.ones((), dtype=torch.int, device=device), loss.detach()

        return model(inputs, mask.roll(-1, 1)), loss_of

    optimizer.zero_gradients()
    losses = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(batches),
        model=[optimizer.model],
        num_microbatches=len(batches),
        seq_length=batches[0].tokens.shape[1],
        micro_batch_size=len(batches[0].tokens),
        forward_only=False,
    )
    optimizer.reduce_gradients()
    metrics = optimizer.step() | {"loss": float(sum(losses))}
    counted = sum(len(sequence.tokens) for sequence in sequences)
    return TrainedOn(message.step, message.minibatch, counted, time.perf_counter() - began_s, metrics)
