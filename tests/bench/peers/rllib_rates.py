"""RLlib's EnvRunners with fixed weights, which nobody trains.

python tests/bench/peers/rllib_rates.py (sampling | workers) NUM_ENVS SECONDS

- sampling: one `SingleAgentEnvRunner` in this process.
- workers: two of them in processes of their own, each asked for its next sample as soon as one is there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import ray
import torch
from measuring import Take, main
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from small_policy import ENV

STEPS = 64
"""Steps of each env in one sample."""


def settings(runners: int, width: int) -> PPOConfig:
    """Return PPO's settings with so many remote runners."""
    model = DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=True)
    return (
        PPOConfig()
        .environment(ENV)
        .env_runners(num_env_runners=runners, num_envs_per_env_runner=width, rollout_fragment_length=STEPS)
        .training(train_batch_size_per_learner=max(runners, 1) * width * STEPS, minibatch_size=STEPS)
        .rl_module(model_config=model)
    )


@contextmanager
def sampling(case: str) -> Iterator[Take]:
    """Sample in this process."""
    torch.set_num_threads(1)
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    runner = SingleAgentEnvRunner(config=settings(0, int(case)))
    yield lambda: sum(len(episode) for episode in runner.sample(num_timesteps=STEPS * int(case)))
    ray.shutdown()


@contextmanager
def workers(case: str) -> Iterator[Take]:
    """Sample with two remote runners."""
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    algorithm = settings(2, int(case)).build_algo()
    group = algorithm.env_runner_group

    def take() -> int:
        while not (found := group.foreach_env_runner_async_fetch_ready(_steps, tag="sample")):
            time.sleep(0.001)
        return sum(found)

    yield take
    algorithm.stop()
    ray.shutdown()


def _steps(runner: SingleAgentEnvRunner) -> int:
    return sum(len(episode) for episode in runner.sample())


if __name__ == "__main__":
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    main(sampling=sampling, workers=workers)
