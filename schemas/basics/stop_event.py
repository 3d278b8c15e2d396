"""Stop signals as an event that a loop can check between two pieces of work, Ctrl-C held back, and names of signals."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` looks for an enum's member in each handler: 2 us a call
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_AGAIN_S = 0.01
"""Seconds after which a Ctrl-C that was held back comes again: the caller has what the call returned by then."""


class StoppedError(Exception):
    """This process was told to stop before its wait was over."""


class StopEvent(threading.Event):
    """An event that a stop signal sets. `came` says which signal it was, and which line was running."""

    came = ""


@contextmanager
def stop_event() -> Iterator[StopEvent]:
    """Give an event that the first SIGTERM or Ctrl-C sets. A second signal acts as it did before this block.

    A process that was started with SIGTERM blocked takes no notice of SIGTERM: its supervisor stops it by SIGINT.
    """
    global _current
    stopping = _current = StopEvent()
    numbers = (signal.SIGINT,) if _is_shielded() else (signal.SIGTERM, signal.SIGINT)

    def on_signal(number: int, frame: FrameType | None) -> None:
        stopping.came = signal.Signals(number).name
        if frame is not None:
            stopping.came += f", which came in {frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"
        restore()  # first: `set` waits for a lock that the main thread may hold
        stopping.set()

    before = {number: signal.signal(number, on_signal) for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    try:
        yield stopping
    finally:
        restore()
        _current = None


_current: StopEvent | None = None
"""The event of the `stop_event` block in which this process is."""


def check_stop() -> None:
    """Raise `StoppedError` if a signal has come in a `stop_event` block. Call it in a wait that knows no such event."""
    if _current is not None and _current.is_set():
        raise StoppedError(f"stopped by {_current.came.partition(',')[0]}")


class interrupt_held:  # it stands for a function; one made by `contextmanager` takes twice as long
    """Hold back Ctrl-C until the main thread has left this block, or enters `interrupt_raises` within it.

    So it never falls between two changes that belong together, nor takes from the caller what the block returns. A
    handler other than Python's own stays in place. Blocks may be nested.
    """

    came = holds = False
    raises = False
    """True in a block of `interrupt_raises`."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.raises:
            raise KeyboardInterrupt
        self.came = True

    def __enter__(self) -> None:
        if _is_main_thread() and _signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            _signal.signal(signal.SIGINT, self)
            self.holds = True

    def __exit__(self, *_: object) -> None:
        if not self.holds:
            return
        _signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.came:
            again = threading.Timer(_AGAIN_S, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
            again.daemon = True
            again.start()


@contextmanager
def interrupt_raises() -> Iterator[None]:
    """Let a Ctrl-C that `interrupt_held` holds back raise in this block, which waits and changes nothing."""
    held = _signal.getsignal(signal.SIGINT) if _is_main_thread() else None
    if not isinstance(held, interrupt_held):
        yield
        return
    try:
        held.raises = True
        if held.came:
            held.came = False
            raise KeyboardInterrupt
        yield
    finally:
        held.raises = False


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


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


_forks = 0
"""Number of forks from the first process of Python to this one."""
_owned_at: int | None = None


def _note_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_note_fork)


def own_process() -> None:
    """Note that this process runs user code. A copy that this code forks is not to do our work a second time."""
    global _owned_at
    _owned_at = _forks


def end_copy() -> None:
    """End this process at once if user code has forked it. Call this where such a copy would go on with our work."""
    if _owned_at is not None and _forks != _owned_at:
        os._exit(1)


def raise_stop(error: BaseException) -> None:
    """Raise `error`, which came out of user code, if it is to end this process: a signal's handler has raised it.

    Everything else is the user code's own error, also `sys.exit()`, and a `BaseException` of a library. In a copy of
    this process that the code has forked, `sys.exit()` ends the copy.
    """
    if isinstance(error, Exception):
        return
    if isinstance(error, SystemExit) and _owned_at is not None and _forks != _owned_at:
        os._exit(error.code if isinstance(error.code, int) else int(error.code is not None))
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    if isinstance(error, KeyboardInterrupt) and signal.default_int_handler in handlers:
        raise error  # a handler in C leaves no frame
    codes = {getattr(handler, "__code__", None) for handler in handlers}
    if any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__)):
        raise error


_NAMES = {number.value: number.name for number in signal.Signals}


def signal_name(number: int) -> str:
    """Return "SIGKILL" and the like; most real-time signals have no name, so their number stands for it."""
    return _NAMES.get(number, str(number))
