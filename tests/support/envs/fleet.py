"""Envs for fleets under test: some fail, some have observations of other kinds."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from headrace.schemas.errors import ExitCode


class Failing(gym.Wrapper[Any, Any, Any, Any]):
    """Raises in `step` after every `period` steps of its life."""

    def __init__(self, env: gym.Env[Any, Any], period: int) -> None:
        super().__init__(env)
        self._left = period

    def step(self, action: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("the simulator diverged")
        return super().step(action)


def three_of_eight(context: Any) -> gym.Env[Any, Any]:
    """CartPole; sub-envs 1, 4 and 6 fail every few hundred steps."""
    env = gym.make("CartPole-v1")
    return Failing(env, 200 + 37 * context.vector_index) if context.vector_index in (1, 4, 6) else env


def always_failing(context: Any) -> gym.Env[Any, Any]:
    """CartPole that never makes a step."""
    return Failing(gym.make("CartPole-v1"), 0)


class Leaving(gym.ObservationWrapper[Any, Any, Any]):
    """Leaves its observation space after `period` observations."""

    def __init__(self, env: gym.Env[Any, Any], period: int) -> None:
        super().__init__(env)
        self._left = period

    def observation(self, observation: Any) -> Any:
        self._left -= 1
        return observation if self._left else np.full_like(observation, 100.0)


def one_leaves_its_space(context: Any) -> gym.Env[Any, Any]:
    """CartPole; sub-env 0 leaves its space every 30 observations, and sub-env 1 raises every few hundred steps."""
    env = gym.make("CartPole-v1")
    return Leaving(env, 30) if context.vector_index == 0 else Failing(env, 400) if context.vector_index == 1 else env


class Deadly(gym.Wrapper[Any, Any, Any, Any]):
    """Does `fatal` after `period` steps of its life."""

    def __init__(self, env: gym.Env[Any, Any], period: int, fatal: Callable[[], Any]) -> None:
        super().__init__(env)
        self._left, self._fatal = period, fatal

    def step(self, action: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            self._fatal()
        return super().step(action)


def some_crash_and_hang(context: Any) -> gym.Env[Any, Any]:
    """CartPole; sub-env 1 segfaults and 2 hangs in C every few hundred steps."""
    env = gym.make("CartPole-v1")
    if context.vector_index == 1:
        return Deadly(env, 300, lambda: ctypes.string_at(0))
    return Deadly(env, 450, lambda: ctypes.PyDLL(None).sleep(1000)) if context.vector_index == 2 else env


FATAL: dict[str, Callable[[], Any]] = {
    "segfaults": lambda: ctypes.string_at(0),
    "hangs": lambda: time.sleep(1000),
    "exits": lambda: os._exit(ExitCode.RUN_DIR),
}


def fatal_once(context: Any) -> gym.Env[Any, Any]:
    """CartPole; sub-env 1 of each worker does its own of `FATAL` after 1,000 steps, in that worker's first life."""
    env = gym.make("CartPole-v1")
    mark = Path(context["marks"]) / f"worker-{context.worker_index}"
    if context.vector_index != 1 or mark.exists():
        return env
    mark.touch()
    return Deadly(env, 1000, list(FATAL.values())[context.worker_index])


def strict_numbers(context: Any) -> gym.Env[Any, Any]:
    """CartPole; from its 41st step on it wants numpy to raise, in its whole process."""
    return Deadly(gym.make("CartPole-v1"), 40, lambda: np.seterr(all="raise"))


class Panic(BaseException):
    """An error as libraries have it that mean to be caught by nobody."""


def _panic() -> None:
    raise Panic


def _give_up(number: int, frame: object) -> None:
    raise TimeoutError("no answer in time")


def _set_an_alarm() -> None:
    signal.signal(signal.SIGALRM, _give_up)
    signal.setitimer(signal.ITIMER_REAL, 0.002)


def _be_strict() -> None:
    np.seterr(all="raise")
    os.chdir("/")


_kept: list[Any] = []
KINDS: dict[str, Callable[[], Any]] = {
    "exits": sys.exit,
    "panics": _panic,
    "signals": _set_an_alarm,
    "leaves a thread": lambda: threading.Thread(target=time.sleep, args=(1000,)).start(),
    "forks": os.fork,
    "leaks descriptors": lambda: _kept.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(20)),
    "leaks memory": lambda: _kept.append(np.ones(1 << 20)),
    "changes its process": _be_strict,
    "closes stderr": lambda: sys.stderr.close(),
    "ignores SIGTERM": lambda: ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(1)),
}
"""What inline envs do to the worker that they live in, and it must go on."""
ODD: dict[str, Callable[[Any], Any]] = {
    "odd returns": lambda answer: (answer[0], float("nan"), *answer[2:]),
    "odd infos": lambda answer: (*answer[:4], {"thing": object()}),
}


class Odd(gym.Wrapper[Any, Any, Any, Any]):
    """Each `period` steps, does `kind` or answers what `odd` makes of the answer."""

    def __init__(self, env: gym.Env[Any, Any], period: int, kind: Callable[[], Any] | None, odd: Any) -> None:
        super().__init__(env)
        self._steps, self._period, self._kind, self._odd = 0, period, kind, odd

    def step(self, action: Any) -> Any:
        self._steps += 1
        due = self._steps % self._period == 0
        if due and self._kind is not None:
            self._kind()
        answer = super().step(action)
        return self._odd(answer) if due and self._odd is not None else answer


def one_of_each_kind(context: Any) -> gym.Env[Any, Any]:
    """CartPole; each sub-env is of another of `KINDS` or `ODD`."""
    names = [*KINDS, *ODD]
    name = names[context.vector_index % len(names)]
    return Odd(gym.make("CartPole-v1"), 100, KINDS.get(name), ODD.get(name))


class Sensors(gym.Env[Any, Any]):
    """Dict observations: a vector, a counter, and a nested tuple."""

    observation_space = gym.spaces.Dict(
        {
            "position": gym.spaces.Box(-1, 1, (3,), np.float32),
            "gear": gym.spaces.Discrete(4),
            "panel": gym.spaces.Tuple((gym.spaces.MultiBinary(5), gym.spaces.Box(0, 255, (2, 2), np.uint8))),
        }
    )
    action_space = gym.spaces.MultiDiscrete([2, 3])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._steps = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        return self._observe(), float(action[0]), self._steps >= 20, False, {"gear": int(action[1])}

    def _observe(self) -> Any:
        rng = self.np_random
        return {
            "position": rng.uniform(-1, 1, 3).astype(np.float32),
            "gear": int(rng.integers(4)),
            "panel": (rng.integers(0, 2, 5).astype(np.int8), rng.integers(0, 256, (2, 2)).astype(np.uint8)),
        }


def sensors(context: Any) -> gym.Env[Any, Any]:
    return Sensors()


class Pixels(gym.Env[Any, Any]):
    """Random images of the size that Atari policies see."""

    observation_space = gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = gym.spaces.Discrete(6)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._steps = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        return self._observe(), 1.0, False, self._steps >= 50, {}

    def _observe(self) -> Any:
        return self.np_random.integers(0, 256, (84, 84, 4), np.uint8)


def pixels(context: Any) -> gym.Env[Any, Any]:
    return Pixels()


class Paced(gym.Wrapper[Any, Any, Any, Any]):
    """Waits in each step for as long as `step_s()` says."""

    def __init__(self, env: gym.Env[Any, Any], step_s: Callable[[], float]) -> None:
        super().__init__(env)
        self._step_s = step_s

    def step(self, action: Any) -> Any:
        time.sleep(self._step_s())
        return super().step(action)


def paced(context: Any) -> gym.Env[Any, Any]:
    """CartPole whose steps take 5 ms, so that a fleet of it takes little processor time."""
    return Paced(gym.make("CartPole-v1"), lambda: 0.005)


def slow_second_worker(context: Any) -> gym.Env[Any, Any]:
    """CartPole; steps of worker 1 take half a second, until the file `context["fast"]` exists."""
    is_slow = context.worker_index == 1
    return Paced(gym.make("CartPole-v1"), lambda: 0.5 if is_slow and not Path(context["fast"]).exists() else 0.002)


def failing_or_gone(context: Any) -> gym.Env[Any, Any]:
    """CartPole; sub-env 1 of worker 0 fails every 50 steps, that of worker 1 once: it cannot be built again."""
    env = Paced(gym.make("CartPole-v1"), lambda: 0.01)
    if context.vector_index != 1:
        return env
    if context.worker_index == 0:
        return Failing(env, 50)
    if context.recreated:
        raise RuntimeError("no licence left")
    return Failing(env, 20)
