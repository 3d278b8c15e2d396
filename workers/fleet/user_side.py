"""Changes of env code to the whole process, and signal handlers that it sets: both hold in env code only.

Envs share their process with the policy and with delivery. `np.seterr(all="raise")` of an env must not make the policy
raise, nor `torch.set_default_dtype` make it compute in another type. Envs keep what they have set.
"""

from __future__ import annotations

import ctypes
import locale
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import torch

from headrace.schemas.accounts.user_calls import UserCall
from headrace.workers.metrics.call_mark import CallMark, CallWords

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.1
_ENV_ROOMS = "headrace.workers.envs.", "headrace.workers.agents."
"""Prefixes of the modules that call envs."""


_STOPS = signal.SIGTERM, signal.SIGINT


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _items() -> list[_Item]:
    items = [
        _Item("numpy's reaction to errors (np.seterr)", np.geterr, lambda kept: np.seterr(**kept)),
        _Item("warnings as errors (warnings.filters)", _error_filters, _set_error_filters),
        _Item("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
        _Item("torch's default device", lambda: torch.empty(0).device, _set_default_device),
        _Item("the locale", partial(locale.setlocale, locale.LC_ALL), partial(locale.setlocale, locale.LC_ALL)),
        _Item("the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
        _Item("the working directory", _working_directory, os.chdir),
    ]
    library = ctypes.CDLL(None)
    if hasattr(library, "fegetround"):
        items.append(_Item("the rounding mode", library.fegetround, library.fesetround))
    return items


class UserSide:
    """Keeps what env code changes in the whole process for env code alone. A `CallMark` calls it.

    It looks from time to time, and after each construction of an env. `look` finds what was changed since.
    """

    def __init__(self) -> None:
        self._ours = {item: item.read() for item in _items()}
        self._theirs: dict[_Item, Any] = {}
        """The items that env code has changed, with its own values."""
        self._look_at = 0.0
        self._is_main = threading.current_thread() is threading.main_thread()

    def keep(self) -> None:
        """Take what our code has changed, such as a policy's module when it was built, as our own."""
        self._ours = {item: item.read() for item in self._ours}

    def enter(self) -> None:
        """Give env code what it has set, because it runs now."""
        for item, value in self._theirs.items():
            _write(item, value)

    def leave(self, now: float, *, built: bool = False) -> None:
        """Put our values back, because our code runs again at the monotonic time `now`."""
        for item in self._theirs:
            self._theirs[item] = item.read()
            _write(item, self._ours[item])
        if built or now >= self._look_at:
            self._look_at = now + LOOK_INTERVAL_S
            self.look()

    def look(self) -> list[str]:
        """Put back what env code has changed since the last look. Return the names of what is newly changed."""
        new = []
        for item, ours in self._ours.items():
            seen = item.read()
            if seen == ours:
                continue
            if item not in self._theirs:
                new.append(item.name)
                log.warning("an env has set %s for its whole process; that holds in envs, not in the policy", item.name)
            self._theirs[item] = seen
            _write(item, ours)
        for number in _STOPS if self._is_main else ():
            if callable(handler := signal.getsignal(number)):
                signal.signal(number, handler)  # over one that a library in C has set
        return new


def _write(item: _Item, value: Any) -> None:
    with suppress(OSError, locale.Error, RecursionError):
        item.write(value)


def _error_filters() -> tuple[Any, ...]:
    """Return all filters of warnings if one of them makes errors, else none."""
    return tuple(warnings.filters) if any(one[0] == "error" for one in warnings.filters) else ()


def _set_error_filters(kept: tuple[Any, ...]) -> None:
    mild = (one for one in warnings.filters if one[0] != "error")
    warnings.filters[:] = kept or mild  # type: ignore[index]


def _set_default_device(kept: torch.device) -> None:
    torch.set_default_device(None if kept.type == "cpu" else kept)  # a device that is set makes tensors slower


def _working_directory() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - five times as fast
    except OSError:  # it was removed
        return ""


class _UserHandler:
    """A signal handler of user code. Where it raises while no env is called, that is logged, and goes no further."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any], words: CallWords) -> None:
        self._handler, self._words = handler, words

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._is_in_env(frame):
            self._handler(number, frame)
            return
        try:
            self._handler(number, frame)
        except BaseException as error:  # noqa: BLE001 - a user's handler
            name, what = signal.Signals(number).name, f"{type(error).__name__}: {error}"
            log.error(
                "%s came while no env was called, and %s raised %s; ignored. Let the env take back its timer and its "
                "handler before a call returns",
                name,
                _place(self._handler),
                what,
            )

    def _is_in_env(self, frame: FrameType | None) -> bool:
        """Return whether the signal came in an env's own code, which a handler may leave by an error."""
        if self._words[0] <= UserCall.OTHER:
            return False
        caller = frame
        while caller is not None:
            module = caller.f_globals.get("__name__", "")
            if module.startswith("headrace."):
                return caller is not frame and module.startswith(_ENV_ROOMS)
            caller = caller.f_back
        return False


@contextmanager
def envs_apart(words: CallWords | None = None) -> Iterator[CallMark]:
    """Give the mark of env calls for a runner that is made in this block, in a process of ours.

    What envs change in the whole process, and their signal handlers, then hold in envs only.
    """
    calls = CallMark(words, UserSide())
    with _own_signals(calls.words):
        yield calls


@contextmanager
def _own_signals(words: CallWords) -> Iterator[None]:
    """Let user code set signal handlers in this block that cannot raise in our code. `words` say which call goes on.

    Signals that stop this process stay its own: it does not install a handler of user code for them.
    """
    install = signal.signal

    def set_handler(number: int, handler: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("headrace.") or isinstance(handler, _UserHandler):
            return install(number, handler)
        if number in _STOPS:
            log.warning(
                "%s is not handled by %s, which %s asks for: it stops this process, which closes its envs",
                signal.Signals(number).name,
                _place(handler),
                caller,
            )
            return signal.getsignal(number)
        return install(number, _UserHandler(handler, words) if callable(handler) else handler)

    signal.signal = set_handler  # type: ignore[assignment]
    try:
        yield
    finally:
        signal.signal = install


def _place(handler: Any) -> str:
    """Return the name of a handler, with its file and line."""
    code = getattr(handler, "__code__", None)
    name = getattr(handler, "__qualname__", repr(handler))
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code is not None else name
