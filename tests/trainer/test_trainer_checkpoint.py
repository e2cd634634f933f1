"""A trainer's state as a file: read back by others, refused where it is not what is asked for, never there in part."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("safetensors")

import msgspec
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError
from laminar_hpc.trainer.api import TrainerState
from laminar_hpc.trainer.checkpoint import Origin, check_states, origin_of, read_state, state_path, write_state
from laminar_hpc.weights.manifest import make_manifest

ORIGIN = Origin("1", "4", "megatron", "2", "1", "bfloat16", "abc")
SHAPES: dict[str, tuple[int, ...]] = {"weight.a": (3, 5), "weight.b": (0,), "exp_avg.a": (7,)}


def numbers() -> dict[str, np.ndarray]:
    """A tensor for each of `SHAPES`; one is empty, as a trainer's run of a parameter may be."""
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def written(directory: Path, step: int = 6, steps: int = 11) -> Path:
    """The file of the state of `numbers`."""
    write_state(str(directory), ORIGIN, step, TrainerState(steps, numbers()))
    return Path(state_path(str(directory), 1))


def refusal(
    directory: Path, step: int = 6, origin: Origin = ORIGIN, shapes: dict[str, tuple[int, ...]] = SHAPES
) -> str:
    """Why the file cannot be gone on from; one line that begins with its name."""
    with pytest.raises(ConfigError) as caught:
        read_state(str(directory), step, origin, shapes)
    text = str(caught.value)
    path = state_path(str(directory), int(origin.trainer))
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    return text.removeprefix(f"{path}: ")


def test_what_is_written_is_a_safetensors_file_as_others_read_it(tmp_path: Path) -> None:
    directory = tmp_path / "not" / "there" / "yet"
    nbytes = write_state(str(directory), ORIGIN, 6, TrainerState(11, numbers()))
    path = directory / "trainer-1.safetensors"
    assert os.listdir(directory) == [path.name]
    assert path.stat().st_size == nbytes
    found = load_file(path)
    assert found.keys() == SHAPES.keys()
    assert all(np.array_equal(found[name], tensor) for name, tensor in numbers().items())
    with safe_open(path, framework="numpy") as file:
        assert file.metadata() == {
            "format": "laminar trainer state 1",
            "step": "6",
            "optimizer_steps": "11",
            "trainer": "1",
            "trainers": "4",
            "engine": "megatron",
            "tensor_parallel": "2",
            "pipeline_parallel": "1",
            "dtype": "bfloat16",
            "model": "abc",
        }


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    written(tmp_path)
    state = read_state(str(tmp_path), 6, ORIGIN, SHAPES)
    assert state.steps == 11
    assert set(state.tensors) == set(SHAPES)
    assert all(np.array_equal(state.tensors[name], tensor) for name, tensor in numbers().items())


def test_a_later_state_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    written(tmp_path)
    written(tmp_path, step=7, steps=13)
    assert read_state(str(tmp_path), 7, ORIGIN, SHAPES).steps == 13
    assert refusal(tmp_path) == "must be the state after step 6, it is that after step 7"


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("trainers", "job.trainers must be 4, as when it was written, got 9"),
        ("engine", "trainer.engine must be megatron, as when it was written, got 9"),
        ("tensor_parallel", "trainer.tensor_parallel must be 2, as when it was written, got 9"),
        ("pipeline_parallel", "trainer.pipeline_parallel must be 1, as when it was written, got 9"),
        ("dtype", "model.dtype must be bfloat16, as when it was written, got 9"),
        ("model", "is the state of another model than that at model.path, whose tensors differ"),
    ],
)
def test_another_trainers_state_is_refused(tmp_path: Path, field: str, text: str) -> None:
    written(tmp_path)
    assert refusal(tmp_path, origin=msgspec.structs.replace(ORIGIN, **{field: "9"})) == text


def test_a_file_under_another_trainers_name_is_refused(tmp_path: Path) -> None:
    os.rename(written(tmp_path), state_path(str(tmp_path), 2))
    text = refusal(tmp_path, origin=msgspec.structs.replace(ORIGIN, trainer="2"))
    assert text == "the trainer's place must be 1, as when it was written, got 2"


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nowhere") == "is missing; a checkpoint has one for each of 4 trainers"


def test_a_file_that_is_not_whole_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    whole = written(tmp_path).read_bytes()
    for length in (0, 5, 8, 100, len(whole) // 2, len(whole) - 1):
        Path(state_path(str(tmp_path), 1)).write_bytes(whole[:length])
        assert refusal(tmp_path).startswith("is no trainer's state, or was cut off: ")
    Path(state_path(str(tmp_path), 1)).write_bytes(whole + b"\0")
    assert refusal(tmp_path).startswith("is no trainer's state, or was cut off: ")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    Path(state_path(str(tmp_path), 1)).mkdir()
    assert refusal(tmp_path) == "cannot be read: Is a directory"


def test_other_safetensors_are_refused(tmp_path: Path) -> None:
    metadata = {
        "format": "laminar trainer state 1",
        "step": "6",
        "optimizer_steps": "-1",
        **msgspec.structs.asdict(ORIGIN),
    }
    path = state_path(str(tmp_path), 1)
    save_file(numbers(), path, metadata)
    assert refusal(tmp_path) == "optimizer_steps must be a whole number, got '-1'"
    save_file(numbers(), path, metadata | {"format": "laminar trainer state 2"})
    assert refusal(tmp_path) == "its format must be 'laminar trainer state 1', it is 'laminar trainer state 2'"
    save_file(numbers(), path)
    assert refusal(tmp_path) == "its format must be 'laminar trainer state 1', it is None"
    save_file({"weight.a": np.zeros(3)}, path, metadata)
    assert refusal(tmp_path) == "is no trainer's state, or was cut off: the tensor weight.a is F64, not F32"


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        (SHAPES | {"weight.a": (5, 3)}, "the tensor weight.a must be float32 [5, 3], it is float32 [3, 5]"),
        (SHAPES | {"weight.c": (1,)}, "the tensor weight.c must be float32 [1], it is absent"),
        ({"weight.a": (3, 5), "weight.b": (0,)}, "the tensor exp_avg.a must be absent, it is float32 [7]"),
    ],
)
def test_tensors_that_the_trainer_has_not_are_refused(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], text: str
) -> None:
    written(tmp_path)
    assert refusal(tmp_path, shapes=shapes) == text


def test_a_full_disk_leaves_what_was_there_before(tmp_path: Path) -> None:
    path = written(tmp_path)
    before = path.read_bytes()
    (tmp_path / ".trainer-1.safetensors.part").symlink_to("/dev/full")  # whose every write finds no space
    with pytest.raises(OSError, match="No space left on device"):
        write_state(str(tmp_path), ORIGIN, 7, TrainerState(13, numbers()))
    assert os.listdir(tmp_path) == [path.name]
    assert path.read_bytes() == before


def test_states_are_checked_before_there_is_a_model(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"run_dir": "unused", "model": {"path": "unused"}}
    two = Config.model_validate(keys | {"job": {"trainers": 2}})
    manifest = make_manifest([("a", (2, 3), "float32")])
    for trainer in range(2):
        write_state(str(tmp_path), origin_of(two, trainer, 2, manifest), 6, TrainerState(11, numbers()))
    check_states(str(tmp_path), 6, two)
    with pytest.raises(ConfigError, match="must be the state after step 7"):
        check_states(str(tmp_path), 7, two)
    with pytest.raises(ConfigError, match=r"trainer-0.*: job.trainers must be 2, as when it was written, got 1"):
        check_states(str(tmp_path), 6, Config.model_validate(keys))
    os.unlink(state_path(str(tmp_path), 1))
    with pytest.raises(ConfigError, match=r"trainer-1.safetensors: is missing"):
        check_states(str(tmp_path), 6, two)


def test_models_differ_by_names_and_shapes_of_their_tensors() -> None:
    config = Config.model_validate({"run_dir": "unused", "model": {"path": "unused"}})
    models = [[("a", (2, 3))], [("a", (3, 2))], [("b", (2, 3))], [("a", (2, 3)), ("b", (1,))]]
    manifests = [make_manifest((name, shape, "float32") for name, shape in model) for model in models]
    assert len({origin_of(config, 0, 1, manifest).model for manifest in manifests}) == len(models)
    again = make_manifest([("a", (2, 3), "float32")])
    assert origin_of(config, 0, 1, again) == origin_of(config, 0, 1, manifests[0])
    assert origin_of(config, 0, 1, again) == Origin(
        "0", "1", "torch", "1", "1", "float32", origin_of(config, 0, 1, again).model
    )
