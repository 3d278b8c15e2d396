"""Stop signals as an event that a loop can check between two pieces of work."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def _do_nothing() -> None:
    """Do nothing."""


@contextmanager
def stop_event(wake: Callable[[], None] = _do_nothing) -> Iterator[threading.Event]:
    """Give an event that the first SIGTERM or Ctrl-C sets. A second signal acts as it did before this block.

    The handler calls `wake` too, which must take no lock that the main thread may hold.

    A process that was started with SIGTERM blocked takes no notice of SIGTERM: its supervisor stops it by SIGINT.
    """
    stopping = threading.Event()
    numbers = (signal.SIGINT,) if _is_shielded() else (signal.SIGTERM, signal.SIGINT)

    def on_signal(number: int, frame: object) -> None:
        stopping.set()
        wake()
        restore()

    before = {number: signal.signal(number, on_signal) for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    try:
        yield stopping
    finally:
        restore()


@contextmanager
def sigterm_blocked(blocked: bool) -> Iterator[None]:
    """Start processes with SIGTERM blocked within this block, if `blocked`. They stay so over exec and fork."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM] if blocked else ())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _is_shielded() -> bool:
    """Return whether this process was started with SIGTERM blocked, and let it ignore the signal from now on.

    Install a handler for that: programs that envs start would inherit a signal that is blocked or ignored.
    """
    if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        signal.signal(signal.SIGTERM, _take_no_notice)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    return signal.getsignal(signal.SIGTERM) is _take_no_notice


def _take_no_notice(number: int, frame: object) -> None:
    """Do nothing."""
