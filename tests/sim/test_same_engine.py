"""The simulated rollout and the paced engine of the real job: the same orders, the same moments."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulated_jobs import simulated, tail_config

from laminar_hpc.protocol.commands import Generate
from laminar_hpc.protocol.peer import Lease
from laminar_hpc.protocol.wire import decode
from laminar_hpc.rollout.api import Request
from laminar_hpc.rollout.paced import PacedEngine
from laminar_hpc.rollout.paced_tokens import LengthTokens
from laminar_hpc.weights.manifest import make_manifest

ROUNDING = 1e-6


class VirtualTime:
    """A clock that goes on exactly as far as somebody waits."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    sleep = wait


@pytest.mark.parametrize("cache_tokens", [640_000, 40_000])
def test_a_batch_ends_as_in_the_paced_engine(tmp_path: Path, cache_tokens: int) -> None:
    """With the smaller cache most of it waits, and some are preempted."""
    config = tail_config(
        tmp_path / "run",
        job={"rollouts": 1, "relays": 1},
        rollout={"concurrency": 128, "kv_cache_tokens": cache_tokens},
        control={"steps": 1},
    )
    run = simulated(config)
    (generate,) = [one for one in (decode(logged.data) for logged in run.commands()) if isinstance(one, Generate)]
    rows = run.table("trajectories")
    took_s = dict(zip(rows["trajectory"].tolist(), (rows["finished_s"] - rows["begun_s"]).tolist(), strict=True))
    prompts = dict(zip(rows["trajectory"].tolist(), rows["prompt_tokens"].tolist(), strict=True))

    time = VirtualTime()
    engine = PacedEngine(config, LengthTokens(config), time)
    path = tmp_path / "image"
    path.write_bytes(bytes(8))
    engine.load(0, make_manifest([("w", (8,), "uint8")]), Lease(0, str(path), 0))
    began_s = time.now()
    for spec in generate.trajectories:
        assert engine.add(Request(spec.id, [1] * prompts[spec.id], [], spec.seed, 1.0)) is None
    ended_s = {}
    while len(ended_s) < len(generate.trajectories):
        ended_s |= {one.trajectory: time.now() - began_s for one in engine.step() if one.stop is not None}
    assert took_s == pytest.approx(ended_s, abs=ROUNDING)
    waiting = run.table("engine")["waiting"].max()
    assert (waiting > 64) == (cache_tokens == 40_000)  # 128 trajectories, 64 slots
