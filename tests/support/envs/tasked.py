"""Envs that write the task that they got into each observation: what a chunk's stamp must say."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from headrace import workers  # a runner needs torch, and processes of envs start sooner without it
from headrace.workers import EnvRunnerConfig
from headrace.workers.envs.vector_env import VectorEnv
from headrace.workers.external import ExternalEnv, ExternalMultiAgentEnv
from headrace.workers.external.self_driven import SelfDrivenEnv

NONE = -1.0
"""The level of an episode without a task."""
SPACE = gym.spaces.Box(-2.0, np.inf, (4,), np.float64)


class Optioned(gym.Env[Any, Any]):
    """Gets its task as options. An observation is (level, seed, step, a number drawn at the reset).

    The config's "length" is that of an episode, "refused" a level that its reset refuses, "breaks" one that fails at
    step 3. With "die" a file's path, env
    0 kills its process once at step 3.
    """

    observation_space, action_space = SPACE, gym.spaces.Discrete(2)

    def __init__(self, config: dict[str, Any]) -> None:
        self._config, self._index = config, config.get("index", getattr(config, "vector_index", 0))
        self._level, self._t = NONE, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self._begin((options or {}).get("level", NONE), seed)

    def _begin(self, level: float, seed: int | None) -> Any:
        if level == self._config.get("refused"):
            raise ValueError("too hard")
        self._level, self._seed, self._t = level, -1 if seed is None else seed % 1000, 0
        self._drawn = float(self.np_random.random())
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self._t += 1
        if self._index == 0 and self._t == 3 and (path := self._config.get("die")) and not Path(path).exists():
            Path(path).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self._t == 3 and self._level == self._config.get("breaks"):
            raise RuntimeError("broken " + "x" * 300)
        return self._seen(), 1.0, self._t == self._config.get("length", 5) + self._index, False, {}

    def _seen(self) -> NDArray[np.float64]:
        return np.array([self._level, self._seed, self._t, self._drawn])


class Taught(Optioned):
    """Gets its task by `set_task`, and keeps it."""

    _taught = NONE

    def set_task(self, values: dict[str, Any]) -> None:
        self._taught = values.pop("level")  # they are its own

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        assert options is None
        gym.Env.reset(self, seed=seed)
        return self._begin(self._taught, seed)


def wrapped(config: dict[str, Any]) -> Any:
    """Return a `Taught` behind wrappers that do not know of tasks."""
    return gym.wrappers.TimeLimit(gym.wrappers.OrderEnforcing(Taught(config)), 1000)


def listed(context: Any) -> VectorEnv:
    """Return a user's vector of `Taught` envs."""
    return VectorEnv.wrap(lambda index: Taught({**context, "index": index}), num_envs=context.num_envs)


def masked(context: Any) -> gym.vector.SyncVectorEnv:
    """Return gymnasium's vector of `Optioned` envs, which resets only where it is told to."""
    return _vector(context, AutoresetMode.DISABLED)


def resetting(context: Any) -> gym.vector.SyncVectorEnv:
    """Return one that resets its envs by itself."""
    return _vector(context, AutoresetMode.SAME_STEP)


def _vector(context: Any, mode: AutoresetMode) -> gym.vector.SyncVectorEnv:
    envs = [partial(Optioned, {**context, "index": index}) for index in range(context.num_envs)]
    return gym.vector.SyncVectorEnv(envs, autoreset_mode=mode)


class Levels(gym.vector.VectorEnv[Any, Any, Any]):
    """A vector in arrays, as simulators are: one seed for all envs of a reset, and tasks in its options."""

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.DISABLED}
    single_observation_space, single_action_space = SPACE, Optioned.action_space

    def __init__(self, config: Any) -> None:
        self.num_envs = config.num_envs
        self.observation_space = batch_space(SPACE, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._seen = np.zeros((self.num_envs, 4))

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        told = options or {}
        mask = told.pop("reset_mask", np.ones(self.num_envs, np.bool_))  # the options are its own
        drawn = self.np_random.random(self.num_envs)
        began = np.array([[told.get("level", NONE), seed % 1000, 0, number] for number in drawn])
        self._seen[mask] = began[mask]
        return self._seen.copy(), {}

    def step(self, actions: Any) -> Any:
        self._seen[:, 2] += 1
        over = self._seen[:, 2] == 5 + np.arange(self.num_envs)
        return self._seen.copy(), np.ones(self.num_envs), over, np.zeros(self.num_envs, np.bool_), {}


class _Asks(SelfDrivenEnv[Any]):
    """Asks which task each of its episodes has."""

    def run(self) -> None:
        self.run_in_threads(self._play, 3)

    def _play(self, thread: int) -> None:
        while True:
            episode = self.start_episode()
            level = (self.task_of(episode) or {}).get("level", NONE)
            for t in range(5):
                self.get_action(episode, self._seen(level, t))
            self.end_episode(episode, self._seen(level, 5))

    def _seen(self, level: float, t: int) -> Any:
        return np.array([level, -1.0, t, 0.0])


class Asking(_Asks, ExternalEnv):
    """With one agent."""

    def __init__(self, config: Any) -> None:
        super().__init__(Optioned.action_space, SPACE)


class AskingPair(_Asks, ExternalMultiAgentEnv):
    """With two agents."""

    def __init__(self, config: Any) -> None:
        super().__init__(dict.fromkeys("ab", Optioned.action_space), dict.fromkeys("ab", SPACE))

    def _seen(self, level: float, t: int) -> Any:
        return dict.fromkeys("ab", super()._seen(level, t))


class Pair:
    """Two agents that both see what a `Taught` env sees."""

    possible_agents = ("a", "b")
    observation_spaces = dict.fromkeys(possible_agents, SPACE)
    action_spaces = dict.fromkeys(possible_agents, Optioned.action_space)

    def __init__(self, config: dict[str, Any]) -> None:
        self._env = Taught(config)
        self.set_task, self.close = self._env.set_task, self._env.close

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        assert options is None
        return dict.fromkeys(self.possible_agents, self._env.reset(seed=seed)[0]), {}

    def step(self, actions: dict[str, Any]) -> Any:
        seen, reward, over, _, _ = self._env.step(0)
        both = self.possible_agents
        return dict.fromkeys(both, seen), dict.fromkeys(both, reward), {"__all__": over}, {"__all__": False}, {}


def runner(env: Any = Taught, worker_index: int = 0, **settings: Any) -> Any:
    """Return a runner of these envs, with a seed."""
    several = env in (Pair, AskingPair, f"{__name__}:Pair")
    kind: Any = workers.MultiAgentEnvRunner if several else workers.SingleAgentEnvRunner
    policies: dict[str, Any] = {"policies": {"one": {}}} if several else {}
    config = EnvRunnerConfig(
        env=env, **{"num_envs": 3, "seed": 5, "rollout_fragment_length": 8, **policies, **settings}
    )
    return kind(config, worker_index, run_uid="test")
