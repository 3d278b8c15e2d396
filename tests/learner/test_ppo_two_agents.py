"""Two policies learn two different things at once, from one env in which both act."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import pytest
import torch

from headrace.learner_stub.reference.policies import LearnerPolicies, build_policies
from headrace.schemas.settings.config import FleetConfig
from headrace.workers import EnvRunnerConfig, MultiAgentEnv, MultiAgentEnvRunner

pytestmark = pytest.mark.long

POLICIES = {"ours": {}, "theirs": {}}


class TwoCartPoles(MultiAgentEnv):
    """ "usual" balances gymnasium's cart; that of "odd" is pushed the other way, more weakly, under a longer pole."""

    def __init__(self, config: Any = None) -> None:
        self._envs: dict[str, Any] = {agent: gym.make("CartPole-v1") for agent in ("usual", "odd")}
        odd = self._envs["odd"].unwrapped
        odd.force_mag, odd.length = -8.0, 0.8
        odd.polemass_length = odd.masspole * odd.length
        self.possible_agents = list(self._envs)
        self.observation_spaces = {agent: env.observation_space for agent, env in self._envs.items()}
        self.action_spaces = {agent: env.action_space for agent, env in self._envs.items()}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._playing = set(self._envs)
        return {agent: env.reset(seed=seed)[0] for agent, env in self._envs.items()}, {}

    def step(self, actions: dict[Any, Any]) -> Any:
        answers = {agent: self._envs[agent].step(action) for agent, action in actions.items()}
        observations, rewards, terminateds, truncateds = (
            {agent: answer[i] for agent, answer in answers.items()} for i in range(4)
        )
        self._playing -= {agent for agent in answers if terminateds[agent] or truncateds[agent]}
        terminateds["__all__"], truncateds["__all__"] = not self._playing, False
        return observations, rewards, terminateds, truncateds, {}


def _config(trained: list[str] | None) -> FleetConfig:
    return FleetConfig.model_validate(
        {
            "sampling": {"policies": POLICIES, "policy_mapping_fn": {"usual": "ours", "odd": "theirs"}},
            "learner": {"policies_to_train": trained, "minibatch_size": 128},
        }
    )


def _arrays(weights: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {module_id: {name: t.numpy() for name, t in own.items()} for module_id, own in weights.items()}


def _runner() -> MultiAgentEnvRunner:
    return MultiAgentEnvRunner(
        EnvRunnerConfig(
            env=TwoCartPoles,
            num_envs=16,
            seed=0,
            policies=list(POLICIES),
            policy_mapping_fn=lambda agent_id, episode_id: {"usual": "ours", "odd": "theirs"}[agent_id],
        )
    )


def _train(
    updates: int, trained: list[str] | None = None
) -> tuple[LearnerPolicies, dict[str, float], dict[str, float]]:
    """(policies, metrics of the first update, of the last)."""
    first: dict[str, float] = {}
    with _runner() as runner:
        policies = build_policies(_config(trained), runner.spaces)
        runner.set_weights(_arrays(policies.weights()), 1)
        for seq in range(2, updates + 2):
            metrics = policies.update(list(runner.sample(num_timesteps=1024).batches.values()))
            runner.set_weights(_arrays(policies.weights()), seq)
            first = first or metrics
    return policies, first, metrics


@pytest.mark.thorough
def test_two_policies_learn_from_one_env() -> None:
    _, first, last = _train(45)
    for module_id in POLICIES:
        assert first[f"{module_id}/mean_return"] < 40
        assert last[f"{module_id}/mean_return"] > 100, last


def test_a_policy_that_is_not_trained_is_published_and_keeps_its_weights() -> None:
    policies, _, last = _train(3, trained=["ours"])
    with _runner() as runner:
        built = build_policies(_config(None), runner.spaces).weights()
    ours, theirs = (
        all(torch.equal(tensor, built[m][name]) for name, tensor in policies.weights()[m].items()) for m in POLICIES
    )
    assert (ours, theirs) == (False, True)
    assert last["theirs/steps"] > 0
    assert "ours/kl" in last
    assert "theirs/kl" not in last
