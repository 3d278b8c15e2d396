"""Stable-Baselines3's PPO with the settings of rl-zoo3, until a mean return of 100 episodes.

python tests/bench/peers/sb3_ppo.py SEED RETURN [CartPole-v1 | Pendulum-v1]. Prints
{"env_steps", "mean_return"} as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

NUM_ENVS, LENGTH = 8, 32
LIMIT_STEPS = 1_000_000
RAMP_STEPS = 100_000
"""The schedules of rl-zoo3 fall to zero over its 100,000 steps; a longer run would not learn after them."""


class Enough(BaseCallback):
    """Stops at a mean return of the newest 100 episodes."""

    def __init__(self, goal: float) -> None:
        super().__init__()
        self.goal = goal

    @property
    def mean_return(self) -> float:
        """Return the mean return of the newest 100 episodes, or -inf before that many have ended."""
        newest = [episode["r"] for episode in self.model.ep_info_buffer or ()]
        return float(np.mean(newest)) if len(newest) == 100 else -np.inf

    def _on_step(self) -> bool:
        return self.mean_return < self.goal


def make_model(seed: int) -> PPO:
    """Build PPO with the settings of rl-zoo3."""

    def falling(start: float) -> Any:
        return lambda left: start * max(0.01, 1 - (1 - left) * LIMIT_STEPS / RAMP_STEPS)

    return PPO(
        "MlpPolicy",
        make_vec_env("CartPole-v1", n_envs=NUM_ENVS, seed=seed),
        n_steps=LENGTH,
        batch_size=256,
        gae_lambda=0.8,
        gamma=0.98,
        n_epochs=20,
        ent_coef=0.0,
        learning_rate=falling(0.001),
        clip_range=falling(0.2),
        seed=seed,
        device="cpu",
    )


def make_pendulum_model(seed: int) -> PPO:
    """Build PPO with the settings of rl-zoo3 for Pendulum-v1."""
    return PPO(
        "MlpPolicy",
        make_vec_env("Pendulum-v1", n_envs=4, seed=seed),
        n_steps=1024,
        gae_lambda=0.95,
        gamma=0.9,
        n_epochs=10,
        learning_rate=0.001,
        use_sde=True,
        sde_sample_freq=4,
        seed=seed,
        device="cpu",
    )


def main() -> None:
    """Train and print the result."""
    seed, goal = int(sys.argv[1]), float(sys.argv[2])
    torch.set_num_threads(2)
    model = make_pendulum_model(seed) if sys.argv[3:] == ["Pendulum-v1"] else make_model(seed)
    enough = Enough(goal)
    model.learn(LIMIT_STEPS, callback=enough)
    print(json.dumps({"env_steps": model.num_timesteps, "mean_return": enough.mean_return}))


if __name__ == "__main__":
    main()
