"""ZAP (ZeroMQ RFC 27): libzmq asks the server's process whether a new connection may stay.

Its I/O thread sends a request to a socket at `ENDPOINT` in the server's own context, and waits for the answer.
"""

from __future__ import annotations

from base64 import b85encode
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.schemas.credentials.keys import ROLES_AT, BrokerKeys
from headrace.schemas.credentials.loopback_token import ServerToken

ENDPOINT = "inproc://zeromq.zap.01"

_Z85 = bytes.maketrans(
    b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~",
    b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#",
)
"""From the digits of RFC 1924, as in base64.b85encode, to those of Z85 (ZeroMQ RFC 32)."""


@dataclass(frozen=True, slots=True)
class ZapAnswer:
    """The answer to one request."""

    frames: list[bytes]
    port: str
    """The ZAP domain of the port to which the peer connected."""
    why: str
    """The reason of a refusal; "" if the peer is let in."""
    seen: str
    """The peer, as the log names it."""


def judge(request: Sequence[bytes], keys: BrokerKeys | ServerToken) -> ZapAnswer:
    """Judge the peer of one request by the key or the token that it shows.

    The connection's user id becomes its public key in Z85, or with a token its role. The status 400 tells the peer that
    the refusal is final, and it does not connect again.
    """
    version, number, domain, address, _, mechanism, *shown = request
    port = domain.decode()
    if isinstance(keys, ServerToken):
        role = keys.role_of(shown)
        user, who = role.encode(), ""
        why = "" if role in ROLES_AT[port] else "another role's name" if role else "another token"
    else:
        user = b85encode(shown[0]).translate(_Z85) if mechanism == b"CURVE" and shown else b""
        why, who = keys.judge(port, user)[1], f"{user[:8].decode()}... "
    status = [b"400", why.encode(), b""] if why else [b"200", b"OK", user]
    return ZapAnswer([version, number, *status, b""], port, why, f"{who}from {address.decode(errors='replace')}")
