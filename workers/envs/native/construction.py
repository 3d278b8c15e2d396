"""Time limits for the construction of an AsyncVectorEnv, which by itself waits for ever for its processes."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gymnasium.vector import AsyncVectorEnv

from headrace.schemas.errors import EnvHangError
from headrace.workers.envs.lane import close_envs
from headrace.workers.envs.native.processes import close_vector, hanging

_SETTING = "env_construct_timeout_s"
_LOOK_EVERY_S = 0.25


@contextmanager
def limited_construction(timeout_s: float) -> Iterator[None]:
    """Raise `EnvHangError` if this thread makes an AsyncVectorEnv in the block and an env's process takes too long.

    Then all processes of the vector are killed. Other code in the block may take any time.
    """
    maker, made, late = threading.get_ident(), threading.Event(), list[tuple[Any, int]]()

    def watch() -> None:
        if made.wait(timeout_s):
            return
        while not late:
            vector = _vector_in_the_making(maker)
            if vector is not None and vector.__dict__.get("parent_pipes"):
                late.append((vector, hanging(vector)))
                for process in vector.processes:
                    if process.pid is not None:  # otherwise it is about to start, and ends with the vector
                        process.kill()
            elif made.wait(_LOOK_EVERY_S):
                return

    thread = threading.Thread(target=watch, name="construction-watchdog", daemon=True)
    thread.start()
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
        if not late:
            raise
    finally:
        made.set()
        thread.join()
    if late:
        vector, lane = late[0]
        close_vector(vector, 0.0, broken=True)
        raise EnvHangError(lane, "construction", timeout_s, _SETTING, "") from error


def _vector_in_the_making(thread: int) -> AsyncVectorEnv | None:
    """Return the AsyncVectorEnv whose constructor runs in the thread. It is found in the frames of the thread."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, AsyncVectorEnv):
            return owner
        frame = frame.f_back
    return None


def build_in_time(builder: Callable[[], Any], timeout_s: float, process: int) -> Any:
    """Return the result of `builder`. Limit its time in `process`, where AsyncVectorEnv builds env 0 for its spaces.

    Raises `EnvHangError` when it takes longer. The building thread cannot be stopped, and is abandoned.
    """
    if os.getpid() != process:
        return builder()
    built, problems, given_up = list[Any](), list[Exception](), threading.Event()

    def build() -> None:
        try:
            built.append(builder())
        except Exception as error:  # noqa: BLE001 - a user's env
            problems.append(error)
        if given_up.is_set():
            close_envs(built, timeout_s)

    thread = threading.Thread(target=build, name="build-env-0", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        given_up.set()
        raise EnvHangError(0, "construction", timeout_s, _SETTING, "", "is left alone, in a thread of this process")
    if problems:
        raise problems[0]
    return built[0]
