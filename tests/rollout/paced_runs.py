"""A paced engine in a time of its own, and one engine's life as the paper shows it."""

from __future__ import annotations

import csv
import random
from pathlib import Path
from typing import Any, NamedTuple

from laminar_hpc.config.schema import Config
from laminar_hpc.protocol.peer import Lease, Manifest
from laminar_hpc.protocol.trajectory import Stop
from laminar_hpc.rollout.api import Request, Run
from laminar_hpc.rollout.paced import PacedEngine
from laminar_hpc.rollout.paced_tokens import LengthTokens
from laminar_hpc.weights.manifest import make_manifest

FOLDER = Path(__file__).parent / "lifecycle"
TRAJECTORIES = 512
FULL = 0.99
"""Of the KV cache: from here on it counts as full."""


class VirtualTime:
    """A clock that goes on exactly as far as somebody waits."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def now(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        assert seconds >= 0
        self.now_s += seconds

    sleep = wait


def paced_config(paced: dict[str, Any] | None = None, **rollout: Any) -> Config:
    """The config of a job without a model; keywords are keys of its section `rollout`."""
    return Config.model_validate(
        {
            "run_dir": "unused",
            "task": {"name": "synthetic"},
            "rollout": {"engine": "paced", **rollout},
            "trainer": {"engine": "paced"},
            "paced": {"time_scale": 1.0, **(paced or {})},
        }
    )


def image_for(folder: Path, nbytes: int = 1000) -> tuple[Manifest, Lease]:
    """An image of weights that mean nothing, on loan."""
    manifest = make_manifest([("w", (nbytes,), "uint8")], chunk_bytes=256)
    path = folder / "image"
    path.write_bytes(random.Random(3).randbytes(nbytes))
    return manifest, Lease(0, str(path), 0)


def loaded_engine(config: Config, folder: Path, time: VirtualTime) -> PacedEngine:
    """An engine for pure timing that holds weights."""
    engine = PacedEngine(config, LengthTokens(config), time)
    engine.load(0, *image_for(folder))
    return engine


def request(trajectory: int, prompt_tokens: int, seed: int, response: list[int] | None = None) -> Request:
    """A request with a prompt of so many tokens."""
    return Request(trajectory, [7] * prompt_tokens, response or [], seed, 1.0)


def ends(engine: PacedEngine, time: VirtualTime, begin_s: float) -> dict[int, tuple[float, Stop]]:
    """Run to the end: when each trajectory was told to have ended, after `begin_s`, and why."""
    found = {}
    while engine.stats().running + engine.stats().waiting:
        for run in engine.step():
            if run.stop is not None:
                found[run.trajectory] = (time.now() - begin_s, run.stop)
    return found


def joined(runs: list[Run], trajectory: int) -> bytes:
    """All tokens of a trajectory that these runs tell of."""
    return b"".join(run.tokens for run in runs if run.trajectory == trajectory)


class Lifecycle(NamedTuple):
    """Moments of one engine's life, in seconds after it began, and how many waited at most."""

    full_from_s: float
    full_until_s: float
    waiting_until_s: float
    last_end_s: float
    most_waiting: int


def lifecycle_of(engine: PacedEngine, time: VirtualTime, seeds: list[int], prompt_tokens: int) -> Lifecycle:
    """What becomes of trajectories that all come at once, whose lengths follow from these seeds."""
    for trajectory, seed in enumerate(seeds):
        assert engine.add(request(trajectory, prompt_tokens, seed)) is None
    begin_s = time.now()
    full, waiting, last_s, most = [], [0.0], 0.0, 0
    engine.step()
    while engine.stats().running:
        now_s, stats = time.now() - begin_s, engine.stats()
        full += [now_s] if stats.kv_use >= FULL else []
        waiting += [now_s] if stats.waiting else []
        most = max(most, stats.waiting)
        if any(run.stop is not None for run in engine.step()):
            last_s = time.now() - begin_s
    return Lifecycle(full[0], full[-1], waiting[-1], last_s, most)


def published_lifecycle() -> Lifecycle:
    """The same of the paper's 32B engine on 4 GPUs with 512 trajectories, averaged over several engines.

    Its clock begins some time before the trajectories come; they are there when their number first shows.
    """
    use, remaining, waiting = (_curve(name) for name in ("kvcache_usage_pct", "remaining_trajs", "waiting_trajs"))
    begin_s = next(time_s for time_s, value in remaining if value > 0)
    full = [time_s - begin_s for time_s, value in use if value >= 100 * FULL]
    waited = [time_s - begin_s for time_s, value in waiting if value > 0]
    last_s = next(time_s for time_s, value in remaining if time_s > full[-1] and value < 1)
    return Lifecycle(full[0], full[-1], waited[-1], last_s - begin_s, round(max(value for _, value in waiting)))


def _curve(name: str) -> list[tuple[float, float]]:
    with open(FOLDER / f"kv_lifecycle_{name}.csv", encoding="utf-8") as file:
        return [(float(row["time_s"]), float(row[name])) for row in csv.DictReader(file)]
