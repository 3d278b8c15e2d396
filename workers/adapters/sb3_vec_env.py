"""A `GymVectorEnv` as a `VecEnv` of Stable-Baselines3. Needs the extra `sb3`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from headrace.schemas.errors import ConfigError
from headrace.workers.adapters.gym_vector_env import GymVectorEnv
from headrace.workers.config import EnvRunnerConfig


class SB3VecEnv(VecEnv):
    """The envs of `GymVectorEnv(config)`, for an algorithm of SB3 that collects its own steps.

        model = PPO("MlpPolicy", VecMonitor(SB3VecEnv(EnvRunnerConfig(env="CartPole-v1", env_placement="process"))))
        model.learn(100_000)

    Answers are those of SB3's `DummyVecEnv`, with the true last observation as `terminal_observation`. An env that
    fails ends its episode with `TimeLimit.truncated` and "env_failure" in its info. Observations are arrays or Dicts of
    arrays. Attributes and methods of envs are out of reach. Raises as `GymVectorEnv` does.
    """

    def __init__(self, config: EnvRunnerConfig) -> None:
        self._envs = GymVectorEnv(config)
        self._actions: Any = None
        super().__init__(self._envs.num_envs, self._envs.single_observation_space, self._envs.single_action_space)

    def reset(self) -> Any:
        """Begin an episode in every env, with the seeds of `seed`. Raises `ConfigError` for options."""
        if any(self._options):
            raise ConfigError("do not travel to envs; use env_config", key="options")
        obs, infos = self._envs.reset(seed=self._seeds)
        self.reset_infos = [_info_of(infos, index) for index in range(self.num_envs)]
        self._reset_seeds()
        return obs

    def step_async(self, actions: NDArray[Any]) -> None:
        self._actions = actions

    def step_wait(self) -> Any:
        """Step all envs with the actions of `step_async`. Return (observations, rewards float32, dones, infos)."""
        obs, rewards, terminated, truncated, infos = self._envs.step(self._actions)
        final, last = infos.pop("final_info", {}), infos.pop("final_obs", None)
        dones, of_env = terminated | truncated, []
        for index in range(self.num_envs):
            info = _info_of(final if dones[index] else infos, index)
            info["TimeLimit.truncated"] = bool(truncated[index] and not terminated[index])
            if dones[index]:
                info["terminal_observation"] = last[index]
                self.reset_infos[index] = _info_of(infos, index)
            of_env.append(info)
        return obs, rewards.astype(np.float32), dones, of_env

    def close(self) -> None:
        """Close all envs."""
        self._envs.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Return None for each env as its render_mode. Raises `AttributeError` for others: they may live elsewhere."""
        if attr_name != "render_mode":
            raise AttributeError(f"{attr_name!r} of envs is out of reach, as they may live elsewhere")
        return [None for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError("attributes of envs are out of reach; use env_config")

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        raise NotImplementedError("methods of envs are out of reach; use a creator that wraps the env")

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> Sequence[bool]:  # type: ignore[override]
        return [False for _ in self._get_indices(indices)]


def _info_of(infos: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return the info of one env from those of a vector."""
    told = [key for key in infos if f"_{key}" in infos and infos[f"_{key}"][index]]
    return {key: _info_of(infos[key], index) if isinstance(infos[key], dict) else infos[key][index] for key in told}
