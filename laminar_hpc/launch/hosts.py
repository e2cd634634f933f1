"""Several hosts on this machine: network namespaces on one bridge, whose outgoing links are limited.

Each host has a host name, an address and a network interface `eth0` of its own, so that MPI takes it for another machine;
memory, files and process ids are this machine's. The links lead nowhere else.

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

from laminar_hpc.errors import ConfigError

NETWORK = "10.77.0"
"""The first three numbers of the hosts' addresses. Two sets of hosts have the same ones, on bridges that never meet."""

MOST_HOSTS = 64

BURST = "128kb"
"""What a link that has been idle sends at once before its limit holds."""

LATENCY = "20ms"
"""How long a packet may wait for the limited link before it is dropped."""

_HOST = re.compile(r"laminar-(\d+)-(\d+)")
_BRIDGE = re.compile(r"lb(\d+)")
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

    `rate` is the limit of each host's outgoing link in tc's spelling, such as "200mbit". ConfigError, one line, where this
    user or this machine cannot have hosts.
    """

    def __init__(self, count: int, rate: str) -> None:
        if not 1 <= count <= MOST_HOSTS:
            raise ConfigError(f"hosts: there can be 1 to {MOST_HOSTS}, got {count}")
        if not _RATE.fullmatch(rate):
            raise ConfigError(f"hosts: a rate is a number with bit, kbit, mbit or gbit, such as 200mbit, got {rate!r}")
        self.names = [f"laminar-{os.getpid()}-{index}" for index in range(count)]
        self._rate = rate
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

    def address(self, host: int) -> str:
        """The IPv4 address of host `host`."""
        return f"{NETWORK}.{host + 1}"

    def set_link(self, host: int, up: bool) -> None:
        """Plug host `host` into the bridge, or unplug it: no packet passes, and no one is told."""
        _run("ip", "link", "set", _veth(os.getpid(), host), "up" if up else "down")

    def command_line(self, mpiexec: str, ranks: list[int], program: list[str], ulfm: bool) -> list[str]:
        """The whole command that runs `program` with `ranks[h]` ranks on host h, started from host 0, over its links alone."""
        places = ",".join(f"{name}:{count}" for name, count in zip(self.names, ranks, strict=False))
        network = f"{NETWORK}.0/24"
        return [
            *("ip", "netns", "exec", self.names[0], "unshare", "--uts"),
            *("sh", "-c", f'hostname {self.names[0]}; exec "$@"', "sh", mpiexec),
            *(("--with-ft", "ulfm") if ulfm else ()),
            *("--prtemca", "plm_ssh_agent", self._agent, "--prtemca", "prte_if_include", network),
            *("--mca", "btl_tcp_if_include", network, "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"),
            *("--host", places, "-n", str(sum(ranks)), *program),
        ]

    @staticmethod
    def settings() -> dict[str, str]:
        """Environment variables for what runs on the hosts: UCX sees one machine by its boot id, and would not use links."""
        return {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"}

    def clear(self) -> None:
        """End all processes on the hosts, and plug all links in again."""
        _end_processes(self.names)
        for host in range(len(self.names)):
            self.set_link(host, up=True)

    def remove(self) -> None:
        """Take everything away; what is not there is no error."""
        _remove(os.getpid(), self.names)
        if self._agent:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._agent)
            self._agent = ""

    def _make(self) -> None:
        owner = os.getpid()
        bridge = f"lb{owner}"
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "link", "set", bridge, "up")
        known = ["127.0.0.1 localhost", *(f"{self.address(host)} {name}" for host, name in enumerate(self.names))]
        for host, name in enumerate(self.names):
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", _veth(owner, host), "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "link", "set", _veth(owner, host), "master", bridge, "up")
            _run("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            limit = ("tbf", "rate", self._rate, "burst", BURST, "latency", LATENCY)
            _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", "root", *limit)
            os.makedirs(_files(name), exist_ok=True)
            with open(os.path.join(_files(name), "hosts"), "w", encoding="utf-8") as file:
                file.write("\n".join(known) + "\n")
        handle, self._agent = tempfile.mkstemp(prefix="laminar-agent-", suffix=".sh")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(_AGENT)
        os.chmod(self._agent, stat.S_IRWXU)


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
        _quietly("ip", "link", "del", _veth(owner, host))
    _quietly("ip", "link", "del", f"lb{owner}")


def _veth(owner: int, host: int) -> str:
    """The bridge's end of a host's link; an interface's name has at most 15 characters."""
    return f"lv{owner}-{host}"


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
