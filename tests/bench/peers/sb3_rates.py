"""Stable-Baselines3's `PPO.collect_rollouts`, with a trunk that policy and value share.

python tests/bench/peers/sb3_rates.py (sampling | workers) NUM_ENVS SECONDS

- sampling: all envs in this process, by `DummyVecEnv`.
- workers: two workers' worth of envs in a process each, by `SubprocVecEnv`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from measuring import Take, main
from small_policy import ENV
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv
from torch import nn

STEPS = 64
"""Steps of each env in one rollout."""


class Trunk(BaseFeaturesExtractor):
    """64 x 64 tanh."""

    def __init__(self, observation_space: Any) -> None:
        super().__init__(observation_space, 64)
        self._layers = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Return the features (rows, 64)."""
        return self._layers(obs)


@contextmanager
def rollouts(width: int, vector: Any) -> Iterator[Take]:
    """Collect rollouts of `width` envs."""
    torch.set_num_threads(1)
    env = make_vec_env(ENV, n_envs=width, seed=0, vec_env_cls=vector)
    settings = {"features_extractor_class": Trunk, "net_arch": []}
    model = PPO("MlpPolicy", env, n_steps=STEPS, batch_size=STEPS * width, policy_kwargs=settings, device="cpu")
    _, callback = model._setup_learn(1 << 40)

    def take() -> int:
        model.collect_rollouts(model.env, callback, model.rollout_buffer, STEPS)
        return STEPS * width

    yield take
    env.close()


def sampling(case: str) -> AbstractContextManager[Take]:
    """Sample in this process."""
    return rollouts(int(case), DummyVecEnv)


def workers(case: str) -> AbstractContextManager[Take]:
    """Sample in a process for each env."""
    return rollouts(2 * int(case), SubprocVecEnv)


if __name__ == "__main__":
    main(sampling=sampling, workers=workers)
