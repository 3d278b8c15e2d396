"""ZAP (ZeroMQ RFC 27): libzmq asks the server's process whether a new connection may stay.

Its I/O thread sends a request to a socket at `ENDPOINT` in the server's own context, and waits for the answer.
"""

from __future__ import annotations

from base64 import b85encode
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.schemas.credentials.keys import BrokerKeys

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


def judge(request: Sequence[bytes], keys: BrokerKeys) -> ZapAnswer:
    """Judge the peer of one request by the key that it shows.

    The connection's user id becomes its public key in Z85. The status 400 tells the peer that the refusal is final, and
    it does not connect again.
    """
    version, number, domain, address, _, mechanism, *shown = request
    port = domain.decode()
    user = b85encode(shown[0]).translate(_Z85) if mechanism == b"CURVE" and shown else b""
    _, why = keys.judge(port, user)
    status = [b"400", why.encode(), b""] if why else [b"200", b"OK", user]
    seen = f"{user[:8].decode()}... from {address.decode(errors='replace')}"
    return ZapAnswer([version, number, *status, b""], port, why, seen)
