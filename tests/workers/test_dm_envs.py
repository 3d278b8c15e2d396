"""Envs of DeepMind's protocol are sampled as gymnasium's are."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import dm_env
import gymnasium as gym
import numpy as np
import pytest
from dm_env import specs

from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.errors import EnvContractError
from headrace.workers.adapters.dm_envs import DmEnv, space_of
from support.envs.toy import check_books, runner


class Catch(dm_env.Environment):
    """Three steps with the discounts that `config` says, and each the reward of its action."""

    def __init__(self, config: Any) -> None:
        self.discount = config.get("discount", 0.0)
        self.within = config.get("within", (1.0, 0.0))
        self.restarts = config.get("restarts", False)
        self.t = 0
        self.closed = False

    def observation_spec(self) -> Any:
        return OrderedDict(
            place=specs.BoundedArray((2,), np.float32, 0.0, [3.0, 9.0], name="place"),
            parts=[specs.Array((), np.float64), specs.Array((2,), bool)],
            left=specs.DiscreteArray(4),
        )

    def action_spec(self) -> Any:
        return specs.DiscreteArray(3, dtype=np.int32)

    def _observe(self) -> Any:
        place = np.array([self.t, 9.0], np.float32)
        return OrderedDict(place=place, parts=[np.float64(self.t), np.array([True, False])], left=3 - self.t)

    def reset(self) -> dm_env.TimeStep:
        self.t = 0
        return dm_env.restart(self._observe())

    def step(self, action: Any) -> dm_env.TimeStep:
        assert isinstance(action, np.int32)
        self.t += 1
        if self.restarts:
            return self.reset()
        if self.t < 3:
            return dm_env.transition(float(action), self._observe(), discount=self.within[self.t - 1])
        return dm_env.TimeStep(dm_env.StepType.LAST, float(action), self.discount, self._observe())

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(("discount", "end"), [(0.0, ChunkEnd.TERMINATED), (1.0, ChunkEnd.TRUNCATED)])
def test_the_last_discount_says_whether_an_episode_has_terminated(discount: float, end: ChunkEnd) -> None:
    with runner(Catch, num_envs=2, env_config={"discount": discount}, rollout_fragment_length=6) as sampler:
        batch = sampler.sample_fragment()
        check_books(sampler)
    assert len(batch) == 4
    for chunk in batch:
        assert chunk.end is end
        assert chunk.obs["place"].tolist() == [[0, 9], [1, 9], [2, 9], [3, 9]]
        assert chunk.obs["parts"][0].tolist() == [0, 1, 2, 3]
        assert chunk.obs["parts"][1].tolist() == [[1, 0]] * 4
        assert chunk.obs["left"].tolist() == [3, 2, 1, 0]
        assert chunk.rewards.tolist() == chunk.actions.tolist()
        assert [info.get("discount") for info in chunk.infos] == [None, 1.0, 0.0, discount]


def test_the_runner_wraps_a_dm_env_and_closes_it() -> None:
    with runner(Catch) as sampler:
        env: Any = sampler.env
        assert isinstance(env, DmEnv)
    assert env.env.closed


def test_an_episode_that_begins_within_a_step_is_a_failure_of_the_env() -> None:
    with (
        runner(Catch, env_config={"restarts": True}, restart_failed_sub_environments=False) as sampler,
        pytest.raises(EnvContractError, match="step type should be MID or LAST"),
    ):
        sampler.sample(num_timesteps=1)


def test_dm_env_specs_become_gymnasium_spaces_of_the_same_values() -> None:
    spaces = gym.spaces
    bounded = specs.BoundedArray((2, 1), np.int16, -3, 4)
    assert space_of(bounded, "") == spaces.Box(np.int16(-3), np.int16(4), (2, 1), np.int16)
    assert space_of(specs.Array((3,), np.uint8), "") == spaces.Box(0, 255, (3,), np.uint8)
    assert space_of(specs.Array((1,), np.float32), "") == spaces.Box(-np.inf, np.inf, (1,), np.float32)
    assert space_of(specs.DiscreteArray(5, np.int64), "") == spaces.Discrete(5)
    with pytest.raises(EnvContractError, match=r"observation spec\['name'\] should be numbers or bools"):
        space_of({"name": specs.StringArray(())}, "observation spec")


@pytest.mark.parametrize("placement", ["inline", "process"])
def test_each_discount_within_an_episode_arrives_as_it_is(placement: str) -> None:
    within = {"within": [float(np.float32(0.99)), 1 / 3]}
    settings: Any = {"env_placement": placement, "env_config": {**within, "discount": 0.25}}
    with runner(f"{__name__}:Catch" if placement == "process" else Catch, **settings) as sampler:
        (chunk,) = sampler.sample(num_episodes=1)
    assert [info.get("discount") for info in chunk.infos] == [None, *within["within"], 0.25]
