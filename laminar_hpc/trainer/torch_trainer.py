"""The plain torch trainer: a transformers model, AdamW, and data parallelism over torch.distributed.

All trainers hold all weights. Each computes its own share of a mini-batch's gradient; one all-reduce sums the shares, and
every trainer makes the same step from the same sum, so weights stay equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from laminar_hpc.config.schema import Config
from laminar_hpc.protocol.peer import Manifest, Tile
from laminar_hpc.trainer.api import MiniBatchTotals, Sequence, TrainerState
from laminar_hpc.trainer.batch import PaddedBatch, count_trained, micro_batches, pad, unpad
from laminar_hpc.trainer.flat import FlatParameters
from laminar_hpc.trainer.hf import load_model, model_manifest
from laminar_hpc.trainer.host_copy import StateCopy
from laminar_hpc.trainer.loss import MAXIMA, SUMMED, mini_batch_metrics, policy_loss, token_batch, token_entropy
from laminar_hpc.trainer.shard import ShardWriter, Source
from laminar_hpc.trainer.shared import Reference, StepCounter, prepare_adam, reference_in_place, trainer_device
from laminar_hpc.weights.reshard import cut_range, whole_tensor


class TorchTrainer:
    """A `TrainingEngine` for Hugging Face Llama- and Qwen-style models.

    With more than one trainer the default process group of torch.distributed must be up, with as many members.
    """

    def __init__(self, config: Config, trainer: int, trainers: int) -> None:
        """Load the checkpoint at `config.model.path`; ConfigError where it is not sound."""
        self._config = config.trainer
        self._temperature = config.rollout.temperature or 1.0  # greedy tokens carry log-probabilities at temperature 1
        self._trainers = trainers
        self._device = trainer_device(trainer)
        self.model: Any = load_model(config.model.path, config.model.dtype).to(self._device)
        self.model.eval()  # no dropout: the ratio compares two policies, not two noises
        self._flat = FlatParameters(self.model)
        self._reference: Reference | None = None
        if config.trainer.kl_coefficient > 0:
            self._reference = Reference(lambda: [self._flat.values], self._flat.spread_values)
        self._optimizer = torch.optim.AdamW(
            self._flat.groups(config.trainer.weight_decay),
            lr=config.trainer.learning_rate,
            betas=(config.trainer.adam_beta1, config.trainer.adam_beta2),
        )
        self._steps = StepCounter(config.trainer)
        self._runs = {"weight": self._flat.values, **self._flat.lay_moments(self._optimizer)}
        prepare_adam(self._optimizer, 0)
        own = self._cut(trainer)
        self._copy = StateCopy({name: run[own] for name, run in self._runs.items()})
        self._manifest = model_manifest(self.model)
        parameters: dict[str, Tensor] = dict(self.model.named_parameters())
        entries = [entry for entry in self._manifest.tensors if entry.nbytes]
        sources = [
            Source(whole_tensor(entry), entry.name, parameters[entry.name], 0, parameters[entry.name].dtype)
            for entry in entries
        ]
        self._writer = ShardWriter(sources, trainers, trainer)

    @property
    def manifest(self) -> Manifest:
        """Layout of the weight image, the same on all trainers, its chunks not chosen yet."""
        return self._manifest

    @property
    def tiles(self) -> list[Tile]:
        """What of the image this trainer publishes."""
        return self._writer.tiles

    def train(self, sequences: list[Sequence], version: int | None = None) -> dict[str, float]:
        """One optimizer step on a mini-batch, of which this trainer has these sequences (there may be none).

        Returns the metrics of the whole mini-batch, equal on all trainers: those of `mini_batch_metrics`; `grad_norm`
        before clipping (infinite where it is not finite); `learning_rate`; `skipped`, 1 where the gradient was not finite
        and no step was made. `version` is that of the weights as they are, if they have one.
        """
        totals = self._totals(sequences)
        self._flat.gradients.zero_()
        sums, maxima = self._zeros(len(SUMMED)), self._zeros(len(MAXIMA))
        for micro_batch in micro_batches(sequences, self._config.micro_batch_tokens):
            micro_sums, micro_maxima = self._backward(micro_batch, totals, version)
            sums += micro_sums
            maxima = torch.maximum(maxima, micro_maxima)
        if self._trainers > 1:
            dist.all_reduce(self._flat.gradients)
            dist.all_reduce(sums)
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        return mini_batch_metrics(sums, maxima, totals) | self._step()

    def score(self, sequences: list[Sequence], reference: bool = False) -> list[NDArray[np.float32]]:
        """Log-probabilities of the tokens of each sequence, float32 (T,), 0 outside its loss mask.

        Under the weights as they are, or with `reference` under those of the checkpoint, which are kept only where
        `trainer.kl_coefficient` is more than 0. Each replica scores its own sequences without the others.
        """
        if not reference:
            return self._score(sequences)
        self._writer.protect()
        with reference_in_place(self._reference):
            return self._score(sequences)

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of the last mini-batch by parameter name, summed over all trainers and clipped."""
        names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        return {
            name: master.grad for name, master in zip(names, self._flat.masters, strict=True) if master.grad is not None
        }

    def write_weights(self, memory: NDArray[np.uint8]) -> Callable[[], object] | None:
        """Copy the bytes of `tiles` as the weights are now to `memory`; None, or what waits until that is done."""
        return self._writer.write(memory)

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of `weight`, `exp_avg` and `exp_avg_sq`, each (n,): the parameters in the order of the image, cut over the trainers."""
        return self._copy.shapes

    def state(self) -> TrainerState:
        """A copy of this trainer's part of what all of them hold; the next call writes over it."""
        return self._copy.take(self._steps.steps)

    def load_state(self, state: TrainerState) -> None:
        """Go on from `state`; all trainers together, each of which has a part of it."""
        self._writer.protect()
        self._copy.protect()
        self._copy.put(state.tensors)
        if self._trainers > 1:
            for run in self._runs.values():
                for trainer in range(self._trainers):
                    dist.broadcast(run[self._cut(trainer)], src=trainer)
        self._steps.steps = state.steps
        prepare_adam(self._optimizer, state.steps)
        self._flat.spread_values()

    def _cut(self, trainer: int) -> slice:
        """Which numbers of a run are in the state of this trainer."""
        low, high = cut_range(self._flat.values.nbytes, self._trainers, trainer)
        return slice(low // self._flat.values.itemsize, high // self._flat.values.itemsize)

    def _totals(self, sequences: list[Sequence]) -> MiniBatchTotals:
        counts = torch.tensor(count_trained(sequences), device=self._device)
        if self._trainers > 1:
            dist.all_reduce(counts)
        return MiniBatchTotals(sequences=int(counts[0]), tokens=int(counts[1]))

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self._device)

    def _backward(
        self, sequences: list[Sequence], totals: MiniBatchTotals, version: int | None
    ) -> tuple[Tensor, Tensor]:
        """Add the gradient of one micro-batch; its sums of `SUMMED` and its maxima of `MAXIMA`, float64."""
        padded = pad(sequences, version)
        if not padded.loss_mask.any():
            return self._zeros(len(SUMMED)), self._zeros(len(MAXIMA))
        log_distribution, logprobs = self._forward(padded)
        batch = token_batch(self._config, padded, totals, logprobs, token_entropy(log_distribution.detach()))
        loss, sums, maxima = policy_loss(self._config, batch)
        torch.autograd.backward(loss)
        self._flat.collect_gradients()
        return sums, maxima

    @torch.no_grad()
    def _score(self, sequences: list[Sequence]) -> list[NDArray[np.float32]]:
        """Cut into the micro-batches that training cuts them into, so that the same weights give the same numbers."""
        parts = micro_batches(sequences, self._config.micro_batch_tokens)
        rows = []
        for padded in map(pad, parts):
            rows.append(np.zeros(padded.tokens.shape, dtype=np.float32))
            if padded.loss_mask.any():
                rows[-1][padded.loss_mask] = self._forward(padded)[1].cpu().numpy()
        return unpad(sequences, parts, rows)

    def _forward(self, padded: PaddedBatch) -> tuple[Tensor, Tensor]:
        """For the N trained tokens, in row order: log-probabilities of all tokens in their places (N, vocabulary), and their
        own (N,)."""
        tokens = torch.from_numpy(padded.tokens).to(self._device)
        mask = torch.from_numpy(padded.loss_mask).to(self._device)
        log_distribution = self._log_distribution(tokens, mask)
        return log_distribution, log_distribution.gather(1, tokens[mask][:, None])[:, 0]

    def _log_distribution(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Log-probabilities of all tokens at the places of `mask`, float32 (N, vocabulary), N set places in row order.

        Padding is on the right and attention is causal, so no attention mask is needed: no real token sees a padded one.
        """
        hidden = self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        predicting = hidden[:, :-1][mask[:, 1:]]
        logits = self.model.get_output_embeddings()(predicting).float() / self._temperature
        return torch.log_softmax(logits, dim=-1)

    def _step(self) -> dict[str, float]:
        norm = float(self._flat.clip(self._config.clip_grad_norm))
        return self._steps.step(self._optimizer, norm, self._update)

    def _update(self) -> None:
        self._writer.protect()
        self._copy.protect()
        self._optimizer.step()
        self._flat.spread_values()
