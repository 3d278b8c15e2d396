"""Stable-Baselines3's own SAC on Pendulum-v1, fed by an `EpisodeStream` with no option set.

python tests/bench/peers/sb3_sac_from_stream.py SEED RETURN. Starts a fleet of two workers, whose module is SB3's actor.
Prints {"env_steps", "mean_return", "lag"} as JSON. The mean is that of the newest 10 episodes, of 200 steps each.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from own_fleet import run
from stable_baselines3 import SAC
from stable_baselines3.common.logger import configure
from torch import nn

from headrace.learner_stub import EpisodeStream, WeightPublisher

LENGTH = 8
LIMIT_STEPS = 20_000


def make_model(seed: int) -> SAC:
    """Build SAC with the settings of rl-zoo3."""
    return SAC("MlpPolicy", "Pendulum-v1", learning_rate=0.001, seed=seed, device="cpu")


class Sb3Actor(nn.Module):
    """SB3's actor as a module that workers act with. The env gets its actions times two, the bound of Pendulum-v1."""

    noise_size, noise_kind = 1, "normal"

    def __init__(self) -> None:
        super().__init__()
        self.actor = make_model(0).actor

    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Sample by the noise."""
        with torch.no_grad():
            mean, log_std, _ = self.actor.get_action_dist_params(batch["obs"])
            return _both(torch.tanh(mean + log_std.exp() * batch["noise"]))

    def forward_inference(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Take the likeliest action."""
        with torch.no_grad():
            return _both(torch.tanh(self.actor.get_action_dist_params(batch["obs"])[0]))


def _both(actions: torch.Tensor) -> dict[str, Any]:
    return {"actions": actions, "actions_for_env": 2.0 * actions}


def build(spaces: Any) -> Sb3Actor:
    """Build the module; workers call it."""
    return Sb3Actor()


def store(model: SAC, batch: Any) -> None:
    """Put all steps of a batch into SB3's replay buffer."""
    steps = batch.transitions()
    for step in range(len(steps)):
        at = slice(step, step + 1)
        ends = (steps.terminated | steps.truncated)[at]
        infos = [{"TimeLimit.truncated": bool(steps.truncated[step])}]
        model.replay_buffer.add(steps.obs[at], steps.next_obs[at], steps.actions[at], steps.rewards[at], ends, infos)


def train(run_dir: Path, seed: int, goal: float) -> dict[str, Any]:
    """Train, one gradient step an env step, until the mean return of 10 episodes is `goal`."""
    model, newest, lags, steps = make_model(seed), deque[float](maxlen=10), [], 0
    model.set_logger(configure(None, []))
    with EpisodeStream.of(run_dir) as stream, WeightPublisher.of(run_dir) as weights:

        def publish() -> None:
            weights.publish({f"actor.{name}": tensor for name, tensor in model.actor.state_dict().items()})

        publish()
        for batch in stream:
            store(model, batch)
            steps += batch.steps
            lags.append(batch.lag.mean() if batch.steps else 0.0)
            newest.extend(chunk.episode_return for chunk in batch if chunk.is_done)
            if steps > 100:
                model.train(batch.steps)
                publish()
            if (len(newest) == 10 and np.mean(newest) >= goal) or steps >= LIMIT_STEPS:
                break
    return {"env_steps": steps, "mean_return": float(np.mean(newest)), "lag": float(np.mean(lags))}


if __name__ == "__main__":
    run(__file__, train, "Pendulum-v1", num_envs=1, length=LENGTH)
