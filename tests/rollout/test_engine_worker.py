"""The engine worker over a real pipe, in a thread and as the process that a rollout starts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from saved_models import CONFIGS, END, Saved  # noqa: E402

from laminar_hpc.errors import ConfigError, ProtocolError  # noqa: E402
from laminar_hpc.process.channel import Channel, ChannelClosed, wait_any  # noqa: E402
from laminar_hpc.process.worker import Worker, start_forkserver  # noqa: E402
from laminar_hpc.protocol.peer import (  # noqa: E402
    AbortTrajectories,
    AddTrajectory,
    Ended,
    EngineOutput,
    EngineUp,
    Lease,
    LoadWeights,
    ManagerAlive,
    Shutdown,
    StartEngine,
    WeightsLoaded,
)
from laminar_hpc.protocol.trajectory import Block, Purpose, Source, Stop, TrajectorySpec  # noqa: E402
from laminar_hpc.protocol.wire import AnyRecord  # noqa: E402
from laminar_hpc.rollout.api import Request, Sampled  # noqa: E402
from laminar_hpc.rollout.torch_engine import TorchEngine  # noqa: E402
from laminar_hpc.rollout.worker import EngineWorker, main  # noqa: E402
from laminar_hpc.weights.digest import chunk_digests, image_digest  # noqa: E402
from laminar_hpc.weights.image import Image  # noqa: E402

pytestmark = pytest.mark.engine

DEADLINE_S = 60.0
PROMPT = [5, 9, 21, 40, 8]


class Driver:
    """The driver's side of a worker that runs in a thread."""

    def __init__(self, saved: Saved, **changes: Any) -> None:
        self.saved = saved
        self.config = saved.config(**changes.pop("rollout", {})).model_copy(update=changes)
        self.channel, theirs = Channel.pair()
        self.result: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(Channel(theirs, waits=True),), daemon=True)

    def _run(self, channel: Channel) -> None:
        try:
            self.result.set_result(main(channel))
        except BaseException as error:
            self.result.set_exception(error)
        finally:
            channel.close()

    def start(self) -> EngineUp:
        self._thread.start()
        self.channel.send(StartEngine(self.config.model_dump_json().encode(), self.saved.manifest))
        up = self.hear()
        assert isinstance(up, EngineUp)
        return up

    def hear(self) -> AnyRecord:
        message = self.channel.receive(DEADLINE_S)
        assert message is not None, "nothing came"
        return message

    def hear_output(self) -> EngineOutput:
        message = self.hear()
        assert isinstance(message, EngineOutput)
        return message

    def hear_until_ended(self, count: int) -> list[EngineOutput]:
        """Outputs up to the one in which the `count`-th trajectory ends."""
        outputs: list[EngineOutput] = []
        while sum(len(output.ended) for output in outputs) < count:
            outputs.append(self.hear_output())
        return outputs

    def join(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def lent(saved: Saved, version: int) -> Iterator[Lease]:
    """A lease on an image with the model's weights, the second slot's, so that its offset is not 0."""
    with Image.create(saved.manifest.nbytes, 2) as image:
        for each in (version - 1, version):
            slot = image.begin_fill(each)
            assert slot is not None
            slot[:] = saved.image if each == version else 0
            image.complete(each)
        del slot
        assert image.lease(7, version) == version
        assert image.offset_of(version) > 0
        yield Lease(version, image.path, image.offset_of(version))


def digest_of(saved: Saved) -> bytes:
    """The digest of the image with the model's weights."""
    return image_digest(chunk_digests(saved.image, saved.manifest))


@contextlib.contextmanager
def running(saved: Saved, version: int = 4, **changes: Any) -> Iterator[Driver]:
    """A worker in a thread, with weights; shut down at the end."""
    driver = Driver(saved, **changes)
    driver.start()
    with lent(saved, version) as lease:
        driver.channel.send(LoadWeights(lease))
        loaded = driver.hear()
    assert isinstance(loaded, WeightsLoaded)
    yield driver
    driver.channel.send(Shutdown())
    driver.join()
    assert driver.result.result() is None


def int32(tokens: list[int]) -> bytes:
    return np.array(tokens, dtype="<i4").tobytes()


def add(trajectory: int, response: list[int] | None = None, purpose: Purpose = Purpose.TRAIN) -> AddTrajectory:
    spec = TrajectorySpec(trajectory, 0, 0, trajectory, purpose, 500 + trajectory, len(response or []))
    return AddTrajectory(spec, int32(PROMPT), int32(response or []))


def tokens_of(blocks: list[Block]) -> list[int]:
    return [token for block in blocks for token in np.frombuffer(block.tokens, "<i4").tolist()]


def logprobs_of(blocks: list[Block]) -> list[float]:
    return [logprob for block in blocks for logprob in np.frombuffer(block.logprobs, "<f4").tolist()]


def blocks_of(outputs: list[EngineOutput], trajectory: int) -> list[Block]:
    return [block for output in outputs for block in output.blocks if block.trajectory == trajectory]


def straight(saved: Saved, trajectory: int, temperature: float, **rollout: Any) -> list[Sampled]:
    """What the engine gives for a trajectory of `add`, without a worker."""
    engine = TorchEngine(saved.config(**rollout))
    engine.load(0, saved.manifest, saved.lease)
    engine.add(Request(trajectory, PROMPT, [], 500 + trajectory, temperature))
    sampled: list[Sampled] = []
    while step := engine.step():
        sampled += step
    return sampled


def check_stream(blocks: list[Block], expected: list[Sampled], begun: int = 0) -> None:
    """The blocks, joined, are the expected tokens from the `begun`-th on, each at its offset."""
    offset = len(PROMPT) + begun
    for block in blocks:
        assert (block.offset, block.source, block.version) == (offset, Source.MODEL, 4)
        assert block.count == len(block.logprobs) // 4 > 0
        offset = block.end
    assert tokens_of(blocks) == [one.token for one in expected[begun:]]
    assert logprobs_of(blocks) == pytest.approx([one.logprob for one in expected[begun:]], abs=1e-5)


def test_trajectories_are_streamed_block_by_block_and_end(llama: Saved) -> None:
    with running(llama, rollout={"slots": 2, "stream_interval_s": 1e-9}) as driver:
        for trajectory in (0, 1, 2):
            driver.channel.send(add(trajectory))
        outputs = driver.hear_until_ended(3)
    for trajectory in (0, 1, 2):
        expected = straight(llama, trajectory, 1.0)
        blocks = blocks_of(outputs, trajectory)
        check_stream(blocks, expected)
        assert [block.count for block in blocks] == [1] * len(expected)  # told after every step
        assert Ended(trajectory, expected[-1].stop or Stop.LENGTH) in [e for output in outputs for e in output.ended]
    assert outputs[-1].kv_use == outputs[-1].running == outputs[-1].waiting == 0
    assert all(output.busy_s > 0 for output in outputs)
    assert all(output.running <= 2 for output in outputs)


def test_within_the_interval_only_ends_are_told_with_all_that_was_generated(llama: Saved) -> None:
    with running(llama, rollout={"stream_interval_s": 1e6}) as driver:
        driver.channel.send(add(0))
        [output] = driver.hear_until_ended(1)
        expected = straight(llama, 0, 1.0)
        [block] = output.blocks
        check_stream([block], expected)
        assert output.ended == [Ended(0, expected[-1].stop or Stop.LENGTH)]


def test_evaluation_has_its_own_temperature(llama: Saved) -> None:
    with running(llama) as driver:
        driver.channel.send(add(0, purpose=Purpose.EVALUATION))
        outputs = driver.hear_until_ended(1)
    greedy = straight(llama, 0, 0.0)
    check_stream(blocks_of(outputs, 0), greedy)
    assert [one.token for one in greedy] != [one.token for one in straight(llama, 0, 1.0)]


def test_a_trajectory_goes_on_from_what_exists_of_it(llama: Saved) -> None:
    expected = straight(llama, 3, 1.0)
    half = [one.token for one in expected[: len(expected) // 2]]
    with running(llama) as driver:
        driver.channel.send(add(3, response=half))
        outputs = driver.hear_until_ended(1)
    check_stream(blocks_of(outputs, 3), expected, begun=len(half))


def test_a_response_that_has_ended_already_ends_at_once_without_new_tokens(llama: Saved) -> None:
    with running(llama) as driver:
        driver.channel.send(add(0, response=[8, END]))
        assert driver.hear_output() == EngineOutput(
            [], [Ended(0, Stop.END_TOKEN)], 0.0, 0, 0, pytest.approx(0, abs=0.1)
        )
        driver.channel.send(add(1, response=[8] * 20))
        assert driver.hear_output().ended == [Ended(1, Stop.LENGTH)]


def test_what_is_given_up_is_told_to_its_last_token_and_then_forgotten(llama: Saved) -> None:
    config = llama.config(stream_interval_s=1.0)
    worker = EngineWorker(config, llama.manifest, TorchEngine(config))
    with lent(llama, 4) as lease:
        worker.handle(LoadWeights(lease))
    expected = straight(llama, 0, 1.0)
    worker.handle(add(0))
    worker.handle(add(1, purpose=Purpose.EVALUATION))
    for _ in range(3):
        worker.step()
    told = worker.take_output(now_s=10.0)
    assert not worker.has_news(now_s=10.9)
    assert worker.has_news(now_s=11.0)
    assert told.running == 2
    worker.step()
    worker.handle(AbortTrajectories([0, 1, 99]))
    assert worker.has_news(now_s=10.1)
    assert not worker.idle
    last = worker.take_output(now_s=10.1)
    assert (last.released, last.ended, last.running, last.kv_use) == ([0, 1], [], 0, 0.0)
    assert worker.idle
    assert not worker.has_news(now_s=99.0)
    kept = tokens_of(blocks_of([told, last], 0))
    assert kept == [one.token for one in expected[:4]]
    worker.handle(add(0, response=kept))
    while not worker.has_news(now_s=10.2):
        worker.step()
    check_stream(blocks_of([told, last, worker.take_output(now_s=10.2)], 0), expected)


def test_what_has_ended_is_not_given_up(llama: Saved) -> None:
    worker = EngineWorker(llama.config(), llama.manifest, TorchEngine(llama.config()))
    worker.handle(add(0, response=[END]))
    worker.handle(add(1, response=[END]))
    worker.handle(AbortTrajectories([0]))
    output = worker.take_output(now_s=0.0)
    assert output.ended == [Ended(0, Stop.END_TOKEN), Ended(1, Stop.END_TOKEN)]
    assert output.released == []
    assert worker.idle
    worker.handle(AbortTrajectories([0, 1]))
    assert worker.take_output(now_s=0.0).released == []
    assert worker.idle


def test_the_digest_is_that_of_the_image_and_only_there_when_asked_for(llama: Saved) -> None:
    for verify in (True, False):
        driver = Driver(llama, weights=llama.config().weights.model_copy(update={"verify": verify}))
        driver.start()
        with lent(llama, 9) as lease:
            driver.channel.send(LoadWeights(lease))
            loaded = driver.hear()
        assert isinstance(loaded, WeightsLoaded)
        assert (loaded.version, loaded.digest) == (9, digest_of(llama) if verify else b"")
        driver.channel.send(Shutdown())
        driver.join()


def test_it_says_how_much_it_takes(llama: Saved) -> None:
    driver = Driver(llama, rollout={"concurrency": 37, "slots": 3, "max_prompt_tokens": 10, "max_response_tokens": 20})
    up = driver.start()
    assert (up.concurrency, up.kv_capacity_tokens) == (37, 3 * 30)
    driver.channel.send(Shutdown())
    driver.join()


def test_a_message_that_is_none_of_its_own_is_an_error(llama: Saved) -> None:
    driver = Driver(llama)
    driver.start()
    driver.channel.send(ManagerAlive())
    driver.join()
    with pytest.raises(ProtocolError, match="engine worker: unexpected ManagerAlive"):
        driver.result.result()


def test_a_model_that_cannot_run_is_an_error(llama: Saved, tmp_path: Path) -> None:
    driver = Driver(llama, model=llama.config().model.model_copy(update={"path": str(tmp_path)}))
    with pytest.raises(ChannelClosed):
        driver.start()
    driver.join()
    with pytest.raises(ConfigError, match=r"model\.path: .*config\.json cannot be read"):
        driver.result.result()


def test_it_ends_with_the_pipe(llama: Saved) -> None:
    driver = Driver(llama)
    driver.start()
    driver.channel.close()
    driver.join()
    with pytest.raises(ChannelClosed):
        driver.result.result()


# --- as a process ---------------------------------------------------------------------------------------------------


def receive(worker: Worker) -> list[AnyRecord]:
    wait_any([worker.channel], DEADLINE_S)
    return worker.receive_all()


def test_the_process_loads_generates_loads_again_and_ends(tmp_path: Path, llama: Saved) -> None:
    other = Saved(tmp_path / "other", CONFIGS["llama"](), seed=99)
    config = llama.config(stream_interval_s=0.01)
    start_forkserver()
    worker = Worker("engine", main, str(tmp_path / "engine.log"))
    try:
        worker.send(StartEngine(config.model_dump_json().encode(), llama.manifest))
        [up] = receive(worker)
        assert isinstance(up, EngineUp)
        for version, saved in ((1, llama), (2, other)):
            with lent(saved, version) as lease:
                worker.send(LoadWeights(lease))
                [loaded] = receive(worker)
            assert isinstance(loaded, WeightsLoaded)
            assert (loaded.version, loaded.digest) == (version, digest_of(saved))
            for trajectory in range(6):
                worker.send(add(trajectory))
            outputs: list[EngineOutput] = []
            while sum(len(output.ended) for output in outputs) < 6:
                messages = receive(worker)
                assert messages, "nothing came"
                outputs += [message for message in messages if isinstance(message, EngineOutput)]
            for trajectory in range(6):
                blocks = blocks_of(outputs, trajectory)
                assert {block.version for block in blocks} == {version}
                assert tokens_of(blocks) == [one.token for one in straight(saved, trajectory, 1.0)]
        worker.stop(timeout_s=DEADLINE_S)
        assert not worker.alive
    finally:
        worker.kill()
