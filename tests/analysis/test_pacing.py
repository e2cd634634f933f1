"""By how much emulated time lagged, as the report says it, by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from laminar_hpc.analysis import tables
from laminar_hpc.analysis.checks import warnings
from laminar_hpc.launch.summary import pace_line
from laminar_hpc.record.status import Status

MakeLedger = Callable[..., Any]


def row(time_s: float, scheduled_s: float, late_s: float, worst_s: float) -> dict[str, float]:
    return {"time_s": time_s, "scheduled_s": scheduled_s, "late_s": late_s, "worst_s": worst_s}


def test_a_rank_beyond_the_limit_is_named(tmp_path: Path, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(3)
    ledger.table("pacing", 1).append(row(2.0, 10.0, 0.1, 0.05))
    ledger.table("pacing", 3).extend([row(2.0, 60.0, 0.3, 0.1), row(4.0, 40.0, 0.7, 0.25)])
    ledger.table("pacing", 4).extend([row(2.0, 50.0, 1.0, 0.5), row(4.0, 50.0, 2.0, 0.5)])
    run = ledger.write(tmp_path / "run")
    table = tables.pacing(run)
    assert table.rows == [
        ["rollout", "2.00%", "3.00%", "500.0"],  # 4 of 200 s; 1 of 100 s and 3 of 100 s
        ["trainer", "1.00%", "1.00%", "50.0"],
    ]
    assert table in tables.all_tables(run)
    assert warnings(run) == ["emulated time lagged by 3.0% on rank 4: times of this run do not count"]


def test_a_run_without_emulation_says_nothing_of_it(tmp_path: Path, make_ledger: MakeLedger) -> None:
    run = make_ledger(3).write(tmp_path / "run")
    assert tables.pacing(run).rows == []
    assert warnings(run) == []


def test_the_last_lines_say_whether_the_times_count() -> None:
    status = Status.blank()
    status.lag, status.lag_of_worst_rank = 0.004, 0.02
    assert pace_line(status) == "emulated time lagged by 0.40%, on the worst rank by 2.00%"
    status.lag_of_worst_rank = 0.021
    assert pace_line(status).endswith("by 2.10%; more than 2%: its times do not count")
