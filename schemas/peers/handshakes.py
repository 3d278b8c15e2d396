"""The outcome of a client's handshakes with a server, read from the events of its socket's monitor.

ZeroMQ says nothing to a peer that is turned away: its socket only stays without a connection. Without these events a
wrong key would look like a missing broker.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Mapping, Sequence

from headrace.schemas.credentials.key_files import key_name
from headrace.schemas.credentials.keys import ClientKeys, server_of
from headrace.schemas.errors import KeysRefusedError, UnreachableError
from headrace.schemas.peers.socket_folder import check_socket

log = logging.getLogger(__name__)

DISCONNECTED, BROKEN_OFF, SUCCEEDED, PROTOCOL, AUTH = 0x0200, 0x0800, 0x1000, 0x2000, 0x4000
"""libzmq's events DISCONNECTED, HANDSHAKE_FAILED_NO_DETAIL, _SUCCEEDED, _FAILED_PROTOCOL and _FAILED_AUTH."""
CLIENT_EVENTS = DISCONNECTED | BROKEN_OFF | SUCCEEDED | PROTOCOL | AUTH

WRONG_BROKER_KEY, OTHER_MECHANISM = 0x11000001, 0x11000002
"""Values of PROTOCOL: ZMTP_CRYPTOGRAPHIC and ZMTP_MECHANISM_MISMATCH."""

_EVENT = struct.Struct("=HI")
_SAY_AFTER, _SAY_AGAIN = 3, 16
"""Broken-off handshakes in a row after which the log says so, and how many times as many until it says so again. A
client that waits tries about twenty times a second.
"""


def read_event(frames: Sequence[bytes]) -> tuple[int, int]:
    """Read (event, value) from a monitor's message."""
    event, value = _EVENT.unpack(frames[0])
    return event, value


def patience_setting(role: str, of_learner: str = "connect_timeout_s") -> str:
    """Return the setting that says how long a peer of `role` waits for its server; "" where none does.

    A learner's is the argument `of_learner` of its stream.
    """
    if role == "learner":
        return of_learner
    return "worker.connect_timeout_s" if role == "worker" or role.startswith("env") else ""


class Handshakes:
    """The handshakes of one client of `role` at `endpoint`, which shows `keys`, or none.

    - server: a name for the server; None: its role.
    - agreed: the server let this client in before, with the same keys.

    Raises `RunDirError` for a Unix socket at which another user could serve, and `ConfigError` for one without a
    path.
    """

    def __init__(
        self, endpoint: str, role: str, keys: ClientKeys | None, *, server: str | None = None, agreed: bool = False
    ) -> None:
        check_socket(endpoint)
        self.endpoint = endpoint
        self.role = role
        self.keys = keys
        self.server = server or server_of(role)
        self.broken_off = 0
        """Number of handshakes in a row that the other side broke off."""
        self._say_at = _SAY_AFTER
        self.connected = False
        """True if the last observed event was a successful handshake."""
        self._agreed = agreed

    def options(self) -> Mapping[str, bytes]:
        """Return the socket options to set before connecting, by their ZeroMQ names."""
        return self.keys.options() if self.keys is not None else {}

    def observe(self, frames: Sequence[bytes]) -> None:
        """Take a message of the monitor.

        Raises `KeysRefusedError` when it says that no handshake can ever succeed: after such an event libzmq does not
        connect again.
        """
        event, value = read_event(frames)
        self.connected = event == SUCCEEDED
        if event == SUCCEEDED:
            self.broken_off, self._agreed = 0, True
            self._say_at = _SAY_AFTER
        elif event == AUTH:
            raise self._refused(self._not_let_in())
        elif event == PROTOCOL and value == OTHER_MECHANISM:
            raise self._refused(self._other_mechanism())
        elif event == BROKEN_OFF:
            self.broken_off += 1
            if self.broken_off >= self._say_at:
                self._say_at *= _SAY_AGAIN
                log.warning("%s", self._refused(self._breaks_off()))

    def why_silent(self, deadline_s: float) -> KeysRefusedError | UnreachableError:
        """Return the error for a broker that has not answered within `deadline_s`.

        A broken-off handshake may come from a broker that has just died, or from a tunnel to one that is not up yet. So
        it counts as a refusal only after the deadline, and never from a broker that let this client in before.
        """
        if self.broken_off and not self._agreed:
            return self._refused(self._breaks_off())
        why = f"it {self._breaks_off()}" if self.broken_off >= _SAY_AFTER else ""
        return UnreachableError(self.server, self.endpoint, deadline_s, why, setting=patience_setting(self.role))

    # -- sentences ----------------------------------------------------------------------------------------------------

    def _refused(self, detail: str) -> KeysRefusedError:
        return KeysRefusedError(self.endpoint, detail, self.server)

    def _not_let_in(self) -> str:
        if self.keys is None:
            return self._other_mechanism()
        return (
            f"does not let in the {self.role} key {self.keys.public[:8].decode()}... of {self.keys.folder}; copy "
            f"{key_name(self.role, self.keys.group)}.secret from where this fleet's keys were made, unless it was "
            f"revoked there, and check that this is the port for a {self.role}"
        )

    def _other_mechanism(self) -> str:
        if self.keys is None:
            return "refuses peers without keys; name their folder in keys.dir"
        return f"serves without keys, but this peer asks for them ({self.keys.folder}); give keys.dir to all or to none"

    def _breaks_off(self) -> str:
        seen = f"breaks off each handshake ({self.broken_off} so far)"
        if self.keys is None:
            return f"{seen}; it seems that it {self._other_mechanism()}"
        file = self.keys.folder / f"{server_of(self.role)}.public"
        return (
            f"{seen}, as a server does that has another key than that in {file}, or none, or is too busy to admit it "
            "in time; read its log, check the address, or copy the right key from where this fleet's keys were made"
        )
