"""The numbers of the tables, against ones worked out by hand from the rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from laminar_hpc.analysis import series, tables

MakeLedger = Callable[..., Any]


def cells(table: tables.Table) -> dict[str, list[str]]:
    return {row[0]: row[1:] for row in table.rows}


def test_throughput_is_a_steps_tokens_over_the_time_between_publications(
    tmp_path: Path, make_ledger: MakeLedger
) -> None:
    ledger = make_ledger(10)
    times_s = [0.0, 1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0, 17.0, 21.0]
    for row, time_s in zip(ledger.table("publications"), times_s, strict=True):
        row["time_s"] = time_s
    for row in ledger.table("steps"):
        row.update(prompt_tokens=100, response_tokens=300, train_s=0.5)
    found = series.step_throughput(run := ledger.write(tmp_path / "run"))
    assert found.ends_s.tolist() == times_s[1:]
    assert found.seconds.tolist() == [1.0] + 8 * [2.0] + [4.0]
    assert found.rates.tolist() == [400.0] + 8 * [200.0] + [100.0]
    shown = cells(tables.throughput(run))
    # a fifth of 10 steps is left out: (7 * 200 + 100) / 8 = 187.5, and (7 * 2 + 4) / 8 = 2.25
    assert shown["a step's tokens / time between publications"] == ["token/s", "187.5"]
    assert shown["time between publications"] == ["s", "2.25"]
    assert shown["tokens of all steps / time of all steps"] == ["token/s", "190.5"]  # 4000 tokens in 21 s
    assert shown["training, while a step runs"] == ["token/s", "800.0"]  # 4000 tokens in 10 * 0.5 s
    # 2 rollouts with 40 rows of 50 tokens and 0.4 s each, the first at 0 s and the last at 19.5 s
    assert shown["generation, all rollouts"] == ["token/s", "205.1"]
    assert shown["generation, a rollout while its engine works"] == ["token/s", "125.0"]


def test_a_step_without_its_two_publications_has_no_throughput(tmp_path: Path, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(5)
    del ledger.table("publications")[2]
    found = series.step_throughput(ledger.write(tmp_path / "run"))
    assert found.ends_s.tolist() == [2.0, 8.0, 10.0]


@pytest.mark.parametrize(("count", "left_out"), [(0, 0), (4, 0), (5, 1), (30, 6), (50, 10), (1000, 10)])
def test_warm_up(count: int, left_out: int) -> None:
    assert series.warm_up(count) == left_out


def test_rewards_compare_the_first_and_the_last_fifth(tmp_path: Path, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(10)
    for index, row in enumerate(ledger.table("steps")):
        row["reward_mean"] = 0.1 * index
    shown = cells(tables.rewards(ledger.write(tmp_path / "run")))
    assert shown["reward"] == ["1", "0.050", "0.850", "+0.800"]


def test_staleness_is_counted_at_finish_and_at_consumption(tmp_path: Path, make_ledger: MakeLedger) -> None:
    run = make_ledger(10).write(tmp_path / "run")
    versions, finish, taken = series.staleness_counts(run)
    # step 1 can only be of version 0 (staleness 0); from step 3 on 4 of 16 are two versions old when taken, 12 one
    assert versions.tolist() == [0, 1, 2]
    assert finish.tolist() == [16, 144, 0]
    assert taken.tolist() == [16, 16 + 8 * 12, 8 * 4]
    assert cells(tables.staleness(run))["2"] == ["0", "0.0%", "32", "20.0%"]


def test_phases_are_summed_over_the_ranks_of_a_role(tmp_path: Path, make_ledger: MakeLedger) -> None:
    shown = cells(tables.phases(make_ledger(10).write(tmp_path / "run")))
    # each rank has a row of 0.2 + 0.3 * len(name) / 8 s a step: work and idle 0.35 s, transfer 0.5 s
    assert shown["manager: work"] == ["3.50", "50.0%"]
    assert shown["relay: transfer"] == ["5.00", "58.8%"]
    assert shown["rollout: idle"][0] == "3.50"


def test_outcomes_are_counted_by_reason_whatever_its_numbers(tmp_path: Path, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(10)
    for row in ledger.table("trajectories")[:3]:
        row.update(state="discarded", reason="the verifier raised", verdict="raised")
    assert tables.outcomes(ledger.write(tmp_path / "run")).rows == [
        ["train: consumed", "trained on in step N", "157"],
        ["train: discarded", "the verifier raised", "3"],
    ]


def test_long_lists_keep_both_ends(tmp_path: Path, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(4)
    ledger.table("failures").extend({"time_s": float(i), "rank": i, "text": f"failure {i}"} for i in range(100))
    rows = tables.failures(ledger.write(tmp_path / "run")).rows
    assert [row[0] for row in rows[19:22]] == ["19.0 s", "(60 more)", "80.0 s"]
    assert rows[-1] == ["99.0 s", "99", "failure 99"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0.00"),
        (12345.6, "12,346"),
        (123.45, "123.5"),
        (1.234, "1.23"),
        (0.04, "0.040"),
        (2e-6, "2e-06"),
        (np.nan, tables.ABSENT),
    ],
)
def test_numbers(value: float, shown: str) -> None:
    assert tables.number(value) == shown
