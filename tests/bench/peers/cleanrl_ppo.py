"""PPO in the form of CleanRL's single file, with its settings, until a mean return of 100 episodes.

python tests/bench/peers/cleanrl_ppo.py SEED RETURN. Prints {"env_steps", "mean_return"} as JSON. The settings are
CleanRL's defaults: 4 envs, 128 steps, 4 epochs of 4 minibatches, a learning rate that falls over 500,000 steps.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

NUM_ENVS, STEPS, EPOCHS, MINIBATCHES = 4, 128, 4, 4
RATE, GAMMA, GAE_LAMBDA, CLIP, ENTROPY, VALUE, NORM = 2.5e-4, 0.99, 0.95, 0.2, 0.01, 0.5, 0.5
RAMP_STEPS, LIMIT_STEPS = 500_000, 1_000_000


def layer(inputs: int, outputs: int, gain: float) -> nn.Linear:
    """Return an orthogonal layer without bias at the start."""
    made = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(made.weight, gain)
    nn.init.zeros_(made.bias)
    return made


def network(outputs: int, gain: float) -> nn.Sequential:
    """Return 64 x 64 tanh."""
    return nn.Sequential(layer(4, 64, 2**0.5), nn.Tanh(), layer(64, 64, 2**0.5), nn.Tanh(), layer(64, outputs, gain))


class Training:
    """Actor and critic, their envs, and the returns of the newest episodes."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        self.actor, self.critic = network(2, 0.01), network(1, 1.0)
        self.parameters = [*self.actor.parameters(), *self.critic.parameters()]
        self.optimizer = torch.optim.Adam(self.parameters, lr=RATE, eps=1e-5)
        make: Any = lambda: gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))  # noqa: E731
        same_step = gym.vector.AutoresetMode.SAME_STEP
        self.envs = gym.vector.SyncVectorEnv([make] * NUM_ENVS, autoreset_mode=same_step)
        self.obs = torch.from_numpy(self.envs.reset(seed=seed)[0])
        self.done = torch.zeros(NUM_ENVS)
        self.returns: deque[float] = deque(maxlen=100)
        self.env_steps = 0

    @property
    def mean_return(self) -> float:
        """Return the mean of 100 episodes; before, -inf."""
        return float(np.mean(self.returns)) if len(self.returns) == 100 else -np.inf

    def rollout(self) -> dict[str, Tensor]:
        """Sample STEPS steps of each env, and estimate advantages: tensors (STEPS, NUM_ENVS, ...)."""
        columns: dict[str, list[Tensor]] = {name: [] for name in ("obs", "done", "action", "logp", "value", "reward")}
        for _ in range(STEPS):
            with torch.no_grad():
                chosen = Categorical(logits=self.actor(self.obs))
                action, value = chosen.sample(), self.critic(self.obs)[:, 0]
            found = (self.obs, self.done, action, chosen.log_prob(action), value)
            for name, column in zip(columns, found, strict=False):
                columns[name].append(column)
            obs, reward, terminated, truncated, infos = self.envs.step(action.numpy())
            columns["reward"].append(torch.as_tensor(reward, dtype=torch.float32))
            self.obs, self.done = torch.from_numpy(obs), torch.from_numpy(terminated | truncated).float()
            if "final_info" in infos:
                ended = infos["final_info"]["episode"]
                self.returns.extend(ended["r"][infos["_final_info"]].tolist())
        self.env_steps += STEPS * NUM_ENVS
        data = {name: torch.stack(column) for name, column in columns.items()}
        return data | {"advantage": self._advantages(data)}

    def _advantages(self, data: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            next_value, next_done = self.critic(self.obs)[:, 0], self.done
        advantage, last = torch.zeros_like(data["reward"]), torch.zeros(NUM_ENVS)
        for t in reversed(range(STEPS)):
            delta = data["reward"][t] + GAMMA * next_value * (1 - next_done) - data["value"][t]
            advantage[t] = last = delta + GAMMA * GAE_LAMBDA * (1 - next_done) * last
            next_value, next_done = data["value"][t], data["done"][t]
        return advantage

    def update(self, data: dict[str, Tensor]) -> None:
        """Train on one rollout."""
        self.optimizer.param_groups[0]["lr"] = RATE * max(0.01, 1 - self.env_steps / RAMP_STEPS)
        flat = {name: column.reshape(STEPS * NUM_ENVS, *column.shape[2:]) for name, column in data.items()}
        for _ in range(EPOCHS):
            for rows in torch.randperm(STEPS * NUM_ENVS).chunk(MINIBATCHES):
                self._step({name: column[rows] for name, column in flat.items()})

    def _step(self, part: dict[str, Tensor]) -> None:
        chosen, value = Categorical(logits=self.actor(part["obs"])), self.critic(part["obs"])[:, 0]
        ratio = (chosen.log_prob(part["action"]) - part["logp"]).exp()
        advantage = (part["advantage"] - part["advantage"].mean()) / (part["advantage"].std() + 1e-8)
        policy_loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
        target = part["advantage"] + part["value"]
        held = part["value"] + (value - part["value"]).clamp(-CLIP, CLIP)
        value_loss = 0.5 * torch.max((value - target) ** 2, (held - target) ** 2).mean()
        loss = policy_loss - ENTROPY * chosen.entropy().mean() + VALUE * value_loss
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, NORM)
        self.optimizer.step()


def main() -> None:
    """Train and print the result."""
    seed, goal = int(sys.argv[1]), float(sys.argv[2])
    torch.set_num_threads(1)
    training = Training(seed)
    while training.mean_return < goal and training.env_steps < LIMIT_STEPS:
        training.update(training.rollout())
    print(json.dumps({"env_steps": training.env_steps, "mean_return": training.mean_return}))
    training.envs.close()


if __name__ == "__main__":
    main()
