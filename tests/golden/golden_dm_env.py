"""An env of the golden chunks in DeepMind's protocol. It stands apart, so that env processes need not load `dm_env`."""

from __future__ import annotations

from typing import Any

import dm_env
import numpy as np
from dm_env import specs
from golden_envs import Walk

from headrace.workers import EnvContext


class OfDeepMind(dm_env.Environment):
    """A walk in DeepMind's protocol, which knows no seeds but the one at its making."""

    def __init__(self, context: EnvContext) -> None:
        self._walk, self._seed = Walk(context), context.seed

    def observation_spec(self) -> Any:
        return specs.BoundedArray((3,), np.float32, -1000.0, 1000.0)

    def action_spec(self) -> Any:
        return specs.DiscreteArray(4)

    def reset(self) -> dm_env.TimeStep:
        observation, _ = self._walk.reset(seed=self._seed)
        self._seed = None
        return dm_env.restart(observation)

    def step(self, action: Any) -> dm_env.TimeStep:
        seen, reward, over, late, _ = self._walk.step(action)
        if over or late:
            return dm_env.termination(reward, seen) if over else dm_env.truncation(reward, seen)
        return dm_env.transition(reward, seen)
