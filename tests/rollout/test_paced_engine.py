"""The paced engine in a time of its own: what it tells, when, and how it says that it was late."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from paced_runs import (
    VirtualTime,
    ends,
    image_for,
    joined,
    loaded_engine,
    paced_config,
    request,
)

from laminar_hpc.config.schema import Config
from laminar_hpc.data.presets import response_lengths
from laminar_hpc.errors import EngineError
from laminar_hpc.protocol.peer import AddTrajectory, Ended, LoadWeights
from laminar_hpc.protocol.trajectory import Purpose, Stop, TrajectorySpec
from laminar_hpc.rollout.paced import PacedEngine
from laminar_hpc.rollout.paced_tokens import VOCABULARY, LengthTokens, drawn_length
from laminar_hpc.rollout.worker import EngineWorker
from laminar_hpc.weights.digest import digests_of

PLAIN = {
    "decode": [[1, 1.0], [2, 2.0]],
    "step_overhead_s": 0.5,
    "prefill_call_s": 1.0,
    "prefill_token_s": 0.1,
    "load_s": 30.0,
}
"""A step of n takes n + 0.5 s."""


def lengths_file(folder: Path, *tokens: int) -> str:
    """A distribution in which each of these lengths has the same share."""
    rows, path = ["tokens,cdf"], folder / "lengths.csv"
    for place, length in enumerate(tokens):
        rows += [f"{length},{place / len(tokens)}", f"{length},{(place + 1) / len(tokens)}"]
    path.write_text("\n".join(rows) + "\n")
    return str(path)


def config_of(folder: Path, *tokens: int, scale: float = 1.0, **rollout: object) -> Config:
    """A config with the costs `PLAIN` and these lengths."""
    limits = {"max_prompt_tokens": 50, "max_response_tokens": 100, "stream_interval_s": 1000.0, **rollout}
    paced = {**PLAIN, "lengths": lengths_file(folder, *tokens), "time_scale": scale}
    return paced_config(paced, **limits)


def seed_for(config: Config, length: int) -> int:
    """A seed that draws this length."""
    lengths = response_lengths(config)
    return next(seed for seed in range(10_000) if drawn_length(lengths, seed, 100) == length)


def test_two_of_known_length_end_at_the_computed_times_by_the_scale(tmp_path: Path) -> None:
    for scale in (1.0, 0.02):
        config = config_of(tmp_path, 2, 5, scale=scale)
        time = VirtualTime()
        engine = loaded_engine(config, tmp_path, time)
        begin_s = time.now()
        assert engine.add(request(1, 10, seed_for(config, 2))) is None
        assert engine.add(request(2, 20, seed_for(config, 5))) is None
        # step 1: prefill 1 + 3 s, and 2.5 s for two; step 2: 2.5 s, the first one ends; three steps of 1.5 s
        found = ends(engine, time, begin_s)
        assert found == {
            1: (pytest.approx(9.0 * scale), Stop.END_TOKEN),
            2: (pytest.approx(13.5 * scale), Stop.END_TOKEN),
        }
        assert engine.stats().pace is not None
        assert engine.stats().pace.scheduled_s == pytest.approx((30.0 + 9.0 + 13.5) * scale)
        assert engine.stats().pace.late_s == pytest.approx(0.0, abs=1e-9)


def test_a_load_takes_its_time_and_keeps_the_bytes(tmp_path: Path) -> None:
    config = config_of(tmp_path, 5, scale=0.1)
    time = VirtualTime()
    engine = PacedEngine(config, LengthTokens(config), time)
    engine.add(request(1, 10, 0))
    with pytest.raises(EngineError, match="before any weights"):
        engine.step()
    engine.abort(1)
    manifest, lease = image_for(tmp_path)
    begin_s = time.now()
    engine.load(7, manifest, lease)
    assert time.now() - begin_s == pytest.approx(3.0)
    image = np.fromfile(lease.path, dtype=np.uint8)
    assert digests_of(engine.weights(manifest), manifest) == digests_of([image], manifest)
    engine.add(request(1, 10, 0))
    with pytest.raises(EngineError, match="version 8 cannot be loaded while 1 trajectories"):
        engine.load(8, manifest, lease)


def test_the_queue_and_the_cache_are_those_of_the_table(tmp_path: Path) -> None:
    config = config_of(tmp_path, 60, kv_cache_tokens=200, slots=2)
    time = VirtualTime()
    engine = loaded_engine(config, tmp_path, time)
    for trajectory in range(3):
        engine.add(request(trajectory, 40, trajectory))
    assert engine.stats().waiting == 3
    begin_s = time.now()
    found = ends(engine, time, begin_s)
    # two slots: 40 + 60 tokens each fill the cache of 200 exactly at their end; then the third
    first_s = 1.0 + 8.0 + 60 * 2.5
    assert found == {
        0: (pytest.approx(first_s), Stop.END_TOKEN),
        1: (pytest.approx(first_s), Stop.END_TOKEN),
        2: (pytest.approx(first_s + 1.0 + 4.0 + 60 * 1.5), Stop.END_TOKEN),
    }


def test_a_preempted_one_has_the_same_tokens_and_comes_later(tmp_path: Path) -> None:
    config = config_of(tmp_path, 60, kv_cache_tokens=150)
    time = VirtualTime()
    engine = loaded_engine(config, tmp_path, time)
    engine.add(request(0, 40, 0))
    engine.add(request(1, 40, 1))
    begin_s = time.now()
    runs, told = [], {}
    while engine.stats().running + engine.stats().waiting:
        new = engine.step()
        runs += new
        told |= {run.trajectory: time.now() - begin_s for run in new if run.stop}
    # 80 tokens, 35 steps of two to 150; then the newer one goes, and comes back with 75 when the older one has ended
    older_s = 1.0 + 8.0 + 35 * 2.5 + 25 * 1.5
    assert told == {0: pytest.approx(older_s), 1: pytest.approx(older_s + 1.0 + 7.5 + 25 * 1.5)}
    for trajectory, seed in ((0, 0), (1, 1)):
        assert joined(runs, trajectory) == ((np.arange(60) + seed) % VOCABULARY).astype("<i4").tobytes()


def test_what_is_exported_goes_on_elsewhere_to_the_same_length_and_tokens(tmp_path: Path) -> None:
    config = config_of(tmp_path, 30, 60, stream_interval_s=10.0)
    seed = seed_for(config, 60)
    alone_time, time, other_time = VirtualTime(), VirtualTime(), VirtualTime()
    alone = loaded_engine(config, tmp_path, alone_time)
    alone.add(request(5, 20, seed))
    whole = []
    while alone.stats().running + alone.stats().waiting:
        whole += alone.step()
    engine, other = (loaded_engine(config, tmp_path, each) for each in (time, other_time))
    engine.add(request(5, 20, seed))
    engine.add(request(6, 20, seed_for(config, 30)))
    begin_s = time.now()
    told = []
    while time.now() - begin_s < 30.0:
        told += engine.step()
    half = engine.export(5)
    # prefill 1 + 4 s, then 2.5 s a step: 10 whole steps by second 30
    assert len(half) == 10
    assert joined(told, 5) == np.array(half, dtype="<i4").tobytes()[: len(joined(told, 5))]
    engine.abort(5)
    assert engine.stats().running == 1
    with pytest.raises(EngineError, match="cannot be exported"):
        engine.export(5)
    begin_s = other_time.now()
    assert other.add(request(5, 20, seed, half)) is None
    rest = []
    while other.stats().running + other.stats().waiting:
        rest += other.step()
    assert other_time.now() - begin_s == pytest.approx(1.0 + 3.0 + 50 * 1.5)  # prefilled with what there was
    assert np.array(half, dtype="<i4").tobytes() + joined(rest, 5) == joined(whole, 5)
    assert other.add(request(5, 20, seed, np.frombuffer(joined(whole, 5), "<i4").tolist())) is Stop.END_TOKEN
    assert ends(engine, time, begin_s).keys() == {6}


def test_others_are_told_of_every_interval_and_each_token_once(tmp_path: Path) -> None:
    config = config_of(tmp_path, 100, stream_interval_s=20.0)
    time = VirtualTime()
    engine = loaded_engine(config, tmp_path, time)
    engine.add(request(0, 10, 0))
    begin_s, runs, moments = time.now(), [], []
    while engine.stats().running + engine.stats().waiting:
        new = engine.step()
        moments += [time.now() - begin_s] if new else []
        runs += new
    assert moments[:-1] == pytest.approx([20.0 * n for n in range(1, len(moments))])
    assert [len(run.tokens) // 4 for run in runs[:2]] == [(20 - 2) * 2 // 3, (40 - 2) * 2 // 3 - 12]  # 1.5 s each
    assert len(joined(runs, 0)) == 400
    assert all(run.logprobs == bytes(len(run.tokens)) for run in runs)
    assert [run.stop for run in runs if run.stop] == [Stop.LENGTH]  # 100 is where responses are cut


def test_a_machine_that_is_late_delays_no_later_step_and_is_told_of(tmp_path: Path) -> None:
    class LateTime(VirtualTime):
        def wait(self, seconds: float) -> None:
            super().wait(seconds + 0.5)

        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)

    config = config_of(tmp_path, 10)
    time = LateTime()
    engine = loaded_engine(config, tmp_path, time)
    begin_s = time.now()
    engine.add(request(0, 10, 0))
    assert ends(engine, time, begin_s) == {0: (pytest.approx(2.0 + 15.0 + 0.5), Stop.END_TOKEN)}
    pace = engine.stats().pace
    assert pace is not None
    assert (pace.scheduled_s, pace.late_s, pace.worst_s) == pytest.approx((30.0 + 17.0, 0.5, 0.5))


def test_a_message_ends_the_wait_and_who_comes_is_in_the_next_step(tmp_path: Path) -> None:
    class Interrupted(VirtualTime):
        def wait(self, seconds: float) -> None:
            super().wait(min(seconds, 3.0))

    config = config_of(tmp_path, 4)
    time = Interrupted()
    engine = loaded_engine(config, tmp_path, time)
    begin_s = time.now()
    engine.add(request(0, 10, 0))
    assert engine.step() == []
    assert time.now() - begin_s == 3.0  # one step of 3.5 s is under way
    engine.add(request(1, 10, 1))
    # step 1 ends at 3.5; step 2 has a prefill of 2 s and two in it; steps 3 and 4 of 2.5 s; one of 1.5 s
    assert ends(engine, time, begin_s) == {
        0: (pytest.approx(13.0, abs=3.0), Stop.END_TOKEN),
        1: (pytest.approx(14.5, abs=3.0), Stop.END_TOKEN),
    }
    assert engine.stats().pace is not None
    assert engine.stats().pace.scheduled_s == pytest.approx(30.0 + 13.0 + 11.5)


def test_what_is_no_request_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, 10)
    engine = loaded_engine(config, tmp_path, VirtualTime())
    engine.add(request(0, 10, 0))
    with pytest.raises(EngineError, match="is in the engine already"):
        engine.add(request(0, 10, 0))
    with pytest.raises(EngineError, match="prompt of 51 tokens"):
        engine.add(request(1, 51, 0))
    engine.abort(99)
    engine.abort(0)
    assert engine.step() == []
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)


def test_drawn_lengths_are_those_of_the_distribution_and_of_the_seed_alone() -> None:
    lengths = response_lengths(paced_config({"lengths": "7b-math"}))
    drawn = [drawn_length(lengths, seed, 16384) for seed in range(4000)]
    assert drawn == [drawn_length(lengths, seed, 16384) for seed in range(4000)]
    shares = np.searchsorted(np.sort(drawn), [640, 1925, 6150, 8209, 9696]) / 4000  # its quantiles at 10 to 90 %
    assert shares == pytest.approx([0.1, 0.25, 0.5, 0.75, 0.9], abs=0.03)
    assert max(drawn) <= 16384
    assert drawn_length(lengths, 0, 3) == 3


def test_a_worker_for_pure_timing_loads_no_torch() -> None:
    program = (
        "import sys; from laminar_hpc.rollout import worker; from laminar_hpc.trainer import worker as trainer\n"
        "from laminar_hpc.config.schema import Config\n"
        "from laminar_hpc.rollout.build import build_engine; from laminar_hpc.trainer.build import build_trainer\n"
        "from laminar_hpc.tasks import worker as task; from laminar_hpc.tasks.build import build_task, build_tokenizer\n"
        "config = Config.model_validate({'run_dir': 'x', 'task': {'name': 'synthetic'}, 'rollout': {'engine': 'paced'},"
        " 'trainer': {'engine': 'paced'}})\n"
        "build_engine(config); build_trainer(config, 0, 1); build_task(config); build_tokenizer(config)\n"
        "print(sorted({'torch', 'transformers', 'vllm', 'tokenizers', 'reasoning_gym'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "[]\n", done.stderr


def test_the_worker_tells_of_runs_as_blocks_and_of_the_pace_since_the_last_output(tmp_path: Path) -> None:
    config = config_of(tmp_path, 40, scale=0.1, stream_interval_s=0.5)
    time = VirtualTime()
    manifest, lease = image_for(tmp_path)
    worker = EngineWorker(config, manifest, PacedEngine(config, LengthTokens(config), time))
    loaded = worker.handle(LoadWeights(lease))
    assert loaded is not None
    prompt = np.full(10, 7, dtype="<i4").tobytes()
    worker.handle(AddTrajectory(TrajectorySpec(1, 0, 0, 0, Purpose.TRAIN, 5), prompt))
    outputs = []
    while not worker.idle:
        worker.step()
        if worker.has_news(0.0) or time.now() > 1004.0:
            outputs.append(worker.take_output(0.0))
    blocks = [block for output in outputs for block in output.blocks]
    assert len(blocks) > 3
    assert [block.offset for block in blocks] == [10, *(block.end for block in blocks[:-1])]
    assert b"".join(block.tokens for block in blocks) == np.arange(5, 45, dtype="<i4").tobytes()
    assert outputs[-1].ended == [Ended(1, Stop.END_TOKEN)]
    paces = [output.pace for output in outputs if output.pace is not None]
    # the load is in the first, the trajectory in the last: prefill 2 s and 40 steps of 1.5 s
    assert [pace.scheduled_s for pace in (paces[0], paces[-1])] == pytest.approx([3.0, 6.2])
    assert sum(pace.scheduled_s for pace in paces) == pytest.approx(9.2)
