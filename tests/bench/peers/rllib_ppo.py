"""RLlib's PPO on CartPole-v1 with the settings of its tuned example, until a mean return of 100 episodes.

python tests/bench/peers/rllib_ppo.py SEED RETURN. Prints {"env_steps", "mean_return"} as JSON.
"""

from __future__ import annotations

import json
import sys

import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig


def main() -> None:
    """Train and print the result."""
    seed, goal = int(sys.argv[1]), float(sys.argv[2])
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    settings = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=2, num_envs_per_env_runner=8)
        .training(lr=0.0003, num_epochs=6, vf_loss_coeff=0.01)
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[32], fcnet_activation="linear", vf_share_layers=True))
        .debugging(seed=seed)
    )
    algorithm = settings.build_algo()
    steps, mean = 0, 0.0
    while mean < goal and steps < 2_000_000:
        result = algorithm.train()
        steps = int(result["num_env_steps_sampled_lifetime"])
        mean = float(result["env_runners"].get("episode_return_mean", 0.0))
    print(json.dumps({"env_steps": steps, "mean_return": mean}))
    algorithm.stop()
    ray.shutdown()


main()
