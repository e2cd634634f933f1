"""Every transport keeps to the same contract, between real ranks; programs/conformance.py checks it, chapter by chapter."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
from bench_kills import SURVIVORS, kill_once
from mpirun import run_mpi

pytestmark = pytest.mark.mpi

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl_cu12") is None, reason="NIXL is not installed")
TRANSPORTS = ["mpi", pytest.param("nixl", marks=needs_nixl)]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("chapter", "ranks"),
    [("whole", 2), ("many", 3), ("wrong", 2), ("cancel", 2), ("forget", 2), ("ring", 4), ("outside", 2)],
)
def test_conformance(transport: str, chapter: str, ranks: int) -> None:
    ended = run_mpi(ranks, "conformance.py", transport, chapter)
    assert ended.code == 0, ended.output
    assert ended.lines() == [f"{rank} ok" for rank in range(ranks)]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_is_stopped_and_goes_on(transport: str) -> None:
    ended = run_mpi(2, "stopped.py", transport)
    assert ended.code == 0, ended.output
    assert ended.lines() == ["0 ok", "1 ok"]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("role", ["sender", "receiver"])
def test_survivors_of_a_kill_go_on(transport: str, role: str) -> None:
    outcome = kill_once(transport, role, "self,sm", delay_s=0.01)
    assert outcome.whole == SURVIVORS, outcome.output
    assert "named" in outcome.noticed_ms
    assert set(outcome.noticed_ms) <= {"PeerLost", "named"}  # the first only where a transfer was under way just then


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("role", ["sender", "receiver"])
def test_survivors_of_twenty_kills_go_on(transport: str, role: str) -> None:
    outcomes = [kill_once(transport, role, "self,sm", delay_s=0.002 * number) for number in range(20)]
    assert [outcome.whole for outcome in outcomes] == [SURVIVORS] * 20


def test_without_nixl_the_error_says_how_to_install_it() -> None:
    source = (
        "import sys\n"
        "sys.modules |= dict.fromkeys(('nixl_cu12', 'nixl_cu13', 'nixl_rocm'))\n"  # what Python does for a missing module
        "from laminar_hpc.errors import ConfigError\n"
        "from laminar_hpc.mpi.nixl_transport import load_nixl\n"
        "try:\n    load_nixl()\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60.0, check=True)
    assert "pip install --no-deps nixl-cu12" in ended.stdout
