"""A Hugging Face decoder as a Megatron-core model: this rank's stage and tensor shard of it, its weights still unset."""

from __future__ import annotations

import importlib.util
import math
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from laminar_hpc.trainer.architecture import Architecture
from laminar_hpc.weights.megatron_layout import padded_vocabulary

Recompute = Literal["none", "selective", "full"]


def uses_transformer_engine() -> bool:
    """Whether layers are Transformer Engine's: where there is a GPU, and it is installed."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


class Shard(GPTModel):  # type: ignore[misc]
    """One rank's part of a decoder. The last stage computes logits only where they are asked for."""

    def __init__(self, architecture: Architecture, config: TransformerConfig) -> None:
        """Parameters have memory and no values; `megatron_weights` sets them."""
        fused = uses_transformer_engine()
        norms = {"qk_layernorm": architecture.shape.qk_norm}
        super().__init__(
            config=config,
            transformer_layer_spec=get_gpt_layer_with_transformer_engine_spec(**norms)
            if fused
            else get_gpt_layer_local_spec(**norms, normalization="RMSNorm"),
            vocab_size=padded_vocabulary(architecture.shape.vocabulary, config.tensor_model_parallel_size),
            max_sequence_length=architecture.positions,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=architecture.shape.tied,
            position_embedding_type="rope",
        )
        frequencies = inverse_frequencies(architecture)
        self.rotary_pos_emb.inv_freq = frequencies.to(self.rotary_pos_emb.inv_freq.device)
        self._own_mask = not fused
        self._masks: dict[int, Tensor] = {}

    def forward(self, tokens: Tensor, selected: Tensor) -> Tensor:
        """From tokens (B, L) to the hidden states (L, B, H) for the next stage.

        In the last stage to the logits (N, V / tensor ranks) of the N places of `selected` (B, L) that are set, in row
        order. Padding is on the right and attention is causal: no real token sees a padded one.
        """
        length = tokens.shape[1]
        hidden: Tensor = self.decoder(
            hidden_states=self.embedding(input_ids=tokens, position_ids=None) if self.pre_process else None,
            attention_mask=self._causal_mask(length, tokens.device) if self._own_mask else None,
            rotary_pos_emb=self.rotary_pos_emb(length),
        )
        if not self.post_process:
            return hidden
        chosen = hidden.transpose(0, 1)[selected][:, None]
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits: Tensor = self.output_layer(chosen, weight=weight)[0]
        return logits[:, 0]

    def _is_in_embd_group(self) -> bool:
        """No: Megatron would make the two copies of tied weights equal here, before they have values."""
        return False

    def _causal_mask(self, length: int, device: torch.device) -> Tensor:
        """Set where a token (row) must not look, (1, 1, L, L); kept, since micro-batches come in few lengths."""
        if length not in self._masks:
            if len(self._masks) > 32:
                self._masks.clear()
            self._masks[length] = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)[None, None]
        return self._masks[length]


def transformer_config(architecture: Architecture, dtype: torch.dtype, recompute: Recompute) -> TransformerConfig:
    """Megatron's description of the model, for the groups that are up.

    `calculate_per_token_loss` takes all divisions out of the schedules: the loss is a sum whose terms are weighted already.
    """
    shape = architecture.shape
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    options: dict[str, Any] = {}
    if recompute != "none":
        options["recompute_granularity"] = recompute
    if recompute == "full":
        options |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_query_groups=shape.query_groups,
        kv_channels=shape.head_size,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_epsilon,
        qk_layernorm=shape.qk_norm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        perform_initialization=False,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=stages,
        variable_seq_lengths=stages > 1,
        moe_token_dispatcher_type="alltoall",  # there are no experts, but Megatron wants it where lengths vary
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,
        **options,
    )


def inverse_frequencies(architecture: Architecture) -> Tensor:
    """The rotary embedding's angle a position, float32 (head size / 2,).

    base^(-2i/d), as in RoFormer (arXiv 2104.09864, section 3.2.2). Llama 3.1 divides those whose wavelength is above
    positions / low by `factor`, keeps those with one below positions / high, and interpolates between (its reference code,
    `apply_scaling`).
    """
    size = architecture.shape.head_size
    plain = 1.0 / architecture.rope_base ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size)
    plain = plain / architecture.rope_factor
    scaling = architecture.llama3
    if scaling is None:
        return plain
    wavelength = 2 * math.pi / plain
    share = (scaling.positions / wavelength - scaling.low) / (scaling.high - scaling.low)
    share = share.clamp(0.0, 1.0)
    return (1 - share) * plain / scaling.factor + share * plain
