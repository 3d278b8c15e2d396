"""Envs for processes of their own: a random walk that does what a test asks of it at one point of its life."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from headrace.workers import EnvContext, StepFailedRecreateEnv
from support.waiting import wait_until


class Troubled(gym.Env[Any, Any]):
    """A walk of its seed and actions. The first env of lane `config["lane"]` does what `config["faults"]` says.

    That is {place: fault}; "step" is every one from the fifth on. Envs that replace it do what `config["again"]` says.
    """

    observation_space: Any = gym.spaces.Box(-1e3, 1e3, (3,), np.float32)
    action_space: Any = gym.spaces.Discrete(3)

    def __init__(self, context: EnvContext) -> None:
        self.context = context
        faults = context.get("again", {}) if context.recreated else context.get("faults", {})
        self._faults = faults if context.vector_index == context.get("lane") else {}
        self._steps = 0
        self._maybe("construction")

    def _maybe(self, at: str, answer: Any = None) -> Any:
        return FAULTS[self._faults[at]](answer, self.context) if at in self._faults else answer

    def _observe(self) -> Any:
        return self._at.astype(np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._at = self.np_random.normal(size=3)
        return self._maybe("reset", (self._observe(), {"seed": seed}))

    def step(self, action: Any) -> Any:
        self._steps += 1
        self._at = self._at * 0.9 + self.np_random.normal(size=3) + float(action)
        answer = self._observe(), float(self._at.sum()), bool(self.np_random.random() < 0.2), False, {}
        return answer if self._steps < 5 else self._maybe("step", answer)

    def close(self) -> None:
        self._maybe("close")


class OtherSpace(Troubled):
    """Lane 1 has another space than the others."""

    def __init__(self, context: EnvContext) -> None:
        super().__init__(context)
        if context.vector_index == 1:
            self.observation_space = gym.spaces.Box(-1e3, 1e3, (4,), np.float32)


class Slow(Troubled):
    """Each step takes `config["step_s"]`, of lane `config["lane"]` only, if that is given."""

    def step(self, action: Any) -> Any:
        if self.context.get("lane", self.context.vector_index) == self.context.vector_index:
            time.sleep(self.context["step_s"])
        return super().step(action)


class Gate:
    """A folder that says whether steps of a `Gated` env may end, and whether one has begun."""

    def __init__(self, folder: Path) -> None:
        self._open, self._reached = folder / "open", folder / "reached"

    def open(self) -> None:
        """Let this step and all later ones end."""
        self._open.touch()

    @property
    def reached(self) -> bool:
        """Return whether a step has begun."""
        return self._reached.exists()

    def wait(self) -> None:
        """Note that a step has begun, and return once the gate is open."""
        self._reached.touch()
        wait_until(self._open.exists, "the gate to be opened")


class Gated(Troubled):
    """Steps of lane `config["lane"]` end when the test opens the `Gate` in the folder `config["gate"]`."""

    def step(self, action: Any) -> Any:
        if self.context.vector_index == self.context["lane"]:
            Gate(Path(self.context["gate"])).wait()
        return super().step(action)


class Jittery(Troubled):
    """Each step takes up to 3 ms, unless `config["hurry"]`, which changes nothing else. Infos tell the time."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._time = 0
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        self._time += 1
        if not self.context.get("hurry"):
            time.sleep(zlib.crc32(f"{self.context.vector_index} {self._steps}".encode()) % 4 / 1000)
        return (*super().step(action)[:4], {"time": self._time})


class Wordy(Troubled):
    """Its infos are as long as its action says: nothing, a few words, or more than a socket holds at once."""

    def step(self, action: Any) -> Any:
        answer = super().step(action)
        return (*answer[:4], {"said": "so" * (int(action) ** 20)} if action else {})


class Unsound(gym.Env[Any, Any]):
    """Observes its time; raises, dies or answers nonsense at a chance that follows from its seed."""

    observation_space: Any = gym.spaces.Box(0.0, 1e3, (1,), np.float32)
    action_space: Any = gym.spaces.Discrete(2)

    def __init__(self, context: EnvContext) -> None:
        self._deadly = context["deadly"]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._time = 0
        if self.np_random.random() < 0.02:
            raise RuntimeError("no reset")
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self._time += 1
        fault = self.np_random.random()
        if fault < self._deadly:
            os._exit(3)
        if fault < 0.01:
            raise RuntimeError("no step")
        reward = float("nan") if fault < 0.015 else float(self._time)
        seen = np.full(1, np.nan if 0.015 < fault < 0.02 else self._time, np.float32)
        return seen, reward, bool(self.np_random.random() < 0.1), False, {"time": self._time}


class Telling(gym.Env[Any, Any]):
    """Observes what it was told at its construction."""

    observation_space: Any = gym.spaces.Box(0, 99, (5,), np.int64)
    action_space: Any = gym.spaces.Discrete(2)

    def __init__(self, context: EnvContext) -> None:
        where = (context.worker_index, context.num_workers, context.vector_index, context.recreated, context["port"])
        self._told = np.array(where, np.int64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._told, {}


class Nested(gym.Env[Any, Any]):
    """Observes its seed and its last action."""

    action_space: Any = gym.spaces.Dict(
        {"gear": gym.spaces.Discrete(4), "push": gym.spaces.Tuple([gym.spaces.Box(-1, 1, (2,), np.float32)])}
    )
    observation_space: Any = gym.spaces.Dict(
        {"seed": gym.spaces.Discrete(100), "echo": gym.spaces.Tuple([gym.spaces.Box(-1, 1, (2,), np.float32)])}
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._seed = seed
        return {"seed": seed, "echo": (np.zeros(2, np.float32),)}, {}

    def step(self, action: Any) -> Any:
        return {"seed": self._seed, "echo": action["push"]}, float(action["gear"]), False, False, {}


class Touchy:
    """Raises whatever it is asked, as a tensor on its way through autograd does."""

    shape = (3,)

    def __array__(self, *arguments: Any, **more: Any) -> Any:
        raise RuntimeError("no array of mine")

    def __iter__(self) -> Any:
        raise RuntimeError("no parts of mine")

    def __repr__(self) -> str:
        raise RuntimeError("no words of mine")


def _raises(answer: Any, config: Any) -> Any:
    raise RuntimeError("diverged")


def _gives_up(answer: Any, config: Any) -> Any:
    sys.exit(3)


def _asks(answer: Any, config: Any) -> Any:
    raise StepFailedRecreateEnv


def _hangs(answer: Any, config: Any) -> Any:
    time.sleep(1000)


def _hangs_with_the_lock(answer: Any, config: Any) -> Any:
    ctypes.PyDLL(None).sleep(1000)


def _segfaults(answer: Any, config: Any) -> Any:
    ctypes.string_at(0)


def _exits(answer: Any, config: Any) -> Any:
    sys.stdout.write("so long\n")
    sys.stdout.flush()
    os._exit(7)


def _is_killed(answer: Any, config: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _is_signalled(answer: Any, config: Any) -> Any:
    os.kill(os.getpid(), 40)


def _forks(answer: Any, config: Any) -> Any:
    os.fork()
    return answer


def _forks_and_raises(answer: Any, config: Any) -> Any:
    if os.fork() == 0:
        raise RuntimeError("I am a copy")
    return answer


def _leaks(answer: Any, config: Any) -> Any:
    _leaked.append(np.ones(5_000_000 // 8))
    return answer


def _floods(answer: Any, config: Any) -> Any:
    for _ in range(100):
        sys.stdout.write("all is well\n" * 10_000)
    return answer


def _leaves_a_child(answer: Any, config: Any) -> Any:
    child = subprocess.Popen(["sleep", "1000"])
    with Path(config["pids"]).open("a") as file:
        file.write(f"{child.pid}\n")
    _left.append(child)
    return answer


_leaked: list[Any] = []
_left: list[Any] = []

FAULTS: dict[str, Callable[[Any, Any], Any]] = {
    "raises": _raises,
    "calls sys.exit": _gives_up,
    "asks": _asks,
    "hangs": _hangs,
    "hangs with the lock": _hangs_with_the_lock,
    "segfaults": _segfaults,
    "exits": _exits,
    "is killed": _is_killed,
    "is signalled": _is_signalled,
    "forks": _forks,
    "forks and raises": _forks_and_raises,
    "leaks": _leaks,
    "floods": _floods,
    "leaves a child": _leaves_a_child,
    "NaN reward": lambda a, _: (a[0], float("nan"), *a[2:]),
    "infinite reward": lambda a, _: (a[0], float("inf"), *a[2:]),
    "complex reward": lambda a, _: (a[0], 1j, *a[2:]),
    "array reward": lambda a, _: (a[0], np.array([1.0]), *a[2:]),
    "list info": lambda a, _: (*a[:4], [1]),
    "info that is no JSON": lambda a, _: (*a[:4], {"made": object()}),
    "observation of wrong shape": lambda a, _: (a[0][:2], *a[1:]),
    "observation of wrong dtype": lambda a, _: (a[0].astype(np.float64), *a[1:]),
    "observation outside": lambda a, _: (a[0] + np.float32(np.inf), *a[1:]),
    "info without words": lambda a, _: (*a[:4], {"made": Touchy()}),
    "ragged observation": lambda a, _: ([[1.0], [2.0, 3.0]], *a[1:]),
    "observation that raises": lambda a, _: (Touchy(), *a[1:]),
    "reward that raises": lambda a, _: (a[0], Touchy(), *a[2:]),
    "answer that raises": lambda a, _: Touchy(),
    "wrong tuple": lambda a, _: a[:4],
}
