"""The making of a vector whose envs are elsewhere (AsyncVectorEnv), which waits for each of them for ever."""

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
    """Raises `EnvHangError` where this thread makes an AsyncVectorEnv within, and some env's process is too late.

    All its processes are killed then. Whatever else takes its time here is let be.
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
                    if process.pid is not None:  # else it is about to start, and ends with the vector
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
    """Nobody is given a vector before it is made, so that it is looked for where it is being made."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, AsyncVectorEnv):
            return owner
        frame = frame.f_back
    return None


def build_in_time(builder: Callable[[], Any], timeout_s: float, process: int) -> Any:
    """What `builder` builds; in `process`, where AsyncVectorEnv builds env 0 for its spaces only, within `timeout_s`.

    Raises `EnvHangError` then: nothing can end a thread, but nobody needs to wait for it.
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
