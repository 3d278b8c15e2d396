"""The Host header of HTTP requests, judged against web pages of strangers."""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from urllib.parse import urlsplit

BY_PROGRAM = "Sec-Headrace"
"""A header that programs send, with any value, where a Host header may name anything.

A web page cannot set it: browsers reserve all names that begin with "Sec-" (Fetch standard, forbidden request-header).
"""


@lru_cache(64)
def is_known_host(value: bytes, hosts: frozenset[str]) -> bool:
    """Return whether a Host header names an address, localhost or one of `hosts`.

    A web page of a stranger can have its own name mean 127.0.0.1 (DNS rebinding). Its browser then sends that name.
    """
    try:
        host = (urlsplit(f"//{value.decode('ascii')}").hostname or "").rstrip(".")
        if host == "localhost" or host in hosts:
            return True
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
