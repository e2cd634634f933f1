"""`laminar bench relay`: start the relay bench again and again, with all that is asked for, on hosts of this machine.

Broadcasts and faults go over limited links, between network namespaces that this program makes and takes away; where it may
not, it says so and leaves them out. A trainer's stall and a rollout's pull need one machine only. In an allocation of a
cluster there is no use for it: start jobs/bench_relay.py there.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType

import msgspec

from laminar_hpc.errors import ConfigError, RecordError
from laminar_hpc.launch import hosts as hosts_module
from laminar_hpc.launch.hosts import Hosts
from laminar_hpc.launch.mpiexec import Launch, environment, find_mpiexec
from laminar_hpc.mpi.world import NODE_VARIABLE
from laminar_hpc.record.paths import RunPaths, check_new_run_dir, create_run_dir
from laminar_hpc.record.reader import read_file
from laminar_hpc.record.schema import BENCH
from laminar_hpc.runtime.relay_bench.failing import FEWEST, UNPLUG
from laminar_hpc.runtime.relay_bench.plan import Plan
from laminar_hpc.runtime.relay_bench.program import FAILED, OVER

LEAVING_S = 5.0
"""After the first rank has said that it is over: how long mpiexec may take. It waits for ever for ranks that are stopped."""

START_S = 1800.0
"""How long one start may take."""

READ_BYTES = 1 << 16


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for. `plan` has what all starts have in common; `chunks` and `transports` are tried one by one."""

    run_dir: str
    parts: tuple[str, ...]
    plan: Plan
    chunks: tuple[int, ...] = (0,)
    transports: tuple[str, ...] = ("mpi",)
    faults: tuple[str, ...] = ()
    times: int = 20
    publish_nbytes: int = 256_000_000
    publish_relays: tuple[int, ...] = (1, 8)
    publish_pairs: int = 30
    pull_nbytes: int = 1_000_000_000
    rate: str = "200mbit"
    cards: int = 1
    hosts: bool = True

    def check(self) -> None:
        """ConfigError for the first thing that cannot be."""
        for plan in (*self.on_hosts(), *self.on_one_machine()):
            plan.check()

    def on_hosts(self) -> list[Plan]:
        """The starts that go over links. A start with faults ends when too few relays are left."""
        change = msgspec.structs.replace
        plans = []
        for transport in self.transports:
            if "broadcast" in self.parts:
                plans += [change(self.plan, part="broadcast", transport=transport, chunks=c) for c in self.chunks]
            if "failure" in self.parts:
                relays, chunks = (max(self.plan.relays),), self.chunks[0]
                plans += [
                    change(self.plan, part="failure", transport=transport, chunks=chunks, relays=relays, fault=fault)
                    for fault in self.faults
                ]
        return plans

    def on_one_machine(self) -> list[Plan]:
        """The others."""
        change = msgspec.structs.replace
        plans = []
        if "publish" in self.parts:
            plans += [
                change(
                    self.plan,
                    part="publish",
                    transport=transport,
                    relays=self.publish_relays,
                    nbytes=self.publish_nbytes,
                    repetitions=self.publish_pairs,
                )
                for transport in self.transports
            ]
        if "pull" in self.parts:
            plans.append(change(self.plan, part="pull", nbytes=self.pull_nbytes))
        return plans


def bench_relay(wishes: Wishes) -> int:
    """Do all that is asked for; the exit code is 0 where every start came to its end."""
    wishes.check()
    check_new_run_dir(wishes.run_dir)
    find_mpiexec()
    plans = wishes.on_hosts()
    if plans and wishes.hosts:
        try:
            hosts_module.check()
        except ConfigError as error:
            print(f"skipped: {len(plans)} starts of broadcasts and faults: {error}", flush=True)
            plans = []
    create_run_dir(wishes.plan.config(wishes.run_dir))
    starts = _Starts(wishes.run_dir)
    with _ends_in_order():
        for plan in wishes.on_one_machine():
            starts.run(plan, None)
        if plans and not wishes.hosts:
            for plan in plans:
                _repeat(starts, plan, wishes.times, None)
        elif plans:
            count = max(max(plan.relays) for plan in plans)
            print(f"{count} hosts on this machine, {wishes.cards} outgoing links of {wishes.rate} each", flush=True)
            with Hosts(count, wishes.rate, wishes.cards) as hosts:
                for plan in plans:
                    _repeat(starts, plan, wishes.times, hosts)
    return 1 if starts.failed else 0


def _repeat(starts: _Starts, plan: Plan, times: int, hosts: Hosts | None) -> None:
    """One start; with faults, as many as it takes until there were `times`, or twice as many as it should take."""
    if plan.part != "failure":
        starts.run(plan, hosts)
        return
    victims = 2 if plan.fault == "pair" else 1
    rounds = (max(plan.relays) - FEWEST - (victims - 1)) // victims + 1
    done = 0
    for start in range(2 * -(-times // rounds)):
        if done >= times:
            return
        left = min(rounds, times - done)
        done += starts.run(msgspec.structs.replace(plan, repetitions=left, seed=plan.seed + start), hosts)
    print(f"{plan.fault}: {done} of {times} rounds came to their end", flush=True)


class _Starts:
    """The starts of one run, numbered."""

    def __init__(self, run_dir: str) -> None:
        self.failed = 0
        self._run_dir = run_dir
        self._attempts = 0

    def run(self, plan: Plan, hosts: Hosts | None) -> int:
        """One start to its end, however that is; how many faults it has recorded."""
        attempt, self._attempts = self._attempts, self._attempts + 1
        what = f"{plan.part} {plan.fault}" if plan.part == "failure" else plan.part
        print(f"job {attempt + 1}: {what}, {plan.transport}, {plan.nbytes / 1e6:g} MB", flush=True)
        program = [sys.executable, "-m", "laminar_hpc.jobs.bench_relay", "--run-dir", self._run_dir]
        program += ["--attempt", str(attempt), *plan.arguments()]
        line = _local_line(plan, program) if hosts is None else _hosts_line(plan, hosts, program)
        settings = {} if hosts is None else hosts.settings()
        job = Launch(line, environment({**settings, **os.environ}))
        try:
            over = _follow(job, hosts)
        finally:
            job.end(signal.SIGKILL)
            job.wait(LEAVING_S)
            if hosts is not None:
                hosts.clear()
        if not over:
            self.failed += 1
            print(f"job {attempt + 1} did not come to its end; see {RunPaths(self._run_dir).logs}", flush=True)
        try:
            return len(read_file(RunPaths(self._run_dir).record(attempt, 0, BENCH)).tables["bench_failures"])
        except RecordError:
            return 0


def _follow(job: Launch, hosts: Hosts | None) -> bool:
    """Pass on what the ranks say, and unplug whom they want unplugged; whether the first rank came to its end."""
    deadline_s = time.monotonic() + START_S
    over, rest = False, b""
    os.set_blocking(job.output.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(job.output, selectors.EVENT_READ)
        while (left_s := deadline_s - time.monotonic()) > 0 and job.poll() is None:
            if not selector.select(min(left_s, 0.2)):
                continue
            read = job.output.read(READ_BYTES)
            if not read:
                break
            *lines, rest = (rest + read).split(b"\n")
            for line in (line.decode(errors="replace") for line in lines):
                if line in (OVER, FAILED):
                    over, deadline_s = line == OVER, time.monotonic() + LEAVING_S
                elif line.startswith(UNPLUG) and hosts is not None:
                    hosts.set_link(int(line.split()[1]), up=False)
                else:
                    print(f"  {line}", flush=True)
    return over


def _hosts_line(plan: Plan, hosts: Hosts, program: list[str]) -> list[str]:
    """The manager, the trainer and the first relay are on the first host, each other relay on one of its own."""
    ranks = [3] + [1] * (max(plan.relays) - 1)
    return hosts.command_line(find_mpiexec(), ranks, program, ulfm=plan.part == "failure")


def _local_line(plan: Plan, program: list[str]) -> list[str]:
    """All on this machine; each relay counts as a node."""
    line = [find_mpiexec(), *(("--with-ft", "ulfm") if plan.part == "failure" else ())]
    line += ["--bind-to", "none", "--oversubscribe"]
    if plan.ranks < 3:
        return [*line, "-n", str(plan.ranks), *program]
    for relay in range(max(plan.relays)):
        line += [":"] if relay else []
        line += ["-n", "1" if relay else "3", "-x", f"{NODE_VARIABLE}=node{relay}", *program]
    return line


@contextlib.contextmanager
def _ends_in_order() -> Iterator[None]:
    """SIGTERM ends this program as Ctrl-C does: what it has made is taken away."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
