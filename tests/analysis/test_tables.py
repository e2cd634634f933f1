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


def test_throughput_is_of_one_range_after_warm_up(tmp_path: Path, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(10)
    times_s = [0.0, 1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0, 17.0, 21.0]
    for row, time_s in zip(ledger.table("publications"), times_s, strict=True):
        row["time_s"] = time_s
    for row in ledger.table("steps"):
        row.update(prompt_tokens=100, response_tokens=300, train_s=0.5)
    ledger.table("steps")[0]["train_s"] = 50.0  # in the warm-up: no rate is slower for it
    found = series.step_throughput(run := ledger.write(tmp_path / "run"))
    assert found.ends_s.tolist() == times_s[1:]
    assert found.seconds.tolist() == [1.0] + 8 * [2.0] + [4.0]
    assert found.rates.tolist() == [400.0] + 8 * [200.0] + [100.0]
    table = tables.throughput(run)
    assert table.note.startswith("Over steps 3 to 10, from publication to publication (18.0 s), but for the last row.")
    shown = cells(table)
    # a fifth of 10 steps is left out: 8 steps of 400 tokens in the 18 s from 3 s to 21 s
    assert shown["training"] == ["token/s", "177.8"]
    assert shown["training, response tokens only"] == ["token/s", "133.3"]
    assert shown["training, while a step runs"] == ["token/s", "800.0"]  # 3200 tokens in 8 * 0.5 s
    assert shown["time between publications"] == ["s", "2.25"]  # (7 * 2 + 4) / 8
    # (7 * 200 + 100) / 8
    assert shown["as in the paper: mean of tokens of a step / its time"] == ["token/s", "187.5"]
    assert shown["training, whole run, start-up included"] == ["token/s", "190.5"]  # 4000 tokens in 21 s
    # each of 2 rollouts has rows of 50 tokens at 0, 0.5 ... 19.5 s: 33 of them after 3 s, each of the 0.4 s before it
    assert shown["generation, all rollouts"] == ["token/s", "183.3"]  # 3300 tokens in 18 s
    assert shown["generation, a rollout while its engine works"] == ["token/s", "125.0"]


def test_throughput_before_a_step_is_that_of_the_engines(tmp_path: Path, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(1)
    ledger.table("steps").clear()
    del ledger.table("publications")[1:]
    for rank in (3, 4):
        for row in ledger.table("engine", rank):
            row["time_s"] += 2.5
    shown = tables.throughput(ledger.write(tmp_path / "run"))
    # 8 rows of 50 tokens and 0.4 s until the last moment on record, 4 s
    assert shown.rows == [
        ["generation, all rollouts", "token/s", "100.0"],
        ["generation, a rollout while its engine works", "token/s", "125.0"],
    ]
    assert shown.note.startswith("Over the whole run.")


def test_a_step_without_its_two_publications_has_no_throughput(tmp_path: Path, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(5)
    del ledger.table("publications")[2]
    found = series.step_throughput(ledger.write(tmp_path / "run"))
    assert found.ends_s.tolist() == [2.0, 8.0, 10.0]


def engine_row(time_s: float, running: int, busy_s: float, tokens: int = 40) -> dict[str, Any]:
    row = {"time_s": time_s, "kv_use": running / 8, "running": running, "waiting": 0}
    return {**row, "generated_tokens": tokens, "busy_s": busy_s}


def test_an_engine_counts_as_idle_where_it_did_not_work(tmp_path: Path, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(10)
    ledger.table("engine", 4).clear()
    # 8 from 1 s to 2 s, which then sink to 4 and end at 4 s; a short one of 2 that begins and ends around 10 s
    ledger.rows[3]["engine"] = [
        engine_row(2.0, 8, 1.0),
        engine_row(3.0, 4, 1.0),
        engine_row(4.0, 0, 1.0),
        engine_row(10.0, 2, 0.5),
        engine_row(10.5, 0, 0.5),
    ]
    run = ledger.write(tmp_path / "run")
    (work,) = series.engine_work(run)
    assert series.rollouts(run) == 2  # the silent one counts
    assert work.level("running").tolist() == [8.0, 8.0, 4.0, 2.0, 2.0]
    edges_s = np.arange(0.0, 13.0)
    trajectory_s = np.diff(work.until(edges_s, work.level("running") * work.seconds))
    assert trajectory_s.tolist() == [0, 8, 8, 4, 0, 0, 0, 0, 0, 1, 1, 0]
    tokens = np.diff(work.until(edges_s, work.rows["generated_tokens"].astype(float)))
    assert tokens.tolist() == [0, 40, 40, 40, 0, 0, 0, 0, 0, 40, 40, 0]


def test_rows_that_came_late_do_not_overlap(tmp_path: Path, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(10)
    ledger.table("engine", 4).clear()
    ledger.rows[3]["engine"] = [engine_row(5.0, 4, 1.0), engine_row(5.0, 4, 0.5)]
    (work,) = series.engine_work(ledger.write(tmp_path / "run"))
    assert (work.begins_s.tolist(), work.ends_s.tolist()) == ([3.5, 4.5], [4.5, 5.0])
    assert work.until(np.array([3.5, 4.0, 4.75, 9.0]), np.array([40.0, 40.0])).tolist() == [0.0, 20.0, 60.0, 80.0]


@pytest.mark.parametrize(("count", "left_out"), [(0, 0), (4, 0), (5, 1), (30, 6), (50, 10), (1000, 10)])
def test_warm_up(count: int, left_out: int) -> None:
    assert series.warm_up(count) == left_out


def test_rewards_compare_the_first_and_the_last_fifth(tmp_path: Path, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(10)
    for index, row in enumerate(ledger.table("steps")):
        row["reward_mean"] = 0.1 * index
    shown = cells(tables.rewards(ledger.write(tmp_path / "run")))
    assert shown["reward"] == ["1", "0.050", "0.850", "+0.800", "0.450"]
    assert shown["entropy"][0] == "nat a token"


def test_groups_with_equal_rewards_are_counted(tmp_path: Path, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(10)
    for row in ledger.table("trajectories"):
        # 4 groups a step: in steps 1 and 2 all four differ, from 3 to 8 two do, in 9 and 10 one
        differing = 4 if row["step"] <= 2 else 2 if row["step"] <= 8 else 1
        row["reward"] = float(row["sample"] == 3 and row["group"] % 4 < differing)
    shown = cells(tables.rewards(ledger.write(tmp_path / "run")))
    # of all 40: 6 * 2 + 2 * 3 = 18
    assert shown["groups whose rewards are all equal"] == ["share", "0.00", "0.750", "+0.750", "0.450"]


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
    assert shown["relay: transfer"][0] == "5.00"
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


def test_a_stop_that_somebody_asked_for_is_no_failure(tmp_path: Path, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(2)
    ledger.table("failures").extend(
        [
            {"time_s": 1.0, "rank": None, "text": "stopped: signal SIGTERM"},
            {"time_s": 2.0, "rank": None, "text": "stopped: signal SIGINT"},
            {"time_s": 3.0, "rank": None, "text": "stalled: no progress"},
            {"time_s": 4.0, "rank": 3, "text": "signal SIGTERM"},
        ]
    )
    assert tables.failures(ledger.write(tmp_path / "run")).rows == [
        ["3.0 s", tables.ABSENT, "stalled: no progress"],
        ["4.0 s", "3", "signal SIGTERM"],
    ]


def test_the_summary_names_ranks_and_program(tmp_path: Path, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(2)
    ledger.metadata = {"git_commit": "unknown", "packages": '{"laminar_hpc": "1.2.3"}'}
    shown = dict(tables.summary(ledger.write(tmp_path / "run")))
    assert shown["Ranks"] == "1 manager, 1 trainer, 1 relay, 2 rollouts"
    assert shown["Commit"] == "unknown (laminar_hpc 1.2.3)"


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


def test_moves_show_what_was_expected_beside_what_was_found(tmp_path: Path, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(2)
    row: dict[str, Any] = {
        "version": 0,
        "source": 3,
        "destination": 4,
        "reason": "2 trajectories with 40 tokens onto rollout 4, which then has 5, 2 s gained",
        "ending": "moved",
        "trajectories": 2,
        "tokens": 40,
        "planned_s": 1.0,
        "handed_over_s": 1.5,
        "resumed_s": 2.0,
        "released_s": 1.5,
        "loaded_s": 3.5,
        "loaded_version": 1,
        "prefill_s": 0.25,
        "expected_gain_s": 2.0,
        "gain_s": 1.5,
    }
    absent = dict.fromkeys(["handed_over_s", "resumed_s", "released_s", "loaded_s", "loaded_version", "prefill_s"])
    ledger.table("moves").extend(
        [
            {**row, "move": 0},
            {**row, "move": 1, "trajectories": 3, "resumed_s": 3.0, "loaded_s": None, "gain_s": None},
            {
                **row,
                "move": 2,
                **absent,
                "ending": "the source was lost",
                "trajectories": 0,
                "tokens": 0,
                "gain_s": None,
            },
        ]
    )
    table = tables.repacks(run := ledger.write(tmp_path / "run"))
    assert table in tables.all_tables(run)
    assert table.rows == [
        ["moves", "", "2 of 3 planned"],
        ["trajectories moved", "", "5"],
        ["tokens read again", "token", "80"],
        ["from the plan to the hand-over, mean", "s", "0.500"],
        ["from the hand-over to the next token, mean", "s", "1.00"],
        ["from the hand-over to newer weights, mean", "s", "2.00"],
        ["gain expected", "s", "4.00 by 2 moves"],
        ["gain found afterwards", "s", "1.50 by 1 move"],
        ["of these, expected and found", "s", "2.00, 1.50"],
    ]


def test_a_run_without_moves_has_no_table_of_them(tmp_path: Path, make_ledger: MakeLedger) -> None:
    assert tables.repacks(make_ledger(2).write(tmp_path / "run")).rows == []
