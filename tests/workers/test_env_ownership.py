"""Each lane has an env object of its own: one that is in use, or was closed, is refused with a sentence."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest
from gymnasium.vector import SyncVectorEnv

from headrace.schemas.errors import EnvContractError, EnvRestartBudgetError
from headrace.workers import EnvContext, VectorEnv
from support.envs.counting import Counting
from support.envs.toy import runner
from support.envs.toy_agents import Together, multi_runner

OF_ENV_0 = r"env 1 should be an object of its own, got the one of env 0 \(.*Counting\); build a new env in each call"


class FailsOnce(Counting):
    """Fails in its third step."""

    def step(self, action: Any) -> Any:
        if self.t == 2:
            raise RuntimeError("diverged")
        return super().step(action)


@pytest.mark.parametrize("settings", [{}, {"gym_env_vectorize_mode": "sync"}], ids=["inline", "sync"])
@pytest.mark.parametrize(
    "wrap", [lambda env: env, lambda env: gym.wrappers.TimeLimit(env, 10)], ids=["bare", "wrapped"]
)
def test_one_env_in_two_lanes_is_refused(wrap: Any, settings: dict[str, Any]) -> None:
    env = Counting(EnvContext({}))
    with pytest.raises(EnvContractError, match=OF_ENV_0):
        runner(lambda context: wrap(env), num_envs=3, **settings)


@pytest.mark.parametrize(
    "vector",
    [
        lambda env: SyncVectorEnv([lambda: env] * 2),
        lambda env: VectorEnv.wrap(lambda index: env, num_envs=2),
        lambda env: VectorEnv.wrap(existing_envs=[env, gym.wrappers.TimeLimit(env, 10)], num_envs=2),
    ],
    ids=["SyncVectorEnv", "make_env", "existing_envs"],
)
def test_one_env_twice_in_a_vector_of_ones_own_is_refused(vector: Any) -> None:
    env = Counting(EnvContext({}))
    with pytest.raises(EnvContractError, match=OF_ENV_0):
        runner(lambda context: vector(env), num_envs=2)


def test_one_env_of_several_agents_in_two_lanes_is_refused() -> None:
    env = Together({})
    with pytest.raises(
        EnvContractError, match=r"env 1 should be an object of its own, got the one of env 0 \(.*Together"
    ):
        multi_runner(lambda context: env, num_envs=2)


_shared: list[Counting] = []


def make_shared(context: EnvContext) -> Counting:
    """Return the one env of this process."""
    _shared[:] = _shared or [Counting(context)]
    return _shared[0]


def test_one_env_in_two_lanes_of_a_process_is_refused() -> None:
    with pytest.raises(EnvContractError, match=OF_ENV_0):
        runner(f"{__name__}:make_shared", num_envs=2, env_placement="process")


def test_a_failed_env_is_not_taken_back_and_no_lane_gets_the_env_of_another() -> None:
    settings = {"num_envs": 2, "env_restart_attempts": 1}
    envs = [FailsOnce(EnvContext({})), Counting(EnvContext({}))]
    with (
        runner(lambda context: envs[context.vector_index], **settings) as sampler,
        pytest.raises(EnvRestartBudgetError, match=r"got the one that it had before \(.*FailsOnce\)"),
    ):
        sampler.sample(num_timesteps=20)
    envs = [FailsOnce(EnvContext({})), Counting(EnvContext({}))]
    with (
        runner(lambda context: envs[1 if context.recreated else context.vector_index], **settings) as sampler,
        pytest.raises(EnvRestartBudgetError, match=r"env 0 should be .*got the one of env 1 \(.*Counting\)"),
    ):
        sampler.sample(num_timesteps=20)


def test_runners_share_an_env_one_after_the_other_only() -> None:
    env = Counting(EnvContext({}))
    with runner(lambda context: env) as sampler:
        sampler.sample(num_timesteps=4)
        with pytest.raises(EnvContractError, match="got the one of another runner, which is open"):
            runner(lambda context: env)
        assert len(sampler.sample(num_timesteps=4)) > 0
    for settings in ({"gym_env_vectorize_mode": "sync"}, {}, {}):
        with runner(lambda context: env, **settings) as sampler:
            assert len(sampler.sample(num_timesteps=4)) > 0
