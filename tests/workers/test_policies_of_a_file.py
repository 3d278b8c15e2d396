"""Policies and mappings in the form of a config file, weights in the form of a message, and the example env."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.schemas.errors import ConfigError, ModuleError
from headrace.schemas.messages.weights import join_modules
from headrace.schemas.settings.config import FleetConfig
from headrace.schemas.settings.config_loading import build_config, parse_text
from headrace.workers import EnvRunnerConfig, MultiAgentEnv
from headrace.workers.config import runner_config
from headrace.workers.modules import actor_critic
from headrace.workers.policy.policies import PolicyMappingError
from support.envs.toy_agents import BOX, CHOICE, Together, multi_runner

TWO_CARTS = "headrace.workers.agents.examples:two_carts"


def to_the_second(agent: str, episode_id: str) -> str:
    return "two"


def fleet(**sampling: Any) -> FleetConfig:
    return build_config({"sampling": {"env": "support.envs.toy_agents:Together", "num_envs": 1, **sampling}})


def modules_of(**sampling: Any) -> dict[str, str]:
    """Agent -> module in a fragment that a fleet's worker would sample."""
    settings = runner_config(fleet(**sampling)).model_dump() | {"env": Together}
    with multi_runner(**settings) as runner:
        return {chunk.agent_id: chunk.module_id for chunk in runner.sample(num_timesteps=5)}


def test_a_table_maps_agents_to_policies_and_config_tables_build_the_modules() -> None:
    policies = {"one": {"build": "headrace.workers.modules:actor_critic", "config": {"hidden": [8]}}, "two": {}}
    table = {"a0": "two", "a1": "one"}
    assert modules_of(policies=policies, policy_mapping_fn=table) == table
    with multi_runner(policies=policies, policy_mapping_fn=table) as runner:
        one, two = (runner.modules[module_id] for module_id in ("one", "two"))
        assert one is not None
        assert two is not None
        assert sum(p.numel() for p in one.parameters()) < sum(p.numel() for p in two.parameters())


def test_a_mapping_function_is_imported_by_its_path() -> None:
    path = f"{__name__}:to_the_second"
    assert modules_of(policies={"one": {}, "two": {}}, policy_mapping_fn=path) == {"a0": "two", "a1": "two"}


class Numbered(MultiAgentEnv):
    """Agents whose ids are numbers."""

    possible_agents = (0, 1)

    def __init__(self, context: Any) -> None:
        self.observation_spaces = dict.fromkeys(self.possible_agents, BOX)
        self.action_spaces = dict.fromkeys(self.possible_agents, CHOICE)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return dict.fromkeys(self.possible_agents, np.zeros(3, np.float32)), {}

    def step(self, actions: dict[Any, Any]) -> Any:
        observations, _ = self.reset()
        return observations, dict.fromkeys(actions, 0.0), {"__all__": False}, {"__all__": False}, {}


def test_a_table_maps_agents_with_number_ids_by_the_text_of_the_id() -> None:
    table = {"0": "two", "1": "one"}
    with multi_runner(Numbered, policies=["one", "two"], policy_mapping_fn=table) as runner:
        assert {chunk.agent_id: chunk.module_id for chunk in runner.sample(num_timesteps=3)} == table


def test_an_unusable_policy_mapping_is_refused_with_the_reason() -> None:
    both = {"one": {}, "two": {}}
    with pytest.raises(ConfigError, match="sampling: agent 'a0' is mapped to 'three'; the policies are"):
        fleet(policies=both, policy_mapping_fn={"a0": "three"})
    with pytest.raises(ConfigError, match="policy_mapping_fn: agent 'a0' is mapped to 'three'; the policies are"):
        multi_runner(policies=["one"], policy_mapping_fn={"a0": "three"})
    with pytest.raises(ConfigError, match="policy_mapping_fn: module 'nowhere' cannot be imported"):
        multi_runner(policies=both, policy_mapping_fn="nowhere:mapping")
    with pytest.raises(ConfigError, match="policy_mapping_fn: 3 is no function"):
        multi_runner(policies=both, policy_mapping_fn=3)
    with (
        multi_runner(policies=both, policy_mapping_fn={"a0": "one"}) as runner,
        pytest.raises(PolicyMappingError, match="agent 'a1' is not in the mapping; it must be mapped to one of"),
    ):
        runner.sample(num_timesteps=1)


@pytest.mark.parametrize("module_id", ["", "a/b"])
def test_a_policy_without_a_usable_name_is_refused(module_id: str) -> None:
    with pytest.raises(ConfigError, match="no name for a policy; give a non-empty string without '/'"):
        fleet(policies={module_id: {}})
    with pytest.raises(ConfigError, match="no name for a policy; give a non-empty string without '/'"):
        multi_runner(policies=[module_id])


def test_a_policys_table_with_an_unknown_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown key"):
        fleet(policies={"one": {"builder": "x:y"}})
    with pytest.raises(ConfigError, match="it may have build, config"):
        multi_runner(policies={"one": {"builder": "x:y"}})


def test_policies_are_given_in_a_flag_as_json() -> None:
    given = parse_text('{"one": {}, "two": {}}')
    assert list(fleet(policies=given).sampling.policies or ()) == ["one", "two"]
    assert fleet(policies=given).sampling.is_multi_agent
    assert EnvRunnerConfig(policies=["one"]).is_multi_agent
    assert not fleet().sampling.is_multi_agent


@pytest.mark.parametrize("modules", [1, 2, 5])
def test_a_window_counts_a_batch_for_each_module_of_a_cut(modules: int) -> None:
    def windows(**sampling: Any) -> int:
        config = {"sampling": {"num_envs": 8, "rollout_fragment_length": 64, **sampling}, "fleet": {"workers": 2}}
        return build_config(config).window_batches()

    policies = {str(i): {} for i in range(modules)}
    assert windows(policies=policies) == modules * windows()
    assert windows(policies=policies, batch_mode="complete_episodes") == modules * 16


def test_a_window_too_small_for_one_update_of_all_modules_is_refused() -> None:
    settings = {"sampling": {"policies": {"one": {}, "two": {}}}, "worker": {"window_batches": 3}}
    with pytest.raises(ConfigError, match="would wait for each other; give 4 or more"):
        build_config(settings)


def test_set_weights_takes_weights_by_module_joined_or_of_the_only_module() -> None:
    with multi_runner(policies=["one", "two"], policy_mapping_fn={"a0": "one", "a1": "two"}) as runner:
        zeros = {name: np.zeros_like(a) for name, a in runner.get_state()["rl_module"]["one"].items()}
        runner.set_weights(join_modules({"one": zeros}), 1)
        state = runner.get_state()["rl_module"]
        assert not any(array.any() for array in state["one"].values())
        assert any(array.any() for array in state["two"].values()), "what is not named is frozen"
        runner.set_weights({"two": zeros}, 2)
        assert runner.weights_version == (0, 2)
        for weights in ({"three": zeros}, join_modules({"three": zeros}), zeros):
            with pytest.raises(ModuleError, match=r"modules are \['one', 'two'\]"):
                runner.set_weights(weights, 3)
        with pytest.raises(ModuleError, match="do not fit the module"):
            runner.set_weights(join_modules({"one": zeros, "two": {"other": zeros["head.bias"]}}), 3)
        assert runner.weights_version == (0, 2)
    with multi_runner() as runner:
        runner.set_weights(zeros, 1)
        assert not any(array.any() for array in runner.get_state()["rl_module"]["shared"].values())


def test_two_carts_have_different_physics_and_each_agent_ends_separately() -> None:
    with multi_runner(TWO_CARTS, num_envs=4, policies=["short", "long"]) as runner:
        chunks = runner.sample(num_episodes=40, random_actions=True)
        assert all(chunk.is_terminated for chunk in chunks)
        lengths = {agent: [len(c) for c in chunks if c.agent_id == agent] for agent in ("short", "long")}
        assert [len(own) for own in lengths.values()] == [len(chunks) // 2] * 2
        assert np.mean(lengths["long"]) > 1.3 * np.mean(lengths["short"])
        assert runner.totals.env_failures == 0
        spaces = runner.module_spaces
    assert list(spaces) == ["short", "long"]
    actor_critic(spaces["short"])
