"""The PPO of the guide learns on a fleet, and takes updates of any number of steps."""

from __future__ import annotations

import pytest
import torch

from bench.own_ppo import of_fleet, program
from headrace.learner_stub import minibatches, to_torch, with_own_logp
from headrace.schemas.errors import ConfigError
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner
from headrace.workers.modules import actor_critic


@pytest.mark.slow
@pytest.mark.thorough
def test_the_ppo_of_the_guide_learns_cartpole() -> None:
    run = of_fleet("fleet", "CartPole-v1", seed=1, steps=80_000)
    assert run.best > 100, run  # an untrained policy has about 22


@pytest.mark.parametrize("size", [1, 2, 3, 128])
def test_minibatches_take_each_step_once_and_none_is_of_one_step(size: int) -> None:
    for steps in (*range(2, 20), 127, 128, 129, 255, 257, 1025):
        parts = minibatches(steps, size)
        assert sorted(torch.cat(parts).tolist()) == list(range(steps))
        sizes = {len(part) for part in parts}
        assert min(sizes) >= 2, (steps, sizes)
        assert max(sizes) - min(sizes) <= 1, (steps, sizes)
        assert max(sizes) <= max(size, 3), (steps, sizes)
    assert [part.tolist() for part in minibatches(1, size)] == [[0]]
    assert minibatches(0, size) == []
    with pytest.raises(ConfigError, match="minibatches of 0 steps; give 2 or more"):
        minibatches(9, 0)


def test_a_last_minibatch_of_one_step_leaves_the_weights_finite() -> None:
    ppo = program("CartPole-v1")
    settings = EnvRunnerConfig(env="CartPole-v1", rollout_fragment_length=ppo.MINIBATCH + 1, seed=0)
    with SingleAgentEnvRunner(settings) as runner:
        batch, module = runner.sample_fragment(), actor_critic(runner.spaces)
    ppo.train(module, torch.optim.Adam(module.parameters()), to_torch(with_own_logp(module, batch).episodes()))
    assert all(torch.isfinite(weights).all() for weights in module.parameters())
