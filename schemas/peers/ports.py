"""TCP ports of our servers: who may bind without keys, and free ports that the kernel gives to no outgoing connection.

A client that reconnects on loopback to a port of the ephemeral range, while no server listens there, may be given that
very port as its own. TCP then connects the client to itself, and the server cannot have its port back.
"""

from __future__ import annotations

import errno
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from headrace.schemas.errors import ConfigError, PortInUseError
from headrace.schemas.peers.advertised import in_url

log = logging.getLogger(__name__)

LOWEST, HIGHEST = 10_000, 65_535
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES = 64


def quiet_ports(rng: random.Random | None = None) -> Iterator[int]:
    """Yield some ports outside the ephemeral range, in random order, for the caller to try one after another.

    Yields none where the range leaves none, or cannot be read.
    """
    low, high = ephemeral_range()
    outside = [*range(LOWEST, min(low, HIGHEST)), *range(max(high + 1, LOWEST), HIGHEST + 1)]
    yield from (rng or random.Random()).sample(outside, min(_TRIES, len(outside)))


def ephemeral_range() -> tuple[int, int]:
    """Return the first and last port that the kernel gives to outgoing connections; all ports where it does not say."""
    try:
        low, high = map(int, _RANGE.read_text().split())
    except (OSError, ValueError):
        return 0, HIGHEST
    return low, high


def ports_to_try(port: int) -> Iterator[int | str]:
    """Yield the ports at which to bind, one after another; for 0 quiet ones, then "*", with which libzmq takes any."""
    if port:
        yield port
        return
    yield from quiet_ports()
    yield "*"


def bind_to_port(bind: Callable[[str], object], host: str, port: int, key: str) -> None:
    """Bind a socket by its `bind` to `port` at `host`; for 0, to a free one.

    Raises `PortInUseError`, and `ConfigError` with `key` for a host that is not this machine's.
    """
    endpoint = ""
    for candidate in ports_to_try(port):
        endpoint = f"tcp://{in_url(host)}:{candidate}"
        try:
            bind(endpoint)
            return
        except Exception as error:  # pyzmq's ZMQError, which schemas do not import
            number = getattr(error, "errno", None)
            if number in (None, errno.EMFILE):
                raise
            if number != errno.EADDRINUSE:
                raise ConfigError(f"{host!r} cannot be bound: {error}", key=key) from error
    raise PortInUseError(endpoint, f"{key.removesuffix('host')}port")


def check_insecure(host: str, key: str, insecure_key: str, *, allowed: bool) -> None:
    """Refuse to serve by TCP without keys, unless that is allowed: any user could connect, and listen.

    `key` is the setting of the host, `insecure_key` the one that allows it. Raises `ConfigError`.
    """
    if not allowed:
        raise ConfigError(
            f"{host!r} serves by TCP, and there are no keys; name their folder in keys.dir (`headrace keys init` makes "
            "them), leave it out to serve this user's processes on this machine by Unix sockets, or set "
            f"{insecure_key} = true on a network you trust",
            key=key,
        )
    log.warning("serving %s without encryption or authentication, since %s = true", host, insecure_key)
