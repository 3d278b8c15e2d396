"""Both kinds of runner over envs whose episodes all have one length, so that every count can be told beforehand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from support.envs import toy, toy_agents

LENGTH = 50


@dataclass(frozen=True)
class Kind:
    """One kind of runner, over envs whose episodes all are of one length."""

    agents: int
    env: Any
    make: Callable[..., Any]
    check_books: Callable[[Any], None]

    def runner(self, num_envs: int, length: int = LENGTH, **settings: Any) -> Any:
        config = {"length": length, "lengths": {}} if self.agents == 1 else {"lengths": [length] * self.agents}
        return self.make(num_envs=num_envs, env_config=config, **settings)

    def env_steps(self, chunks: Any) -> int:
        steps = sum(map(len, chunks))
        assert steps % self.agents == 0
        return steps // self.agents


SINGLE = Kind(1, toy.Counting, toy.runner, toy.check_books)
MULTI = Kind(2, toy_agents.Together, toy_agents.multi_runner, toy_agents.check_books)

KINDS = pytest.mark.parametrize("kind", [SINGLE, MULTI], ids=["single", "multi"])
WIDTHS = pytest.mark.parametrize("num_envs", [1, 3, 8])
MODES = pytest.mark.parametrize("mode", ["num_timesteps", "num_episodes"])


def whole_polls(count: int, num_envs: int) -> int:
    """The next multiple of `num_envs`: what all envs together do when each does as much as any."""
    return -(-count // num_envs) * num_envs


def episodes_of(chunks: Any) -> set[str]:
    """Their ids."""
    return {c.episode_id for c in chunks}


def resets_of(sampler: Any) -> int:
    """How often its envs were reset since they were built."""
    return sum(len(lane.env.seeds) for lane in sampler._sampler.envs.lanes)
