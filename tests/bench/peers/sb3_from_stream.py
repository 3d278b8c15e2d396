"""Stable-Baselines3's own PPO, fed by an `EpisodeStream` with no option set.

python tests/bench/peers/sb3_from_stream.py SEED RETURN. Starts a fleet of two workers whose module is SB3's policy.
Prints {"env_steps", "mean_return", "lag"} as JSON. The settings are those of rl-zoo3, as in `sb3_ppo.py`.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from own_fleet import run
from sb3_ppo import LENGTH, LIMIT_STEPS, NUM_ENVS, make_model
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.logger import configure
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import nn

from headrace.learner_stub import EpisodeStream, WeightPublisher


class Sb3Module(nn.Module):
    """SB3's policy as a module that workers act with."""

    noise_size, noise_kind = 1, "uniform"

    def __init__(self) -> None:
        super().__init__()
        env = gym.make("CartPole-v1")
        self.policy = ActorCriticPolicy(env.observation_space, env.action_space, lambda _: 0.0)

    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Sample by the noise, and add what SB3's rollout buffer needs."""
        with torch.no_grad():
            logits = self.policy.get_distribution(batch["obs"]).distribution.logits
            actions = (logits.exp().cumsum(1)[:, :-1] < batch["noise"]).sum(1)
            values = self.policy.predict_values(batch["obs"]).flatten()
            return {"actions": actions, "logp": logits.gather(1, actions[:, None])[:, 0], "values": values}

    def forward_inference(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Take the likeliest action."""
        with torch.no_grad():
            return {"actions": self.policy.get_distribution(batch["obs"]).distribution.logits.argmax(1)}


def build(spaces: Any) -> Sb3Module:
    """Build the module; workers call it."""
    return Sb3Module()


def fill(model: PPO, batch: Any) -> None:
    """Put a worker's batch, `LENGTH` steps of each env, into SB3's rollout buffer."""
    steps = batch.transitions()
    for step in np.flatnonzero(steps.truncated):  # as SB3 does: the episode would have gone on
        steps.rewards[step] += model.gamma * value_of(model, steps.next_obs[step : step + 1])[0]
    starts = np.roll(steps.last, 1) & (batch.table["t_start"][steps.chunk] == 0)
    by_env = np.argsort(batch.table["env_index"][steps.chunk], kind="stable").reshape(NUM_ENVS, LENGTH)
    buffer: RolloutBuffer = model.rollout_buffer
    buffer.reset()
    for row in by_env.T:
        of_policy = (torch.as_tensor(steps.columns[name][row]) for name in ("values", "logp"))
        buffer.add(steps.obs[row], steps.actions[row, None], steps.rewards[row], starts[row], *of_policy)
    last = by_env[:, -1]
    ends = (steps.terminated | steps.truncated)[last]
    buffer.compute_returns_and_advantage(torch.as_tensor(value_of(model, steps.next_obs[last])), ends)


def value_of(model: PPO, obs: Any) -> Any:
    """Return the values of observations (rows, ...) as numpy."""
    with torch.no_grad():
        return model.policy.predict_values(torch.as_tensor(np.array(obs, np.float32))).flatten().numpy()


def train(run_dir: Path, seed: int, goal: float) -> dict[str, Any]:
    """Train until the mean return of 100 episodes is `goal`."""
    model, newest, steps, lags = (
        make_model(seed),
        deque[float](maxlen=100),
        0,
        [],
    )
    model.set_logger(configure(None, []))
    with EpisodeStream.of(run_dir) as stream, WeightPublisher.of(run_dir) as weights:

        def publish() -> None:
            weights.publish({f"policy.{name}": tensor for name, tensor in model.policy.state_dict().items()})

        publish()
        for batch in stream:
            if batch.steps != NUM_ENVS * LENGTH:
                continue  # a worker's last, shorter one
            fill(model, batch)
            steps += batch.steps
            lags.append(batch.lag)
            newest.extend(chunk.episode_return for chunk in batch if chunk.is_done)
            model._current_progress_remaining = 1 - steps / LIMIT_STEPS
            model.train()
            publish()
            if (len(newest) == 100 and np.mean(newest) >= goal) or steps >= LIMIT_STEPS:
                break
    return {"env_steps": steps, "mean_return": float(np.mean(newest)), "lag": float(np.mean(lags))}


if __name__ == "__main__":
    run(__file__, train, "CartPole-v1", num_envs=NUM_ENVS, length=LENGTH)
