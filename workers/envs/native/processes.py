"""The processes of a vector whose envs are elsewhere (AsyncVectorEnv): killed where they do not answer or do not end.

Such a vector waits for its envs for ever, in `step` and in `close`. A killed process closes its pipe, and whoever waits
for it gets an error at once: so a thread beside needs to know no more than when to kill.
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
        """Raises `EnvHangError` when what is done within took longer, and failed because of that."""
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
                except OSError:  # a pipe was closed at this very moment; whoever it was is killed with all others
                    self._late = 0
                kill(self._env)
                return

    def stop(self) -> None:
        """End the thread, for whoever forks next should find none."""
        self._stopped.set()
        self._thread.join()


def processes_of(env: Any) -> Sequence[Any]:
    """The processes in which the vector's envs are, by lane; none for one that runs here."""
    vector = env.unwrapped
    return vector.processes if isinstance(vector, AsyncVectorEnv) else ()


def hanging(env: Any) -> int:
    """An env that surely has not answered, when some have not.

    Answers are read in order, so that before the one that is waited for all pipes are empty again; from there on an
    empty one has brought nothing. The last before the first that holds something is one of these.
    """
    pipes = env.unwrapped.parent_pipes
    full = (i for i, pipe in enumerate(pipes) if pipe is not None and not pipe.closed and pipe.poll(0))
    return max(next(full, len(pipes)) - 1, 0)


def kill(env: Any) -> None:
    """End the vector's processes at once."""
    for process in processes_of(env):
        process.kill()


def close_vector(env: Any, timeout_s: float, *, broken: bool) -> None:
    """Close `env` within `timeout_s` seconds. Of one that is `broken`, or does not end in time, nothing runs on.

    A broken vector of processes is not asked to close: it would wait for an answer of the env that gives none.
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
        env.unwrapped.closed = True  # or its `__del__` closes it once more
