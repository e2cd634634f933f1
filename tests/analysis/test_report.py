"""The page stands alone, shows what is recorded, escapes what it shows, and is made of any record that can be opened."""

from __future__ import annotations

import base64
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from laminar_hpc.analysis.report import ending, make_report, print_report, state, write_report
from laminar_hpc.errors import RecordError
from laminar_hpc.record import schema
from laminar_hpc.record.reader import open_run
from laminar_hpc.record.writer import RecordWriter

MakeLedger = Callable[..., Any]

FIGURES = {"reward", "throughput", "staleness", "length", "phases", "engine", "policy"}
PNG = b"\x89PNG\r\n\x1a\n"
VOID = {"meta", "img"}


class Page(HTMLParser):
    """The text, images and tags of a page; unbalanced tags are an error."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.texts: list[str] = []
        self.images: list[bytes] = []
        source = Path(path).read_text(encoding="utf-8")
        self.feed(source)
        assert self.open == []
        assert not re.search(r"(src|href)=\"(?!data:)", source), "the page needs another file"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "img":
            self.images.append(base64.b64decode((dict(attrs)["src"] or "").removeprefix("data:image/png;base64,")))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_has_checks_figures_and_tables(tmp_path: Path, make_ledger: MakeLedger) -> None:
    run = make_ledger(12).write(tmp_path / "run")
    path = write_report(make_report(run))
    assert path == str(tmp_path / "run" / "report" / "report.html")
    page = Page(path)
    pictures = {name.stem: name.read_bytes() for name in (tmp_path / "run" / "report").glob("*.png")}
    assert set(pictures) == FIGURES
    assert all(picture.startswith(PNG) for picture in pictures.values())
    assert sorted(page.images) == sorted(pictures.values())
    assert page.texts.count("holds") == 7
    for shown in ("Throughput", "Training", "Staleness of trained-on trajectories", "Time by phase", "Weights"):
        assert shown in page.texts
    assert "chain sum <b>& (run)" in page.texts  # the name is text, no markup
    assert not {"b", "script"} & set(page.seen)


def test_violations_are_on_the_page_and_in_the_terminal(
    tmp_path: Path, make_ledger: MakeLedger, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = make_ledger(4)
    ledger.table("pulls", 4)[2]["digest"] ^= 1
    ledger.table("failures").append({"time_s": 3.0, "rank": 4, "text": "<script>alert(1)</script> & more"})
    run = ledger.write(tmp_path / "run")
    page = Page(write_report(make_report(run), str(tmp_path / "elsewhere")))
    assert page.texts.count("violated") == 1
    assert "<script>alert(1)</script> & more" in page.texts
    print_report(make_report(run))
    printed = capsys.readouterr().out
    assert "violated" in printed
    assert "<script>alert(1)</script> & more" in printed
    assert "\x1b" not in printed
    assert (tmp_path / "elsewhere" / "report.html").exists()
    assert not (tmp_path / "run" / "report").exists()


def test_a_run_that_cannot_learn_is_warned_of_once(
    tmp_path: Path, make_ledger: MakeLedger, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = make_ledger(4)
    for row in ledger.table("trajectories"):
        row["reward"] = 0.0
    report = make_report(ledger.write(tmp_path / "run"))
    line = "warning: no group had differing rewards: nothing can be learned"
    print_report(report)
    assert capsys.readouterr().out.count(line) == 1
    assert Page(write_report(report)).texts.count(line) == 1


def test_a_run_that_has_just_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "records").mkdir()
    path = tmp_path / "records" / schema.file_name("manager", 0, 0)
    writer = RecordWriter(str(path), "manager", 0, 0, {}, 1.0)
    run = open_run(str(tmp_path))
    page = Page(write_report(make_report(run)))
    assert page.images == []
    assert "The record has no figures yet." in page.texts
    assert "The record has no numbers yet." in page.texts
    assert page.texts.count("nothing to check") == 7
    assert "holds" not in page.texts
    assert ending(run) == "no status file; its record ends in mid-run"
    print_report(make_report(run))
    assert "No step has been trained yet." in capsys.readouterr().out
    writer.close()


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_of_few_steps(tmp_path: Path, make_ledger: MakeLedger, steps: int) -> None:
    page = Page(write_report(make_report(make_ledger(steps).write(tmp_path / "run"))))
    assert len(page.images) == len(FIGURES)


KILLED_WRITER = """
import sys
from pathlib import Path
from laminar_hpc.record.status import Status, write_status
sys.path.insert(0, sys.argv[2])
from conftest import Ledger
ledger = Ledger(8, "laminar")
ledger.closed, ledger.state = False, ""
ledger.table("groups").pop()
ledger.write(Path(sys.argv[1]))
write_status(sys.argv[1], Status.blank())
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_killed_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-c", KILLED_WRITER, str(run_dir), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        assert state(open_run(str(run_dir))) == "running"
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    (run_dir / "records" / "attempt-0.rank-00009.rollout.h5").write_bytes(b"torn")
    run = open_run(str(run_dir))
    assert state(run) == "killed"
    assert ending(run).startswith("killed, without a word, at least ")
    page = Page(write_report(make_report(run)))
    assert len(page.images) == len(FIGURES)
    assert "killed" in page.texts
    assert "group 32 (attempt 0) is open" in page.texts
    assert any("attempt-0.rank-00009.rollout.h5: cannot be read" in text for text in page.texts)
    assert "violated" not in page.texts


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path, make_ledger: MakeLedger) -> None:
    run = make_ledger(1).write(tmp_path / "run")
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="file/report: cannot be written: Not a directory"):
        write_report(make_report(run), str(tmp_path / "file" / "report"))


def test_how_it_ended(tmp_path: Path, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(10)
    ledger.state = "stalled"
    run = ledger.write(tmp_path / "run")
    assert state(run) == "stalled"
    assert re.fullmatch(r"stalled 20 s after its start at 2023-11-1[45] \d\d:\d\d:20: all steps are done", ending(run))
