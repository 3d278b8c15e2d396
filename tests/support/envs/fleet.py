"""Envs for fleets under test: some fail, some have observations of other kinds."""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import locale
import logging
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
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


class FailsWhenBad(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole that raises where an episode would end with a return below 20, as about every other one at random."""

    def __init__(self, context: Any) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self._earned = 0.0

    def reset(self, **settings: Any) -> Any:
        self._earned = 0.0
        return super().reset(**settings)

    def step(self, action: Any) -> Any:
        answer = super().step(action)
        self._earned += float(answer[1])
        if answer[2] and self._earned < 20:
            raise RuntimeError("the pole fell too soon")
        return answer


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


def _overflow_the_stack() -> None:
    pair = (ctypes.c_int * 2)(2, 1)
    compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    again = compare(lambda left, right: ctypes.CDLL(None).qsort(pair, 2, 4, again) or 1)
    sys.setrecursionlimit(1 << 30)
    again(None, None)


FATAL: dict[str, Callable[[], Any]] = {
    "segfaults": lambda: ctypes.string_at(0),
    "hangs": lambda: time.sleep(1000),
    "exits": lambda: os._exit(ExitCode.RUN_DIR),
    "exits as if all were well": lambda: os._exit(0),
    "kills itself": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "aborts": os.abort,
    "overflows the stack": _overflow_the_stack,
    "becomes another program": lambda: os.execv("/bin/true", ["true"]),
    "closes all descriptors": lambda: os.closerange(0, 1 << 16),
    "stops its process": lambda: signal.raise_signal(signal.SIGTERM),
    "exits in a thread": lambda: threading.Timer(0.001, os._exit, (3,)).start(),
}
"""What no process outlives."""


def fatal_once(context: Any) -> gym.Env[Any, Any]:
    """CartPole; sub-env 1 of each worker does its own of `FATAL` after 1,000 steps, in that worker's first life.

    The env config names the `kinds`, one for each worker.
    """
    env = gym.make("CartPole-v1")
    mark = Path(context["marks"]) / f"worker-{context.worker_index}"
    if context.vector_index != 1 or mark.exists():
        return env
    mark.touch()
    return Deadly(env, 1000, FATAL[context["kinds"][context.worker_index]])


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


def _change_the_process() -> None:
    import torch  # here, so that processes of other envs start without it

    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(7)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    warnings.simplefilter("error")
    logging.disable(logging.CRITICAL)
    gc.disable()
    locale.setlocale(locale.LC_ALL, "C")
    sys.setrecursionlimit(200)
    os.umask(0o777)
    sys.path.clear()
    os.environ.clear()
    os.environ["TMPDIR"] = "/nonexistent"


def _replace_functions() -> None:
    sys.stdout = None
    json.dumps = np.load = None  # type: ignore[assignment]
    time.sleep = lambda seconds: None
    atexit.register(lambda: 1 / 0)
    sys.excepthook = lambda *error: os._exit(9)


def _remove_the_working_directory() -> None:
    os.chdir(folder := tempfile.mkdtemp())
    Path(folder).rmdir()


def _use_other_signals() -> None:
    for number, timer in ((signal.SIGPROF, signal.ITIMER_PROF), (signal.SIGVTALRM, signal.ITIMER_VIRTUAL)):
        signal.signal(number, lambda number, frame: None)  # one that raises would come in the forks of other envs too
        signal.setitimer(timer, 0.002, 0.002)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _leave_a_zombie() -> None:
    if os.fork() == 0:
        os._exit(0)


def _leave_a_pool() -> None:
    _kept.append(pool := ThreadPoolExecutor(2))
    list(pool.map(abs, range(4)))


def _want_all_descriptors() -> None:
    while True:
        _kept.append(os.open(os.devnull, os.O_RDONLY))


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
WORSE: dict[str, Callable[[], Any]] = {
    "changes more of its process": _change_the_process,
    "removes its working directory": _remove_the_working_directory,
    "uses other signals": _use_other_signals,
    "blocks all signals": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()),
    "leaves a zombie": _leave_a_zombie,
    "leaves a pool": _leave_a_pool,
    "closes descriptors 0, 1 and 2": lambda: os.closerange(0, 3),
    "writes bytes": lambda: os.write(1, bytes(range(256)) * 400),
    "recurses": lambda: WORSE["recurses"](),
    "wants too much memory": lambda: np.empty(1 << 60),
    "replaces functions": _replace_functions,
    "wants all descriptors": _want_all_descriptors,
    "takes torch's default device": lambda: import_module("torch").set_default_device("meta"),
    "forgets modules": lambda: [sys.modules.pop(name) for name in list(sys.modules) if name.startswith("headrace.")],
    "stops the clock": lambda: setattr(time, "time", lambda: 0.0),
    "leaves torch's modes": lambda: import_module("torch").inference_mode(True).__enter__(),
    "sees a write fail": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY)),
}
"""What a worker may end by where several are in one process. The fleet goes on, and its books are exact."""
_CYCLE: dict[str, Any] = {}
_CYCLE["me"] = _CYCLE
ODD: dict[str, Callable[[Any], Any]] = {
    "odd returns": lambda answer: (answer[0], float("nan"), *answer[2:]),
    "odd infos": lambda answer: (*answer[:4], {"thing": object()}),
    "returns too few": lambda answer: answer[:4],
    "returns None": lambda answer: None,
    "an array for a reward": lambda answer: (answer[0], np.ones(2), *answer[2:]),
    "a complex reward": lambda answer: (answer[0], 1j, *answer[2:]),
    "a float32 reward": lambda answer: (answer[0], np.float32(1.0), *answer[2:]),
    "a bool observation": lambda answer: (answer[0] > 0, *answer[1:]),
    "a short observation": lambda answer: (answer[0][:3], *answer[1:]),
    "NaN observed": lambda answer: (answer[0] * np.nan, *answer[1:]),
    "text for terminated": lambda answer: (*answer[:2], "False", *answer[3:]),
    "a cyclic info": lambda answer: (*answer[:4], _CYCLE),
    "a lone surrogate": lambda answer: (*answer[:4], {"x": "\ud800"}),
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
    """CartPole; each sub-env is of another of the env config's `kinds`, by default of `KINDS` and `ODD`."""
    names = context.get("kinds", [*KINDS, *ODD])
    name = names[context.vector_index % len(names)]
    return Odd(gym.make("CartPole-v1"), 100, (FATAL | KINDS | WORSE).get(name), ODD.get(name))


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
    """CartPole; sub-env 1 of worker 0 fails every 50 steps, that of worker 1 once: it cannot be built again.

    With "hangs" in the context, its construction does not end.
    """
    env = Paced(gym.make("CartPole-v1"), lambda: 0.01)
    if context.vector_index != 1:
        return env
    if context.worker_index == 0:
        return Failing(env, 50)
    if context.recreated:
        if context.get("hangs"):
            time.sleep(600)
        raise RuntimeError("no licence left")
    return Failing(env, 20)
