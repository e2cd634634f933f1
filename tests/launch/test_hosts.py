"""Hosts on this machine: they reach each other over limited links, and nothing of them stays."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from laminar_hpc.errors import ConfigError
from laminar_hpc.launch import hosts as hosts_module
from laminar_hpc.launch.hosts import Hosts, remove_leftovers

SERVER = """
import socket, sys
server = socket.create_server(("0.0.0.0", 0))
print(server.getsockname()[1], flush=True)
while True:
    connection, _ = server.accept()
    received = 0
    while data := connection.recv(1 << 16):
        received += len(data)
    connection.sendall(str(received).encode())
    connection.close()
"""

CLIENT = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[4])) as connection:
    connection.sendall(bytes(int(sys.argv[3])))
    connection.shutdown(socket.SHUT_WR)
    connection.settimeout(30.0)
    print(connection.recv(100).decode(), socket.gethostbyname(sys.argv[5]))
"""


def _reason() -> str:
    try:
        hosts_module.check()
    except ConfigError as error:
        return str(error)
    return ""


may_have_hosts = pytest.mark.skipif(bool(_reason()), reason=_reason() or "-")


@pytest.fixture
def pair() -> Iterator[Hosts]:
    """Two hosts, 20 Mbit/s each way."""
    with Hosts(2, "20mbit") as hosts:
        yield hosts


def _on(hosts: Hosts, host: int, *command: str) -> list[str]:
    return ["ip", "netns", "exec", hosts.names[host], *command]


def _start_server(hosts: Hosts) -> tuple[subprocess.Popen[str], str]:
    server = subprocess.Popen(_on(hosts, 1, sys.executable, "-c", SERVER), stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    return server, server.stdout.readline().strip()


def _send_to(
    hosts: Hosts, address: str, port: str, nbytes: int = 1, timeout_s: float = 0.5
) -> subprocess.CompletedProcess[str]:
    words = [address, port, str(nbytes), str(timeout_s), hosts.names[1]]
    line = _on(hosts, 0, sys.executable, "-c", CLIENT, *words)
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)


def _send(hosts: Hosts, port: str, nbytes: int, timeout_s: float = 10.0) -> subprocess.CompletedProcess[str]:
    return _send_to(hosts, hosts.address(1), port, nbytes, timeout_s)


@may_have_hosts
def test_hosts_reach_each_other_by_name_and_no_faster_than_the_link(pair: Hosts) -> None:
    server, port = _start_server(pair)
    began_s = time.monotonic()
    sent = _send(pair, port, 2_500_000)
    seconds = time.monotonic() - began_s
    server.kill()
    server.communicate()
    assert sent.stdout.split() == ["2500000", pair.address(1)], sent.stderr
    assert seconds > 0.9  # 1 s at 20 Mbit/s, less the burst of 128 kB


@may_have_hosts
def test_nothing_passes_a_link_that_is_unplugged(pair: Hosts) -> None:
    server, port = _start_server(pair)
    pair.set_link(1, up=False)
    cut = _send(pair, port, 1, timeout_s=0.5)
    pair.set_link(1, up=True)
    plugged_in = _send(pair, port, 1)
    server.kill()
    server.communicate()
    assert "Error" in cut.stderr
    assert plugged_in.stdout.startswith("1 "), plugged_in.stderr


@may_have_hosts
def test_each_card_has_a_link_of_its_own() -> None:
    with Hosts(2, "20mbit", cards=2) as hosts:
        server, port = _start_server(hosts)
        words = [sys.executable, "-c", CLIENT]
        began_s = time.monotonic()
        clients = [
            subprocess.Popen(
                _on(hosts, 0, *words, hosts.address(1, card), port, "1250000", "10", hosts.names[1]),
                stdout=subprocess.PIPE,
                text=True,
            )
            for card in (0, 1)
        ]
        hosts_reached = [client.communicate(timeout=60)[0].split() for client in clients]
        seconds = time.monotonic() - began_s
        hosts.set_link(1, up=False)
        cut = [_send_to(hosts, hosts.address(1, card), port) for card in (0, 1)]
        server.kill()
        server.communicate()
    assert hosts_reached == [["1250000", hosts.address(1)]] * 2
    assert seconds > 0.4  # 0.5 s for each at 20 Mbit/s, less the burst of 128 kB
    assert all("Error" in client.stderr for client in cut)


@may_have_hosts
def test_clear_ends_what_runs_on_the_hosts_and_plugs_links_in_again(pair: Hosts) -> None:
    server, port = _start_server(pair)
    pair.set_link(1, up=False)
    assert "Error" in _send(pair, port, 1, timeout_s=0.2).stderr
    pair.clear()
    assert server.wait(timeout=10) == -9
    server, port = _start_server(pair)
    sent = _send(pair, port, 1, timeout_s=1.0)
    server.kill()
    server.communicate()
    assert sent.stdout.startswith("1 "), sent.stderr


@may_have_hosts
def test_at_the_end_nothing_is_left() -> None:
    hosts = Hosts(1, "1gbit")
    name = hosts.names[0]

    def fails_with_a_process_on_a_host() -> None:
        with hosts:
            children.append(_wait_on(hosts.names[0]))
            raise RuntimeError("on purpose")

    children: list[subprocess.Popen[bytes]] = []
    with pytest.raises(RuntimeError, match="on purpose"):
        fails_with_a_process_on_a_host()
    (child,) = children
    child.communicate(timeout=10)
    assert child.returncode == -9
    assert name not in _output("ip", "netns", "list")
    assert f"{os.getpid()}" not in _output("ip", "-brief", "link")
    assert not os.path.exists(f"/etc/netns/{name}")


@may_have_hosts
def test_leftovers_of_a_program_that_is_no_more_are_taken_away_and_others_stay(pair: Hosts) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    name = f"laminar-{gone.pid}-0"
    subprocess.run(["ip", "netns", "add", name], check=True)
    child = _wait_on(name)
    remove_leftovers()
    child.communicate(timeout=10)
    assert child.returncode == -9
    names = _output("ip", "netns", "list")
    assert name not in names
    assert pair.names[0] in names


def _wait_on(name: str) -> subprocess.Popen[bytes]:
    """A process on the host of that name, which is there when this returns, and waits for ever."""
    line = ["ip", "netns", "exec", name, "sh", "-c", "echo here; exec cat"]
    child = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"here\n"
    return child


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("count", "rate", "text"),
    [
        (0, "200mbit", "there can be 1 to 64, got 0"),
        (65, "200mbit", "there can be 1 to 64, got 65"),
        (2, "fast", "such as 200mbit, got 'fast'"),
        (2, "200mbit; reboot", "such as 200mbit"),
    ],
)
def test_numbers_and_rates_that_cannot_be_are_refused(count: int, rate: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Hosts(count, rate)
    with pytest.raises(ConfigError, match="each has 1 to 4 network cards, got 5"):
        Hosts(2, "200mbit", cards=5)


def test_who_is_not_root_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="made by root only"):
        Hosts(1, "200mbit").__enter__()


def test_where_there_is_no_iproute2_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"no `ip` on PATH"):
        Hosts(1, "200mbit").__enter__()
