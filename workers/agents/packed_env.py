"""A multi-agent env with the interface of an env of one agent, for processes and hosts of envs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np

from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.spaces import (
    Dict,
    Space,
    Spaces,
    Tuple,
    column_dtype,
    leaf_shape,
)
from headrace.workers.agents.env import ALL, AgentDict, build_multi_agent_env, gym_spaces_of, spaces_by_agent
from headrace.workers.agents.lane_report import check_known, read_reset, take_step_apart, with_content
from headrace.workers.agents.packing import Packing
from headrace.workers.envs.bounds import blank_value
from headrace.workers.envs.checks import check_rewards, end_of
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.creators import EnvCreator, build_env
from headrace.workers.envs.spaces import spaces_of
from headrace.workers.envs.task_reset import reset_with


def build_any_env(creator: EnvCreator, context: EnvContext, several_agents: bool | None) -> tuple[Any, Spaces]:
    """Return an env of one agent or, packed, of several, and its spaces. `several_agents` None: either kind.

    Raises `EnvContractError` for an env of the other kind, and what the creator raises.
    """
    built = creator(context)
    if several_agents is None:
        several_agents = hasattr(getattr(built, "unwrapped", built), "possible_agents")
    if several_agents:
        packed = PackedEnv(build_multi_agent_env(lambda _: built, context))
        return packed, packed.packing.spaces
    env = build_env(lambda _: built, context)
    return env, spaces_of(env)


class PackedEnv(gym.Env[Any, Any]):
    """A multi-agent env whose `reset` and `step` speak in rows of a `Packing`. It checks what the env returns."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self.render_mode = getattr(env, "render_mode", None)
        self.packing = Packing(spaces_by_agent(gym_spaces_of(env)))
        blank = {agent: _blank(spaces.observation) for agent, spaces in self.packing.by_agent.items()}
        self._unseen = self.packing.pack_seen(blank, {}, {})

    def render(self) -> Any:
        """Return the env's picture."""
        return self._env.render()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the env, with a task in `options`, and return a row and the infos."""
        observations, infos = read_reset(reset_with(self._env, seed, options), self.packing.agents)
        return self._unseen | self.packing.pack_seen(observations, {}, {}), self.packing.pack_infos(infos)

    def step(self, action: Any) -> Any:
        """Step the env, and return an iterator over the parts of a step. The iterator raises for a bad answer.

        So the env's step counts as taken even if its answer is bad.
        """
        actions = self.packing.unpack_actions(action)
        return self._parts(actions, self._env.step(actions))

    def _parts(self, actions: AgentDict, answer: Any) -> Iterator[Any]:
        known = self.packing.agents
        observations, rewards, terminateds, truncateds, infos = take_step_apart(answer)
        check_known(observations, known)
        check_known(rewards, known)
        infos = with_content(infos)
        values, problems = check_rewards(list(rewards.values()), [0] * len(rewards), [actions])
        for _, problem in problems[:1]:
            raise problem
        agents = (*known, ALL)
        ends = {agent: end_of(terminateds.get(agent, False), truncateds.get(agent, False)) for agent in agents}
        got = dict(zip(rewards, values.tolist(), strict=True))
        yield self._unseen | self.packing.pack_seen(observations, got, ends)
        yield 0.0
        yield ends[ALL] is ChunkEnd.TERMINATED
        yield ends[ALL] is ChunkEnd.TRUNCATED
        yield self.packing.pack_infos(infos)

    def close(self) -> None:
        """Close the env."""
        close = getattr(self._env, "close", None)
        if close is not None:
            close()


def _blank(space: Space) -> Any:
    """Return a value inside `space`, as near to zero as possible."""
    if isinstance(space, Dict):
        return {key: _blank(sub) for key, sub in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(_blank(sub) for sub in space.spaces)
    return np.full(leaf_shape(space), blank_value("", space), column_dtype(space))
