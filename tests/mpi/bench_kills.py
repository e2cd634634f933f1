"""Kills a rank in the middle of transfers, again and again: who stays whole, and how soon the others know.

    python tests/mpi/bench_kills.py mpi nixl --kills 40

Each kill is a job of four ranks (programs/kills.py); in every second one the victim receives, else it sends. A survivor is
whole when it got all chunks of the other survivors as they were sent, and came to the end of its program.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field

from mpirun import ENVIRONMENT, MPIEXEC, PROGRAMS, kill_family

SURVIVORS = 3


@dataclass
class Outcome:
    """One kill: survivors that stayed whole, and the milliseconds until each way of noticing, by its name."""

    whole: int = 0
    noticed_ms: dict[str, list[float]] = field(default_factory=dict)
    output: str = ""


def kill_once(transport: str, role: str, btl: str, delay_s: float, timeout_s: float = 70.0) -> Outcome:
    """Run the job, kill its last rank `delay_s` after it is under way, and read what the others say."""
    options = ["--with-ft", "ulfm", "--bind-to", "none", "--oversubscribe", "--mca", "pml", "ob1", "--mca", "btl", btl]
    environment = os.environ | ENVIRONMENT | ({"UCX_TLS": "tcp"} if "tcp" in btl else {})
    process = subprocess.Popen(
        [MPIEXEC, "-n", "4", *options, sys.executable, str(PROGRAMS / "kills.py"), transport, role],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    assert process.stdout is not None
    outcome, killed_s, deadline = Outcome(), 0.0, signal.alarm(int(timeout_s))
    signal.signal(signal.SIGALRM, lambda *_: kill_family(process.pid))
    for line in process.stdout:
        outcome.output += line
        match line.split():
            case ["victim", pid]:
                _spin(delay_s)
                killed_s = time.monotonic()
                os.kill(int(pid), signal.SIGKILL)
            case ["whole", _, _]:
                outcome.whole += 1
            case ["named" | "PeerLost" as way, _, moment_s]:
                outcome.noticed_ms.setdefault(way, []).append(1e3 * (float(moment_s) - killed_s))
    signal.alarm(deadline)
    process.wait(timeout=10.0)
    return outcome


def _spin(seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        pass


def main() -> None:
    """Print a line for each transport and role."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("transports", nargs="+")
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--btl", default="self,sm")
    options = parser.parse_args()
    outcomes: dict[tuple[str, str], list[Outcome]] = {}
    delays = random.Random(0)
    for number in range(options.kills):
        role = ("sender", "receiver")[number % 2]
        for transport in options.transports:
            outcome = kill_once(transport, role, options.btl, delays.uniform(0.0, 0.05))
            outcomes.setdefault((transport, role), []).append(outcome)
            if outcome.whole < SURVIVORS:
                print(f"--- {transport}, {role}: {outcome.whole} whole\n{outcome.output}", file=sys.stderr, flush=True)
    for (transport, role), all_of_it in outcomes.items():
        whole = sum(outcome.whole == SURVIVORS for outcome in all_of_it)
        print(f"{transport:5} {role:8} killed {len(all_of_it)} times, survivors whole {whole} times", end="")
        for way in ("PeerLost", "named"):
            first = [min(outcome.noticed_ms[way]) for outcome in all_of_it if way in outcome.noticed_ms]
            if first:
                last = max(max(outcome.noticed_ms[way]) for outcome in all_of_it if way in outcome.noticed_ms)
                print(f"; {way} after {statistics.median(first):.1f} ms (median), {last:.1f} ms at most", end="")
        print(flush=True)


if __name__ == "__main__":
    main()
