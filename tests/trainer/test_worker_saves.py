"""The trainer's worker saves its state beside its training, answers when it is on the disk, and goes on from it."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.numpy import load_file  # noqa: E402
from trainer_cases import config_for  # noqa: E402
from worker_cases import answer, start, train_on, workers  # noqa: E402

from laminar_hpc.config.schema import Config  # noqa: E402
from laminar_hpc.process.worker import Worker  # noqa: E402
from laminar_hpc.protocol.peer import Resume, SaveState, StartTrainer, StateSaved, TrainedOn, WorkerError  # noqa: E402
from laminar_hpc.trainer.batch import own_sequences  # noqa: E402
from laminar_hpc.trainer.checkpoint import state_path  # noqa: E402
from laminar_hpc.trainer.torch_trainer import TorchTrainer  # noqa: E402

pytestmark = pytest.mark.engine

ALL = list(range(7))


def config_of(path: str) -> Config:
    return config_for(path, warmup_steps=6, weight_decay=0.1)


def train(worker: Worker, *steps: int) -> list[TrainedOn]:
    """Train, and hear of each step."""
    trained = []
    for step in steps:
        worker.send(train_on(ALL, step))
        said = answer(worker)
        assert isinstance(said, TrainedOn)
        trained.append(said)
    return trained


def save(worker: Worker, step: int, directory: Path) -> StateSaved:
    """Save, and hear of it."""
    worker.send(SaveState(step, 7, str(directory)))
    said = answer(worker)
    assert isinstance(said, StateSaved)
    assert said.step == step
    return said


class SlowDisk:
    """A directory in which the first trainer's state goes through a pipe: it is written when, and as far as, it is read."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        os.mkfifo(directory / ".trainer-0.safetensors.part")

    @contextlib.contextmanager
    def begun(self) -> Iterator[IO[bytes]]:
        """The pipe, of which something has been read: the worker is writing, and comes no further than is read."""
        with open(self.directory / ".trainer-0.safetensors.part", "rb", buffering=0) as pipe:
            assert pipe.read(1000)
            yield pipe

    def read_all(self) -> None:
        """To the end."""
        with self.begun() as pipe:
            while pipe.read(1 << 16):
                pass


@contextlib.contextmanager
def one_worker(tmp_path: Path) -> Iterator[Worker]:
    with workers(1, tmp_path) as (worker,):
        yield worker


def test_the_state_is_that_of_its_place_among_the_requests(model_path: str, tmp_path: Path) -> None:
    config = config_of(model_path)
    with one_worker(tmp_path) as worker:
        up = start(worker, config)
        requests = (train_on(ALL, 1), SaveState(1, 7, str(tmp_path / "saved")), train_on(ALL, 2), train_on(ALL, 3))
        for request in requests:
            worker.send(request)
        said = [answer(worker) for _ in requests]
    (saved,) = [message for message in said if isinstance(message, StateSaved)]
    assert [message.step for message in said if isinstance(message, TrainedOn)] == [1, 2, 3]
    path = Path(state_path(str(tmp_path / "saved"), 0))
    assert (saved.step, saved.error, saved.nbytes) == (1, "", path.stat().st_size)
    assert 0 < saved.stall_s <= saved.seconds
    expected = TorchTrainer(config, 0, 1)
    expected.train(own_sequences(train_on(ALL, 1)))
    found, tensors = load_file(path), expected.state().tensors
    assert found.keys() == tensors.keys()
    assert all(np.array_equal(found[name], tensor) for name, tensor in tensors.items())
    assert up.state_bytes == sum(tensor.nbytes for tensor in found.values())


def test_a_worker_goes_on_from_a_state(model_path: str, tmp_path: Path) -> None:
    config = config_of(model_path)
    with one_worker(tmp_path) as worker:
        start(worker, config)
        train(worker, 1, 2)
        assert save(worker, 2, tmp_path / "two").error == ""
        unbroken = train(worker, 3, 4)
        assert save(worker, 4, tmp_path / "four").error == ""
    with one_worker(tmp_path) as worker:
        start(worker, config, Resume(str(tmp_path / "two"), 2))
        resumed = train(worker, 3, 4)
        assert save(worker, 4, tmp_path / "again").error == ""
    assert [message.metrics for message in resumed] == [message.metrics for message in unbroken]
    files = [Path(state_path(str(tmp_path / name), 0)).read_bytes() for name in ("four", "again")]
    assert files[0] == files[1]


def test_another_state_is_refused_while_one_is_being_written(model_path: str, tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path / "slow")
    with one_worker(tmp_path) as worker:
        start(worker, config_of(model_path))
        worker.send(SaveState(1, 7, str(disk.directory)))
        train(worker, 2, 3)  # whatever the disk does
        refused = save(worker, 3, tmp_path / "other")
        assert refused.error == "the state after step 1 is still being written"
        assert refused.nbytes == 0
        assert not (tmp_path / "other").exists()
        reader = threading.Thread(target=disk.read_all)
        reader.start()
        first = answer(worker)
        reader.join()
        assert isinstance(first, StateSaved)
        assert first.step == 1
        # a pipe cannot be synced, and what cannot be synced is not there
        assert first.error == f"{state_path(str(disk.directory), 0)}: cannot be written: Invalid argument"
        assert save(worker, 3, tmp_path / "other").error == ""


def test_a_kill_while_writing_leaves_no_file_under_the_name(model_path: str, tmp_path: Path) -> None:
    config, disk = config_of(model_path), SlowDisk(tmp_path / "slow")
    with one_worker(tmp_path) as worker:
        start(worker, config)
        worker.send(SaveState(1, 7, str(disk.directory)))
        with disk.begun():  # a pipe has room for 64 KiB, the state is larger
            worker.kill()
    assert not os.path.lexists(state_path(str(disk.directory), 0))
    with one_worker(tmp_path) as worker:
        worker.send(StartTrainer(config.model_dump_json().encode(), 0, 1, Resume(str(disk.directory), 1)))
        said = answer(worker)
        assert isinstance(said, WorkerError)
        path = state_path(str(disk.directory), 0)
        assert said.text == f"ConfigError: {path}: is missing; a checkpoint has one for each of 1 trainers"


def test_a_full_disk_is_one_line_and_training_goes_on(model_path: str, tmp_path: Path) -> None:
    directory = tmp_path / "full"
    path = state_path(str(directory), 0)
    with one_worker(tmp_path) as worker:
        start(worker, config_of(model_path))
        assert save(worker, 0, directory).error == ""
        before = Path(path).read_bytes()
        train(worker, 1)
        limits = resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (len(before) // 2, resource.RLIM_INFINITY))
        failed = save(worker, 1, directory)
        assert failed.error == f"{path}: cannot be written: File too large"
        assert failed.nbytes == 0
        assert os.listdir(directory) == [os.path.basename(path)]
        assert Path(path).read_bytes() == before
        train(worker, 2)
        resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, limits)
        assert save(worker, 2, directory).error == ""
        assert Path(path).read_bytes() != before


def test_shutdown_waits_for_what_is_being_written(model_path: str, tmp_path: Path) -> None:
    with one_worker(tmp_path) as worker:
        start(worker, config_of(model_path))
        worker.send(SaveState(0, 7, str(tmp_path / "last")))
        worker.stop(timeout_s=60.0)
    assert os.path.getsize(state_path(str(tmp_path / "last"), 0)) > 0
