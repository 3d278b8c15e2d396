"""Models of Stable-Baselines3 with the settings of rl-zoo3, for `bench.adapters`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

from bench.adapter_learners import Watch


@dataclass(frozen=True, slots=True)
class Recipe:
    """An algorithm's settings for an env: `steps` is the most that a run takes, `window` the episodes of its mean."""

    algorithm: Any
    env: str
    num_envs: int
    n_steps: int
    steps: int
    window: int = 100
    settings: dict[str, Any] = field(default_factory=dict)


def falling(start: float) -> Callable[[float], float]:
    """Return a schedule that falls to 0."""
    return lambda left: left * start


RECIPES = {
    "PPO CartPole-v1": Recipe(
        PPO,
        "CartPole-v1",
        num_envs=8,
        n_steps=32,
        steps=150_000,
        settings={
            "batch_size": 256,
            "gae_lambda": 0.8,
            "gamma": 0.98,
            "n_epochs": 20,
            "ent_coef": 0.0,
            "learning_rate": falling(0.001),
            "clip_range": falling(0.2),
        },
    ),
    "PPO Pendulum-v1": Recipe(
        PPO,
        "Pendulum-v1",
        num_envs=4,
        n_steps=1024,
        steps=300_000,
        settings={"gae_lambda": 0.95, "gamma": 0.9, "n_epochs": 10, "ent_coef": 0.0, "learning_rate": 0.001},
    ),
    "SAC Pendulum-v1": Recipe(
        SAC, "Pendulum-v1", num_envs=1, n_steps=0, steps=20_000, window=10, settings={"learning_rate": 0.001}
    ),
    "DQN CartPole-v1": Recipe(
        DQN,
        "CartPole-v1",
        num_envs=1,
        n_steps=0,
        steps=100_000,
        settings={
            "learning_rate": 0.0023,
            "batch_size": 64,
            "buffer_size": 100_000,
            "learning_starts": 1000,
            "gamma": 0.99,
            "target_update_interval": 10,
            "train_freq": 256,
            "gradient_steps": 128,
            "exploration_fraction": 0.08,
            "exploration_final_eps": 0.04,
            "policy_kwargs": {"net_arch": [256, 256]},
        },
    ),
}
"""The schedules of PPO on CartPole-v1 fall to 0 over 150,000 steps, not 100,000: nothing learns at their end. Its
Pendulum-v1 is without gSDE, which an adapter does not take. DQN has 100,000 steps, not 50,000, and explores over the
same 8,000."""


def make(recipe: str, seed: int, *, by_fleet: bool = False, envs: Any = None) -> Any:
    """Build the model. With `by_fleet` it has one env, whose steps are never taken."""
    own = RECIPES[recipe]
    settings = own.settings | {"seed": seed, "device": "cpu", "stats_window_size": own.window}
    if own.n_steps:
        settings["n_steps"] = own.n_steps * (own.num_envs if by_fleet else 1)
    if envs is None:
        envs = own.env if by_fleet else make_vec_env(own.env, n_envs=own.num_envs, seed=seed)
    return own.algorithm("MlpPolicy", envs, **settings)


def module_options(recipe: str) -> tuple[str, ...]:
    """Return the options of `headrace up` that give workers the layers of the model."""
    kwargs = RECIPES[recipe].settings.get("policy_kwargs", {})
    return tuple(
        word
        for name, value in kwargs.items()
        for word in ("--set", f"module.config.policy_kwargs.{name}={json.dumps(value)}")
    )


def mean_return(model: Any) -> float:
    """Return the mean return of the newest episodes; -inf before there are enough."""
    newest = [episode["r"] for episode in model.ep_info_buffer or ()]
    return float(np.mean(newest)) if len(newest) == model._stats_window_size else -np.inf


class Enough(BaseCallback):
    """Stops a model at its mark, in its own `learn` and in a loop over updates; `watch` is told how far it is."""

    def __init__(self, mark: float, watch: Watch | None = None) -> None:
        super().__init__()
        self._mark, self._watch = mark, watch

    def is_reached(self, model: Any) -> bool:
        """Return whether the mark is reached."""
        if self._watch is not None:
            self._watch.at(model.num_timesteps)
        return mean_return(model) >= self._mark

    def _on_step(self) -> bool:
        return not self.is_reached(self.model)
