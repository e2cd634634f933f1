"""A run's record as rows, made by a small deterministic pipeline; a test bends rows before they are written."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from laminar_hpc.config.load import check_config
from laminar_hpc.protocol.commands import Generate
from laminar_hpc.protocol.events import Finished
from laminar_hpc.protocol.trajectory import Purpose, Stop, TrajectorySpec, Verdict
from laminar_hpc.protocol.wire import encode
from laminar_hpc.record import provenance, schema
from laminar_hpc.record.reader import Run, open_run
from laminar_hpc.record.status import Status, write_status
from laminar_hpc.record.writer import RecordWriter

ROLE_OF_RANK = {0: "manager", 1: "trainer", 2: "relay", 3: "rollout", 4: "rollout"}
STEP_S = 2.0
GROUPS, GROUP_SIZE, PROMPT_TOKENS = 4, 4, 10
IMAGE_BYTES = 400_000

Row = dict[str, Any]


class Ledger:
    """Rows by rank and table, and the commands and events of the trajectories. `write` makes the files of them.

    `control` is that section of the config, `metadata` goes over what a run writes (None: absent).

    Step s (1 first) publishes version s at s * STEP_S and consumes GROUPS groups of GROUP_SIZE; in mode laminar a
    group is one version old when it finishes and one or two when it is consumed, in mode sync it is current.
    """

    def __init__(self, steps: int, mode: str) -> None:
        self.rows: dict[int, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
        self.commands: list[Generate] = []
        self.events: list[Finished] = []
        self.steps = steps
        self.control: Row = {"mode": mode, "steps": max(1, steps)}
        self.metadata: dict[str, str | None] = {}
        self.mode = mode
        self.state = "finished"
        self.closed = True
        self.writers: list[RecordWriter] = []
        self._random = random.Random(7)
        self._publish(0, 0.5)
        for step in range(1, steps + 1):
            self._step(step)
            self._publish(step, step * STEP_S)
            self._engines(step)
        for version in range(0, steps + 1, max(1, steps // 4)):
            self._evaluate(version)
        self._return_one(steps)

    def table(self, name: str, rank: int = 0) -> list[Row]:
        """The rows of a table, to be bent."""
        return self.rows[rank][name]

    def write(self, run_dir: Path) -> Run:
        """The run, from the files."""
        (run_dir / "records").mkdir(parents=True)
        config = check_config(
            {
                "run_dir": str(run_dir),
                "job": {"name": "chain sum <b>&"},
                "model": {"path": "models/tiny"},
                "control": self.control,
            },
            "test",
        )
        metadata = provenance.gather(config, "{}", clock_zero_unix_s=1_700_000_000.0)
        changed = {**metadata, **self.metadata}
        metadata = {key: value for key, value in changed.items() if value is not None}
        for rank, role in ROLE_OF_RANK.items():
            path = run_dir / "records" / schema.file_name(role, rank, 0)
            writer = RecordWriter(str(path), role, rank, 0, metadata, flush_s=1.0)
            self.writers.append(writer)
            self._fill(writer, rank)
            writer.flush()
            if self.closed:
                writer.close()
        if self.state:
            status = Status.blank()
            status.state, status.reason, status.step = self.state, "all steps are done", self.steps
            status.started_s, status.ended_s = 1_700_000_000.0, 1_700_000_000.0 + self.steps * STEP_S
            write_status(str(run_dir), status)
        return open_run(str(run_dir))

    def _fill(self, writer: RecordWriter, rank: int) -> None:
        for table, rows in self.rows[rank].items():
            for row in rows:
                writer.add(table, **row)
        for phase in schema.PHASES[ROLE_OF_RANK[rank]]:
            for step in range(self.steps):
                writer.add("phases", time_s=step * STEP_S, phase=phase, seconds=0.2 + 0.3 * len(phase) / 8)
        if rank == 0:
            for event in self.events:
                writer.add_stream("events", 0.0, encode(event))
            for command in self.commands:
                writer.add_stream("commands", 0.0, encode(command), cause=0)

    def _publish(self, version: int, time_s: float) -> None:
        digest = 2**63 + version
        self.table("publications").append(
            {
                "version": version,
                "attempt": 0,
                "step": version,
                "time_s": time_s,
                "digest": digest,
                "nbytes": IMAGE_BYTES,
                "stall_s": 0.02 + 0.01 * self._random.random(),
            }
        )
        self.table("relay_versions", 2).append(
            {
                "version": version,
                "time_s": time_s + 0.1,
                "what": "complete",
                "seconds": 0.08,
                "nbytes": IMAGE_BYTES,
                "memory_bytes": 3 * IMAGE_BYTES,
            }
        )
        for rank in (3, 4):
            self.table("pulls", rank).append(
                {
                    "version": version,
                    "time_s": time_s + 0.3,
                    "wait_s": 0.1,
                    "copy_s": 0.0,
                    "pause_s": 0.05,
                    "digest": digest,
                }
            )

    def _step(self, step: int) -> None:
        members = []
        for place in range(GROUPS):
            staleness = 0 if self.mode == "sync" else 1 + (place == 0)
            version = max(0, step - 1 - staleness)
            members += self._group((step - 1) * GROUPS + place, step, version, step - 1 - version)
        rewards = [row["reward"] for row in members]
        mean = sum(rewards) / len(rewards)
        self.table("steps").append(
            {
                "step": step,
                "version": step,
                "started_s": (step - 1) * STEP_S + 0.5,
                "finished_s": step * STEP_S - 0.1,
                "train_s": STEP_S - 0.6,
                "samples": len(members),
                "prompt_tokens": sum(row["prompt_tokens"] for row in members),
                "response_tokens": sum(row["response_tokens"] for row in members),
                "reward_mean": mean,
                "reward_std": (mean * (1 - mean)) ** 0.5,
                "staleness_finish_mean": 1.0,
                "staleness_finish_max": 1,
                "staleness_consumption_mean": 1.25,
                "staleness_consumption_max": 2,
                "loss": -0.01,
                "entropy": 2.0 / (1 + step / 20),
                "clip_fraction_low": 0.01 * self._random.random(),
                "clip_fraction_high": 0.02 * self._random.random(),
                "kl_behaviour": 0.004 * self._random.random(),
                "ratio_max": 1.5,
                "grad_norm": 0.7,
                "learning_rate": 1e-3,
                "skipped": 0.0,
            }
        )

    def _group(self, group: int, step: int, version: int, staleness: int) -> list[Row]:
        begun_s = max(0.6, version * STEP_S)
        shared: Row = {"group": group, "prompt": 3 * group, "purpose": "train"}
        self.table("hand_outs").append({**shared, "handed_out_s": begun_s})
        members = [
            self._trajectory(GROUP_SIZE * group + i, i, shared, step, version, staleness) for i in range(GROUP_SIZE)
        ]
        self.commands.append(
            Generate(
                "a rollout has room",
                3 + group % 2,
                0,
                version,
                [
                    TrajectorySpec(row["trajectory"], group, 3 * group, row["sample"], Purpose.TRAIN, 1)
                    for row in members
                ],
            )
        )
        self.table("groups").append(
            {
                **shared,
                "state": "consumed",
                "reason": f"trained on in step {step}",
                "version": version,
                "step": step,
                "trajectories": GROUP_SIZE,
                "handed_out_s": begun_s,
                "settled_s": step * STEP_S,
            }
        )
        return members

    def _trajectory(self, id: int, sample: int, shared: Row, step: int, version: int, staleness: int) -> Row:
        tokens = 5 + self._random.randrange(30)
        row = {
            **shared,
            "trajectory": id,
            "sample": sample,
            "state": "consumed",
            "reason": f"trained on in step {step}",
            "version": version,
            "newest_version": version,
            "spans": 1,
            "prefilled_tokens": 0,
            "rank": 3 + shared["group"] % 2,
            "prompt_tokens": PROMPT_TOKENS,
            "response_tokens": tokens,
            "reward": float(self._random.random() < 0.1 + 0.8 * step / self.steps),
            "verdict": "graded",
            "stop": "end_token",
            "begun_s": 0.6,
            "finished_s": step * STEP_S - 1.0,
            "settled_s": step * STEP_S - 0.5,
            "staleness_finish": min(1, staleness),
            "staleness_consumption": staleness,
            "step": step,
        }
        self.table("trajectories").append(row)
        self.events.append(
            Finished(row["rank"], 0, id, version, PROMPT_TOKENS, tokens, Stop.END_TOKEN, Verdict.GRADED, row["reward"])
        )
        return row

    def _engines(self, step: int) -> None:
        for rank in (3, 4):
            for part in range(4):
                self.table("engine", rank).append(
                    {
                        "time_s": (step - 1) * STEP_S + 0.5 * part,
                        "kv_use": min(1.0, 0.5 + 0.15 * part + 0.05 * self._random.random()),
                        "running": 8 - part,
                        "waiting": 4 - part,
                        "generated_tokens": 50,
                        "busy_s": 0.4,
                    }
                )

    def _evaluate(self, version: int) -> None:
        accuracy = round(0.1 + 0.8 * version / self.steps, 3) if self.steps else 0.0
        self.table("evaluations").append(
            {
                "time_s": version * STEP_S + 1.0,
                "version": version,
                "step": version,
                "prompts": 200,
                "graded": 200,
                "accuracy": accuracy,
                "reward_mean": accuracy,
                "response_tokens": 4000,
            }
        )

    def _return_one(self, steps: int) -> None:
        group, end_s = steps * GROUPS, steps * STEP_S
        shared = {"group": group, "prompt": 0, "purpose": "train"}
        self.table("hand_outs").append({**shared, "handed_out_s": end_s})
        self.table("groups").append(
            {
                **shared,
                "state": "returned",
                "reason": "the job ended first",
                "version": None,
                "step": None,
                "trajectories": 0,
                "handed_out_s": end_s,
                "settled_s": end_s,
            }
        )


@pytest.fixture
def make_ledger() -> Callable[..., Ledger]:
    """A ledger of `steps` steps in `mode`."""

    def make(steps: int = 10, mode: str = "laminar") -> Ledger:
        return Ledger(steps, mode)

    return make
