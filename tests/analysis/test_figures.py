"""The figures over time share the run's whole range and show idle time as 0; any phase of the schema has a colour."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.patches import StepPatch

from laminar_hpc.analysis import figures
from laminar_hpc.record import schema

MakeLedger = Callable[..., Any]


@pytest.mark.parametrize("name", ["throughput", "engine"])
def test_figures_over_time_share_the_whole_run(tmp_path: Path, make_ledger: MakeLedger, name: str) -> None:
    run = make_ledger(10).write(tmp_path / "run")
    _, figure = figures.all_figures(run)[name]
    for axes in figure.axes:
        assert axes.get_xlim() == (0.0, 20.0)  # the last publication
        assert axes.get_ylim()[0] == 0.0
        assert axes.get_ylim()[1] > max(np.nanmax(curve.get_data().values) for curve in curves(axes))


def curves(axes: Any) -> list[StepPatch]:
    found = [patch for patch in axes.patches if isinstance(patch, StepPatch)]
    assert found
    return found


def test_engines_are_shown_idle_where_they_are(tmp_path: Path, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(10)
    ledger.table("engine", 4).clear()
    rows = ledger.table("engine", 3)
    rows[:] = [row for row in rows if not 6.0 < row["time_s"] <= 12.0]
    _, figure = figures.all_figures(ledger.write(tmp_path / "run"))["engine"]
    values, edges_s, _ = curves(figure.axes[1])[0].get_data()
    idle = (edges_s[:-1] >= 6.0) & (edges_s[1:] <= 12.0)
    assert idle.sum() == 24  # 80 bins of 0.25 s
    assert not values[idle].any()
    # 8, 7, 6, 5 in turn, the larger of two neighbours for 0.4 of 0.5 s: (8 + 8 + 7 + 6) / 4 * 0.8, of 2 rollouts
    turns = (edges_s[:-1] >= 2.0) & (edges_s[1:] <= 4.0)
    assert values[turns].mean() == pytest.approx(2.9)


def test_training_has_a_panel_with_two_scales_of_tokens(tmp_path: Path, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(4)
    for row in ledger.table("steps"):
        row.update(prompt_tokens=100, response_tokens=300)
    _, figure = figures.all_figures(ledger.write(tmp_path / "run"))["throughput"]
    both, responses = (curve.get_data() for curve in curves(figure.axes[1]))
    # publications at 0.5, 2, 4, 6 and 8 s
    assert both.edges.tolist() == [0.0, 0.5, 2.0, 4.0, 6.0, 8.0]
    assert both.values.tolist() == [0.0, 400 / 1.5, 200.0, 200.0, 200.0]
    assert responses.values.tolist() == [0.0, 200.0, 150.0, 150.0, 150.0]


def test_every_phase_is_drawn_in_the_order_of_the_schema(
    tmp_path: Path, make_ledger: MakeLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_ledger(4).write(tmp_path / "run")
    monkeypatch.delitem(figures.PHASE_COLOURS, "train")  # a phase that the schema has and the colours lack
    _, figure = figures.all_figures(run)["phases"]
    drawn = " ".join(text.get_text() for text in figure.axes[0].texts)
    of_roles = [schema.PHASES[role] for role in {file.role for file in run.files}]
    assert len(of_roles) == 4
    for phases in of_roles:
        assert all(phase in drawn for phase in phases)
    assert len(figure.axes[0].patches) == sum(map(len, of_roles))
