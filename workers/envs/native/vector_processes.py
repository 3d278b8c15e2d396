"""Watches the processes of an AsyncVectorEnv, and kills them if they do not answer or do not end.

By itself such a vector waits for ever for its envs, in its constructor, in `step` and in `close`. When a process is
killed, its pipe closes, and the vector gets an error. So a watchdog thread only needs to know when to kill.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from gymnasium.vector import AsyncVectorEnv

from headrace.schemas.accounts.user_calls import SETTINGS, UserCall
from headrace.schemas.errors import EnvHangError
from headrace.workers.envs.lane import close_envs
from headrace.workers.randomness.seeds import draw_global_seeds

_SLOWEST_LOOK_S = 0.25


_draws_seeds = False
"""True while a vector is made, whose processes are to have global random numbers of their own."""


def _after_fork() -> None:
    if _draws_seeds:
        draw_global_seeds()


os.register_at_fork(after_in_child=_after_fork)


class Watchdog:
    """Kills the processes of a vector when a call that is `limited` takes too long. Its thread lives until `stop`.

    `find` returns the vector, or None while there is none.
    """

    def __init__(self, find: Callable[[], Any], shortest_s: float) -> None:
        self.killed: Any = None
        """The vector whose processes were killed."""
        self._find = find
        self._deadline: float | None = None
        self._late = 0
        """The env for which the vector waited when it was killed."""
        self._stopped = threading.Event()
        self._interval_s = min(shortest_s / 4, _SLOWEST_LOOK_S)
        self._thread = threading.Thread(target=self._watch, name="vector-watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def limited(self, phase: str, timeout_s: float, setting: str) -> Iterator[None]:
        """Raise `EnvHangError` if the processes were killed because the block takes longer than `timeout_s`."""
        error: Exception | None = None
        self._deadline = time.monotonic() + timeout_s
        try:
            yield
        except Exception as raised:
            if self.killed is None:
                raise
            traceback.clear_frames(raised.__traceback__)  # else Python 3.14 may warn later of a buffer
            error = raised
        finally:
            self._deadline = None
        if self.killed is not None:
            raise EnvHangError(self._late, phase, timeout_s, setting, "") from error

    def _watch(self) -> None:
        while not self._stopped.wait(self._interval_s):
            deadline = self._deadline
            vector = self._find() if deadline is not None and time.monotonic() > deadline else None
            if vector is None:
                continue
            if self.killed is None:
                with suppress(OSError):  # a pipe was closed at this moment; its process is killed with all others
                    self._late = hanging(vector)
                self.killed = vector
            kill(vector)  # at each look, because a constructor may go on starting processes

    def stop(self) -> None:
        """End the thread: a process that forks should have no other threads."""
        self._stopped.set()
        self._thread.join()


@contextmanager
def limited_construction(timeout_s: float) -> Iterator[None]:
    """Raise `EnvHangError` if this thread makes an AsyncVectorEnv in the block and an env's process takes too long.

    Then all processes of the vector are killed. Other code in the block may take any time. Processes that are forked
    in the block draw global random numbers of their own.
    """
    global _draws_seeds
    _draws_seeds = True
    watchdog = Watchdog(partial(_vector_in_the_making, threading.get_ident()), timeout_s)
    try:
        with watchdog.limited("construction", timeout_s, SETTINGS[UserCall.CONSTRUCTION]):
            try:
                yield
            finally:
                watchdog.stop()
    finally:
        _draws_seeds = False
        if watchdog.killed is not None:
            close_vector(watchdog.killed, broken=True)


def _vector_in_the_making(thread: int) -> AsyncVectorEnv | None:
    """Return the vector whose constructor starts its processes in the thread. Its frame is found in the thread's."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, AsyncVectorEnv):
            return owner if owner.__dict__.get("processes") else None
        frame = frame.f_back
    return None


def processes_of(env: Any) -> Sequence[Any]:
    """Return the processes of the vector's envs, by lane; none for a vector that runs in this process."""
    vector = env.unwrapped
    return vector.processes if isinstance(vector, AsyncVectorEnv) else ()


def hanging(env: Any) -> int:
    """Return an env that has certainly not answered, when some envs have not.

    The vector reads answers in order. The pipes before the one that it waits for are empty, because it has read them.
    From there on, an empty pipe means that its env has not answered. The last pipe before the first full one is such a
    pipe.
    """
    pipes = env.unwrapped.parent_pipes
    full = (i for i, pipe in enumerate(pipes) if pipe is not None and not pipe.closed and pipe.poll(0))
    return max(next(full, len(pipes)) - 1, 0)


def kill(env: Any) -> None:
    """Kill the vector's processes."""
    for process in processes_of(env):
        if process.pid is not None:  # otherwise it is about to start
            process.kill()


def close_vector(env: Any, *, broken: bool) -> None:
    """Close `env` within 5 s. Kill the processes of a `broken` vector, or of one that takes longer.

    A broken vector with processes is not asked to close, because it would wait for the env that does not answer.
    """
    processes = processes_of(env)
    if not (broken and processes):
        close_envs([env])
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()
    if processes:
        for pipe in env.unwrapped.parent_pipes:
            if pipe is not None:
                pipe.close()
        env.unwrapped.closed = True  # otherwise its `__del__` closes it again


def end_watched(watchdog: Watchdog, env: Any) -> None:
    """Kill the processes of a vector that was dropped. It is not asked to close, as a call may be under way in it."""
    watchdog.stop()
    close_vector(env, broken=True)
