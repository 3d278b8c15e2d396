"""From which cost of an env step a fleet pays: env steps per second of SB3 alone and of a fleet, both training.

Pendulum-v1 whose step sleeps for 0, 1, 5 or 20 ms more. PPO alone steps 1 and 8 envs in a process. The fleet has two
workers of 8 envs. The arms of a round run one after the other, so that a busy machine slows all of them; the table has
the medians of the rounds, and the fleet's speed as a multiple of the faster arm without a fleet.

PYTHONPATH=tests python -m bench.sb3_env_costs [ROUNDS] [SECONDS]
"""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import Any

import gymnasium as gym
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv

import headrace
from headrace.learner_stub.adapters.sb3 import updates

COSTS_MS = (0, 1, 5, 20)
ALONE = (1, 8)
WORKERS, NUM_ENVS = 2, 8


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


class _Until(BaseCallback):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._end = time.monotonic() + seconds

    def _on_step(self) -> bool:
        return time.monotonic() < self._end


def _model(sleep_ms: int, width: int) -> PPO:
    env = DummyVecEnv([lambda: SlowPendulum({"sleep_ms": sleep_ms})] * width)
    return PPO("MlpPolicy", env, n_steps=256 // width, n_epochs=4, device="cpu")


def alone(sleep_ms: int, seconds: float, width: int) -> float:
    """Return the env steps per second of `model.learn` with `width` envs."""
    model, began = _model(sleep_ms, width), time.monotonic()
    model.learn(1 << 40, callback=_Until(seconds))
    return model.num_timesteps / (time.monotonic() - began)


def fleet(sleep_ms: int, seconds: float) -> float:
    """Return the env steps per second of `updates`, from its first update on."""
    model = _model(sleep_ms, 1)
    settings = {"sampling.env_config": {"sleep_ms": sleep_ms}, "sampling.rollout_fragment_length": 16}
    module = "headrace.workers.modules.sb3:build"
    with (
        headrace.fleet(SlowPendulum, workers=WORKERS, num_envs=NUM_ENVS, module=module, settings=settings) as run,
        run.stream() as stream,
        run.weights() as weights,
    ):
        began, before = 0.0, 0
        for steps in updates(model, stream, weights, total_timesteps=1 << 40):
            now = time.monotonic()
            began, before = (began, before) if began else (now, steps)
            if now > began + seconds:
                return (steps - before) / (now - began)
    raise SystemExit("the fleet has ended early")


def main(rounds: int = 3, seconds: float = 5.0) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print("| ms a step | SB3, 1 env | SB3, 8 envs | fleet | fleet / faster |\n|---|---|---|---|---|", flush=True)
    for sleep_ms in COSTS_MS:
        found = [
            [*(alone(sleep_ms, seconds, width) for width in ALONE), fleet(sleep_ms, seconds)] for _ in range(rounds)
        ]
        *own, fleets = (median(arm) for arm in zip(*found, strict=True))
        ratio = median(row[-1] / max(row[:-1]) for row in found)
        print(f"| {sleep_ms} | {' | '.join(f'{rate:,.0f}' for rate in (*own, fleets))} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main(*(kind(text) for kind, text in zip((int, float), sys.argv[1:], strict=False)))
