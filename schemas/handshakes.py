"""The outcome of a client's handshakes with the broker, read from the events of its socket's monitor. Does no I/O.

ZeroMQ says nothing to a peer that is turned away: its socket only stays without a connection. Without these events a
wrong key would look like a missing broker.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence

from headrace.schemas.errors import KeysRefusedError, UnreachableError
from headrace.schemas.keys import BROKER, ClientKeys

log = logging.getLogger(__name__)

DISCONNECTED, BROKEN_OFF, SUCCEEDED, PROTOCOL, AUTH = 0x0200, 0x0800, 0x1000, 0x2000, 0x4000
"""libzmq's events DISCONNECTED, HANDSHAKE_FAILED_NO_DETAIL, _SUCCEEDED, _FAILED_PROTOCOL and _FAILED_AUTH."""
CLIENT_EVENTS = DISCONNECTED | BROKEN_OFF | SUCCEEDED | PROTOCOL | AUTH
SERVER_EVENTS = BROKEN_OFF | PROTOCOL

WRONG_BROKER_KEY, OTHER_MECHANISM = 0x11000001, 0x11000002
"""Values of PROTOCOL: ZMTP_CRYPTOGRAPHIC and ZMTP_MECHANISM_MISMATCH."""

_EVENT = struct.Struct("=HI")
_SAY_AFTER = 3


def read_event(frames: Sequence[bytes]) -> tuple[int, int]:
    """Read (event, value) from a monitor's message."""
    event, value = _EVENT.unpack(frames[0])
    return event, value


class Handshakes:
    """The handshakes of one client that shows `keys` at `endpoint` to the broker, or to another `server`.

    `agreed`: the server let this client in before, with the same keys.
    """

    def __init__(self, endpoint: str, keys: ClientKeys | None, server: str = BROKER, *, agreed: bool = False) -> None:
        self.endpoint = endpoint
        self.keys = keys
        self.server = server
        self.broken_off = 0
        """Number of handshakes in a row that the other side broke off."""
        self.connected = False
        """True if the last observed event was a successful handshake."""
        self._agreed = agreed

    def observe(self, frames: Sequence[bytes]) -> None:
        """Take a message of the monitor.

        Raises `KeysRefusedError` when it says that no handshake can ever succeed: after such an event libzmq does not
        connect again.
        """
        event, value = read_event(frames)
        self.connected = event == SUCCEEDED
        if event == SUCCEEDED:
            self.broken_off, self._agreed = 0, True
        elif event == AUTH:
            raise self._refused(self._not_let_in())
        elif event == PROTOCOL and value == OTHER_MECHANISM:
            raise self._refused(self._other_mechanism())
        elif event == BROKEN_OFF:
            self.broken_off += 1
            if self.broken_off == _SAY_AFTER:
                log.warning("%s", self._refused(self._breaks_off()))

    def why_silent(self, deadline_s: float) -> KeysRefusedError | UnreachableError:
        """Return the error for a broker that has not answered within `deadline_s`.

        A broken-off handshake may come from a broker that has just died, or from a tunnel to one that is not up yet. So
        it counts as a refusal only after the deadline, and never from a broker that let this client in before.
        """
        if self.broken_off and not self._agreed:
            return self._refused(self._breaks_off())
        return UnreachableError(self.server, self.endpoint, deadline_s)

    def _refused(self, detail: str) -> KeysRefusedError:
        return KeysRefusedError(self.endpoint, detail, self.server)

    def _not_let_in(self) -> str:
        if self.keys is None:
            return "refuses peers without keys; name their folder in keys.dir"
        keys, role = self.keys, self.keys.role
        return (
            f"does not let in the {role} key {keys.public[:8].decode()}... of {keys.folder}; copy {role}.secret from "
            f"where this fleet's keys were made, and check that this is the port for a {role}"
        )

    def _other_mechanism(self) -> str:
        if self.keys is None:
            return "refuses peers without keys; name their folder in keys.dir"
        return f"serves without keys, but this peer asks for them ({self.keys.folder}); give keys.dir to all or to none"

    def _breaks_off(self) -> str:
        seen = f"breaks off each handshake ({self.broken_off} so far), as a server does that"
        if self.keys is None:
            return f"{seen} asks for keys; name their folder in keys.dir, or check the address"
        file = self.keys.folder / f"{self.server}.public"
        return (
            f"{seen} has another key than that in {file}, or none; copy it from where this fleet's keys were made, "
            "or check the address"
        )
