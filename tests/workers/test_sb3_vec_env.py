"""`SB3VecEnv` gives what SB3's own vector gives, and SB3's PPO trains on it though an env fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor

from headrace.schemas.errors import ConfigError
from headrace.workers import EnvRunnerConfig
from headrace.workers.adapters.sb3_vec_env import SB3VecEnv
from support.envs.walks import SpaceWalk


def make(walk: Any = None, **settings: Any) -> SB3VecEnv:
    named = {"env": "support.envs.walks:SpaceWalk", "env_config": walk or {}, "num_envs": 3, **settings}
    return SB3VecEnv(EnvRunnerConfig(**named))


@pytest.fixture(params=["Box", "Dict"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[SB3VecEnv, DummyVecEnv]]:
    walk = {"observation": request.param}
    ours = make(walk)
    yield ours, DummyVecEnv([lambda: SpaceWalk(walk)] * 3)
    ours.close()


def test_answers_are_those_of_sb3s_vector(pair: tuple[SB3VecEnv, DummyVecEnv]) -> None:
    for envs in pair:
        envs.seed(5)
    np.testing.assert_equal(*(envs.reset() for envs in pair))
    np.testing.assert_equal(*(envs.reset_infos for envs in pair))
    actions = np.random.default_rng(0)
    ended = 0
    for _ in range(60):
        chosen = actions.integers(3, size=3)
        (obs, rewards, dones, infos), due = (envs.step(chosen) for envs in pair)
        np.testing.assert_equal((obs, rewards, dones, infos), due)
        assert rewards.dtype == due[1].dtype
        np.testing.assert_equal(*(envs.reset_infos for envs in pair))
        ended += dones.sum()
    assert ended > 10


def test_sb3s_ppo_trains_though_an_env_fails() -> None:
    envs = VecMonitor(make({"lane": 1, "fault": "raises", "at": 20}))
    model = PPO("MlpPolicy", envs, n_steps=64, batch_size=64, n_epochs=1, device="cpu", seed=0)
    model.learn(400)
    assert model.ep_info_buffer is not None
    assert len(model.ep_info_buffer) > 20
    envs.close()


def test_what_does_not_travel_to_envs_is_refused() -> None:
    envs = make()
    envs.set_options({"low": 1})
    with pytest.raises(ConfigError, match="env_config"):
        envs.reset()
    with pytest.raises(AttributeError, match="out of reach"):
        envs.get_attr("length")
    with pytest.raises(NotImplementedError, match="creator"):
        envs.env_method("jump")
    envs.close()
