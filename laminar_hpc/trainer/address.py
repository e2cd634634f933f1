"""Under which address the trainers of other nodes reach this host, and by which network interface.

A host's name is no good answer: Debian's /etc/hosts gives it the address 127.0.1.1, under which every other host would
reach itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable

from laminar_hpc.errors import ConfigError

HOST_VARIABLE = "LAMINAR_HOST_ADDRESS"
"""Where it is set, this host's address or name as the other nodes know it, on hosts with several networks."""

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "127.0.0.1"

_ELSEWHERE = ("192.0.2.1", 9)  # an address for documentation, RFC 5737: on no network, yet there is a route to it
_SIOCGIFADDR = 0x8915  # netdevice(7): the address of an interface
_IFREQ = struct.Struct("16s24x")  # its name; the address comes back behind it, in a struct sockaddr_in


def host_address() -> str:
    """The environment's LAMINAR_HOST_ADDRESS; else the address that this host sends to other networks from; else the one
    that its name resolves to; else, where none of them leaves the host, 127.0.0.1. ConfigError where the environment
    names a host that there is not.
    """
    chosen = os.environ.get(HOST_VARIABLE)
    if not chosen:
        return first_reachable([_routed_address(), _resolve(socket.gethostname())])
    try:
        socket.getaddrinfo(chosen, None)
    except OSError as error:
        raise ConfigError(f"{HOST_VARIABLE}: must be an address or a name of this host, got {chosen!r}") from error
    return chosen


def first_reachable(candidates: Iterable[str | None]) -> str:
    """The first of these IPv4 addresses that is not a loopback one, else 127.0.0.1."""
    return next((address for address in candidates if address is not None and not _is_loopback(address)), LOOPBACK)


def set_gloo_interface() -> None:
    """Have gloo meet at `host_address` where it would choose the loopback interface, or where the environment names an
    address of this host. GLOO_SOCKET_IFNAME, where it is set, stays as it is.
    """
    own_choice = _resolve(socket.gethostname())
    gloo_leaves_host = own_choice is not None and not _is_loopback(own_choice)
    if GLOO_VARIABLE in os.environ or (gloo_leaves_host and not os.environ.get(HOST_VARIABLE)):
        return
    address = _resolve(host_address())
    interface = None if address is None else interface_of(address)
    if interface is not None:
        os.environ[GLOO_VARIABLE] = interface


def interface_of(address: str) -> str | None:
    """The network interface of this host with this IPv4 address; None where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, _IFREQ.pack(name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def _routed_address() -> str | None:
    """The address that packets to other networks would leave from; none are sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
        except OSError:  # no route
            return None
        address: str = probe.getsockname()[0]
        return address


def _resolve(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
