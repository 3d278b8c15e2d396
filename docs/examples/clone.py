"""Behaviour cloning: `python clone.py RECORDING` learns CartPole-v1 from its best episodes."""

import sys

import gymnasium as gym
import numpy as np
import torch

from headrace import EpisodeStream


def mean_return(net, episodes=10):
    """Play episodes, and return their mean return."""
    env, total = gym.make("CartPole-v1"), 0.0
    for seed in range(episodes):
        (obs, _), ends = env.reset(seed=seed), []
        while not any(ends):
            obs, reward, *ends, _ = env.step(int(net(torch.from_numpy(obs)).argmax()))
            total += reward
    return total / episodes


torch.manual_seed(0)
torch.set_num_threads(1)
_, path = sys.argv
with EpisodeStream.of(path) as stream:
    least = np.quantile(stream.episodes()["episode_return"], 0.9)
with EpisodeStream.of(path, keep=lambda row: row["episode_return"] >= least) as stream:
    steps = [batch.transitions() for batch in stream]
obs = torch.from_numpy(np.concatenate([own.obs for own in steps]))
actions = torch.from_numpy(np.concatenate([own.actions for own in steps]))
net = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))
optimizer = torch.optim.Adam(net.parameters(), 0.003)
print(f"mean return {mean_return(net):.1f} before, of episodes of {least:.0f} and more")
for rows in torch.randint(len(obs), (1000, 256)):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(net(obs[rows]), actions[rows]).backward()
    optimizer.step()
print(f"mean return {mean_return(net):.1f} after")
