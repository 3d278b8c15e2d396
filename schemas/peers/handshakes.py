"""The outcome of a client's handshakes with a server, read from the events of its socket's monitor.

ZeroMQ says nothing to a peer that is turned away: its socket only stays without a connection. Without these events a
wrong key would look like a missing broker.

A server on loopback may ask for a token, and have another one after a restart. So a client that is turned away there
looks for the token again, and connects again if there is another one.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol
from urllib.parse import urlsplit

from headrace.schemas.credentials.key_files import key_name
from headrace.schemas.credentials.keys import ClientKeys, PeerKeys, server_of
from headrace.schemas.credentials.loopback_token import LoopbackToken, read_named_token
from headrace.schemas.errors import KeysError, KeysRefusedError, UnreachableError
from headrace.schemas.peers.port_listing import listed_token
from headrace.schemas.peers.socket_folder import check_socket
from headrace.schemas.settings.config import is_loopback

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
_ATTEMPTS, _ATTEMPT_PAUSE_S = 50, 0.1
"""How often, and after which pause, a client on loopback tries again at a server that speaks another mechanism: one
that has just started may not have listed its port yet.
"""
_NO_TOKEN = {"PLAIN_SERVER": 0}
"""Takes back libzmq's choice of PLAIN."""


class ClientSocket(Protocol):
    """A pyzmq socket."""

    def connect(self, endpoint: str) -> Any:
        """Connect."""

    def disconnect(self, endpoint: str) -> Any:
        """Undo `connect`. Raises pyzmq's ZMQError if there is no such connection."""


def read_event(frames: Sequence[bytes]) -> tuple[int, int]:
    """Read (event, value) from a monitor's message."""
    event, value = _EVENT.unpack(frames[0])
    return event, value


class Handshakes:
    """The handshakes of one client of `role` at `endpoint`, and what it shows there: `keys`, or a token that it finds.

    - server: a name for the server; None: its role.
    - agreed: the server let this client in before, with the same keys.

    Raises `RunDirError` for a Unix socket at which another user could serve, and `ConfigError` for one without a
    path.
    """

    def __init__(
        self, endpoint: str, role: str, keys: PeerKeys | None, *, server: str | None = None, agreed: bool = False
    ) -> None:
        check_socket(endpoint)
        self.endpoint = endpoint
        self.role = role
        self.server = server or server_of(role)
        self.broken_off = 0
        """Number of handshakes in a row that the other side broke off."""
        self._say_at = _SAY_AFTER
        self.connected = False
        """True if the last observed event was a successful handshake."""
        self._agreed = agreed
        self._given = keys
        self._port = _loopback_port(endpoint)
        self._attempts = 0
        self.keys = self._look()

    def options(self) -> Mapping[str, bytes | int]:
        """Return the socket options to set before connecting, by their ZeroMQ names."""
        return self.keys.options() if self.keys is not None else {}

    def observe(self, frames: Sequence[bytes]) -> bool:
        """Take a message of the monitor. Return whether to `connect_again`.

        Raises `KeysRefusedError` when it says that no handshake can ever succeed: after such an event libzmq does not
        connect again. May wait a moment for a server on loopback that has just started.
        """
        event, value = read_event(frames)
        self.connected = event == SUCCEEDED
        if event == SUCCEEDED:
            self.broken_off, self._attempts, self._agreed = 0, 0, True
            self._say_at = _SAY_AFTER
        elif event == AUTH:
            if not self._finds_another():
                raise self._refused(self._not_let_in())
            return True
        elif event == PROTOCOL and value == OTHER_MECHANISM:
            if not (self._finds_another() or self._waits_for_listing()):
                raise self._refused(self._other_mechanism())
            return True
        elif event == BROKEN_OFF:
            self.broken_off += 1
            if self._finds_another():
                return True
            if self.broken_off >= self._say_at:
                self._say_at *= _SAY_AGAIN
                log.warning("%s", self._refused(self._breaks_off()))
        return False

    def connect_again(self, socket: ClientSocket) -> None:
        """Connect the socket with what this client shows now."""
        # pyzmq's ZMQError, which schemas do not import: libzmq has given that connection up already
        with suppress(Exception):
            socket.disconnect(self.endpoint)
        for name, value in (self.options() or _NO_TOKEN).items():
            setattr(socket, name.lower(), value)
        socket.connect(self.endpoint)

    def why_silent(self, deadline_s: float) -> KeysRefusedError | UnreachableError:
        """Return the error for a broker that has not answered within `deadline_s`.

        A broken-off handshake may come from a broker that has just died, or from a tunnel to one that is not up yet. So
        it counts as a refusal only after the deadline, and never from a broker that let this client in before.
        """
        if self._attempts and not self._agreed:
            return self._refused(self._other_mechanism())
        if self.broken_off and not self._agreed:
            return self._refused(self._breaks_off())
        why = f"it {self._breaks_off()}" if self.broken_off >= _SAY_AFTER else ""
        return UnreachableError(self.server, self.endpoint, deadline_s, why)

    # -- the token ----------------------------------------------------------------------------------------------------

    def _look(self) -> PeerKeys | None:
        """Return what to show: the keys that were given, or on loopback the token of the server at this port.

        A token that the user named is read again. It may have changed with its run, but no other one is taken.
        """
        given = self._given
        if isinstance(given, ClientKeys) or self._port is None:
            return given if isinstance(given, ClientKeys) else None
        listed = None if given is not None and given.named else listed_token(self._port, self.role)
        if listed is None and given is not None:
            with suppress(KeysError):
                return replace(read_named_token(given.path, self.role), named=given.named)
        return listed

    def _finds_another(self) -> bool:
        """Look for the token again. Return whether another one is to be shown, or none any more."""
        before, self.keys = self.keys, self._look()
        return self.keys != before

    def _waits_for_listing(self) -> bool:
        """Wait a moment for a server on loopback that may not have listed its port yet. Return False after a while."""
        if self._port is None or isinstance(self.keys, ClientKeys) or self._attempts >= _ATTEMPTS:
            return False
        self._attempts += 1
        time.sleep(_ATTEMPT_PAUSE_S)
        return True

    # -- sentences ----------------------------------------------------------------------------------------------------

    def _refused(self, detail: str) -> KeysRefusedError:
        return KeysRefusedError(self.endpoint, detail, self.server)

    def _not_let_in(self) -> str:
        if self.keys is None:
            return self._asks_for_keys()
        if isinstance(self.keys, LoopbackToken):
            return (
                f"does not let in the {self.role} with the token in {self.keys.path}; it is another run's token: name "
                f"this fleet's run directory in keys.dir, and check that this is the port for a {self.role}"
            )
        return (
            f"does not let in the {self.role} key {self.keys.public[:8].decode()}... of {self.keys.folder}; copy "
            f"{key_name(self.role, self.keys.group)}.secret from where this fleet's keys were made, unless it was "
            f"revoked there, and check that this is the port for a {self.role}"
        )

    def _asks_for_keys(self) -> str:
        run = "" if self._port is None else ", or the run directory of its fleet, or a copy of the file token there"
        return f"refuses peers without keys; name their folder in keys.dir{run}"

    def _other_mechanism(self) -> str:
        if self.keys is None:
            return self._asks_for_keys()
        if isinstance(self.keys, LoopbackToken):
            return f"does not ask for a token, but this peer shows the one in {self.keys.path}; check the address"
        return f"serves without keys, but this peer asks for them ({self.keys.folder}); give keys.dir to all or to none"

    def _breaks_off(self) -> str:
        seen = f"breaks off each handshake ({self.broken_off} so far)"
        if not isinstance(self.keys, ClientKeys):
            return f"{seen}; it seems that it {self._other_mechanism()}"
        file = self.keys.folder / f"{server_of(self.role)}.public"
        return (
            f"{seen}, as a server does that has another key than that in {file}, or none, or is too busy to admit it "
            "in time; read its log, check the address, or copy the right key from where this fleet's keys were made"
        )


def _loopback_port(endpoint: str) -> int | None:
    """Return the port of an address on loopback; None for any other address, and for an invalid one."""
    with suppress(AttributeError, TypeError, ValueError):
        parts = urlsplit(endpoint)
        if is_loopback(parts.hostname or ""):
            return parts.port
    return None
