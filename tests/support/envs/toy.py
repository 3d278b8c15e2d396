"""Small real envs whose every observation says where it comes from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

from headrace import workers  # a runner needs torch, and processes of envs start sooner without it
from headrace.workers import EnvContext, EnvRunnerConfig
from support.envs.counting import Counting

if TYPE_CHECKING:
    from headrace.workers import SingleAgentEnvRunner


class Walk(Counting):
    """A random walk of its own seed and actions, so that any influence from elsewhere shows."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def observe(self) -> Any:
        return self.at.astype(np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.at = np.zeros(3)
        super().reset(seed=seed)
        self.at = self.np_random.normal(size=3)
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        self.at = self.at * 0.9 + self.np_random.normal(size=3) * 0.1 + (float(action) - 1.0) * 0.1
        self.t += 1
        return self.observe(), float(self.at.sum()), bool(self.np_random.random() < 0.02), False, {}


class Faulty(Walk):
    """Envs of `config["faulty"]` do `config["fault"]` every `config["every"]` of their steps, over all their lives."""

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        steps = self.config["steps"]
        steps[self.index] = steps.get(self.index, 0) + 1
        answer = super().step(action)
        if self.index in self.config["faulty"] and steps[self.index] % self.config["every"] == 0:
            return self.config["fault"](answer)
        return answer


def make_counting(context: EnvContext) -> Counting:
    """A creator to be named by its import path."""
    return Counting(context)


class CountingSteps:
    """A callback object to be named by its import path."""

    def on_episode_step(self, metrics_logger: Any) -> None:
        metrics_logger.log_value("steps_counted", 1, reduce="sum")


def log_sample(metrics_logger: Any) -> None:
    """A callback function, likewise."""
    metrics_logger.log_value("samples_seen", 1, reduce="lifetime_sum")


def runner(env: Any = Counting, worker_index: int = 0, **settings: Any) -> SingleAgentEnvRunner:
    """A runner of `env` with a seed, and rebuilds that do not wait."""
    incarnation, run_uid = settings.pop("incarnation", 0), settings.pop("run_uid", "test")
    settings = {"seed": 7, **settings}
    config = EnvRunnerConfig(env=env, **settings)
    return workers.SingleAgentEnvRunner(config, worker_index, incarnation=incarnation, run_uid=run_uid)


def check_books(sampler: SingleAgentEnvRunner) -> None:
    """stepped = open + discarded + delivered."""
    t = sampler.totals
    assert t.stepped == t.open + sum(t.discarded.values()) + t.delivered


Answer = tuple[Any, Any, Any, Any, Any]


def diverge(answer: Answer) -> Answer:
    raise RuntimeError("diverged")


def with_fault(fault: Callable[[Answer], Any], *, faulty: set[int], every: int = 30) -> dict[str, Any]:
    return {"fault": fault, "faulty": faulty, "every": every, "steps": {}}
