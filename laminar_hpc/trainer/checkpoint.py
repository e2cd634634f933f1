"""A trainer's state as a file: one for each trainer, in safetensors, whole under its name or not there at all.

The file has float32 tensors as `TrainingEngine.state` gives them, and says whose state it is: the step, the trainer's place,
how the model is cut, and the model itself, by a digest of its tensors' names and shapes. Only a trainer for which all of this
is the same can go on from it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError
from laminar_hpc.process.disk import sync_directory
from laminar_hpc.protocol.peer import Manifest
from laminar_hpc.trainer.api import TrainerState

FORMAT = "laminar trainer state 1"
"""Its last word is the version. 1: the first."""

SYNC_BYTES = 64 << 20
"""Written between two syncs: what waits in the kernel for the disk stays this small, for others write there, too."""


class Origin(msgspec.Struct, frozen=True):
    """Whose state a file has. All of it is text, as metadata of safetensors is."""

    trainer: str
    trainers: str
    engine: str
    tensor_parallel: str
    pipeline_parallel: str
    dtype: str
    model: str
    """Digest of the names and shapes of the model's tensors ("": not known)."""


KEYS = {
    "trainer": "the trainer's place",
    "trainers": "job.trainers",
    "engine": "trainer.engine",
    "tensor_parallel": "trainer.tensor_parallel",
    "pipeline_parallel": "trainer.pipeline_parallel",
    "dtype": "model.dtype",
}
"""What people know the fields of `Origin` by."""


def origin_of(config: Config, trainer: int, trainers: int, manifest: Manifest | None = None) -> Origin:
    """That of trainer number `trainer` of `trainers`, whose model `manifest` lists."""
    tensors = json.dumps([[entry.name, list(entry.shape)] for entry in manifest.tensors]) if manifest else ""
    return Origin(
        trainer=str(trainer),
        trainers=str(trainers),
        engine=config.trainer.engine,
        tensor_parallel=str(config.trainer.tensor_parallel),
        pipeline_parallel=str(config.trainer.pipeline_parallel),
        dtype=config.model.dtype,
        model=hashlib.sha256(tensors.encode()).hexdigest() if tensors else "",
    )


def state_path(directory: str, trainer: int) -> str:
    """Where the state of trainer number `trainer` is in a checkpoint's directory."""
    return os.path.join(directory, f"trainer-{trainer}.safetensors")


def write_state(directory: str, origin: Origin, step: int, state: TrainerState) -> int:
    """Write the state after `step` to a file in `directory`, which is made where it is not there; the file's bytes.

    The file appears under its name when all of it is on the disk. OSError where it cannot be written; then nothing is left.
    """
    path = state_path(directory, int(origin.trainer))
    part = os.path.join(directory, f".{os.path.basename(path)}.part")
    os.makedirs(directory, exist_ok=True)
    header = _header(origin, step, state)
    try:
        with open(part, "wb", buffering=0) as file:
            _write(file.fileno(), header)
            for tensor in state.tensors.values():
                _write(file.fileno(), np.ascontiguousarray(tensor, dtype="<f4").reshape(-1).view(np.uint8).data)
            os.fsync(file.fileno())
            nbytes = file.tell()
        os.rename(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
    sync_directory(directory)
    return nbytes


def read_state(directory: str, step: int, origin: Origin, shapes: Mapping[str, tuple[int, ...]]) -> TrainerState:
    """The state after `step` of the trainer that `origin` describes, its tensors read from the disk as they are asked for.

    ConfigError, one line that names the file, where there is no such state, it is not whole, or it is another trainer's.
    """
    path = state_path(directory, int(origin.trainer))
    file = _open(path, origin)
    steps = _check_metadata(path, file.metadata, step, origin)
    if file.shapes != dict(shapes):
        name = min(name for name in file.shapes.keys() | shapes.keys() if file.shapes.get(name) != shapes.get(name))
        raise ConfigError(
            f"{path}: the tensor {name} must be {_text(shapes.get(name))}, it is {_text(file.shapes.get(name))}"
        )
    return TrainerState(steps, file)


def check_states(directory: str, step: int, config: Config) -> None:
    """ConfigError, one line, where the trainers of `config` cannot go on from the states after `step` in `directory`.

    Only the files' headers are read, and no model: whether they are of this one, `read_state` finds out.
    """
    for trainer in range(config.job.trainers):
        path = state_path(directory, trainer)
        origin = origin_of(config, trainer, config.job.trainers)
        _check_metadata(path, _open(path, origin).metadata, step, origin)


def _open(path: str, origin: Origin) -> _StateFile:
    try:
        with open(path, "rb"):
            return _StateFile(path)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: is missing; a checkpoint has one for each of {origin.trainers} trainers") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except SafetensorError as error:
        raise ConfigError(f"{path}: is no trainer's state, or was cut off: {error}") from error


def _check_metadata(path: str, metadata: dict[str, str], step: int, origin: Origin) -> int:
    """How many steps the optimizer has made; ConfigError where the file is not what is asked for."""
    if metadata.get("format") != FORMAT:
        raise ConfigError(f"{path}: its format must be {FORMAT!r}, it is {metadata.get('format')!r}")
    for field, wanted in msgspec.structs.asdict(origin).items():
        found = metadata.get(field)
        if field == "model" and wanted and found != wanted:
            raise ConfigError(f"{path}: is the state of another model than that at model.path, whose tensors differ")
        if field != "model" and found != wanted:
            raise ConfigError(f"{path}: {KEYS[field]} must be {found}, as when it was written, got {wanted}")
    if metadata.get("step") != str(step):
        raise ConfigError(f"{path}: must be the state after step {step}, it is that after step {metadata.get('step')}")
    steps = metadata.get("optimizer_steps", "")
    if not steps.isdecimal():
        raise ConfigError(f"{path}: optimizer_steps must be a whole number, got {steps!r}")
    return int(steps)


def _text(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else f"float32 {list(shape)}"


class _StateFile(Mapping[str, NDArray[np.float32]]):
    """The tensors of a file, each read when it is asked for. SafetensorError where it is broken."""

    def __init__(self, path: str) -> None:
        self._file = cast(Any, safe_open(path, framework="numpy"))
        self.metadata: dict[str, str] = self._file.metadata() or {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name in self._file.keys():  # noqa: SIM118 (it is no mapping)
            entry = self._file.get_slice(name)
            if entry.get_dtype() != "F32":
                raise SafetensorError(f"the tensor {name} is {entry.get_dtype()}, not F32")
            self.shapes[name] = tuple(entry.get_shape())

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        tensor: NDArray[np.float32] = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def _header(origin: Origin, step: int, state: TrainerState) -> bytes:
    """The beginning of the file: its length in 8 bytes, little-endian, and JSON, filled up to a multiple of 8 bytes."""
    metadata = {"format": FORMAT, "step": str(step), "optimizer_steps": str(state.steps)}
    entries: dict[str, object] = {"__metadata__": metadata | msgspec.structs.asdict(origin)}
    done = 0
    for name, tensor in state.tensors.items():
        entries[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [done, done + tensor.nbytes]}
        done += tensor.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(fd: int, data: bytes | memoryview) -> None:
    """All of it; the interpreter is free meanwhile."""
    for start in range(0, len(data), SYNC_BYTES):
        rest = memoryview(data)[start : start + SYNC_BYTES]
        while rest:
            rest = rest[os.write(fd, rest) :]
        if start + SYNC_BYTES < len(data):
            os.fdatasync(fd)
