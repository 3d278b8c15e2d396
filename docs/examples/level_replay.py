r"""Prioritised level replay: levels that the agent has not learnt yet come more often.

    python level_replay.py runs/replay

Each level has signs of its own: the action that opens a sign's door in one level ends the episode
in another. A level's score is the mean size of the advantages in its newest chunks. The teacher
publishes a distribution over all levels, by the ranks of their scores, after each 20 updates.

Jiang et al., Prioritized Level Replay (2021), https://arxiv.org/abs/2010.03934, section 3.
"""

import argparse

import gymnasium as gym
import numpy as np
from curriculum import SIGNS, Corridor, learn
from impala import goal_of

import headrace

LEVELS, DOORS, TEMPERATURE, UPDATES = 24, 3, 0.3, 20


class Levels(Corridor):
    """Corridors of three doors. The task's level says which action opens which sign."""

    observation_space = gym.spaces.Box(0.0, 1.0, (LEVELS + SIGNS,), np.float32)

    def __init__(self, context=None):
        self.set_task({"level": 0})

    def set_task(self, task):
        self.level, self.doors = task["level"], DOORS
        self.opens = np.random.default_rng(self.level).permutation(SIGNS)

    def _observe(self):
        return np.concatenate(
            [np.eye(LEVELS, dtype=np.float32)[self.level], super()._observe()]
        )


class Replay:
    """Publishes the levels with weights by the ranks of their scores."""

    def __init__(self, tasks, module):
        self.tasks, self.module, self.updates = tasks, module, 0
        self.scores = np.full(LEVELS, np.inf)  # levels not seen so far come first
        self._publish()

    def __str__(self):
        return f"level {self.scores.argmax()} is the hardest,"

    def look(self, batch):
        """Score the levels of a batch by the advantages of their steps."""
        for task, own in batch.by_task():
            if task and own.steps:
                goal = goal_of(self.module, headrace.to_torch(own.episodes()))
                self.scores[task.values["level"]] = goal.advantages.abs().mean()
        self.updates += 1
        if self.updates % UPDATES == 0:
            self._publish()

    def _publish(self):
        ranks = np.argsort(np.argsort(-self.scores)) + 1
        weights = (1 / ranks) ** (1 / TEMPERATURE) + 0.01  # each level comes now and then
        self.tasks.publish(
            [({"level": level}, float(w)) for level, w in enumerate(weights)]
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir")
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    learn(Levels, Replay, given.run_dir, given.steps, given.seed)
