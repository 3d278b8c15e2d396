"""The Host header of HTTP requests, judged against web pages of strangers."""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache

BY_PROGRAM = "Sec-Headrace"
"""A header that programs send, with any value, where a Host header may name anything.

A web page cannot set it: browsers reserve all names that begin with "Sec-" (Fetch standard, forbidden request-header).
"""


_HOST = re.compile(rb"(?:\[([\dA-Fa-f:.]{2,45})\]|([\w.-]{1,254}?)\.?)(?::\d{1,5})?")
"""host or host:port, without the dot at the end of a name. An IPv6 address stands in brackets."""


def is_known_host(value: bytes, hosts: frozenset[str]) -> bool:
    """Return whether a Host header is an address, localhost or one of `hosts`, alone or with a port.

    A web page of a stranger can have its own name mean 127.0.0.1 (DNS rebinding). Its browser then sends that name.
    """
    found = _HOST.fullmatch(value)
    if found is None:
        return False
    if found[1]:
        return _is_ip(found[1].decode(), 6)
    name = found[2].decode().lower()
    return name == "localhost" or name in hosts or _is_ip(name, 4)


@lru_cache(64)
def _is_ip(text: str, version: int) -> bool:
    try:
        return ipaddress.ip_address(text).version == version
    except ValueError:
        return False
