"""The relay bench's tables and figure, from a record with known rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from laminar_hpc.analysis.relay_bench import bench_figure, broadcasts, print_bench, write_bench_figure
from laminar_hpc.record.reader import Run, open_run
from laminar_hpc.record.schema import BENCH, file_name
from laminar_hpc.record.writer import RecordWriter


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Three rounds of a broadcast to 4 relays and of one copy, two publications, a pull, and two faults."""
    (tmp_path / "records").mkdir()
    path = tmp_path / "records" / file_name(BENCH, 0, 0)
    with RecordWriter(str(path), BENCH, 0, 0, {}, flush_s=1.0) as record:
        times = {"relays": (1.2, 1.1, 9.0), "copy": (1.0, 1.0, 1.5)}
        for way, seconds in times.items():
            for repetition, value in enumerate(seconds):
                record.add(
                    "bench_broadcasts",
                    way=way,
                    transport="mpi",
                    relays=4,
                    nbytes=1_000_000,
                    chunks=10 if way == "relays" else 1,
                    repetition=repetition,
                    seconds=value,
                    publish_s=None,
                    formula_s=0.8 if way == "relays" else None,
                )
        for repetition, (publish_s, copy_s) in enumerate([(0.3, 0.2), (0.5, 0.2)]):
            record.add(
                "bench_publishes",
                transport="mpi",
                relays=1,
                nbytes=10,
                repetition=repetition,
                publish_s=publish_s,
                copy_s=copy_s,
            )
        record.add("bench_pulls", readers=2, nbytes=10, repetition=0, pull_s=0.25, copy_s=0.2)
        for repetition, moved_s in enumerate([0.05, None]):
            record.add(
                "bench_failures",
                fault="pair",
                transport="mpi",
                relays=8,
                nbytes=10,
                chunks=5,
                repetition=repetition,
                at=0.5,
                noticed_s=0.02,
                moved_s=moved_s,
                complete_s=0.4,
                survivors=6,
                complete=6 - repetition,
                lost_publications=repetition,
            )
    return open_run(str(tmp_path))


def test_a_cell_has_the_median_of_its_rounds_and_its_ratio_to_one_copy(run: Run) -> None:
    relays, copy = broadcasts(run)
    assert (relays.way, relays.relays, relays.chunks, relays.rounds) == ("relays", 4, 10, 3)
    assert (relays.seconds, relays.fastest_s, relays.slowest_s) == (1.2, 1.1, 9.0)
    assert relays.over_copy == pytest.approx(1.2)
    assert relays.formula_s == pytest.approx(0.8)
    assert (copy.way, copy.seconds, copy.over_copy) == ("copy", 1.0, 1.0)


def test_the_tables_say_what_the_rows_say(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    print_bench(run)
    lines = [[cell.strip() for cell in line.split("│")] for line in capsys.readouterr().out.splitlines()]
    cells = [line[1:-1] for line in lines if len(line) > 2]
    assert ["4", "1", "mpi", "10", "relays", "3", "1.200", "1.100", "9.000", "1.20", "0.800", "1.50"] in cells
    assert ["1", "1e-05", "mpi", "2", "400.0", "200.0", "2.000"] in cells
    assert ["2", "1e-05", "1", "250", "200", "0.800"] in cells
    assert ["pair", "mpi", "2", "1", "1", "20", "50", "50", "400"] in cells


def test_the_figure_has_a_panel_for_what_there_is_and_ticks_at_whole_relays(run: Run, tmp_path: Path) -> None:
    left, right = bench_figure(run).axes
    assert [text.get_text() for text in left.get_xticklabels()] == ["4"]
    assert left.yaxis.get_major_formatter()(0.5) == "0.5"
    assert right.get_title() == "From noticing a fault to the next chunk"
    folder = tmp_path / "only" / "records"
    folder.mkdir(parents=True)
    with RecordWriter(str(folder / file_name(BENCH, 0, 0)), BENCH, 0, 0, {}, flush_s=1.0) as record:
        for relays in (3, 8):
            record.add(
                "bench_broadcasts",
                way="relays",
                transport="mpi",
                relays=relays,
                nbytes=1_000_000,
                chunks=10,
                repetition=0,
                seconds=0.5,
                publish_s=None,
                formula_s=0.4,
            )
    figure = bench_figure(open_run(str(tmp_path / "only")))
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["3", "8"]
    assert figure.get_size_inches()[0] == 5.0


def test_the_figure_is_a_picture(run: Run) -> None:
    path = Path(write_bench_figure(run))
    assert path.parent == Path(run.run_dir)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
