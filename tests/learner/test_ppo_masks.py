"""PPO on observations that say which actions are legal."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch

from headrace.learner_stub.reference.ppo import PPO
from headrace.learner_stub.rollouts.minibatches import minibatches_for
from headrace.learner_stub.rollouts.module import build_module
from headrace.learner_stub.rollouts.rollout import join
from headrace.schemas.settings.config import LearnerSection, ModuleSection
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner

CHOICES = 4


class Masked(gym.Env[Any, Any]):
    """The largest of numbers is to be picked among those that are legal. One step an episode."""

    observation_space = gym.spaces.Dict(
        {
            "observation": gym.spaces.Box(0.0, 1.0, (CHOICES,), np.float32),
            "action_mask": gym.spaces.Box(0, 1, (CHOICES,), np.int8),
        }
    )
    action_space = gym.spaces.Discrete(CHOICES)

    def _seen(self) -> dict[str, Any]:
        self.numbers = self.np_random.random(CHOICES, np.float32)
        self.mask = self.np_random.integers(2, size=CHOICES).astype(np.int8)
        self.mask[self.np_random.integers(CHOICES)] = 1
        return {"observation": self.numbers, "action_mask": self.mask}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.mask[action], "an illegal action"
        best = np.where(self.mask, self.numbers, -1.0).argmax()
        return self._seen(), float(action == best), True, False, {}


def test_ppo_learns_among_legal_actions_only() -> None:
    config = EnvRunnerConfig(
        env=lambda _: Masked(), num_envs=16, seed=0, module=ModuleSection().build, module_config={"hidden": (32,)}
    )
    with SingleAgentEnvRunner(config, worker_index=0) as runner:
        ppo = PPO(
            build_module(ModuleSection(config={"hidden": (32,)}), runner.spaces), LearnerSection(learning_rate=0.01)
        )
        first = ppo.update([runner.sample(num_timesteps=512)])["mean_return"]
        for seq in range(1, 15):
            runner.set_weights({name: tensor.numpy() for name, tensor in ppo.weights().items()}, seq)
            batch = runner.sample(num_timesteps=512)
            rollout = join([batch])
            assert rollout is not None
            targets = ppo._targets(rollout, minibatches_for(ppo.module, rollout))
            assert torch.allclose(targets.logp, rollout.logp, atol=1e-5)
            metrics = ppo.update([batch])
    assert first < 0.7
    assert metrics["mean_return"] > 0.8
    assert all(np.isfinite(value) for value in metrics.values())
