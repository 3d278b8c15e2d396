r"""Prioritised level replay: levels from which the agent learns at present come more often.

    python level_replay.py runs/replay            # 64 levels after 100,000 steps, in a minute
    python level_replay.py runs/plain --plain     # the same learner, each level equally often

Levels have 1 to 8 doors and share six signs, so the agent soon passes them all. But each sixteenth
level has three doors and six signs of its own. Random actions pass it once in 216 episodes. Drawn
equally often, it gets one episode in 64.

The teacher knows nothing of that. Its score of a level is the mean size of the advantages there:
near 0 where the agent always passes, and where it never does.

Jiang et al., Prioritized Level Replay (2021), https://arxiv.org/abs/2010.03934, section 3.
"""

import gymnasium as gym
import numpy as np
from curriculum import MARK, Corridor, learn, read_arguments
from impala import goal_of

import headrace

LEVELS, SIGNS, NEWEST = 64, 6, 20
TEMPERATURE, STALENESS = 0.5, 0.3


class Levels(Corridor):
    """A corridor for each level. Chance says which action opens which sign."""

    observation_space = gym.spaces.Box(0.0, 1.0, (5 * SIGNS,), np.float32)
    action_space = gym.spaces.Discrete(SIGNS)

    def __init__(self, context=None):
        self.set_task({"level": 0})

    def set_task(self, task):
        hard, easy = divmod(task["level"], 16)
        self.kind, self.doors = (0, 1 + easy % 8) if easy else (1 + hard, 3)
        self.opens = np.random.default_rng(self.kind).permutation(SIGNS)

    def _sign(self):
        self.sign = int(self.np_random.integers(SIGNS))
        return np.eye(5 * SIGNS, dtype=np.float32)[self.kind * SIGNS + self.sign]


class Replay:
    """Publishes all levels, weighted by the ranks of their scores and by the ages of these."""

    def __init__(self, tasks, plain):
        self.tasks, self.plain, self.batches = tasks, plain, 0
        self.scores, self.seen = np.ones(LEVELS), np.zeros(LEVELS)
        self.returns = [[0.0] for _ in range(LEVELS)]
        self._publish(np.ones(LEVELS))

    def __str__(self):
        means = [np.mean(own) for own in self.returns]
        learnt = sum(mean >= MARK for mean in means)
        return f"{learnt} levels learnt, mean return over all {np.mean(means):.2f}"

    def look(self, batch, module):
        """Score the levels of a batch, keep their newest returns, and publish new weights."""
        self.batches += 1
        for task, own in batch.by_task():
            if not task or not own.steps:
                continue
            level = task.values["level"]
            goal = goal_of(module, headrace.to_torch(own.episodes()))
            self.scores[level] = goal.advantages.abs().mean().item()
            self.seen[level] = self.batches
            ended = [chunk.episode_return for chunk in own if chunk.is_done]
            self.returns[level] = (self.returns[level] + ended)[-NEWEST:]
        if not self.plain:
            ranks = 1 + np.argsort(np.argsort(-self.scores))
            by_rank, ages = ranks ** (-1 / TEMPERATURE), self.batches - self.seen + 1
            self._publish(
                (1 - STALENESS) * by_rank / by_rank.sum() + STALENESS * ages / ages.sum()
            )

    def _publish(self, weights):
        self.tasks.publish(
            [({"level": level}, weight) for level, weight in enumerate(weights)]
        )


if __name__ == "__main__":
    learn(Levels, Replay, read_arguments(steps=120_000))
