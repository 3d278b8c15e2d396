"""Gymnasium's `AsyncVectorEnv`, a process an env, and a torch policy in plain operations.

python tests/bench/peers/gymnasium_rates.py workers NUM_ENVS SECONDS
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import gymnasium as gym
import torch
from measuring import Take, main
from small_policy import ENV, SmallPolicy

STEPS = 64
"""Steps of each env between two looks at the clock."""


@contextmanager
def workers(case: str) -> Iterator[Take]:
    """Step two vectors' worth of envs, as two workers do."""
    torch.set_num_threads(1)
    width = 2 * int(case)
    env = gym.make_vec(ENV, num_envs=width, vectorization_mode="async")
    policy, state = SmallPolicy(), {"obs": env.reset(seed=0)[0]}

    def take() -> int:
        for _ in range(STEPS):
            actions, _, _ = policy(torch.from_numpy(state["obs"]))
            state["obs"] = env.step(actions.numpy())[0]
        return STEPS * width

    yield take
    env.close()


if __name__ == "__main__":
    main(workers=workers)
