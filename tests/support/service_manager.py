"""A service manager's end of the socket by which its services speak."""

from __future__ import annotations

import os
import socket


class Manager:
    """The manager's end of the socket."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address[0] == "@" else address)
        self._socket.setblocking(False)
        self.told: list[str] = []

    def take(self) -> list[str]:
        """Return what has come since the last call."""
        new = []
        try:
            while True:
                new.append(self._socket.recv(4096).decode())
        except BlockingIOError:
            self.told += new
            return new

    def hears(self, message: str) -> bool:
        return any(told.startswith(message) for told in self.take())

    def environment(self, watchdog_s: float = 0.4) -> dict[str, str]:
        return {**os.environ, "NOTIFY_SOCKET": self.address, "WATCHDOG_USEC": str(int(watchdog_s * 1e6))}

    def close(self) -> None:
        self._socket.close()
