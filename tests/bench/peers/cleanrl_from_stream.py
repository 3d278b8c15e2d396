"""PPO in one file, as CleanRL writes it and with its settings, fed by an `EpisodeStream`.

python tests/bench/peers/cleanrl_from_stream.py SEED RETURN [--synchronous]. Starts a fleet of two workers on CartPole.
Without --synchronous no option of the stream is set. Prints {"env_steps", "mean_return", "lag"} as JSON.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from own_fleet import run
from torch import nn

from headrace.learner_stub import EpisodeStream, WeightPublisher, episodes_of, gae, to_torch
from headrace.workers.modules import actor_critic

NUM_ENVS, LENGTH = 4, 128
LEARNING_RATE, TOTAL_STEPS = 2.5e-4, 1_000_000
GAMMA, GAE_LAMBDA, CLIP, ENTROPY, VALUE = 0.99, 0.95, 0.2, 0.01, 0.5
EPOCHS, MINIBATCHES = 4, 4
SIZE = NUM_ENVS * LENGTH
OPTIONS: dict[str, Any] = {"synchronous": True, "steps_per_update": SIZE} if "--synchronous" in sys.argv else {}


def build(spaces: Any) -> Any:
    """Build the module; workers call it. Policy and value have two layers of 64 each."""
    return actor_critic(spaces, vf_share_layers=False)


def update(agent: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Any]) -> None:
    """Train on some batches: clipped objective, clipped value loss, entropy bonus."""
    episodes = to_torch(episodes_of(batches))
    with torch.no_grad():
        every_value = agent.forward_train({"obs": episodes.obs})["values"]
    estimate = gae(episodes, every_value, gamma=GAMMA, gae_lambda=GAE_LAMBDA)
    advantage, returns, values = estimate.advantages, estimate.targets, every_value[episodes.step_rows]
    obs, actions, logp = episodes.obs[episodes.step_rows], episodes.actions, episodes.columns["logp"]
    for _ in range(EPOCHS):
        for some in torch.randperm(len(actions)).chunk(MINIBATCHES):
            answer = agent.forward_train({"obs": obs[some]})
            ratio = (agent.logp(answer["action_dist_inputs"], actions[some]) - logp[some]).exp()
            scaled = (advantage[some] - advantage[some].mean()) / (advantage[some].std() + 1e-8)
            policy_loss = torch.maximum(-scaled * ratio, -scaled * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
            near = values[some] + (answer["values"] - values[some]).clamp(-CLIP, CLIP)
            errors = [(value - returns[some]).square() for value in (answer["values"], near)]
            value_loss = 0.5 * torch.maximum(*errors).mean()
            loss = policy_loss - ENTROPY * agent.entropy(answer["action_dist_inputs"]).mean() + VALUE * value_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()


def train(run_dir: Path, seed: int, goal: float) -> dict[str, Any]:
    """Train until the mean return of 100 episodes is `goal`."""
    newest, lags, steps, gathered = deque[float](maxlen=100), [], 0, []
    with EpisodeStream.of(run_dir, **OPTIONS) as stream, WeightPublisher.of(run_dir) as weights:
        agent = actor_critic(stream.spaces(timeout_s=60.0), vf_share_layers=False, seed=seed)
        optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE, eps=1e-5)
        weights.publish(agent.state_dict())
        for batch in stream:
            steps += batch.steps
            lags.append(batch.lag)
            newest.extend(chunk.episode_return for chunk in batch if chunk.is_done)
            gathered.append(batch)
            if sum(part.steps for part in gathered) < SIZE:
                continue
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * max(0.0, 1 - steps / TOTAL_STEPS)
            update(agent, optimizer, gathered)
            gathered = []
            weights.publish(agent.state_dict())
            if (len(newest) == 100 and np.mean(newest) >= goal) or steps >= TOTAL_STEPS:
                break
    return {"env_steps": steps, "mean_return": float(np.mean(newest)), "lag": float(np.mean([x.mean() for x in lags]))}


if __name__ == "__main__":
    run(__file__, train, "CartPole-v1", num_envs=NUM_ENVS, length=LENGTH)
