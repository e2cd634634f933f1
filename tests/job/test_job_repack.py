"""Whole runs with moves of trajectories between rollouts: the same tokens as without."""

from __future__ import annotations

import numpy as np
import pytest
from laminar_command import Laminar
from test_run import finished, replayed

from laminar_hpc.record.reader import Run

pytestmark = pytest.mark.job


def responses(run: Run) -> dict[tuple[int, int, int], list[int]]:
    """The tokens of every trajectory, by the number of its hand-out, its place there, and its prompt."""
    tokens: dict[int, list[int]] = {}
    for block in run.tokens():
        tokens.setdefault(block.trajectory, []).extend(block.tokens.tolist())
    return {
        (int(row["group"]), int(row["sample"]), int(row["prompt"])): tokens[int(row["trajectory"])]
        for row in run.table("trajectories")
    }


def test_every_trajectory_has_the_same_tokens_with_and_without_repack(laminar: Laminar) -> None:
    found = []
    for enabled in (False, True):
        run = finished(
            laminar,
            job={"rollouts": 3},
            # the 16 groups of the only step go out under version 0, at most 3 at once to a rollout
            rollout={"concurrency": 12, "slots": 16, "max_response_tokens": 160, "stream_interval_s": 0.02},
            repack={"enabled": enabled, "every_s": 0.1, "batch": 12, "gain_gate": False},
            control={"steps": 1, "ahead": 0.0},
            batch={"prompts": 16},
            evaluation={"every": 0},
            record={"tokens": True},
        )
        replayed(run)
        moves = run.table("moves")
        done = moves[moves["ending"] == b"moved"]
        assert (len(done) > 0) == enabled
        assert np.all(done["handed_over_s"] >= done["planned_s"])
        assert np.all(done["tokens"] > done["trajectories"])
        rows = run.table("trajectories")
        assert np.all(rows["version"] == 0)
        found.append(responses(run))
        laminar.run_dir.rename(laminar.directory / f"repack {enabled}")
    without, with_moves = found
    assert len(without) == 64
    assert max(map(len, without.values())) > 100
    assert with_moves == without
