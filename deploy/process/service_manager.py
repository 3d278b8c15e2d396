"""Messages to systemd, or another service manager of its kind, by the socket in $NOTIFY_SOCKET.

    READY=1        it serves
    WATCHDOG=1     it makes progress; a manager kills a service that does not say so within $WATCHDOG_USEC
    STATUS=TEXT    one line for `systemctl status`
    STOPPING=1     it drains

Each message is one datagram. Without $NOTIFY_SOCKET a process sends none.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

from headrace.schemas.basics.printable import one_line

if TYPE_CHECKING:
    from headrace.deploy.process.event_loop import EventLoop

_SEND_S = 0.5
_SHARE = 4
"""A sign of life is sent so many times within the manager's limit."""
_SHORTEST_S, _STATUS_S = 0.05, 5.0
_LONGEST_STATUS = 200
_MOST_USEC = 1 << 53


class ServiceManager:
    """Sends the state of this process to the manager at the socket `address`; "" for no manager.

    - watchdog_s: seconds without a sign of life after which the manager kills this process; 0.0 for never.
    """

    def __init__(self, address: str, watchdog_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._socket = _connected(address) if address else None
        self._every_s = max(_SHORTEST_S, watchdog_s / _SHARE) if watchdog_s else 0.0
        self._clock = clock
        self._is_ready = False
        self._alive_at = self._status_at = -1.0

    @classmethod
    def from_environment(cls) -> ServiceManager:
        """Return the manager that the environment names.

        Takes the variables out of the environment: processes that we start must not speak for us.
        """
        address, usec, pid = (os.environ.pop(name, "") for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"))
        is_ours = not pid or pid == str(os.getpid())
        watched = is_ours and usec.isascii() and usec.isdigit() and 0 < int(usec) < _MOST_USEC
        return cls(address, int(usec) / 1e6 if watched else 0.0)

    def ready(self) -> None:
        """Tell the manager, once, that this process serves. Earlier signs of life are not sent."""
        if not self._is_ready:
            self._is_ready = True
            self._send("READY=1")

    def alive(self) -> None:
        """Tell the manager that this process makes progress; cheap enough for every turn of a loop."""
        if self._every_s and self._is_ready and self._clock() >= self._alive_at:
            self._alive_at = self._clock() + self._every_s
            self._send("WATCHDOG=1")

    def turn(self) -> None:
        """Tell the manager that a serving loop has turned. The first call reports this process as ready."""
        self.ready()
        self.alive()

    def status(self, text: Callable[[], str]) -> None:
        """Send `text()` to the manager as the status, every few seconds at most."""
        if self._socket is not None and self._clock() >= self._status_at:
            self._status_at = self._clock() + _STATUS_S
            self._send(f"STATUS={one_line(text())[:_LONGEST_STATUS]}")

    def stopping(self) -> None:
        """Tell the manager that this process drains."""
        self._send("STOPPING=1")

    def follow(self, loop: EventLoop) -> None:
        """Give a sign of life for as long as `loop` is turned."""
        self.alive()
        if self._every_s:
            loop.call_later(self._every_s, lambda: self.follow(loop))

    def close(self) -> None:
        """Close the socket. Later calls send nothing."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, message: str) -> None:
        if self._socket is not None:
            with suppress(OSError):  # the manager is gone and expects no messages
                self._socket.send(message.encode())


@cache
def service_manager() -> ServiceManager:
    """Return the manager of this process. Call it before this process starts another."""
    return ServiceManager.from_environment()


def _connected(address: str) -> socket.socket | None:
    """Return a socket to the address: a path, or "@" and a name that is in no file system; None if there is none."""
    if address[0] not in "/@":
        return None
    out = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    out.settimeout(_SEND_S)
    try:
        out.connect("\0" + address[1:] if address[0] == "@" else address)
    except OSError:
        out.close()
        return None
    return out
