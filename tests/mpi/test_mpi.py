"""MPI between real ranks: who is where, mail, transfers, ways to leave."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest
from mpirun import run_mpi

pytestmark = pytest.mark.mpi


def test_ranks_that_share_memory_are_a_node() -> None:
    ended = run_mpi(3, "nodes.py", "-", "-", "-")
    assert ended.code == 0, ended.output
    node = f"{socket.gethostname()}:0"
    assert ended.lines() == [f"{rank} 3 True {node} {node} {node}" for rank in range(3)]


def test_the_launchers_key_counts_more() -> None:
    ended = run_mpi(4, "nodes.py", "a", "b", "-", "b")
    assert ended.code == 0, ended.output
    nodes = f"a b {socket.gethostname()}:0 b"
    assert ended.lines() == [f"{rank} 4 True {nodes}" for rank in range(4)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_mail_keeps_each_senders_order(ranks: int) -> None:
    ended = run_mpi(ranks, "mail.py")
    assert ended.code == 0, ended.output
    assert ended.lines() == [f"{rank} ok" for rank in range(ranks)]


@pytest.mark.parametrize("nbytes", [10, 5_000_000])
def test_mail_goes_on_after_a_death(nbytes: int) -> None:
    ended = run_mpi(3, "mail_death.py", nbytes, survive=True)
    assert [line for line in ended.lines() if "went on" in line] == ["0 went on", "1 went on"], ended.output


@pytest.mark.parametrize("way", ["alone", "broken"])
def test_leaving_never_waits_long(way: str) -> None:
    ended = run_mpi(2, "leaving.py", way, timeout_s=30.0)
    assert ended.code is not None, ended.output
    assert {"alone": "left alone", "broken": "left at once"}[way] in ended.output


def test_a_program_that_hangs_is_gone_after_its_deadline() -> None:
    begun_s = time.monotonic()
    ended = run_mpi(2, "leaving.py", "hang", timeout_s=3.0)  # which reads the output to its end: no rank has it open
    assert ended.code is None
    assert time.monotonic() - begun_s < 15.0


def test_importing_the_package_does_not_import_mpi() -> None:
    modules = (
        "laminar_hpc.mpi.mail, laminar_hpc.mpi.transport, laminar_hpc.weights.forward, laminar_hpc.weights.publish"
    )
    source = f"import sys, {modules}; sys.exit(any(name.startswith('mpi4py') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", source], timeout=60.0, check=False).returncode == 0
