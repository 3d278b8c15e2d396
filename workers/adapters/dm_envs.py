"""DeepMind's envs as gymnasium envs. Imported only where a creator has loaded `dm_env`, which is no dependency."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dm_env
import gymnasium as gym
import numpy as np
from dm_env import specs

from headrace.schemas.errors import EnvContractError


def as_gymnasium(env: Any) -> Any:
    """Return a `dm_env.Environment` as a gymnasium env. Return any other object unchanged."""
    return DmEnv(env) if isinstance(env, dm_env.Environment) else env


class DmEnv(gym.Env[Any, Any]):
    """A `dm_env.Environment` as a gymnasium env. Its specs become spaces.

    An episode that ends with discount 0 has terminated; with any other discount it was truncated. The info of
    each step has its "discount". The protocol has no seeds: the creator seeds the env, for example by `context.seed`.
    """

    def __init__(self, env: dm_env.Environment) -> None:
        self.env = env
        self.observation_space = space_of(env.observation_spec(), "observation spec")
        self.action_space = space_of(env.action_spec(), "action spec")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode. `seed` has no effect. `options`, a task, needs a `set_task` of the env."""
        if options:
            self.env.set_task(options)
        return self._seen(self.env.reset()), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the env. Raises `EnvContractError` for a step that begins an episode."""
        step = self.env.step(action)
        if step.first():
            raise EnvContractError("step type", "FIRST", "MID or LAST in answer to step, after a reset")
        terminated = step.last() and step.discount == 0.0
        discount = np.asarray(step.discount).tolist()  # exact: a float32 as the float of this value
        return self._seen(step), step.reward, terminated, step.last() and not terminated, {"discount": discount}

    def close(self) -> None:
        """Close the env."""
        self.env.close()

    def _seen(self, step: dm_env.TimeStep) -> Any:
        return _nested(step.observation)


def space_of(spec: Any, where: str) -> gym.Space[Any]:
    """Return the space that `spec` describes. Raises `EnvContractError` for strings and the like."""
    match spec:
        case specs.DiscreteArray():
            return gym.spaces.Discrete(spec.num_values, dtype=spec.dtype.type)
        case specs.Array() if spec.dtype == np.bool_:
            return gym.spaces.MultiBinary(spec.shape)
        case specs.Array() if spec.dtype.kind in "iuf":
            low, high = _bounds(spec)
            return gym.spaces.Box(low, high, spec.shape, spec.dtype.type)
        case Mapping():
            return gym.spaces.Dict({key: space_of(part, f"{where}[{key!r}]") for key, part in spec.items()})
        case tuple() | list():
            return gym.spaces.Tuple([space_of(part, f"{where}[{index}]") for index, part in enumerate(spec)])
    raise EnvContractError(where, f"{spec!r:.120}", "numbers or bools, or nested dicts and tuples of such")


def _bounds(spec: specs.Array) -> tuple[Any, Any]:
    if isinstance(spec, specs.BoundedArray):
        return np.broadcast_to(spec.minimum, spec.shape), np.broadcast_to(spec.maximum, spec.shape)
    if spec.dtype.kind == "f":
        return -np.inf, np.inf
    return np.iinfo(spec.dtype).min, np.iinfo(spec.dtype).max


def _nested(observation: Any) -> Any:
    """Return lists, which specs allow, as the tuples of a space, and bools as the integers of MultiBinary."""
    if isinstance(observation, Mapping):
        return {key: _nested(part) for key, part in observation.items()}
    if isinstance(observation, list | tuple):
        return tuple(_nested(part) for part in observation)
    array = np.asarray(observation)
    return array.astype(np.int8) if array.dtype == np.bool_ else array
