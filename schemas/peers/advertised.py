"""The name or address by which peers on other machines reach a server here."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

from headrace.schemas.errors import ConfigError
from headrace.schemas.settings.config import is_loopback

Name = TypeVar("Name", bound=str)


def in_url(host: str) -> str:
    """Return the host as a URL has it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def advertised(endpoints: Mapping[Name, str], host: str) -> dict[Name, str]:
    """Return endpoints with `host` in place of the address that was bound; Unix sockets as they are."""
    return {
        role: endpoint
        if endpoint.startswith("ipc://")
        else f"{endpoint.partition('://')[0]}://{in_url(host)}:{endpoint.rpartition(':')[2]}"
        for role, endpoint in endpoints.items()
    }


def host_to_advertise(bound: str, advertise: str, key: str = "broker.advertise") -> str:
    """Return the name or address by which peers reach a server that is bound to `bound`.

    It is `advertise` if that is given. Otherwise it is `bound`, or this machine's name where `bound` is a wildcard, or
    the address of its network where the name means loopback. Raises `ConfigError` for a name that does not resolve;
    `key` is the setting that has it.
    """
    if advertise:
        _resolve(advertise, key)
        return advertise
    if bound.strip("[]") not in ("0.0.0.0", "::"):
        return bound
    name = socket.getfqdn()
    try:
        if not is_loopback(_resolve(name, key)):
            return name
    except ConfigError:
        pass
    return _address_of_network() or name


def is_own_address(endpoint: str) -> bool:
    """Return whether an endpoint is on this machine: a Unix socket, loopback, or an address that can be bound here."""
    host = urlsplit(endpoint).hostname or ""
    if endpoint.startswith("ipc://") or is_loopback(host):
        return True
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: tuple[Any, ...]) -> bool:
    with socket.socket(family, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.bind(address)
        return True
    return False


def _resolve(name: str, key: str) -> str:
    try:
        return str(socket.getaddrinfo(name.strip("[]"), None)[0][4][0])
    except (OSError, UnicodeError) as error:
        problem = f"{name!r:.80} cannot be resolved on this machine ({error}); give a name or address that peers reach"
        raise ConfigError(problem, key=key) from error


def _address_of_network() -> str:
    """Return this machine's address on the way to other networks; "" for a machine without one. Sends nothing."""
    for family, far in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):  # addresses of no machine
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((far, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return ""
