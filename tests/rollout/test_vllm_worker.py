"""The engine worker with vLLM as a process: digests and outputs with several shards, and what a dead shard does."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("vllm")

from batches import forward_logprobs, generated, prompts_of_lengths  # noqa: E402
from saved_models import Saved  # noqa: E402
from vllm_cases import (  # noqa: E402
    MODELS,
    EngineProcess,
    digest_of,
    same_until_near_tie,
)

from laminar_hpc.protocol.peer import EngineOutput, WorkerError  # noqa: E402
from laminar_hpc.protocol.trajectory import Purpose  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.engine, pytest.mark.process]


def models(directory: Path, kind: str, dtype: str = "float32") -> list[Saved]:
    """Two sets of weights of one kind of model."""
    return [Saved(directory / str(seed), MODELS[kind](), seed, dtype) for seed in (31, 32)]


def check_loads_and_outputs(engine: EngineProcess, versions: list[Saved]) -> None:
    """Load one version after the other: digests are the images', and all that is generated is the reference's."""
    prompts = prompts_of_lengths(1, 9, 70, 24, 5)
    for version, saved in enumerate(versions):
        loaded = engine.load(version, saved)
        assert (loaded.version, loaded.digest) == (version, digest_of(saved))
        for purpose, temperature in ((Purpose.EVALUATION, 1.0), (Purpose.TRAIN, 0.7)):
            for prompt, (tokens, logprobs) in zip(prompts, engine.generate(prompts, purpose), strict=True):
                assert logprobs == pytest.approx(forward_logprobs(saved, prompt, tokens, temperature), abs=1e-4)
                if purpose is Purpose.EVALUATION:
                    assert same_until_near_tie(saved, prompt, tokens, generated(saved, prompt, 20))
    assert digest_of(versions[0]) != digest_of(versions[1])


def shards_of(engine: EngineProcess) -> list[int]:
    """The processes that vLLM has started for its shards."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and group_of(entry) == engine.worker.pid != int(entry.name):
            found.append(int(entry.name))
    return found


def group_of(entry: Path) -> int | None:
    """The process group of a living process."""
    try:
        state, _, group = entry.joinpath("stat").read_text().rpartition(")")[2].split()[:3]
    except OSError:
        return None
    return int(group) if state != "Z" else None


@pytest.fixture(scope="module")
def two_shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineProcess, list[Saved]]]:
    directory = tmp_path_factory.mktemp("two-shards")
    versions = models(directory, "qwen2-tied")
    engine = EngineProcess(versions[0], directory / "engine.log", tensor_parallel=2)
    yield engine, versions
    engine.worker.kill()


def test_no_shared_memory_of_theirs_has_a_name_that_could_be_left_behind(
    two_shards: tuple[EngineProcess, list[Saved]],
) -> None:
    engine, _ = two_shards
    processes = [engine.worker.pid, *shards_of(engine)]
    maps = [line for pid in processes for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    mapped = {int(line.split()[4]) for line in maps if "/dev/shm/" in line}
    assert len(mapped) >= 3  # the queue to the shards, and one back from each
    assert [entry.name for entry in os.scandir("/dev/shm") if entry.inode() in mapped] == []


def test_two_shards_hold_the_images_bytes_and_compute_the_same(
    two_shards: tuple[EngineProcess, list[Saved]],
) -> None:
    check_loads_and_outputs(*two_shards)


def test_a_dead_shard_is_an_error_of_the_engine_within_a_bound(two_shards: tuple[EngineProcess, list[Saved]]) -> None:
    engine, _ = two_shards
    shards = shards_of(engine)
    assert len(shards) >= 2
    os.kill(shards[-1], signal.SIGKILL)
    engine.add(0, [5, 9], Purpose.TRAIN)
    assert engine.hear(WorkerError).text.startswith("EngineError: vllm engine: ")
    left = [os.pidfd_open(shard) for shard in shards_of(engine)]
    engine.worker.kill()
    for shard in left:  # killed with it; giving their memory back takes them a moment
        assert select.select([shard], [], [], 10.0)[0]
        os.close(shard)
    assert shards_of(engine) == []


def test_a_trajectory_goes_on_in_another_process(tmp_path: Path) -> None:
    """Half of it by one engine, the rest by a second one: the greedy tokens are those of the whole."""
    [saved, _] = models(tmp_path, "llama")
    [prompt] = prompts_of_lengths(40)
    first = EngineProcess(saved, tmp_path / "first.log", max_response_tokens=8)
    try:
        first.load(1, saved)
        [(half, _)] = first.generate([prompt], Purpose.EVALUATION)
    finally:
        first.worker.kill()
    second = EngineProcess(saved, tmp_path / "second.log")
    try:
        second.load(1, saved)
        [(whole, logprobs)] = second.generate([prompt], Purpose.EVALUATION)
        second.add(0, prompt, Purpose.EVALUATION, half)
        output = second.hear(EngineOutput)
        rest: list[int] = []
        while True:
            for block in output.blocks:
                rest += list(memoryview(block.tokens).cast("i"))
            if output.ended:
                break
            output = second.hear(EngineOutput)
    finally:
        second.worker.kill()
    assert logprobs == pytest.approx(forward_logprobs(saved, prompt, whole), abs=1e-4)
    assert same_until_near_tie(saved, prompt, half + rest, whole)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2-tied", "qwen3"])
def test_every_kind_of_model_agrees_with_transformers(tmp_path: Path, kind: str) -> None:
    versions = models(tmp_path, kind)
    engine = EngineProcess(versions[0], tmp_path / "engine.log")
    try:
        check_loads_and_outputs(engine, versions)
    finally:
        engine.worker.kill()


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_bfloat16_weights_are_the_images_bytes(tmp_path: Path, shards: int) -> None:
    versions = models(tmp_path, "qwen3", "bfloat16")
    engine = EngineProcess(versions[0], tmp_path / "engine.log", tensor_parallel=shards)
    try:
        for version, saved in enumerate(versions):
            assert engine.load(version, saved).digest == digest_of(saved)
            assert engine.generate(prompts_of_lengths(9), Purpose.EVALUATION)
    finally:
        engine.worker.kill()
