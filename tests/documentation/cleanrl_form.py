"""PPO in the form of CleanRL's `ppo.py`, as written for gymnasium before 1.0, to which the documented diff is applied.

Its loop, its names and what it reads of `infos` are as there; the text is our own. It prints each episode's return.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical


def make_env(env_id: str, idx: int, capture_video: bool, run_name: str) -> Callable[[], gym.Env]:
    def thunk() -> gym.Env:
        return gym.wrappers.RecordEpisodeStatistics(gym.make(env_id))

    return thunk


def network(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    layers = [nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)]
    for layer, own in zip(layers[::2], (2**0.5, 2**0.5, gain), strict=True):
        nn.init.orthogonal_(layer.weight, own)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class Agent(nn.Module):
    def __init__(self, envs: gym.vector.VectorEnv) -> None:
        super().__init__()
        inputs = int(np.prod(envs.single_observation_space.shape))
        self.critic, self.actor = network(inputs, 1, 1.0), network(inputs, int(envs.single_action_space.n), 0.01)

    def act(self, obs: Tensor, action: Tensor | None = None) -> tuple[Tensor, ...]:
        choice = Categorical(logits=self.actor(obs))
        action = choice.sample() if action is None else action
        return action, choice.log_prob(action), choice.entropy(), self.critic(obs)[:, 0]


def minibatches(size: int, epochs: int, parts: int) -> list[Tensor]:
    return [rows for _ in range(epochs) for rows in torch.randperm(size).chunk(parts)]


def main(args: argparse.Namespace) -> None:
    run_name, device = f"{args.env_id}-{args.seed}", torch.device("cpu")
    writer = SimpleNamespace(add_scalar=lambda name, value, step: None)
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)

    envs = gym.vector.SyncVectorEnv(
        [make_env(args.env_id, i, args.capture_video, run_name) for i in range(args.num_envs)],
    )
    assert isinstance(envs.single_action_space, gym.spaces.Discrete), "only discrete actions"
    agent = Agent(envs)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    shape = args.num_steps, args.num_envs
    obs = torch.zeros(shape + envs.single_observation_space.shape)
    actions, logprobs, rewards, dones, values = (torch.zeros(shape) for _ in range(5))

    global_step, batch_size = 0, args.num_steps * args.num_envs
    next_obs, _ = envs.reset(seed=args.seed)
    next_obs, next_done = torch.Tensor(next_obs), torch.zeros(args.num_envs)
    for update in range(args.total_timesteps // batch_size):
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - update * batch_size / args.total_timesteps)
        for step in range(args.num_steps):
            global_step += args.num_envs
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                action, logprobs[step], _, values[step] = agent.act(next_obs)
            actions[step] = action
            next_obs, reward, terminations, truncations, infos = envs.step(action.cpu().numpy())
            next_done = np.logical_or(terminations, truncations)
            rewards[step] = torch.tensor(reward).to(device).view(-1)
            next_obs, next_done = torch.Tensor(next_obs).to(device), torch.Tensor(next_done).to(device)

            if "final_info" in infos:
                for info in infos["final_info"]:
                    if info and "episode" in info:
                        print(f"global_step={global_step}, episodic_return={info['episode']['r']}", flush=True)  # noqa: T201
                        writer.add_scalar("charts/episodic_return", info["episode"]["r"], global_step)

        with torch.no_grad():
            advantages, last, after = torch.zeros(shape), torch.zeros(args.num_envs), agent.act(next_obs)[3]
            going_on = 1 - next_done
            for t in reversed(range(args.num_steps)):
                delta = rewards[t] + args.gamma * after * going_on - values[t]
                advantages[t] = last = delta + args.gamma * args.gae_lambda * going_on * last
                after, going_on = values[t], 1 - dones[t]
        returns = (advantages + values).reshape(-1)
        flat = [
            column.reshape(batch_size, *column.shape[2:]) for column in (obs, actions, logprobs, advantages, values)
        ]
        for rows in minibatches(batch_size, args.update_epochs, args.num_minibatches):
            old_obs, old_action, old_logprob, gain, value = (column[rows] for column in flat)
            _, logprob, entropy, new_value = agent.act(old_obs, old_action)
            ratio = (logprob - old_logprob).exp()
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            policy_loss = torch.max(-gain * ratio, -gain * ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)).mean()
            held = value + (new_value - value).clamp(-args.clip_coef, args.clip_coef)
            value_loss = 0.5 * torch.max((new_value - returns[rows]) ** 2, (held - returns[rows]) ** 2).mean()
            loss = policy_loss - args.ent_coef * entropy.mean() + args.vf_coef * value_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()
    envs.close()


if __name__ == "__main__":
    options = {"env-id": "CartPole-v1", "seed": 1, "num-envs": 4, "num-steps": 128, "total-timesteps": 500_000}
    options |= {"learning-rate": 2.5e-4, "gamma": 0.99, "gae-lambda": 0.95, "update-epochs": 4, "num-minibatches": 4}
    options |= {"clip-coef": 0.2, "ent-coef": 0.01, "vf-coef": 0.5, "max-grad-norm": 0.5, "capture-video": False}
    parser = argparse.ArgumentParser()
    for name, value in options.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    torch.set_num_threads(1)
    main(parser.parse_args())
