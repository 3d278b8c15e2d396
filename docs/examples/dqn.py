r"""Double DQN on the steps of a fleet, for Box observations and Discrete actions.

Start a fleet in one terminal and this learner in another, both in this folder:

    headrace up --env CartPole-v1 --set learner.enabled=false \
        --set module.build=dqn:QNetwork --until-return 475 --run-dir runs/dqn
    python dqn.py runs/dqn

Workers act with the network of this file. The rate of exploration is a buffer of it, and
comes to them with the weights. So all workers explore alike, however many there are.

Every step is trained on, random ones too: targets do not depend on who acted. Where a chunk
is cut, fewer rewards count, and the value of its last observation stands for the rest.

Start the learner again after a crash: it goes on, but its replay buffer fills anew.

Van Hasselt et al., Deep Reinforcement Learning with Double Q-learning (2016), equation 4.
"""

import sys
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from headrace import EpisodeStream, LearnerState, WeightPublisher, to_torch

HIDDEN = (128, 128)
REPLAYED, WARM_UP = 100_000, 1_000  # steps in the buffer: at most, and before training
GRADIENT_STEPS, COPY_INTERVAL = 0.25, 200  # for each step; between copies to the target
MINIBATCH, LEARNING_RATE, GAMMA, N_STEP, MAX_NORM = 64, 0.001, 0.99, 3, 10.0
EXPLORED, LAST_RATE = 10_000, 0.02  # exploration falls over so many steps, to this rate


class QNetwork(nn.Module):
    """A value for each action. It takes a random one with probability `exploration_rate`."""

    noise_size, noise_kind = 2, "uniform"

    def __init__(self, spaces):
        super().__init__()
        self.first = spaces.action.start
        sizes = (int(np.prod(spaces.observation.shape)), *HIDDEN, spaces.action.n)
        layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
        self.layers = nn.Sequential(nn.Flatten(), *layers[:-1])
        for layer in self.layers[1::2]:
            nn.init.orthogonal_(layer.weight, 2**0.5)
        self.register_buffer("exploration_rate", torch.ones(()))

    def forward(self, obs):
        """Return the value of each action (rows, actions)."""
        return self.layers(obs.float())

    @torch.no_grad()
    def forward_inference(self, batch):
        """Return the best action."""
        return {"actions": self(batch["obs"]).argmax(1) + self.first}

    @torch.no_grad()
    def forward_exploration(self, batch):
        """Return the best action, or a random one."""
        values, noise = self(batch["obs"]), batch["noise"]
        random = (noise[:, 1] * values.shape[1]).long()
        explores = noise[:, 0] < self.exploration_rate
        return {"actions": torch.where(explores, random, values.argmax(1)) + self.first}


def n_step(one):
    """Return obs, actions, returns, next_obs and discounts of next_obs, over N_STEP steps."""
    at, ends = np.arange(len(one)), np.flatnonzero(one.last)
    ahead = np.minimum(ends[np.searchsorted(ends, at)] - at, N_STEP - 1)
    returns = np.zeros(len(one), np.float32)
    for k in range(N_STEP):
        counts = np.flatnonzero(ahead >= k)
        returns[counts] += GAMMA**k * one.rewards[counts + k]
    discounts = np.where(one.terminated[at + ahead], 0.0, GAMMA ** (ahead + 1))
    return one.obs, one.actions, returns, one.next_obs[at + ahead], np.float32(discounts)


class Replay:
    """The newest steps, in arrays that are made once and overwritten in turn."""

    columns, added = None, 0

    def add(self, columns):
        """Add each row of `columns`."""
        if self.columns is None:
            self.columns = [np.empty((REPLAYED, *c.shape[1:]), c.dtype) for c in columns]
        rows = np.arange(self.added, self.added + len(columns[0])) % REPLAYED
        for own, new in zip(self.columns, columns, strict=True):
            own[rows] = new
        self.added += len(rows)

    def sample(self):
        """Return tensors of MINIBATCH random rows."""
        rows = np.random.randint(min(self.added, REPLAYED), size=MINIBATCH)
        return [to_torch(column[rows]) for column in self.columns]


def loss_of(module, target, sample):
    """Return the loss: the module chooses the next action, and the target values it."""
    obs, actions, returns, next_obs, discounts = sample
    with torch.no_grad():
        best = module(next_obs).argmax(1, keepdim=True)
        goal = returns + discounts * target(next_obs).gather(1, best)[:, 0]
    values = module(obs).gather(1, (actions.long() - module.first)[:, None])[:, 0]
    return nn.functional.smooth_l1_loss(values, goal)


def main(run_dir):
    """Train until the fleet ends."""
    torch.set_num_threads(1)  # the workers need the other cores
    state = LearnerState.of(run_dir)
    saved = state.load()  # None in the first life
    position = saved and saved.position
    stream = EpisodeStream.of(run_dir, auto_commit=False, position=position)
    with stream, WeightPublisher.of(run_dir) as weights:
        module, target = QNetwork(stream.spaces()), QNetwork(stream.spaces())
        optimizer = torch.optim.Adam(module.parameters(), lr=LEARNING_RATE, eps=1e-5)
        replay, steps, updates, due = Replay(), 0, 0, 0.0
        if saved:
            module.load_state_dict(saved.policy)
            optimizer.load_state_dict(saved.more["optimizer"])
            steps, updates = saved.steps, saved.updates
        target.load_state_dict(module.state_dict())
        weights.publish(module.state_dict())
        for batch in stream:
            replay.add(n_step(batch.transitions()))
            steps += batch.steps
            due += batch.steps * GRADIENT_STEPS if replay.added > WARM_UP else 0.0
            while due >= 1.0:
                loss = loss_of(module, target, replay.sample())
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
                optimizer.step()
                updates, due = updates + 1, due - 1.0
                if updates % COPY_INTERVAL == 0:
                    target.load_state_dict(module.state_dict())
                    weights.log({"loss": loss.item()})
            module.exploration_rate.fill_(max(LAST_RATE, 1.0 - steps / EXPLORED))
            more = {"optimizer": optimizer.state_dict(), "updates": updates, "steps": steps}
            state.save(stream, module.state_dict(), **more)  # before the commit
            stream.commit()
            weights.publish(module.state_dict())


if __name__ == "__main__":
    main(sys.argv[1])
