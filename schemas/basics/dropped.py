"""The end of what an object owns when it is dropped without being closed, as by a notebook's cell that runs again."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

_WAIT_S = 1.0


def when_dropped(owner: object, sentence: str, end: Callable[..., object], *parts: Any) -> weakref.finalize[..., Any]:
    """Call `end(*parts)` when `owner` is dropped, and warn with `sentence`. Neither may hold `owner`.

    `detach()` of the result takes it back, as `owner` does when it is closed.

    `end` runs in a thread of its own. The garbage collector drops objects in any thread, also in one that holds a lock
    that `end` needs, or that `end` waits for. The dropping thread waits for a second at most, so what `end` does in
    that time is done when `del` or `gc.collect()` returns.

    Nothing is called at the end of the program, where threads may still use the parts, and nothing in a copy of the
    process by `fork`, which shares sockets and processes.
    """
    dropped = weakref.finalize(owner, _end_dropped, os.getpid(), sentence, end, parts)
    dropped.atexit = False
    return dropped


def _end_dropped(process: int, sentence: str, end: Callable[..., object], parts: tuple[Any, ...]) -> None:
    if process != os.getpid():
        return
    thread = threading.Thread(target=end, args=parts, name="end-dropped", daemon=True)
    thread.start()
    thread.join(_WAIT_S)
    warnings.warn(sentence, ResourceWarning, stacklevel=1)
