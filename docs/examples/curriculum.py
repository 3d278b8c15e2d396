r"""A curriculum: a teacher adds doors to a corridor that an agent would never get through at once.

    python curriculum.py runs/curriculum      # 12 doors after 40,000 steps, in half a minute
    python curriculum.py runs/plain --plain   # the same learner, 12 doors from the beginning

Each door shows one of five signs, drawn by the episode's seed. One of five actions opens it, and
any other ends the episode. Only the last door gives a reward. Random actions open 12 doors once in
244 million episodes, so there is nothing to learn from. With one door, they do so in each fifth.
"""

import argparse

import gymnasium as gym
import numpy as np
import torch
from impala import train

import headrace

SIGNS, DOORS, MARK, EPISODES = 5, 12, 0.8, 300
OPENS = [3, 0, 4, 1, 2]


class Corridor(gym.Env):
    """`doors` doors in a row; `set_task` says how many."""

    observation_space = gym.spaces.Box(0.0, 1.0, (SIGNS,), np.float32)
    action_space = gym.spaces.Discrete(SIGNS)

    def __init__(self, context=None):
        self.opens, self.doors = OPENS, DOORS

    def set_task(self, task):
        self.doors = task["doors"]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.open = 0
        return self._sign(), {}

    def step(self, action):
        if action != self.opens[self.sign]:
            return self._sign(), 0.0, True, False, {}
        self.open += 1
        is_over = self.open == self.doors
        return self._sign(), float(is_over), is_over, False, {}

    def _sign(self):
        self.sign = int(self.np_random.integers(SIGNS))
        return np.eye(SIGNS, dtype=np.float32)[self.sign]


class Teacher:
    """Publishes a level, and the next one once the mean return of `EPISODES` episodes passes the mark."""

    def __init__(self, tasks, plain):
        self.tasks, self.doors, self.returns = tasks, DOORS if plain else 1, []
        tasks.publish({"doors": self.doors})

    def __str__(self):
        return f"{self.doors} doors"

    def look(self, batch, module):
        """Count the episodes of the present level that end in a batch."""
        for chunk in batch:
            if chunk.is_done and chunk.task and chunk.task.values["doors"] == self.doors:
                self.returns.append(chunk.episode_return)
        if len(self.returns) >= EPISODES:
            if np.mean(self.returns) >= MARK and self.doors < DOORS:
                self.doors += 1
                self.tasks.publish({"doors": self.doors})
            self.returns = []


def learn(env, teacher_of, given):
    """Train on a fleet for `given.steps` steps, and print how it goes."""
    torch.set_num_threads(1)  # the workers need the other cores
    torch.manual_seed(given.seed)
    settings = {"fleet.until_steps": given.steps, "sampling.seed": given.seed}
    with headrace.fleet(env, workers=2, settings=settings, run_dir=given.run_dir) as run:
        stream, weights = run.stream(), run.weights()
        module = headrace.actor_critic(stream.spaces())
        optimizer = torch.optim.Adam(module.parameters(), lr=0.001)
        teacher = teacher_of(weights.tasks, given.plain)
        weights.publish(module.state_dict())
        steps, returns = 0, []
        for batch in stream:
            if not batch.steps:  # it only tells of episodes that were aborted
                continue
            teacher.look(batch, module)
            train(module, optimizer, headrace.to_torch(batch.episodes()))
            weights.publish(module.state_dict())
            returns += [chunk.episode_return for chunk in batch if chunk.is_done]
            before, steps = steps, steps + batch.steps
            if steps // 10_000 > before // 10_000:
                share = np.mean(returns[-EPISODES:])
                print(
                    f"{steps} steps: {teacher}; {share:.2f} of the newest episodes passed"
                )


def read_arguments(steps):
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    learn(Corridor, Teacher, read_arguments(steps=60_000))
