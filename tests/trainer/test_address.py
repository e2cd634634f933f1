"""Where other hosts reach this one."""

from __future__ import annotations

import ipaddress
import os
import socket

import pytest

from laminar_hpc.errors import ConfigError
from laminar_hpc.trainer.address import (
    GLOO_VARIABLE,
    HOST_VARIABLE,
    first_reachable,
    host_address,
    interface_of,
    set_gloo_interface,
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (HOST_VARIABLE, GLOO_VARIABLE):
        monkeypatch.setenv(name, "")  # so that the test's own changes are undone, too
        monkeypatch.delenv(name)


def name_resolves_to(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an entry for this host in /etc/hosts would have it."""
    resolve = socket.gethostbyname
    monkeypatch.setattr(
        socket, "gethostbyname", lambda name: address if name == socket.gethostname() else resolve(name)
    )


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        (["10.1.2.3", "127.0.1.1"], "10.1.2.3"),
        ([None, "127.0.1.1"], "127.0.0.1"),
        ([None, "10.1.2.4"], "10.1.2.4"),
        (["127.0.0.5", "10.1.2.4"], "10.1.2.4"),
        (["10.1.2.3", "10.1.2.4"], "10.1.2.3"),
        ([None, None], "127.0.0.1"),
    ],
)
def test_a_loopback_address_is_the_last_resort(candidates: list[str | None], expected: str) -> None:
    assert first_reachable(candidates) == expected


def test_the_address_is_one_of_this_host_and_a_loopback_one_only_where_no_other_leads_anywhere() -> None:
    address = host_address()
    with socket.create_server((address, 0)) as server:  # which only an address of this host allows
        socket.create_connection((address, server.getsockname()[1]), timeout=10.0).close()
    with open("/proc/net/route", encoding="ascii") as file:
        routes = file.read()
    has_default_route = any(line.split()[1] == "00000000" for line in routes.splitlines()[1:])
    assert not (has_default_route and ipaddress.ip_address(address).is_loopback)


def test_debians_address_of_a_name_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    name_resolves_to("127.0.1.1", monkeypatch)
    assert host_address() != "127.0.1.1"


def test_the_environment_goes_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for chosen in ("127.0.0.1", "localhost"):
        monkeypatch.setenv(HOST_VARIABLE, chosen)
        assert host_address() == chosen
    monkeypatch.setenv(HOST_VARIABLE, "no such host")
    with pytest.raises(ConfigError, match=r"LAMINAR_HOST_ADDRESS: must be an address or a name .* got 'no such host'"):
        host_address()


def test_interfaces_have_addresses() -> None:
    loopback = interface_of("127.0.0.1")
    assert loopback is not None
    assert loopback in os.listdir("/sys/class/net")
    assert interface_of("198.51.100.7") is None  # RFC 5737, too: no host has it


def test_gloo_is_told_where_it_would_choose_the_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    name_resolves_to("127.0.1.1", monkeypatch)
    set_gloo_interface()
    assert os.environ[GLOO_VARIABLE] == interface_of(host_address())


def test_gloo_is_left_alone_where_it_finds_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    name_resolves_to("10.1.2.3", monkeypatch)
    set_gloo_interface()
    assert GLOO_VARIABLE not in os.environ


def test_gloo_follows_the_environments_address_but_not_against_its_own_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name_resolves_to("10.1.2.3", monkeypatch)
    monkeypatch.setenv(HOST_VARIABLE, "127.0.0.1")
    set_gloo_interface()
    assert os.environ[GLOO_VARIABLE] == interface_of("127.0.0.1")
    monkeypatch.setenv(GLOO_VARIABLE, "ib0")
    set_gloo_interface()
    assert os.environ[GLOO_VARIABLE] == "ib0"


def test_an_address_of_another_host_tells_gloo_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    name_resolves_to("10.1.2.3", monkeypatch)
    monkeypatch.setenv(HOST_VARIABLE, "198.51.100.7")
    set_gloo_interface()
    assert GLOO_VARIABLE not in os.environ
