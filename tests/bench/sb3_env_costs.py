"""From which cost of an env step a fleet pays: env steps per second of SB3 alone and of a fleet, both training.

Pendulum-v1 whose step sleeps for 0, 1, 5 or 20 ms more. PPO alone steps 8 envs in its process or in 8 others. The fleet
has two workers of 8 envs, in their worker or in processes of their own. Both sides are measured over whole updates of
256 steps, after the first ones. The arms of a round run one after the other, so that a busy machine slows all of them.
The table has the medians of the rounds, and the faster fleet's speed as a multiple of the faster SB3's.

PYTHONPATH=tests nice -n -15 python -m bench.sb3_env_costs [ROUNDS] [SECONDS]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import gymnasium as gym
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

import headrace
from headrace.learner_stub.adapters.sb3 import updates

COSTS_MS = (0, 1, 5, 20)
VECTORS: tuple[type[VecEnv], ...] = (DummyVecEnv, SubprocVecEnv)
PLACEMENTS = ("inline", "process")
WORKERS, NUM_ENVS = 2, 8
STEPS_PER_UPDATE, WARM_UP = 256, 4
"""Env steps of an update, and the first updates that do not count."""


class SlowPendulum(gym.Wrapper[Any, Any, Any, Any]):
    """Pendulum-v1 whose step takes `sleep_ms` longer."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(gym.make("Pendulum-v1"))
        self._sleep_s = config["sleep_ms"] / 1000

    def step(self, action: Any) -> Any:
        """Sleep, and step."""
        if self._sleep_s:
            time.sleep(self._sleep_s)
        return super().step(action)


class Pace:
    """The env steps per second from the end of the warm-up to the first update that ends `seconds` later."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._updates, self._began, self._before = seconds, 0, 0.0, 0
        self.rate = 0.0

    def update(self, steps: int) -> bool:
        """Note an update that ends now, after `steps` in all. Return whether it was the last."""
        self._updates += 1
        now = time.monotonic()
        if self._updates <= WARM_UP:
            self._began, self._before = now, steps
        elif now >= self._began + self._seconds:
            self.rate = (steps - self._before) / (now - self._began)
        return self.rate > 0


class _Measure(BaseCallback):
    """Ends SB3's training with its pace. A rollout begins when the update before it has ended."""

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace

    def _on_rollout_start(self) -> None:
        if self.num_timesteps:
            self._pace.update(self.num_timesteps)

    def _on_step(self) -> bool:
        return not self._pace.rate


def _model(env: VecEnv) -> PPO:
    return PPO("MlpPolicy", env, n_steps=STEPS_PER_UPDATE // env.num_envs, n_epochs=4, device="cpu")


def alone(sleep_ms: int, seconds: float, vector: Callable[[list[Callable[[], Any]]], VecEnv]) -> float:
    """Return the env steps per second of `model.learn` with 8 envs in a vector of SB3."""
    env, pace = vector([lambda: SlowPendulum({"sleep_ms": sleep_ms})] * NUM_ENVS), Pace(seconds)
    _model(env).learn(1 << 40, callback=_Measure(pace))
    env.close()
    return pace.rate


def fleet(sleep_ms: int, seconds: float, placement: str) -> float:
    """Return the env steps per second of `updates`, with the envs of the workers placed so."""
    model, pace = _model(DummyVecEnv([lambda: SlowPendulum({"sleep_ms": 0})])), Pace(seconds)
    settings = {
        "sampling.env_config": {"sleep_ms": sleep_ms},
        "sampling.rollout_fragment_length": 16,
        "sampling.env_placement": placement,
        "sampling.envs_per_process": 1,  # as SubprocVecEnv has it
    }
    module = "headrace.workers.modules.sb3:build"
    with (
        headrace.fleet(SlowPendulum, workers=WORKERS, num_envs=NUM_ENVS, module=module, settings=settings) as run,
        run.stream() as stream,
        run.weights() as weights,
    ):
        for steps in updates(model, stream, weights, total_timesteps=1 << 40):
            if pace.update(steps):
                return pace.rate
    raise SystemExit("the fleet has ended early")


def main(rounds: int = 3, seconds: float = 5.0) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    arms = [f"SB3, {vector.__name__}" for vector in VECTORS] + [f"fleet, {placement}" for placement in PLACEMENTS]
    print(f"| ms a step | {' | '.join(arms)} | fleet / SB3 |\n|{'---|' * (len(arms) + 2)}", flush=True)
    for sleep_ms in COSTS_MS:
        found = [
            (
                [alone(sleep_ms, seconds, vector) for vector in VECTORS],
                [fleet(sleep_ms, seconds, placement) for placement in PLACEMENTS],
            )
            for _ in range(rounds)
        ]
        medians = [median(arm) for arm in zip(*(own + fleets for own, fleets in found), strict=True)]
        ratio = median(max(fleets) / max(own) for own, fleets in found)
        print(f"| {sleep_ms} | {' | '.join(f'{rate:,.0f}' for rate in medians)} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main(*(kind(text) for kind, text in zip((int, float), sys.argv[1:], strict=False)))
