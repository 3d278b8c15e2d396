"""Watches the processes of an AsyncVectorEnv, and kills them if they do not answer or do not end.

By itself such a vector waits for ever for its envs, in `step` and in `close`. When a process is killed, its pipe
closes, and the vector gets an error. So a watchdog thread only needs to know when to kill.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gymnasium.vector import AsyncVectorEnv

from headrace.schemas.errors import EnvHangError
from headrace.workers.envs.lane import close_envs

_SLOWEST_LOOK_S = 0.25


class Watchdog:
    """Kills the processes of `env` when a call that is `limited` takes too long. Its thread lives until `stop`."""

    def __init__(self, env: Any, shortest_s: float) -> None:
        self._env = env
        self._deadline: float | None = None
        self._late: int | None = None
        self._stopped = threading.Event()
        self._interval_s = min(shortest_s / 4, _SLOWEST_LOOK_S)
        self._thread = threading.Thread(target=self._watch, name="vector-watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def limited(self, phase: str, timeout_s: float, setting: str) -> Iterator[None]:
        """Raise `EnvHangError` if the block takes longer than `timeout_s`, and fails because of that."""
        self._deadline = time.monotonic() + timeout_s
        try:
            yield
        except Exception as error:
            if self._late is None:
                raise
            raise EnvHangError(self._late, phase, timeout_s, setting, "") from error
        finally:
            self._deadline = None

    def _watch(self) -> None:
        while not self._stopped.wait(self._interval_s):
            deadline = self._deadline
            if deadline is not None and time.monotonic() > deadline:
                try:
                    self._late = hanging(self._env)
                except OSError:  # a pipe was closed at this moment; its process is killed with all others
                    self._late = 0
                kill(self._env)
                return

    def stop(self) -> None:
        """End the thread: a process that forks should have no other threads."""
        self._stopped.set()
        self._thread.join()


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
        process.kill()


def close_vector(env: Any, timeout_s: float, *, broken: bool) -> None:
    """Close `env` within `timeout_s` seconds. Kill the processes of a `broken` vector, or of one that takes longer.

    A broken vector with processes is not asked to close, because it would wait for the env that does not answer.
    """
    processes = processes_of(env)
    if not (broken and processes):
        close_envs([env], timeout_s)
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()
    if processes:
        for pipe in env.unwrapped.parent_pipes:
            if pipe is not None:
                pipe.close()
        env.unwrapped.closed = True  # otherwise its `__del__` closes it again
