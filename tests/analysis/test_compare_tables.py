"""Runs beside each other, from small records: what is compared is reckoned by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from laminar_hpc.analysis.compare import Comparison, Measured, Member, compare, measure, tables, warnings
from laminar_hpc.analysis.compare_figures import all_figures
from laminar_hpc.analysis.compare_report import print_comparison, write_comparison
from laminar_hpc.config.load import check_config
from laminar_hpc.record.reader import Run, open_run

MakeLedger = Callable[..., Any]

PACED = {
    "rollout": {"engine": "paced"},
    "trainer": {"engine": "paced"},
    "paced": {"time_scale": 0.25},
    "task": {"name": "synthetic"},
}


def write(ledger: Any, run_dir: Path, response_tokens: int = 300, **sections: dict[str, Any]) -> Run:
    """The run, with steps of 100 prompt tokens and these response tokens, and a config that has `sections`."""
    for row in ledger.table("steps"):
        row.update(prompt_tokens=100, response_tokens=response_tokens)
    values = {"run_dir": str(run_dir), "model": {"path": "m"}, "control": {"mode": ledger.mode}, **sections}
    ledger.metadata["config"] = check_config(values, "test").model_dump_json()
    run: Run = ledger.write(run_dir)
    return run


@pytest.fixture
def compared(tmp_path: Path, make_ledger: MakeLedger) -> Comparison:
    """Two seeds of laminar and one of sync, whose other one failed; sync's evaluations come 11 s later."""
    members = []
    for mode, seed, tokens in (("sync", 0, 100), ("laminar", 0, 300), ("laminar", 1, 500)):
        ledger = make_ledger(10, mode)
        for row in ledger.table("evaluations"):
            row["time_s"] += 11.0 * (mode == "sync")
        write(ledger, tmp_path / f"{mode}-{seed}", tokens)
        members.append(Member(mode, seed, str(tmp_path / f"{mode}-{seed}")))
    members.append(Member("sync", 1, "nowhere", "stalled: nobody moves"))
    return compare(members, ["sync", "laminar"], 0.6)


def test_a_run_is_measured(tmp_path: Path, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(10)
    rows = ledger.table("trajectories")
    rows[0]["prefilled_tokens"], rows[1]["prefilled_tokens"] = 70, 5
    rows.append({**rows[0], "trajectory": 1000, "state": "discarded", "response_tokens": 33, "prefilled_tokens": 0})
    measured = measure(write(ledger, tmp_path / "run"), "laminar", 3)
    # steps 3 to 10, of 400 tokens, in the 16 s from 4 to 20 s
    assert measured.tokens_per_s == 200.0
    # phases last 0.2 s and 0.0375 s for each letter: train, repeat, publish and wait; generate, pull, grade and idle
    assert measured.idle == pytest.approx({"trainer": 0.35 / 1.625, "rollout": 0.35 / 1.5875})
    # of 160 trajectories, 16 of step 1 are current, 32 were taken 2 versions old, all others finished and were taken 1 old
    assert measured.staleness == pytest.approx((0.9, 1.0, 1.1, 2.0))
    assert measured.taken.tolist() == [16, 112, 32]
    assert (measured.prefilled_tokens, measured.discarded_tokens) == (75, 33)
    # the first publication is at 0.5 s; step 1 ends at 1.9 s; version 8 is evaluated at 17 s
    assert measured.rewards.seconds[0] == pytest.approx(1.4)
    assert measured.rewards.samples.tolist() == [16.0 * step for step in range(1, 11)]
    assert measured.accuracies.samples.tolist() == [0.0, 32.0, 64.0, 96.0, 128.0, 160.0]
    assert measured.accuracies.first_at(0.6) == 16.5
    assert measured.learns


def test_emulated_times_are_those_of_the_hardware(tmp_path: Path, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(10)
    ledger.table("pacing", 3).append({"time_s": 2.0, "scheduled_s": 100.0, "late_s": 3.0, "worst_s": 0.1})
    ledger.table("pacing", 4).append({"time_s": 2.0, "scheduled_s": 100.0, "late_s": 1.0, "worst_s": 0.1})
    measured = measure(write(ledger, tmp_path / "run", **PACED), "laminar", 0)
    assert measured.tokens_per_s == 50.0
    assert measured.accuracies.first_at(0.6) == 66.0
    assert measured.lag == pytest.approx(0.03)
    assert math.isnan(measure(open_run(str(tmp_path / "run")), "alone-training", 0).lag)  # no trainer has a schedule
    assert not measured.learns
    lagging = Comparison({"laminar": [measured]}, [], [])
    assert warnings(lagging) == [
        "laminar, seed 0: emulated time lagged by 3.0% on the worst rank: its times do not count"
    ]
    table = tables(lagging)[0]
    assert "lag" in table.header
    assert "reward" not in table.header


def test_modes_are_beside_each_other(compared: Comparison) -> None:
    overview, staleness, time = tables(compared)
    assert overview.header[:3] == ["mode", "tokens/s", "x laminar"]
    assert [row[:3] for row in overview.rows] == [
        ["sync", "100.0", "0.500"],  # of seed 0, the one that both have
        ["laminar", "250.0 ± 50.00", "1.00 ± 0.00"],
    ]
    assert [row[-1] for row in overview.rows] == ["seed 1: stalled: nobody moves", "–"]  # noqa: RUF001
    assert "of the bound" not in overview.header
    assert "The bound was not measured" in overview.note
    assert [row[1:5] for row in staleness.rows] == [
        ["0.00", "0", "0.00", "0"],
        ["0.900 ± 0.00", "1", "1.10 ± 0.00", "2"],
    ]
    assert time.rows == [["sync", "1 of 1", "27.50", "1.67"], ["laminar", "2 of 2", "16.50 ± 0.00", "1.00 ± 0.00"]]


def test_what_never_came_to_the_target_has_a_dash(compared: Comparison) -> None:
    never = Comparison(compared.runs, [], [], 0.95)
    assert [row[1:] for row in tables(never)[2].rows] == [["0 of 1", "–", "–"], ["0 of 2", "–", "–"]]  # noqa: RUF001


def test_the_bound_is_the_slower_half(tmp_path: Path, make_ledger: MakeLedger) -> None:
    runs: dict[str, Measured] = {}
    for kind, tokens, sections in (
        ("laminar", 300, {}),
        ("sync", 100, {"control": {"mode": "sync", "colocated": True}}),
        ("alone-generation", 700, {}),
        ("alone-training", 400, {}),
    ):
        mode = kind if kind in ("sync", "laminar") else "laminar"
        run = write(make_ledger(10, mode), tmp_path / kind, tokens, **PACED, **sections)
        runs[kind] = measure(run, kind, 0)
    alone = [runs["alone-generation"], runs["alone-training"]]
    compared = Comparison({"sync": [runs["sync"]], "laminar": [runs["laminar"]]}, alone, [])
    table = tables(compared)[0]
    assert table.header[3] == "of the bound"
    assert [row[3] for row in table.rows] == ["40.0%", "80.0%"]  # of 500 tokens in 2 s
    assert "generation alone (100.0 tokens/s) and training alone (62.50 tokens/s)" in table.note
    assert "It is none of sync" in table.note
    axes = all_figures(compared)["throughput"][1].axes[0]
    assert [bar.get_height() for bar in axes.patches] == [25.0, 50.0]
    assert axes.lines[-1].get_ydata()[0] == 62.5
    assert axes.get_ylim()[1] > 62.5


def test_without_the_default_mode_the_fastest_is_the_reference(compared: Comparison) -> None:
    alone = Comparison({"sync": compared.runs["sync"], "laminar": []}, [], [])
    assert alone.reference == "sync"
    assert [row[2] for row in tables(alone)[0].rows] == ["1.00", "–"]  # noqa: RUF001


def test_the_figures_have_a_line_for_each_mode(compared: Comparison) -> None:
    figures = {name: figure for name, (_, figure) in all_figures(compared).items()}
    assert set(figures) == {"throughput", "learning", "staleness"}
    assert [text.get_text() for text in figures["learning"].legends[0].get_texts()] == ["sync", "laminar"]
    assert len(figures["learning"].axes) == 4
    assert all(axes.get_ylabel() or axes.get_subplotspec().colspan.start for axes in figures["learning"].axes)
    shares = [bar.get_height() for bar in figures["staleness"].axes[0].patches]
    assert shares == pytest.approx([1.0, 0.0, 0.0, 0.1, 0.7, 0.2])


def test_the_page_is_written_beside_its_figures(
    compared: Comparison, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(write_comparison(compared, str(tmp_path / "out")))
    assert path == tmp_path / "out" / "compare.html"
    assert {file.name for file in path.parent.glob("*.png")} == {"throughput.png", "learning.png", "staleness.png"}
    page = path.read_text(encoding="utf-8")
    assert page.count("data:image/png") == 3
    assert "laminar, seed 1: the rules of its report hold" in page
    assert json.dumps("config of sync")[1:-1] in page
    assert "seed 1: stalled: nobody moves" in page
    print_comparison(compared)
    assert "Time to accuracy 0.6" in capsys.readouterr().out


def test_a_comparison_of_nothing_is_a_page_too(tmp_path: Path) -> None:
    members = [Member("sync", 0, "nowhere", "failed: no mpiexec"), Member("sync", 1, str(tmp_path / "lost"))]
    page = Path(write_comparison(compare(members, ["sync"]), str(tmp_path))).read_text(encoding="utf-8")
    assert "failed: no mpiexec" in page
    assert "seed 1: " in page  # its record is not there
    assert "cannot be read" in page
