"""Drains what env processes print, so that no process blocks, and keeps the last 4 KiB of each."""

from __future__ import annotations

import os
import select
import threading

_KEPT = 4096
_READ = 1 << 16


class Tail:
    """The end of the output from one pipe."""

    def __init__(self) -> None:
        self._kept = b""
        self.finished = threading.Event()
        """Set when the pipe is closed at the other end, and everything was read."""

    def add(self, data: bytes) -> None:
        """Add what was read."""
        self._kept = (self._kept + data)[-_KEPT:]

    def text(self) -> str:
        """Return the last output, without an incomplete first line."""
        kept = self._kept
        if len(kept) == _KEPT:
            kept = kept.partition(b"\n")[2] or kept
        return kept.decode(errors="replace")


class OutputDrain:
    """A thread that reads any number of pipes, and sleeps while none has output."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._tails: dict[int, Tail] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="env-output", daemon=True)
        self._thread.start()

    def watch(self, pipe: int) -> Tail:
        """Read `pipe` from now on. The drain owns it, and closes it at its end."""
        os.set_blocking(pipe, False)
        tail = Tail()
        with self._lock:
            self._tails[pipe] = tail
        self._epoll.register(pipe, select.EPOLLIN)
        return tail

    def stop(self) -> None:
        """Stop the thread, and close the open pipes: a process that was not killed may hold the other end."""
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        for pipe in list(self._tails):
            self._finish(pipe)
        self._epoll.close()
        os.close(self._wake)

    def _run(self) -> None:
        while True:
            for pipe, _ in self._epoll.poll():
                if pipe == self._wake:
                    return
                try:
                    data = os.read(pipe, _READ)
                except BlockingIOError:
                    continue
                if data:
                    self._tails[pipe].add(data)
                else:
                    self._epoll.unregister(pipe)
                    self._finish(pipe)

    def _finish(self, pipe: int) -> None:
        with self._lock:
            tail = self._tails.pop(pipe)
        os.close(pipe)
        tail.finished.set()
