"""The KV cache of the torch engine, and the attention over it that transformers' model code calls.

The cache has a row for each trajectory that is being decoded. Running trajectories take rows 0 to B - 1, without gaps,
so that a decode step reads one slice, as long as its longest trajectory. A forward pass is given what it works on
(`Prefill` or `Decode`) as the keyword `rows`, which the model code hands through to `attend`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ATTENTION = "laminar_rows"
"""The name under which `attend` is known to transformers. No mask function goes with it: the rows bring their own."""


class KVCache:
    """Keys and values after the rotary embedding: (layers, 2, rows, kv heads, places, head size)."""

    def __init__(self, layers: int, rows: int, heads: int, places: int, head_size: int, like: torch.Tensor) -> None:
        """`like` gives dtype and device. The memory starts as zeros: what is masked is read, and must be finite."""
        self.storage = like.new_zeros((layers, 2, rows, heads, places, head_size))

    def move(self, sources: list[int], targets: list[int], places: int) -> None:
        """Copy the first `places` places of each source row to its target row."""
        self.storage[:, :, targets, :, :places] = self.storage[:, :, sources, :, :places]


class Rows(Protocol):
    """The trajectories that a forward pass works on."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Store keys and values (B, kv heads, T, D), and attend with `query` (B, heads, T, D); returns its shape."""


class Prefill:
    """Whole trajectories, padded at their ends; `of_row` int64 (N,) says which of them each row from `first` on takes.

    What is stored for the padding is overwritten before it is ever attended to.
    """

    def __init__(self, cache: KVCache, first: int, of_row: torch.Tensor) -> None:
        self._storage = cache.storage[:, :, first : first + len(of_row)]
        self._of_row = of_row

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """As in `Rows`; each token attends to those before it and to itself."""
        keys, values = self._storage[layer]
        places = key.shape[2]
        keys[:, :, :places] = key[self._of_row]
        values[:, :, :places] = value[self._of_row]
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)


class Decode:
    """One token of each of the first B rows, at `positions` int64 (B,), the largest of which is `longest`."""

    def __init__(self, cache: KVCache, positions: torch.Tensor, longest: int) -> None:
        count, places, heads = len(positions), longest + 1, cache.storage.shape[3]
        self._positions = positions
        self._storage = cache.storage[:, :, :count, :, :places]
        self._row_index = torch.arange(count, device=positions.device)
        beyond = torch.arange(places, device=positions.device) > positions[:, None]
        mask = cache.storage.new_zeros((count, places)).masked_fill_(beyond, float("-inf"))
        self._mask = mask.repeat_interleave(heads, dim=0).unsqueeze(1)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """As in `Rows`; each token attends to its own row up to itself.

        Query heads that share a key head go in as further queries of it, so keys are never repeated in memory. On few
        tokens a row, the plain products are faster than torch's fused attention on a CPU.
        """
        keys, values = self._storage[layer]
        keys[self._row_index, :, self._positions] = key.squeeze(2)
        values[self._row_index, :, self._positions] = value.squeeze(2)
        grouped = query.reshape(len(self._mask), -1, query.shape[-1])
        scores = torch.baddbmm(self._mask, grouped, keys.flatten(0, 1).transpose(1, 2), alpha=scale)
        shares = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
        return torch.bmm(shares, values.flatten(0, 1)).view(query.shape)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float,
    rows: Rows,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of transformers' interface: output (B, T, heads, D), and no weights."""
    layer = module.layer_idx
    assert attention_mask is None
    assert isinstance(layer, int)
    return rows.attend(layer, query, key, value, scaling).transpose(1, 2), None


AttentionInterface.register(ATTENTION, attend)
