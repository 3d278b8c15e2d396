"""A multi-agent env packed into one row: it unpacks to equal values in order, and impossible spaces are refused."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.spaces import Box, Dict, Discrete, Spaces, column_dtype, leaf_shape, leaves
from headrace.schemas.errors import DecodeError, EnvContractError
from headrace.workers import EnvContext
from headrace.workers.agents.env import gym_spaces_of, spaces_by_agent
from headrace.workers.agents.packed_env import PackedEnv
from headrace.workers.agents.packing import Packing, is_packed
from headrace.workers.envs.observations import Observations
from support.envs.crowd import Crowd

ONE = Spaces(observation=Box(shape=(2,), dtype="<f4"), action=Discrete(n=2))


def crowd() -> Packing:
    return Packing(spaces_by_agent(gym_spaces_of(Crowd(EnvContext({})))))


def columns_of(packing: Packing, width: int) -> dict[str, Any]:
    parts = (packing.spaces.observation, "obs"), (packing.spaces.action, "actions")
    every = [leaf for space, root in parts for leaf in leaves(space, root)]
    return {name: np.zeros((width, *leaf_shape(leaf)), column_dtype(leaf)) for name, leaf in every}


def test_the_spaces_of_a_row_give_back_its_agents_and_their_spaces() -> None:
    packing = crowd()
    again = Packing.of(Spaces.model_validate_json(packing.spaces.model_dump_json()))
    assert list(again.by_agent.items()) == list(packing.by_agent.items())
    assert list(again.agents) == ["red/1", 3, "blue", "late"]
    assert is_packed(packing.spaces)
    assert not is_packed(ONE)


def test_an_env_answer_unpacks_unchanged_and_absent_agents_stay_in_bounds() -> None:
    packed, row = PackedEnv(Crowd(EnvContext({}))), 1
    columns = columns_of(packed.packing, 2)
    into = Observations(packed.packing.spaces.observation, 2, check_bounds=True, columns=columns)
    first, infos = packed.reset(seed=4)
    twin = Crowd(EnvContext({}))
    expected, told = twin.reset(seed=4)
    for _ in range(12):
        assert not into.put(np.array([row]), [first])
        found = packed.packing.unpack_observations(columns, row)
        assert list(found) == list(expected)
        np.testing.assert_equal(found, expected)
        assert packed.packing.unpack_infos(infos) == told
        actions = {agent: twin.action_spaces[agent].sample() for agent in expected if agent not in twin.done}
        packed.packing.pack_actions(columns, row, actions)
        space = packed.packing.spaces.action
        sent = {name: columns[f"actions/{name}"][row] for name in space.spaces} if isinstance(space, Dict) else {}
        first, _, terminated, truncated, infos = packed.step(sent)
        expected, rewards, terminateds, truncateds, told = twin.step(actions)
        assert not into.put(np.array([row]), [first])
        answer = packed.packing.unpack_step(columns, row, infos)
        assert list(answer[1].items()) == list(rewards.items())
        assert {a for a, end in answer[2].items() if end} == {a for a, end in terminateds.items() if end}
        assert {a for a, end in answer[3].items() if end} == {a for a, end in truncateds.items() if end}
        assert (terminated, truncated) == (terminateds["__all__"], truncateds["__all__"])
        if terminated or truncated:
            break


@pytest.mark.parametrize("agent", [(1, 2), None, 1.5, True, 2**70, "\ud800", np.int64(3)])
def test_an_agent_id_that_cannot_be_serialized_is_refused(agent: Any) -> None:
    with pytest.raises(EnvContractError, match="agent id should be text or a whole number"):
        Packing({"fine": ONE, agent: ONE})


def _with_keys(*keys: str) -> Spaces:
    whole = Packing({"a": ONE, "b": ONE}).spaces
    seen, done = whole.observation, whole.action
    assert isinstance(seen, Dict)
    assert isinstance(done, Dict)
    own = dict.fromkeys(keys, ONE.observation)
    flags = {name: space for name, space in seen.spaces.items() if name[0].isalpha()}
    acts = {**dict.fromkeys(keys, ONE.action), "acting": done.spaces["acting"]}
    return Spaces(observation=Dict(spaces={**own, **flags}), action=Dict(spaces=acts))


@pytest.mark.parametrize(
    "keys",
    [
        ('0 "a"',),
        ('1 "b"', '0 "a"'),
        ('0 "a"', '1 "a"'),
        ("0 1", '1 "1"'),
        ('0 "a"', "1 [1]"),
        ('0 "a"', '1 {"b": 1}'),
        ('0 "a"', "1 true"),
        ('0 "a"', "1 b"),
        ('0 "a"', '7 "b"'),
        ('0 "a"', "b"),
    ],
)
def test_spaces_that_no_multi_agent_env_has_are_refused(keys: tuple[str, ...]) -> None:
    assert Packing.of(_with_keys('0 "a"', '1 "b"')).agents == {"a": 0, "b": 1}
    with pytest.raises(DecodeError, match="spaces of no multi-agent env"):
        Packing.of(_with_keys(*keys))


def test_out_of_range_flags_and_bad_infos_from_an_env_host_are_ignored() -> None:
    """The numbers of the host have the right dtypes, and nothing else about them is certain."""
    packing = Packing({"a": ONE, "b": ONE})
    columns = columns_of(packing, 1)
    columns["obs/observed"][0], columns["obs/rewarded"][0] = [-5, -5], [2**31 - 1, 1]
    columns["obs/ends"][0] = [9, ChunkEnd.TERMINATED, -1]
    observations, rewards, terminateds, truncateds, infos = packing.unpack_step(
        columns, 0, {"7": {"x": 1}, "b": {"x": 1}, "1": [3], "0": {"y": 1}}
    )
    assert list(observations) == ["a", "b"]
    assert list(rewards) == ["b", "a"]
    assert terminateds == {"b": True, "__all__": False}
    assert truncateds == {"__all__": False}
    assert infos == {"a": {"y": 1}}


def test_an_agent_without_observation_has_a_row_inside_bounds_far_from_zero() -> None:
    class Far(Crowd):
        possible_agents = ("here", "gone")
        observation_spaces: Any = dict.fromkeys(
            possible_agents,
            gym.spaces.Dict(
                {
                    "high": gym.spaces.Box(5, 6, (1,), np.float32),
                    "low": gym.spaces.Box(-9, -8, (2,), np.int16),
                    "one": gym.spaces.Discrete(2, start=7),
                    "many": gym.spaces.Tuple([gym.spaces.MultiDiscrete([2, 2], start=[3, 4])]),
                }
            ),
        )
        action_spaces: Any = dict.fromkeys(possible_agents, gym.spaces.Discrete(2))

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return {}, {}

    packed = PackedEnv(Far(EnvContext({})))
    into = Observations(packed.packing.spaces.observation, 1, check_bounds=True)
    assert into.put(None, [packed.reset()[0]]) == []
