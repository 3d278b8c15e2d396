"""Connectors of several agents: each agent's rows pass once, in order, and never mix with those of another agent."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from headrace.schemas.chunks.chunk import EpisodeChunk, to_episode
from headrace.schemas.chunks.spaces import Box, Dict, Discrete, Spaces
from headrace.schemas.errors import ConfigError, ConnectorError, ModuleError
from headrace.workers import PolicySpec
from headrace.workers.connectors import (
    AgentOneHot,
    ClipActions,
    Connector,
    FlattenObservations,
    FrameStack,
    MeanStd,
    PreviousActionReward,
    Rows,
    TimeOneHot,
)
from support.envs.toy_agents import BOX, CHOICE, TakingTurns, Together, check_books, multi_runner, scheduled
from support.runners.connectors import Echo, FailingConnector

PIECES = [PreviousActionReward, partial(TimeOneHot, 4), partial(AgentOneHot, 5), FlattenObservations, FrameStack(3)]


def naive(agent: int, seen: list[Any], actions: list[int], rewards: Any) -> list[Any]:
    """`PIECES` as a loop over one agent's episode."""
    one_hot = partial(np.eye, dtype=np.float32)
    rows: list[Any] = []
    for t, frame in enumerate(seen):
        action = one_hot(3)[actions[t - 1]] if t else np.zeros(3, np.float32)
        reward = np.float32([rewards[t - 1] if t else 0])
        rows.append(np.concatenate([frame, action, reward, one_hot(4)[min(t, 3)], one_hot(5)[agent]]))
    padded = [rows[0]] * 2 + rows
    return [np.concatenate(padded[t : t + 3]) for t in range(len(rows))]


def check_agent(agent: str, truth: dict[str, Any], chunks: list[EpisodeChunk]) -> None:
    whole = to_episode(chunks)
    expected = naive(int(agent[1:]), truth["seen"][agent], truth["actions"][agent], whole.rewards)
    np.testing.assert_array_equal(whole.columns["saw"], expected[: len(whole)])
    if len(expected) == len(whole):  # done without a last observation: it sees what it saw
        expected.append(expected[-1])
    np.testing.assert_array_equal(whole.obs, expected)


def test_the_terminal_observations_pass_before_on_episode_end() -> None:
    passed: list[tuple[float, ...]] = []
    ended: list[int] = []

    class Noting(Connector):
        def connect(self, spaces: Spaces, width: int) -> Spaces:
            return spaces

        def process(self, rows: Rows) -> Any:
            passed.extend(tuple(row) for row in rows.columns["obs"].tolist())
            return dict(rows.columns)

    def look(episode: Any, env_index: int) -> None:
        ended.append(env_index)
        for agent, length in ((0.0, 2.0), (1.0, 3.0)):
            last = (length, float(env_index), agent)
            assert passed.count(last) == ended.count(env_index), "each has passed, this one's too"

    settings = {"env_config": {"lengths": [2, 3]}, "callbacks": [{"on_episode_end": look}]}
    with multi_runner(num_envs=2, env_to_module=[Noting], **settings) as sampler:
        sampler.sample(num_timesteps=20)
        assert sampler.totals.discarded == {}, "no callback has raised"
    assert {0, 1} <= set(ended)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("num_envs", "length", "fails"), [(1, 1, 0.0), (3, 2, 0.0), (4, 7, 0.02)])
def test_module_observations_equal_a_loop_over_each_agents_episode(
    num_envs: int, length: int, fails: float, seed: int
) -> None:
    truth: list[dict[str, Any]] = []
    lives: dict[Any, list[EpisodeChunk]] = defaultdict(list)

    def mapping(agent: str, episode_id: str) -> str:
        return ("even", "odd")[(int(agent[1:]) + int(episode_id, 16)) % 2]

    settings = {"policies": ["even", "odd"], "policy_mapping_fn": mapping, "module": Echo, "env_to_module": PIECES}
    settings |= {"rollout_fragment_length": length, "seed": seed, "env_restart_attempts": 10**5}
    with multi_runner(scheduled(truth, 3 + seed % 3, fails), num_envs=num_envs, **settings) as sampler:
        while sampler.totals.episodes < 60:
            for chunk in sampler.sample_fragment():
                lives[chunk.env_index, chunk.seed, chunk.agent_id].append(chunk)
            check_books(sampler)
    checked = 0
    for episode in truth:
        for agent in episode["actions"] if episode["over"] else ():
            check_agent(agent, episode, lives[episode["env"], episode["seed"], agent])
            checked += 1
    assert checked > 60


def test_observations_pass_the_connectors_under_random_actions() -> None:
    truth: list[dict[str, Any]] = []
    with multi_runner(scheduled(truth), module=Echo, env_to_module=PIECES) as sampler:
        chunks = sampler.sample(num_episodes=20, random_actions=True)
    over = {episode["seed"]: episode for episode in truth if episode["over"]}
    for chunk in chunks:
        episode, agent = over[chunk.seed], chunk.agent_id
        expected = naive(int(agent[1:]), episode["seen"][agent], episode["actions"][agent], chunk.rewards)
        np.testing.assert_array_equal(chunk.obs[: len(chunk)], expected[: len(chunk)])


def test_policies_may_have_connectors_of_their_own() -> None:
    policies = {"a0": None, "a1": PolicySpec(env_to_module=[PreviousActionReward], module_to_env=[])}
    with multi_runner(policies=policies, env_to_module=[FrameStack(2)], module_to_env=[ClipActions]) as sampler:
        spaces = sampler.spaces
        chunks = sampler.sample(num_timesteps=10)
        assert sampler.get_spaces()["a0"] == (BOX, CHOICE)
    assert spaces["a0"].observation == Box(shape=(6,), dtype="<f4")
    assert isinstance(spaces["a1"].observation, Dict)
    for chunk in chunks:
        assert (chunk.obs["obs"] if chunk.agent_id == "a1" else chunk.obs).shape[1] == (
            3 if chunk.agent_id == "a1" else 6
        )
        assert ("actions_for_env" in chunk.columns) == (chunk.agent_id == "a0")


def test_without_connectors_the_module_reads_the_envs_own_columns() -> None:
    with multi_runner(num_envs=2) as sampler:
        sampler.sample(num_timesteps=4)
        (module,) = sampler._sampler.steps._modules
        assert module.policy.connectors.columns is module.observations.columns


# -- actions on their way out ------------------------------------------------------------------------------------------


class Mirror(Connector):
    """Action n - 1 - a for a, and a log of who passed."""

    passed: list[Any]

    def connect(self, spaces: Spaces, width: int) -> Spaces:
        return spaces

    def process(self, rows: Rows) -> Any:
        self.passed.append((rows.lanes.tolist(), rows.agents.tolist()))
        return {"actions": 2 - rows.columns["actions"]}


@pytest.mark.parametrize("random_actions", [False, True])
def test_the_policys_action_and_the_sent_action_are_both_stored(random_actions: bool) -> None:
    env = type("Turns", (TakingTurns,), {"got": []})
    piece = type("Logged", (Mirror,), {"passed": []})
    with multi_runner(env, module_to_env=[piece], module=Echo) as sampler:
        chunks = sampler.sample(num_episodes=3, random_actions=random_actions)
    sent: dict[str, list[int]] = defaultdict(list)
    for chunk in chunks:
        sent[chunk.agent_id] += chunk.columns["actions_for_env"].tolist()
        np.testing.assert_array_equal(chunk.columns["actions_for_env"], 2 - chunk.actions)
    got: dict[str, list[int]] = defaultdict(list)
    for agent, action in env.got:
        got[agent].append(action)
    assert sent == got
    assert piece.passed
    assert all(lanes == agents and len(lanes) == 1 for lanes, agents in piece.passed), (
        "those who act pass, and no other"
    )


class Masked(Together):
    """Which actions are legal changes with every step and agent."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        space = gym.spaces.Dict({"action_mask": gym.spaces.Box(0, 1, (3,), np.int8), "seen": BOX})
        self.observation_spaces = dict.fromkeys(self.possible_agents, space)

    def _legal(self, agent: int) -> int:
        return (self.t * 5 + agent * 2 + self.index) % 3

    def observe(self, agent: int) -> Any:
        mask = np.zeros(3, np.int8)
        mask[self._legal(agent)] = 1
        return {"action_mask": mask, "seen": super().observe(agent)}

    def step(self, actions: dict[Any, Any]) -> Any:
        assert all(action == self._legal(int(agent[1:])) for agent, action in actions.items()), "legal"
        return super().step(actions)


class Hidden(Connector):
    """Makes one vector of mask and observation."""

    def connect(self, spaces: Spaces, width: int) -> Spaces:
        return Spaces(observation=Box(shape=(6,), dtype="<f4"), action=spaces.action)

    def process(self, rows: Rows) -> Any:
        return {"obs": np.concatenate([rows.columns[f"obs/{name}"] for name in ("action_mask", "seen")], 1)}


def test_random_actions_stay_legal_when_a_connector_hides_the_mask() -> None:
    settings = {"env_config": {"lengths": [4, 6, 9]}, "restart_failed_sub_environments": False, "module": Echo}
    with multi_runner(Masked, num_envs=3, env_to_module=[Hidden], **settings) as sampler:
        assert sampler.spaces["shared"].observation == Box(shape=(6,), dtype="<f4")
        assert sum(map(len, sampler.sample(num_timesteps=300, random_actions=True))) > 300


def test_a_connector_that_hides_the_mask_from_a_module_that_obeys_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="removes the action mask 'obs/action_mask', so module 'shared' cannot obey"):
        multi_runner(Masked, env_to_module=[Hidden])


@pytest.mark.parametrize("module", ["actor_critic", "lstm_actor_critic"])
def test_every_module_obeys_masks_behind_every_piece(module: str) -> None:
    pieces = [PreviousActionReward, partial(AgentOneHot, 3), FlattenObservations, MeanStd, partial(FrameStack, 2)]
    settings = {"env_config": {"lengths": [4, 6, 9]}, "restart_failed_sub_environments": False}
    named = f"headrace.workers.modules:{module}"
    for explore in (True, False):
        with multi_runner(Masked, num_envs=2, env_to_module=pieces, module=named, **settings) as sampler:
            for chunk in sampler.sample(num_timesteps=100, explore=explore):
                assert chunk.obs["action_mask"].dtype == np.int8
                assert (chunk.obs["action_mask"].argmax(1)[:-1] == chunk.actions).all()


def test_random_actions_of_another_space_pass_on_their_way_to_the_env() -> None:
    class Halved(Connector):
        def connect(self, spaces: Spaces, width: int) -> Spaces:
            return Spaces(observation=spaces.observation, action=Discrete(n=6))

        def process(self, rows: Rows) -> Any:
            return {"actions": rows.columns["actions"] // 2}

    with multi_runner(num_envs=2, module_to_env=[Halved], module=Echo) as sampler:
        for random_actions in (True, False):
            for chunk in sampler.sample(num_timesteps=40, random_actions=random_actions, force_reset=True):
                np.testing.assert_array_equal(chunk.columns["actions_for_env"], chunk.actions // 2)
        assert sampler.spaces["shared"].action == Discrete(n=6)


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["env_to_module", "module_to_env"])
@pytest.mark.parametrize("fails_at", [1, 2, 5, 9])
def test_a_failed_connector_is_named_with_its_policy_and_totals_stay_right(setting: str, fails_at: int) -> None:
    piece = type("Fails", (FailingConnector,), {"fails_at": fails_at})
    policies = {"a0": None, "a1": PolicySpec(**{setting: [piece]})}
    with multi_runner(policies=policies, num_envs=2) as sampler:
        with pytest.raises(
            ConnectorError, match=r"\(Fails\) of policy 'a1' failed: ZeroDivisionError: no mass"
        ) as caught:
            sampler.sample(num_timesteps=30)
        assert setting in caught.value.connector
        check_books(sampler)
        assert sampler.totals.open == 0
        chunks = [chunk for chunk in sampler.sample(num_timesteps=8) if len(chunk)]
        assert {(chunk.t_start, len(chunk)) for chunk in chunks} == {(0, 4)}
        check_books(sampler)


def test_a_connector_that_raises_in_widen_is_named_and_may_be_retried() -> None:
    piece = type("Cramped", (FailingConnector,), {"widens": False})
    with multi_runner(env_to_module=[piece, FrameStack(2)]) as sampler:
        with pytest.raises(ConnectorError, match=r"\(Cramped\) of policy 'shared' failed: MemoryError: no room"):
            sampler.sample(num_timesteps=3)
        check_books(sampler)
        assert sum(map(len, sampler.sample(num_timesteps=3))) == 6


def test_an_agent_beyond_the_size_of_agent_one_hot_raises() -> None:
    with (
        multi_runner(env_to_module=[partial(AgentOneHot, 2)], env_config={"lengths": [3, 3, 3]}) as sampler,
        pytest.raises(ConnectorError, match=r"place 2 among the env's possible_agents; give num_agents = 3 or more"),
    ):
        sampler.sample(num_timesteps=3)
    with pytest.raises(ConfigError, match=r"AgentOneHot\(num_agents=0\)"):
        AgentOneHot(0)


def test_connectors_that_do_not_fit_a_policy_fail_when_it_is_built() -> None:
    pieces = [PreviousActionReward, FrameStack(2)]
    with pytest.raises(ConfigError, match="FrameStack"), multi_runner(Masked, env_to_module=pieces):
        pass


def test_an_exception_in_a_module_keeps_the_open_steps() -> None:
    class Raising(Echo):
        calls = 0

        def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
            self.calls += 1
            if self.calls == 4:
                raise RuntimeError("nan")
            return super().forward_exploration(batch)

    with multi_runner(module=Raising, env_to_module=[FrameStack(2)]) as sampler:
        with pytest.raises(ModuleError, match="nan"):
            sampler.sample(num_timesteps=10)
        assert sampler.totals.open == 6
        assert sum(map(len, sampler.sample(num_timesteps=1))) == 8
        check_books(sampler)
