"""`laminar bench`: what our loops cost, measured against the bare library on the same work.

Both sides are worker processes of one machine, driven by the same messages, and take turns: round after round, so that
whatever else the machine does meets both alike. The figure is the median of the rounds' ratios.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError, EngineError
from laminar_hpc.process.channel import Channel, ChannelClosed, wait_any
from laminar_hpc.process.worker import Worker, WorkerMain, start_forkserver
from laminar_hpc.protocol.peer import (
    AddTrajectory,
    EngineOutput,
    EngineUp,
    LoadWeights,
    Manifest,
    StartEngine,
    StartTrainer,
    TrainedOn,
    TrainerUp,
    TrainOn,
    WeightsLoaded,
    WeightsWritten,
    WorkerError,
    WriteWeights,
)
from laminar_hpc.protocol.trajectory import Block, Purpose, Source, TrajectorySpec
from laminar_hpc.protocol.wire import AnyRecord
from laminar_hpc.trainer.architecture import read_architecture
from laminar_hpc.weights.image import Image
from laminar_hpc.weights.reshard import ShardMap
from laminar_hpc.weights.scatter import scatter

ROUNDS = 5


class Round(msgspec.Struct, frozen=True):
    """One turn of one side: tokens done in so many seconds."""

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


class _Side:
    """A worker process, waited for with a bound."""

    def __init__(self, name: str, main: WorkerMain, logs: str) -> None:
        self.name = name
        self._log = os.path.join(logs, f"{name}.log")
        self._worker = Worker(name, main, self._log)

    def send(self, message: AnyRecord) -> None:
        self._worker.send(message)

    def receive(self, bound_s: float, what: str) -> AnyRecord:
        """The next message; EngineError where none comes within `bound_s`, or the worker ends."""
        deadline_s = time.monotonic() + bound_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            wait_any([self._worker.channel], left_s)  # which also sends on what the stream had no room for
            try:
                message = self._worker.channel.receive()
            except ChannelClosed as error:
                raise EngineError(f"{self.name} has ended while it was to {what}:\n{self._last_lines()}") from error
            if isinstance(message, WorkerError):
                raise EngineError(f"{self.name}: {message.text}")
            if message is not None:
                return message
        raise EngineError(f"{self.name} did not {what} within {bound_s:g} s")

    def stop(self) -> None:
        self._worker.kill()

    def _last_lines(self) -> str:
        with open(self._log, encoding="utf-8", errors="replace") as file:
            return "".join(file.readlines()[-5:])


def bench_rollout(config: Config, rounds: int = ROUNDS) -> float:
    """The rollout's engine loop against `vllm.LLM.generate`: ratio of their generated tokens a second.

    A round is `batch.prompts * batch.group_size` responses to prompts of the config's task, which neither side has seen
    before. ConfigError where the config's engine is not vllm, or its task has too few prompts.
    """
    if config.rollout.engine != "vllm":
        raise ConfigError(f"bench rollout: rollout.engine must be 'vllm', got {config.rollout.engine!r}")
    work = _prompts(config, rounds + 1)
    from laminar_hpc.rollout import vllm_bare
    from laminar_hpc.rollout import worker as engine_worker

    start_forkserver()
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as logs:
        image, manifest = _published(config, logs)
        loop = _Side("rollout", engine_worker.main, logs)
        bare = _Side("bare-vllm", vllm_bare.main, logs)
        try:
            for side in (loop, bare):
                side.send(StartEngine(config.model_dump_json().encode(), manifest))
                _expect(side.receive(config.job.start_timeout_s, "start"), EngineUp)
            loop.send(LoadWeights(image.lent(0)))
            _expect(loop.receive(config.rollout.timeout_s, "load the weights"), WeightsLoaded)
            for side in (loop, bare):
                _generate(side, config, work[0])  # warm up
            return _compare(
                "rollout",
                rounds,
                lambda turn: _generate(loop, config, work[turn + 1]),
                lambda turn: _generate(bare, config, work[turn + 1]),
            )
        finally:
            loop.stop()
            bare.stop()
            image.close()


def bench_trainer(config: Config, rounds: int = ROUNDS) -> float:
    """The trainer's step against a bare Megatron-core loop: ratio of their trained tokens a second.

    A round is one step on `batch.prompts * batch.group_size` trajectories of random tokens, of lengths between half and all
    of what the config allows. ConfigError where the config's trainer is not megatron, or is more than one rank.
    """
    if config.trainer.engine != "megatron" or config.job.trainers != 1:
        raise ConfigError(
            f"bench trainer: trainer.engine must be 'megatron' with job.trainers = 1, got {config.trainer.engine!r} and "
            f"{config.job.trainers}"
        )
    from laminar_hpc.trainer import worker as trainer_worker

    start_forkserver()
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as logs:
        ours = _Side("trainer", trainer_worker.main, logs)
        bare = _Side("bare-megatron", _bare_megatron, logs)
        try:
            for side in (ours, bare):
                side.send(StartTrainer(config.model_dump_json().encode(), 0, 1))
                _expect(side.receive(config.job.start_timeout_s, "start"), TrainerUp)
            for side in (ours, bare):
                _train(side, config, 0)  # warm up
            return _compare(
                "trainer",
                rounds,
                lambda turn: _train(ours, config, turn + 1),
                lambda turn: _train(bare, config, turn + 1),
            )
        finally:
            ours.stop()
            bare.stop()


def _compare(name: str, rounds: int, ours: Callable[[int], Round], bare: Callable[[int], Round]) -> float:
    """Take turns, each first in every other round, print the rounds, and return the median ratio of the rates."""
    table = Table("round", f"{name}, tok/s", "bare, tok/s", "ratio")
    ratios = []
    for turn in range(rounds):
        if turn % 2:
            second, first = bare(turn), ours(turn)
        else:
            first, second = ours(turn), bare(turn)
        ratios.append(first.rate / second.rate)
        table.add_row(str(turn + 1), f"{first.rate:.1f}", f"{second.rate:.1f}", f"{ratios[-1]:.3f}")
    console = Console(highlight=False)
    console.print(table)
    median = statistics.median(ratios)
    console.print(f"{name}: {median:.3f} of the bare rate (median of {rounds} rounds)")
    return median


def _expect(message: AnyRecord, kind: type) -> None:
    if not isinstance(message, kind):
        raise EngineError(f"expected {kind.__name__}, got {type(message).__name__}")


# --- the rollout's side ---------------------------------------------------------------------------------------------


def _prompts(config: Config, rounds: int) -> list[list[bytes]]:
    """Tokens (int32) of the prompts of each round, none of them twice."""
    from laminar_hpc.tasks.build import build_task, build_tokenizer
    from laminar_hpc.tasks.encoding import encode_prompt

    task, tokenizer = build_task(config), build_tokenizer(config)
    count = config.batch.prompts
    if task.prompts < rounds * count:
        raise ConfigError(f"bench rollout: the task has {task.prompts} prompts, {rounds * count} are needed")
    tokens = [
        np.asarray(encode_prompt(tokenizer, task, Purpose.TRAIN, i, config.rollout.max_prompt_tokens), "<i4").tobytes()
        for i in range(rounds * count)
    ]
    return [tokens[i * count : (i + 1) * count] for i in range(rounds)]


def _published(config: Config, logs: str) -> tuple[Image, Manifest]:
    """The checkpoint's weights as version 0 of an image, written by a trainer's worker, as in a job."""
    from laminar_hpc.trainer import worker as trainer_worker

    alone = config.model_copy(
        update={
            "job": config.job.model_copy(update={"trainers": 1}),
            "trainer": config.trainer.model_copy(update={"tensor_parallel": 1, "pipeline_parallel": 1}),
        }
    )
    side = _Side("publisher", trainer_worker.main, logs)
    try:
        side.send(StartTrainer(alone.model_dump_json().encode(), 0, 1))
        up = side.receive(config.job.start_timeout_s, "start")
        assert isinstance(up, TrainerUp), type(up).__name__
        shard = ShardMap(up.tiles)
        with Image.create(shard.nbytes, 2) as published:
            data = published.begin_fill(0)
            image = Image.create(up.manifest.nbytes, 2)
            slot = image.begin_fill(0)
            assert data is not None
            assert slot is not None
            side.send(WriteWeights(0, published.path, published.offset_of(0)))
            _expect(side.receive(config.job.stall_timeout_s, "write the weights"), WeightsWritten)
            scatter(data, shard.rectangles(0, shard.nbytes), slot)
            image.complete(0)
        return image, up.manifest
    finally:
        side.stop()


def _generate(side: _Side, config: Config, prompts: list[bytes]) -> Round:
    size = config.batch.group_size
    began_s = time.perf_counter()
    for number in range(len(prompts) * size):
        spec = TrajectorySpec(number, number // size, number // size, number % size, Purpose.TRAIN, seed=number)
        side.send(AddTrajectory(spec, prompts[number // size]))
    tokens, ended = 0, 0
    while ended < len(prompts) * size:
        output = side.receive(config.rollout.timeout_s, "generate")
        assert isinstance(output, EngineOutput), type(output).__name__
        tokens += sum(block.count for block in output.blocks)
        ended += len(output.ended)
    return Round(tokens, time.perf_counter() - began_s)


# --- the trainer's side ---------------------------------------------------------------------------------------------


def _train(side: _Side, config: Config, step: int) -> Round:
    message = random_mini_batch(config, step)
    began_s = time.perf_counter()
    side.send(message)
    _expect(side.receive(config.job.stall_timeout_s, "train"), TrainedOn)
    tokens = sum(block.count for blocks in message.blocks for block in blocks)
    return Round(tokens, time.perf_counter() - began_s)


def _bare_megatron(channel: Channel) -> None:
    """In the worker, so that Megatron is loaded there and not here."""
    from laminar_hpc.trainer.megatron_bare import main

    main(channel)


def random_mini_batch(config: Config, step: int) -> TrainOn:
    """A step's trajectories of random tokens of the model's vocabulary, the same for both sides."""
    random = np.random.default_rng(step)
    size, limits = config.batch.group_size, config.rollout
    vocabulary = read_architecture(config.model.path).shape.vocabulary
    numbers = list(range(config.batch.prompts * size))
    blocks = []
    for number in numbers:
        prompt, response = (
            int(random.integers(max(1, longest // 2), longest + 1))
            for longest in (limits.max_prompt_tokens, limits.max_response_tokens)
        )
        tokens = random.integers(0, vocabulary, size=prompt + response, dtype=np.int32).astype("<i4")
        logprobs = -random.random(response, dtype=np.float32).astype("<f4")
        blocks.append(
            [
                Block(number, 0, Source.PROMPT, None, tokens[:prompt].tobytes()),
                Block(number, prompt, Source.MODEL, 0, tokens[prompt:].tobytes(), logprobs.tobytes()),
            ]
        )
    return TrainOn(
        step=step + 1,
        minibatch=0,
        minibatches=1,
        trajectories=numbers,
        groups=[number // size for number in numbers],
        rewards=[float(reward) for reward in random.integers(0, 2, size=len(numbers))],
        own=numbers,
        blocks=blocks,
    )
