"""The Megatron trainer: a megatron-core model over tensor ranks, stages and replicas, on GPUs or on CPUs.

The trainers of one replica hold a copy of the model together and are given the same sequences; replicas each have their
own, in any number of micro-batches. A replica runs Megatron's schedule over its micro-batches without the others, then all
reduce their gradients. Each term of the loss is weighted before it is summed, so gradients are sums everywhere. Memory for
gradients and the optimizer's state is cut over the replicas (Megatron's distributed optimizer); master weights are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from numpy.typing import NDArray
from torch import Tensor

from laminar_hpc.config.schema import Config
from laminar_hpc.protocol.peer import Manifest, Tile
from laminar_hpc.trainer.api import MiniBatchTotals, Sequence, TrainerState
from laminar_hpc.trainer.architecture import check_tensors, read_architecture
from laminar_hpc.trainer.batch import PaddedBatch, count_trained, micro_batches, pad, unpad
from laminar_hpc.trainer.hf import check_model_directory
from laminar_hpc.trainer.loss import MAXIMA, SUMMED, mini_batch_metrics, policy_loss, token_batch
from laminar_hpc.trainer.megatron_groups import join_groups, own_device
from laminar_hpc.trainer.megatron_model import Shard, transformer_config, uses_transformer_engine
from laminar_hpc.trainer.megatron_optimizer import ShardOptimizer
from laminar_hpc.trainer.megatron_weights import Seat, fill, shard_writer
from laminar_hpc.trainer.shared import Reference, reference_in_place
from laminar_hpc.trainer.vocabulary import token_logprobs
from laminar_hpc.weights.manifest import make_manifest
from laminar_hpc.weights.megatron_layout import Grid, placements

Loss = Callable[[Tensor], tuple[Tensor, Tensor, Any]]


class MegatronTrainer:
    """A `TrainingEngine` for Hugging Face Llama, Qwen2 and Qwen3 models.

    With more than one trainer the default process group of torch.distributed must be up, with as many members.
    """

    def __init__(self, config: Config, trainer: int, trainers: int) -> None:
        """Load this trainer's shard of the checkpoint; ConfigError where it is not sound or cannot be cut like this."""
        self._config = config.trainer
        self._temperature = config.rollout.temperature or 1.0  # greedy tokens carry log-probabilities at temperature 1
        path, cut = config.model.path, (config.trainer.tensor_parallel, config.trainer.pipeline_parallel)
        check_model_directory(path)
        architecture = read_architecture(path)
        self._vocabulary = architecture.shape.vocabulary
        self._device = own_device(trainer)
        layout = placements(architecture.shape, *cut)
        check_tensors(path, layout)
        dtype = getattr(torch, config.model.dtype)
        self._manifest = make_manifest((p.name, p.shape, config.model.dtype) for p in layout)
        seat = Seat(Grid(cut[0], trainers // (cut[0] * cut[1]), cut[1]), trainer)
        self._groups = join_groups(config, seat, trainers)
        if uses_transformer_engine():
            layout = placements(architecture.shape, *cut, fused_norms=True)
        self._settings = transformer_config(architecture, dtype, config.trainer.recompute)
        module = Shard(architecture, self._settings).to(self._device)
        fill(module, layout, seat, path)
        self._reference = Reference(module.parameters) if config.trainer.kl_coefficient > 0 else None
        self._optimizer = ShardOptimizer(config.trainer, self._settings, module)
        self.module = module
        """This trainer's part of the model."""
        self._writer = shard_writer(module, layout, seat, self._manifest)

    @property
    def manifest(self) -> Manifest:
        """Layout of the weight image, the same on all trainers, its chunks not chosen yet."""
        return self._manifest

    @property
    def tiles(self) -> list[Tile]:
        """What of the image this trainer publishes."""
        return self._writer.tiles

    def train(self, sequences: list[Sequence], version: int | None = None) -> dict[str, float]:
        """One optimizer step on a mini-batch, of which this trainer's replica has these sequences (there may be none).

        Returns the metrics of the whole mini-batch, equal on all trainers: those of `mini_batch_metrics`; `grad_norm`
        before clipping (infinite where it is not finite); `learning_rate`; `skipped`, 1 where the gradient was not finite
        and no step was made. `version` is that of the weights as they are, if they have one.
        """
        totals = self._totals(sequences)
        self._optimizer.zero_gradients()
        batches = [pad(part, version) for part in self._micro_batches(sequences)]
        results = self._run(batches, lambda batch: self._policy_loss(batch, totals))
        sums, maxima = self._zeros(len(SUMMED)), self._zeros(len(MAXIMA))
        if self._groups.reports:  # all tensor ranks of the last stage have the same
            for micro_sums, micro_maxima in results:
                sums += micro_sums
                maxima = torch.maximum(maxima, micro_maxima)
        dist.all_reduce(sums)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        self._optimizer.reduce_gradients()
        self._writer.protect()
        return mini_batch_metrics(sums, maxima, totals) | self._optimizer.step()

    def score(self, sequences: list[Sequence], reference: bool = False) -> list[NDArray[np.float32]]:
        """Log-probabilities of the tokens of each sequence, float32 (T,), 0 outside its loss mask; equal in a replica.

        Under the weights as they are, or with `reference` under those of the checkpoint, which are kept only where
        `trainer.kl_coefficient` is more than 0. Each replica scores its own sequences without the others.
        """
        if not reference:
            return self._score(sequences)
        self._writer.protect()
        with reference_in_place(self._reference):
            return self._score(sequences)

    def write_weights(self, memory: NDArray[np.uint8]) -> Callable[[], object] | None:
        """Copy the bytes of `tiles` as the weights are now to `memory`; None, or what waits until that is done."""
        return self._writer.write(memory)

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the runs of master weights and moments that this trainer has in the distributed optimizer."""
        return self._optimizer.state_shapes

    def state(self) -> TrainerState:
        """A copy of this trainer's part of the optimizer; the next call writes over it."""
        return self._optimizer.state()

    def load_state(self, state: TrainerState) -> None:
        """Go on from `state`; all trainers together, each with its own."""
        self._writer.protect()
        self._optimizer.load_state(state)

    def _totals(self, sequences: list[Sequence]) -> MiniBatchTotals:
        counts = torch.tensor(count_trained(sequences), device=self._device)
        dist.all_reduce(counts, group=self._groups.data)
        return MiniBatchTotals(sequences=int(counts[0]), tokens=int(counts[1]))

    def _zeros(self, length: int) -> Tensor:
        return torch.zeros(length, dtype=torch.float64, device=self._device)

    def _micro_batches(self, sequences: list[Sequence]) -> list[list[Sequence]]:
        """Those with a token to train on."""
        parts = micro_batches(sequences, self._config.micro_batch_tokens)
        return [part for part in parts if any(sequence.loss_mask.any() for sequence in part)]

    def _run(self, batches: list[PaddedBatch], loss_of: Callable[[PaddedBatch], Loss], train: bool = True) -> list[Any]:
        """Megatron's schedule over these micro-batches; what the loss function gave beside the loss, on the last stage."""
        if not batches:
            return []

        def forward(queue: Iterator[PaddedBatch], model: Any) -> tuple[Tensor, Loss]:
            batch = next(queue)
            return model(self._on_device(batch.tokens), self._predicting(batch)), loss_of(batch)

        results: list[Any] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(batches),
            model=[self._optimizer.model],
            num_microbatches=len(batches),
            seq_length=batches[0].tokens.shape[1],  # unused: stages tell each other
            micro_batch_size=len(batches[0].tokens),
            forward_only=not train,
        )
        return results

    def _on_device(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _predicting(self, batch: PaddedBatch) -> Tensor:
        """The places (B, L) whose outputs predict a trained token: one before each."""
        places = np.zeros_like(batch.loss_mask)
        places[:, :-1] = batch.loss_mask[:, 1:]
        return self._on_device(places)

    def _token_logprobs(self, batch: PaddedBatch, logits: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self._on_device(batch.tokens[batch.loss_mask])
        first = self._groups.tensor_rank * logits.shape[1]
        return token_logprobs(logits.float() / self._temperature, tokens, first, self._vocabulary, self._groups.tensor)

    def _policy_loss(self, batch: PaddedBatch, totals: MiniBatchTotals) -> Loss:
        def loss_of(logits: Tensor) -> tuple[Tensor, Tensor, Any]:
            logprobs, entropy = self._token_logprobs(batch, logits)
            loss, sums, maxima = policy_loss(self._config, token_batch(self._config, batch, totals, logprobs, entropy))
            return loss, _one(logits), (sums, maxima)

        return loss_of

    @torch.no_grad()
    def _score(self, sequences: list[Sequence]) -> list[NDArray[np.float32]]:
        """Cut into the micro-batches that training cuts them into, so that the same weights give the same numbers."""

        def loss_of(batch: PaddedBatch) -> Loss:
            return lambda logits: (logits.sum(), _one(logits), self._token_logprobs(batch, logits)[0])

        parts = self._micro_batches(sequences)
        batches = [pad(part) for part in parts]
        counts = [int(batch.loss_mask.sum()) for batch in batches]
        results = self._run(batches, loss_of, train=False)
        flat = torch.cat(results) if results else torch.zeros(sum(counts), device=self._device)
        if self._groups.stages is not None:
            dist.broadcast(flat, src=self._groups.last_stage, group=self._groups.stages)
        rows = [np.zeros(batch.tokens.shape, dtype=np.float32) for batch in batches]
        for row, batch, values in zip(rows, batches, torch.split(flat.cpu(), counts), strict=True):
            row[batch.loss_mask] = values.numpy()
        return unpad(sequences, parts, rows)


def _one(logits: Tensor) -> Tensor:
    """What the schedules count as tokens; nothing is divided by it."""
    return torch.ones((), dtype=torch.int, device=logits.device)
