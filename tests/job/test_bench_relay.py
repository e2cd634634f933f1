"""The relay bench as a user starts it, without hosts: real ranks, real workers, small bytes."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest
from laminar_command import LAMINAR

from laminar_hpc.record import schema
from laminar_hpc.record.reader import Run, open_run

pytestmark = pytest.mark.job


def _bench(directory: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], Run]:
    line = [LAMINAR, "bench", "relay", "out", "--no-hosts", *options]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, cwd=directory, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done, open_run(str(directory / "out"))


def test_every_way_is_timed_in_every_round_and_stall_and_pull_in_pairs(tmp_path: Path) -> None:
    options = [
        "--relays",
        "2,3",
        "--nbytes",
        "3e6",
        "--repetitions",
        "2",
        "--ways",
        "relays,copy,bcast,star,chain,file",
    ]
    options += ["--publish-nbytes", "2e6", "--pairs", "3", "--pull-nbytes", "1e6"]
    done, run = _bench(tmp_path, *options)
    rows = run.table("bench_broadcasts")
    names = schema.TABLES["bench_broadcasts"].column("way").names
    counted = Counter((names[row["way"]], int(row["relays"])) for row in rows)
    assert counted == {
        (way, relays): 2 for way in ("relays", "copy", "bcast", "star", "chain", "file") for relays in (2, 3)
    }
    assert (rows["seconds"] > 0.0).all()
    assert len(run.table("bench_publishes")) == 2 * 3
    assert Counter(run.table("bench_pulls")["readers"].tolist()) == {1: 2, 2: 2}
    assert (tmp_path / "out" / "relay_bench.png").exists()
    assert "x one copy" in done.stdout


def test_survivors_of_a_killed_relay_end_with_the_newest_version(tmp_path: Path) -> None:
    _, run = _bench(
        tmp_path, "--parts", "failure", "--kill", "middle", "--times", "1", "--relays", "4", "--nbytes", "20e6"
    )
    (row,) = run.table("bench_failures")
    assert (row["relays"], row["survivors"], row["complete"], row["lost_publications"]) == (4, 3, 3, 0)
    assert row["noticed_s"] >= 0.0
