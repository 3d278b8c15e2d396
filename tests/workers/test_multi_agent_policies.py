"""The mapping of agents to modules, the spaces that modules are built for, and the errors of both."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from headrace.schemas.errors import ConfigError, EnvContractError, ModuleError
from headrace.workers import EnvRunnerConfig, MultiAgentEnvRunner, PolicySpec, SingleAgentEnvRunner
from headrace.workers.agents.env import MultiAgentEnv
from headrace.workers.policy.policies import PolicyMappingError
from support.envs.toy import Counting
from support.envs.toy_agents import BOX, CHOICE, Together, check_books, multi_runner, scheduled

WIDE: Any = gym.spaces.Box(-np.inf, np.inf, (5,), np.float32)
PUSH: Any = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)


class TwoKinds(Together):
    """a0 is as ever; a1 sees five numbers and pushes."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.observation_spaces = {"a0": BOX, "a1": WIDE}
        self.action_spaces = {"a0": CHOICE, "a1": PUSH}

    def observe(self, agent: int) -> Any:
        row = super().observe(agent)
        return np.concatenate((row, np.zeros(2, np.float32))) if agent else row

    def step(self, actions: dict[Any, Any]) -> Any:
        assert all(self.action_spaces[agent].contains(action) for agent, action in actions.items())
        return super().step(actions)


def test_the_mapping_is_called_once_for_each_agent_and_episode() -> None:
    asked: Counter[tuple[str, str]] = Counter()

    def mapping(agent: str, episode_id: str) -> str:
        asked[agent, episode_id] += 1
        return "even" if int(episode_id, 16) % 2 == 0 else "odd"

    with multi_runner(num_envs=3, policies=["even", "odd"], policy_mapping_fn=mapping) as sampler:
        chunks = [c for _ in range(12) for c in sampler.sample(num_timesteps=9)]
        check_books(sampler)
    assert set(asked.values()) == {1}
    assert set(asked) >= {(c.agent_id, c.episode_id) for c in chunks}
    for c in chunks:
        assert c.module_id == ("even" if int(c.episode_id, 16) % 2 == 0 else "odd")
        np.testing.assert_array_equal(c.obs[:, 0], np.arange(c.t_start, c.t_start + len(c) + 1))
        assert {tuple(row) for row in c.obs[:, 1:]} == {(c.env_index, int(c.agent_id[1:]))}
    assert {c.module_id for c in chunks} == {"even", "odd"}


def test_modules_of_different_spaces_each_act_once_a_poll() -> None:
    calls: Counter[str] = Counter()

    def counted(name: str) -> Any:
        def build(spaces: Any, **config: Any) -> Any:
            from headrace.workers.modules import actor_critic

            module = actor_critic(spaces, **config)
            act = module.numpy_act()

            def counting_act(columns: Any, noise: Any) -> Any:
                calls[name] += 1
                return act(columns, noise)

            module.numpy_act = lambda: counting_act  # type: ignore[method-assign]
            return module

        return build

    policies = {"a0": counted("a0"), "a1": PolicySpec(counted("a1"), {"hidden": (8,)})}
    with multi_runner(TwoKinds, num_envs=8, policies=policies) as sampler:
        batches = sampler.sample(num_timesteps=80)
        assert calls == {"a0": 10, "a1": 10}
        assert {c.obs.shape[1:] for c in batches if c.module_id == "a1"} == {(5,)}
        assert {c.actions.shape[1:] for c in batches if c.module_id == "a1"} == {(2,)}
        assert all("actions_for_env" in c.columns for c in batches if c.module_id == "a1")
        spaces = sampler.get_spaces()
        assert [spaces[module] for module in ("a0", "a1")] == [(BOX, CHOICE), (WIDE, PUSH)]
        sampler.sample(num_timesteps=8, random_actions=True)
        check_books(sampler)


@pytest.mark.parametrize("module", [None, "who", 3])
def test_the_error_names_an_agent_that_is_mapped_to_no_policy(module: Any) -> None:
    with multi_runner(policy_mapping_fn=lambda agent, episode: module if agent == "a1" else "shared") as sampler:
        with pytest.raises(PolicyMappingError, match=r"agent 'a1' was mapped to .* policies \['shared'\]") as caught:
            sampler.sample(num_timesteps=1)
        assert isinstance(caught.value, ConfigError)
        assert caught.value.agent == "a1"
        check_books(sampler)


def test_a_mapping_that_fails_later_keeps_the_totals_consistent() -> None:
    bad: list[str] = []

    def mapping(agent: str, episode_id: str) -> str:
        if bad:
            raise RuntimeError("no idea")
        return "shared"

    with multi_runner(num_envs=3, policy_mapping_fn=mapping) as sampler:
        sampler.sample(num_timesteps=6)
        bad.append("from now on")
        with pytest.raises(PolicyMappingError, match=r"could not be mapped \(RuntimeError: no idea\)"):
            sampler.sample(num_timesteps=30)
        check_books(sampler)
        bad.clear()
        chunks = sampler.sample(num_timesteps=6)
        assert all(c.t_start == 0 for c in chunks if len(c) and not c.is_done)
        check_books(sampler)


def test_a_mapping_that_fails_at_times_keeps_the_totals_consistent() -> None:
    asked = itertools.count(1)

    def mapping(agent: str, episode_id: str) -> str:
        return "shared" if next(asked) % 9 else "nobody"

    refused = 0
    with multi_runner(scheduled([], 5), num_envs=2, policy_mapping_fn=mapping, rollout_fragment_length=9) as sampler:
        for _ in range(200):
            try:
                sampler.sample_fragment()
            except PolicyMappingError:
                refused += 1
            check_books(sampler)
        assert sampler.totals.delivered > 0
    assert refused > 20


def test_agents_of_different_spaces_cannot_share_a_module() -> None:
    with pytest.raises(ConfigError, match="'a0' and 'a1' have different spaces and are both mapped to 'shared'"):
        multi_runner(TwoKinds)
    with pytest.raises(ConfigError, match="no agent is mapped to 'spare'"):
        multi_runner(TwoKinds, policies={"a0": None, "a1": None, "spare": None})
    given = {"mine": PolicySpec(observation_space=BOX, action_space=CHOICE)}
    with (
        multi_runner(TwoKinds, policies=given) as sampler,
        pytest.raises(PolicyMappingError, match="built for other spaces"),
    ):
        sampler.sample(num_timesteps=1)


def test_policies_that_cannot_be_built_are_refused() -> None:
    for policies, words in (({}, "at least one"), ({"p": 3}, "give None"), ({"": None}, "no name for a policy")):
        with pytest.raises(ConfigError, match=words):
            multi_runner(policies=policies)
    with pytest.raises(ConfigError, match="both spaces or neither"):
        multi_runner(policies={"p": PolicySpec(observation_space=BOX)})


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ("a0", "'a0' is no mapping by policy id, and no list of such ids"),
        (3, "3 is no mapping by policy id"),
        ([["a0"]], "is no name for a policy"),
        ({"a0": PolicySpec(module_config=3)}, "module_config of policy 'a0' should be a mapping"),  # type: ignore[arg-type]
        ({"a0": PolicySpec(env_to_module="x:Y")}, "env_to_module of policy 'a0' should be a list of connectors"),
        ({"a0": {"module_to_env": 3}}, "module_to_env of policy 'a0' should be a list of connectors, got 3"),
    ],
)
def test_a_policies_setting_of_a_wrong_type_is_named_in_the_error(policies: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        multi_runner(policies=policies)


class Named(MultiAgentEnv):
    """Agents of any ids, who act once."""

    def __init__(self, *agents: Any) -> None:
        self.possible_agents = agents
        self.observation_spaces, self.action_spaces = dict.fromkeys(agents, BOX), dict.fromkeys(agents, CHOICE)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return dict.fromkeys(self.possible_agents, np.zeros(3, np.float32)), {}

    def step(self, actions: dict[Any, Any]) -> Any:
        return self.reset()[0], dict.fromkeys(actions, 1.0), {"__all__": True}, {"__all__": False}, {}


def test_an_agent_with_an_integer_id_maps_to_the_policy_of_that_name() -> None:
    with multi_runner(lambda _: Named(0, 1), policies=["0", "1"]) as sampler:
        chunks = sampler.sample(num_episodes=1)
    assert [(chunk.agent_id, chunk.module_id) for chunk in chunks] == [("0", "0"), ("1", "1")]


def test_agents_with_equal_or_reserved_ids_as_text_are_refused() -> None:
    with pytest.raises(EnvContractError, match="possible_agents should be of different names, as text, got '1' twice"):
        multi_runner(lambda _: Named(1, "1"))
    with pytest.raises(EnvContractError, match=r"possible_agents should be of names of their own.*got '__all__'"):
        multi_runner(lambda _: Named("__all__", "1"))


def test_each_runner_refuses_the_others_config_and_envs() -> None:
    with pytest.raises(ConfigError, match=r"policies=\{module_id: \.\.\.\}, policy_mapping_fn=") as caught:
        MultiAgentEnvRunner(EnvRunnerConfig(env=Together))
    assert caught.value.key == "policies"
    with pytest.raises(EnvContractError, match="needs SingleAgentEnvRunner"):
        multi_runner(Counting)
    with pytest.raises(EnvContractError, match="needs SingleAgentEnvRunner"):
        multi_runner("CartPole-v1")
    with pytest.raises(EnvContractError, match="take MultiAgentEnvRunner"):
        SingleAgentEnvRunner(EnvRunnerConfig(env=Together))
    with pytest.raises(ConfigError, match="MultiAgentEnvRunner"):
        SingleAgentEnvRunner(EnvRunnerConfig(env=Counting, policies={"p": None}))


def test_envs_of_different_spaces_are_refused() -> None:
    def creator(context: Any) -> Together:
        return TwoKinds(context) if context.vector_index == 1 else Together(context)

    with pytest.raises(EnvContractError, match="spaces of env 1 should be those of env 0"):
        multi_runner(creator, num_envs=2)


def test_an_env_may_be_a_gymnasium_one_and_give_its_spaces_by_functions() -> None:
    class ByFunction(gym.Env[Any, Any]):
        possible_agents = (1, 2)

        def observation_space(self, agent: int) -> Any:  # type: ignore[override]
            return BOX

        def get_action_space(self, agent: int) -> Any:
            return CHOICE

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return {1: np.zeros(3, np.float32)}, {1: {"level": 7}}

        def step(self, actions: dict[Any, Any]) -> Any:
            seen = {2 if 1 in actions else 1: np.ones(3, np.float32)}
            return seen, {1: 1.0}, {"__all__": False}, {}, {agent: {"turn": agent} for agent in seen}

    gym.register("ByFunction-v0", ByFunction)
    try:
        with multi_runner("ByFunction-v0", rollout_fragment_length=6) as sampler:
            first, second = sorted(sampler.sample_fragment(), key=lambda c: c.agent_id)
    finally:
        del gym.registry["ByFunction-v0"]
    assert (first.agent_id, first.env_t.tolist(), first.rewards.tolist()) == ("1", [0, 2, 4], [2.0, 2.0, 2.0])
    assert (second.agent_id, second.env_t.tolist()) == ("2", [1, 3])
    assert first.infos == [{"level": 7}, {"turn": 1}, {"turn": 1}, {"turn": 1}]


def test_masks_in_infos_bind_random_actions() -> None:
    class Masked(Together):
        def step(self, actions: dict[Any, Any]) -> Any:
            assert self.t == 0 or set(actions.values()) == {self.t % 3}
            *parts, _ = super().step(actions)
            mask = np.arange(3) == self.t % 3
            return *parts, {agent: {"action_mask": mask} for agent in self.possible_agents}

    with multi_runner(Masked, num_envs=3, env_config={"lengths": [9, 9]}) as sampler:
        sampler.sample(num_timesteps=300, random_actions=True)
        assert sampler.totals.env_failures == 0


def test_a_policy_without_a_module_can_only_act_at_random() -> None:
    def none(spaces: Any) -> Any:
        raise NotImplementedError

    with multi_runner(policies={"a0": None, "a1": none}) as sampler:
        assert len(sampler.sample(num_timesteps=4, random_actions=True)) == 2
        with pytest.raises(ModuleError, match="random_actions=True"):
            sampler.sample(num_timesteps=1)
        sampler.sample(num_episodes=2, random_actions=True)
        check_books(sampler)


def test_equal_settings_repeat_a_run_and_seeds_differ_between_workers() -> None:
    def lives(**settings: Any) -> list[Any]:
        with multi_runner(num_envs=3, **settings) as sampler:
            return [(c.episode_id, c.agent_id, c.seed, c.actions.tolist()) for c in sampler.sample(num_timesteps=60)]

    assert lives() == lives()
    seeds = {one[2] for one in lives()}
    assert not seeds & {one[2] for one in lives(worker_index=1)}
    assert not seeds & {one[2] for one in lives(incarnation=1)}
