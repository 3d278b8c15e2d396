"""SIGTERM, Ctrl-C and a closed terminal as a file descriptor that an event loop can wait for."""

from __future__ import annotations

import os
import signal
import socket
from types import FrameType
from typing import Any

CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopSignals:
    """Counts stop signals while the `with` block runs; the main thread only.

    `fd` becomes readable with each signal, so that a poll ends at once; `clear` empties it. A SIGHUP that was inherited
    as ignored stays ignored, as `nohup` wants it.
    """

    def __init__(self) -> None:
        self.count = 0
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self.fd = self._reader.fileno()
        self._before: dict[signal.Signals, Any] = {}
        self._fd_before = -1

    def __enter__(self) -> StopSignals:
        self._fd_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        caught = [number for number in CAUGHT if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._on_signal) for number in caught}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd_before)
        self._reader.close()
        self._writer.close()

    def clear(self) -> None:
        """Make `fd` unreadable until the next signal."""
        try:
            while os.read(self.fd, 64):
                pass
        except BlockingIOError:
            return

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
