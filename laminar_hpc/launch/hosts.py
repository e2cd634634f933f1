"""Several hosts on this machine: network namespaces on a bridge, whose outgoing links are limited.

Each host has a host name and one or more network cards of its own, `eth0` and so on, each with an address in a network and
on a bridge of its own, so that MPI takes it for another machine; memory, files and process ids are this machine's. The links
lead nowhere else.

Names carry the process id of the program that made the hosts: several programs can have theirs at once, each one set at a
time, and what a killed one has left is known by a process that is no more, and taken away by the next one that makes hosts.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import stat
import subprocess
import tempfile
import time

from laminar_hpc.errors import ConfigError

NETWORK = "10.77"
"""The first two numbers of the hosts' addresses; the third is the card's. Two sets of hosts have the same addresses, on
bridges that never meet."""

MOST_HOSTS = 64
MOST_CARDS = 4

BURST = "128kb"
"""What a link that has been idle sends at once before its limit holds."""

LATENCY = "20ms"
"""How long a packet may wait for the limited link before it is dropped."""

LINKS_UP_S = 10.0
LOOK_S = 0.05

_HOST = re.compile(r"laminar-(\d+)-(\d+)")
_BRIDGE = re.compile(r"lb(\d+)-\d")
_RATE = re.compile(r"[1-9]\d*(\.\d+)?(bit|kbit|mbit|gbit)")

_AGENT = """#!/bin/sh
# Stands in for ssh when mpiexec starts its daemons: AGENT HOST COMMAND... runs COMMAND on HOST under that host name.
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
exec ip netns exec "$host" unshare --uts sh -c "hostname $host; exec sh -c '$*'"
"""


class Hosts:
    """`count` hosts, host 0 first; a context manager, at whose end nothing of them is left, processes on them included.

    `rate` is the limit of each card's outgoing link in tc's spelling, such as "200mbit". ConfigError, one line, where this
    user or this machine cannot have hosts.
    """

    def __init__(self, count: int, rate: str, cards: int = 1) -> None:
        if not 1 <= count <= MOST_HOSTS:
            raise ConfigError(f"hosts: there can be 1 to {MOST_HOSTS}, got {count}")
        if not 1 <= cards <= MOST_CARDS:
            raise ConfigError(f"hosts: each has 1 to {MOST_CARDS} network cards, got {cards}")
        if not _RATE.fullmatch(rate):
            raise ConfigError(f"hosts: a rate is a number with bit, kbit, mbit or gbit, such as 200mbit, got {rate!r}")
        self.names = [f"laminar-{os.getpid()}-{index}" for index in range(count)]
        self._rate = rate
        self._cards = range(cards)
        self._agent = ""

    def __enter__(self) -> Hosts:
        check()
        remove_leftovers()
        try:
            self._make()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def address(self, host: int, card: int = 0) -> str:
        """The IPv4 address of a card of host `host`."""
        return f"{NETWORK}.{card}.{host + 1}"

    def set_link(self, host: int, up: bool) -> None:
        """Plug all cards of host `host` into their bridges, or unplug them: no packet passes, and no one is told."""
        for card in self._cards:
            _run("ip", "link", "set", _veth(os.getpid(), host, card), "up" if up else "down")

    def command_line(self, mpiexec: str, ranks: list[int], program: list[str], ulfm: bool) -> list[str]:
        """The whole command that runs `program` with `ranks[h]` ranks on host h, started from host 0, over its links alone."""
        places = ",".join(f"{name}:{count}" for name, count in zip(self.names, ranks, strict=False))
        networks = [f"{NETWORK}.{card}.0/24" for card in self._cards]
        return [
            *("ip", "netns", "exec", self.names[0], "unshare", "--uts"),
            *("sh", "-c", f'hostname {self.names[0]}; exec "$@"', "sh", mpiexec),
            *(("--with-ft", "ulfm") if ulfm else ()),
            *("--prtemca", "plm_ssh_agent", self._agent, "--prtemca", "prte_if_include", networks[0]),
            *("--mca", "btl_tcp_if_include", ",".join(networks), "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"),
            *("--host", places, "-n", str(sum(ranks)), *program),
        ]

    def settings(self) -> dict[str, str]:
        """Environment variables for what runs on the hosts: UCX sees one machine by its boot id, and would not use links."""
        return {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": ",".join(f"eth{card}" for card in self._cards)}

    def clear(self) -> None:
        """End all processes on the hosts, and plug all links in again; ConfigError where they do not come up."""
        _end_processes(self.names)
        for host in range(len(self.names)):
            self.set_link(host, up=True)
        self._await_links()
        for name in self.names:  # what it could not reach while the link was down it would not try again at once
            _run("ip", "-n", name, "neigh", "flush", "all")

    def remove(self) -> None:
        """Take everything away; what is not there is no error."""
        _remove(os.getpid(), self.names)
        if self._agent:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._agent)
            self._agent = ""

    def _make(self) -> None:
        owner = os.getpid()
        for card in self._cards:
            _run("ip", "link", "add", _bridge(owner, card), "type", "bridge")
            _run("ip", "link", "set", _bridge(owner, card), "up")
        known = ["127.0.0.1 localhost", *(f"{self.address(host)} {name}" for host, name in enumerate(self.names))]
        for host, name in enumerate(self.names):
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            for card in self._cards:
                self._plug_in(owner, host, card)
            os.makedirs(_files(name), exist_ok=True)
            with open(os.path.join(_files(name), "hosts"), "w", encoding="utf-8") as file:
                file.write("\n".join(known) + "\n")
        handle, self._agent = tempfile.mkstemp(prefix="laminar-agent-", suffix=".sh")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(_AGENT)
        os.chmod(self._agent, stat.S_IRWXU)
        self._await_links()

    def _await_links(self) -> None:
        """The kernel takes up to a second to notice that a card is plugged in, and lets nothing pass until then."""
        deadline_s = time.monotonic() + LINKS_UP_S
        while down := [name for name in self.names if not _is_up(name, len(self._cards))]:
            if time.monotonic() > deadline_s:
                raise ConfigError(f"hosts: the links of {', '.join(down)} do not come up within {LINKS_UP_S:g} s")
            time.sleep(LOOK_S)

    def _plug_in(self, owner: int, host: int, card: int) -> None:
        name, here, there = self.names[host], f"eth{card}", _veth(owner, host, card)
        _run("ip", "link", "add", there, "type", "veth", "peer", "name", here, "netns", name)
        _run("ip", "link", "set", there, "master", _bridge(owner, card), "up")
        _run("ip", "-n", name, "addr", "add", f"{self.address(host, card)}/24", "dev", here)
        _run("ip", "-n", name, "link", "set", here, "up")
        limit = ("tbf", "rate", self._rate, "burst", BURST, "latency", LATENCY)
        _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", here, "root", *limit)


def check() -> None:
    """ConfigError, one line, where this user on this machine may not make hosts."""
    if os.geteuid() != 0:
        raise ConfigError("hosts: network namespaces are made by root only")
    for program in ("ip", "tc", "unshare"):
        if shutil.which(program) is None:
            raise ConfigError(f"hosts: there is no `{program}` on PATH; it comes with iproute2 and util-linux")
    trial = f"laminar-{os.getpid()}-trial"
    try:
        _run("ip", "netns", "add", trial)
    finally:
        _quietly("ip", "netns", "del", trial)


def remove_leftovers() -> None:
    """Take away the hosts of programs that are no more."""
    owners: dict[int, list[str]] = {}
    for line in _run("ip", "netns", "list").splitlines():
        if found := _HOST.match(line):
            owners.setdefault(int(found[1]), []).append(found[0])
    for line in _run("ip", "-brief", "link", "show", "type", "bridge").splitlines():
        if found := _BRIDGE.match(line):
            owners.setdefault(int(found[1]), [])
    for owner, names in owners.items():
        if not os.path.exists(f"/proc/{owner}"):
            _remove(owner, names)


def _is_up(name: str, cards: int) -> bool:
    """Whether the kernel has noticed that all cards of a host are plugged in."""
    lines = [line.split() for line in _run("ip", "-n", name, "-brief", "link", "show").splitlines()]
    return sum(words[0].startswith("eth") and words[1] == "UP" for words in lines) == cards


def _end_processes(names: list[str]) -> None:
    for name in names:
        for pid in _quietly("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def _remove(owner: int, names: list[str]) -> None:
    _end_processes(names)
    for name in names:
        _quietly("ip", "netns", "del", name)
        shutil.rmtree(_files(name), ignore_errors=True)
    for host in range(len(names)):  # a namespace goes when its last process has ended; its link need not wait for that
        for card in range(MOST_CARDS):
            _quietly("ip", "link", "del", _veth(owner, host, card))
    for card in range(MOST_CARDS):
        _quietly("ip", "link", "del", _bridge(owner, card))


def _bridge(owner: int, card: int) -> str:
    return f"lb{owner}-{card}"


def _veth(owner: int, host: int, card: int) -> str:
    """The bridge's end of a card's link; an interface's name has at most 15 characters."""
    return f"lv{owner}-{host}-{card}"


def _files(name: str) -> str:
    """What `ip netns exec` puts over /etc on this host."""
    return f"/etc/netns/{name}"


def _run(*command: str) -> str:
    """The command's output; ConfigError with its first word of complaint where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise ConfigError(f"hosts: `{' '.join(command[:4])} ...` failed: {said}")
    return done.stdout


def _quietly(*command: str) -> str:
    """The command's output, "" where it fails."""
    with contextlib.suppress(ConfigError):
        return _run(*command)
    return ""
