"""Weights into vLLM and out of it again: what runs inside each of vLLM's workers, next to its shard of the model.

vLLM imports this module in every worker through the worker extension, which registers two plugs there:

* a model loader: the model is built without reading a checkpoint, since all weights come from the relay;
* a weight-transfer engine: it maps the memory that the relay lends, and vLLM's own `load_weights` copies this shard's
  part of each tensor straight from there into the parameters.

On a CPU, vLLM's linear layers multiply with a copy of their weights that oneDNN has packed, and drop the original. Here
they keep the original, too. Every load fills the originals and packs them anew, and reading back gives the originals'
bytes after `check_packed` has compared some columns of each packed copy with them, exactly.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader import DummyModelLoader, register_model_loader
from vllm.platforms import current_platform

from laminar_hpc.errors import EngineError
from laminar_hpc.process.memory import KeptMappings, map_writable
from laminar_hpc.rollout.pinning import pin
from laminar_hpc.rollout.vllm_layout import Piece, pieces_of
from laminar_hpc.rollout.vllm_setup import BACKEND, unlink_shared_memory
from laminar_hpc.weights.digest import chunk_digest

PROBED_COLUMNS = 8
"""Columns of each packed weight that are compared with the original, others at each load."""


@register_model_loader(BACKEND)
class UnreadModelLoader(DummyModelLoader):  # type: ignore[misc]
    """Builds the model with weights that mean nothing; on a CPU, its linear layers keep their weights when they pack them."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Fill the model with numbers, as vLLM's own dummy loader does."""
        super().load_weights(model, model_config)
        if current_platform.is_cpu():
            keeping = _KeepingLinearMethod()
            for module in model.modules():
                if type(getattr(module, "quant_method", None)) is UnquantizedLinearMethod:
                    module.quant_method = keeping


class _KeepingLinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]
    """vLLM's linear method for CPUs, but for the original weight, which stays."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)


@dataclass
class Layout(WeightTransferInitInfo):  # type: ignore[misc]
    """The image's layout: a `TensorEntry` as (name, shape, dtype, offset, nbytes) for each tensor."""

    tensors: list[tuple[str, tuple[int, ...], str, int, int]]


@dataclass
class Lent(WeightTransferUpdateInfo):  # type: ignore[misc]
    """An image: the `nbytes` from `offset` on of the memory at `path`."""

    path: str
    offset: int
    nbytes: int


class SharedMemoryEngine(WeightTransferEngine[Layout, Lent]):  # type: ignore[misc]
    """Weights from memory of this node, filled by somebody else and lent for the time of the call."""

    init_info_cls = Layout
    update_info_cls = Lent

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM's factory calls it."""
        super().__init__(*args, **kwargs)
        self._pieces: dict[str, Piece] = pieces_of(self.model)
        self._tensors: list[tuple[str, tuple[int, ...], str, int, int]] = []
        self._probes = np.random.default_rng(0)
        self._lent = KeptMappings(pin)

    def init_transfer_engine(self, init_info: Layout) -> None:
        """Take in the layout. EngineError names the first tensor that is not as in the model; nothing is copied yet."""
        tensors = [(name, tuple(shape), dtype, offset, size) for name, shape, dtype, offset, size in init_info.tensors]
        dtype = str(self.model_config.dtype).removeprefix("torch.")
        pieces = dict(self._pieces)
        for name, shape, entry_dtype, _, nbytes in tensors:
            piece = pieces.pop(name, None)
            if piece is None:
                raise EngineError(f"vllm engine: the model has no tensor {name}, or the manifest has it twice")
            expected = np.prod(piece.shape) * self.model_config.dtype.itemsize
            if (shape, entry_dtype, nbytes) != (piece.shape, dtype, expected):
                raise EngineError(
                    f"vllm engine: {name} is {dtype} {piece.shape} in the model, "
                    f"but {entry_dtype} {shape} with {nbytes} bytes in the manifest"
                )
        if pieces:
            raise EngineError(f"vllm engine: the manifest lacks {', '.join(pieces)}")
        self._tensors = tensors

    def start_weight_update(self) -> None:
        """Nothing: parameters are filled in place."""

    def receive_weights(self, update_info: Lent) -> None:
        """Copy this shard's part of every tensor into the model."""
        image = self._lent.view(update_info.path, update_info.offset, update_info.nbytes)
        self.model.load_weights(self._tensors_in(image))

    def finish_weight_update(self) -> None:
        """Pack anew what the CPU's kernels read packed. On GPUs the parameters are what the kernels read."""
        if not current_platform.is_cpu():
            return
        for module in self.model.modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, QuantizeMethodBase):
                method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Nothing is held between loads."""

    def _tensors_in(self, image: NDArray[np.uint8]) -> list[tuple[str, torch.Tensor]]:
        """The whole tensors, as views of the image."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable")  # nobody writes to them
            raw = [(name, torch.from_numpy(image[at : at + size])) for name, _, _, at, size in self._tensors]
        return [
            (name, data.view(getattr(torch, dtype)).view(shape))
            for (name, data), (_, shape, dtype, _, _) in zip(raw, self._tensors, strict=True)
        ]

    def write_to(self, name: str, path: str) -> tuple[int, bytes]:
        """Write this shard's part of tensor `name` to its place in the whole tensor, which begins the memory at `path`.

        Returns where the part begins (row or column), and the digest of its bytes (empty where this is the only shard):
        shards with the same part must agree.
        """
        piece = self._pieces[name]
        dtype = self.model_config.dtype
        part = piece.part.to("cpu", dtype).contiguous()
        nbytes = int(np.prod(piece.shape)) * dtype.itemsize
        with map_writable(path, 0, nbytes) as memory:
            whole = torch.from_numpy(memory).view(dtype).view(piece.shape)
            whole.narrow(piece.dim, piece.start, part.shape[piece.dim]).copy_(part)
        if self.parallel_config.tensor_parallel_size == 1:
            return piece.start, b""
        return piece.start, chunk_digest(part.view(-1).view(torch.uint8).numpy())

    def check_packed(self) -> None:
        """Compare columns of each packed weight with the original: EngineError names the first layer where they differ.

        The product of a packed weight with a unit vector is a column of it, exactly: one term and zeros. The columns are
        drawn anew each time. What it finds is a packed copy that is not of these originals, say of the version before; a
        single wrong element elsewhere it can miss.
        """
        for name, module in self.model.named_modules():
            if not hasattr(module, "cpu_linear") or module.weight.dim() != 2:
                continue
            weight = module.weight.data
            columns = torch.from_numpy(self._probes.integers(0, weight.shape[1], PROBED_COLUMNS))
            unit = torch.zeros((PROBED_COLUMNS, weight.shape[1]), dtype=weight.dtype)
            unit[torch.arange(PROBED_COLUMNS), columns] = 1.0
            if not torch.equal(module.quant_method.apply(module, unit, None), weight[:, columns].t()):
                raise EngineError(f"vllm engine: the packed weight of {name} is not that of the version loaded last")


class WeightReader:
    """What vLLM's worker class is extended with: calls for `collective_rpc`, answered by the worker's engine above."""

    weight_transfer_engine: SharedMemoryEngine

    def write_weight_to(self, name: str, path: str) -> tuple[int, bytes]:
        """`SharedMemoryEngine.write_to`."""
        return self.weight_transfer_engine.write_to(name, path)

    def unlink_shared_memory(self) -> None:
        """`vllm_setup.unlink_shared_memory`, in this worker's process."""
        unlink_shared_memory()

    def check_packed_weights(self) -> None:
        """`SharedMemoryEngine.check_packed`."""
        self.weight_transfer_engine.check_packed()


WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryEngine)
