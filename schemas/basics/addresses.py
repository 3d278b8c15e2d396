"""The forms of addresses that Headrace connects to. libzmq refuses some others only in the call that connects."""

from __future__ import annotations

import re

HOST = r"([A-Za-z0-9][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+\])"
"""Pattern of a name or address of a machine, as a URL has it."""

_LOCAL_HOST = r"\[[0-9A-Fa-f:.]+%[A-Za-z0-9_.-]+\]"
"""Pattern of an address that is known to one network interface alone."""

PORT = r"(6553[0-5]|655[0-2]\d|65[0-4]\d\d|6[0-4]\d{3}|[1-5]\d{4}|[1-9]\d{0,3})"

SOCKET = r"ipc:///[^\x00-\x1f\x7f-\x9f]{1,106}"
"""Pattern of the endpoint of a Unix socket. Its path may have spaces, and no line breaks: they would forge log lines.
"""

_BROKER = re.compile(rf"tcp://({HOST}|{_LOCAL_HOST}):{PORT}|{SOCKET}", re.ASCII)
_LONGEST = 255


def is_broker_address(text: object) -> bool:
    """Return whether this is the address of a broker, or of a worker's port for peers by ZeroMQ."""
    return isinstance(text, str) and len(text) <= _LONGEST and _BROKER.fullmatch(text) is not None
