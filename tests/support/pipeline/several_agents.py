"""Envs of several agents for the delivery path, and a witness of what becomes of each agent's episode."""

from __future__ import annotations

from collections import Counter
from typing import Any

import gymnasium as gym
import numpy as np

from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import ChunkEnd, EpisodeChunk
from headrace.workers import EnvRunnerConfig, MultiAgentEnv, MultiAgentEnvRunner

TWO_CARTS: dict[str, Any] = {
    "env": "headrace.workers.agents.examples:two_carts",
    "num_envs": 2,
    "rollout_fragment_length": 16,
    "seed": 1,
    "policies": {"short": {}, "long": {}},
}
CARTS_AT_RANDOM = {
    "sampling": TWO_CARTS,
    "worker": {"random_actions_before_weights": True},
}

_AGENTS = ("red", "green", "blue")


class ComeAndGo(MultiAgentEnv):
    """Who is seen, pauses, ends and comes late is drawn anew in each step. Observation: (env step,). Reward: 1."""

    def __init__(self, context: Any) -> None:
        box: Any = gym.spaces.Box(0, 1e6, (1,), np.float32)
        choice: Any = gym.spaces.Discrete(2)
        self.possible_agents = _AGENTS
        self.observation_spaces = dict.fromkeys(_AGENTS, box)
        self.action_spaces = dict.fromkeys(_AGENTS, choice)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.random = np.random.default_rng(seed)
        self.t, self.done = 0, set[str]()
        first = [agent for agent in _AGENTS if self.random.random() < 0.6]
        return {agent: self._now() for agent in first}, {}

    def step(self, actions: dict[Any, Any]) -> Any:
        self.t += 1
        if self.random.random() < 0.03:
            raise RuntimeError("diverged")
        over = self.random.random() < 0.05
        observations, terminateds = {}, {"__all__": over}
        for agent in _AGENTS:
            if agent not in self.done and (agent in actions or self.random.random() < 0.5):
                if self.random.random() < 0.7:
                    observations[agent] = self._now()
                if self.random.random() < 0.05:
                    terminateds[agent] = True
                    self.done.add(agent)
        return observations, dict.fromkeys(actions, 1.0), terminateds, {"__all__": False}, {}

    def _now(self) -> Any:
        return np.array([self.t], np.float32)


def by_episode(agent: str, episode_id: str) -> str:
    """Who plays an agent changes from episode to episode."""
    return "one" if (int(episode_id, 16) + _AGENTS.index(agent)) % 2 else "two"


def come_and_go(num_envs: int, length: int, seed: int) -> MultiAgentEnvRunner:
    """A runner of `ComeAndGo` with two modules."""
    return MultiAgentEnvRunner(
        EnvRunnerConfig(
            env=ComeAndGo,
            num_envs=num_envs,
            rollout_fragment_length=length,
            seed=seed,
            policies={"one": None, "two": None},
            policy_mapping_fn=by_episode,
            env_restart_attempts=1000,
        ),
        run_uid="test",
    )


class AgentWitness:
    """Sees every chunk and complains of whatever breaks the promise: per agent and episode in order and whole, with
    one end."""

    def __init__(self) -> None:
        self.steps: Counter[str] = Counter()
        """By module."""
        self.markers: Counter[str | None] = Counter()
        """By reason."""
        self.ended: set[tuple[str, str]] = set()
        self._last: dict[tuple[str, str], EpisodeChunk] = {}

    def see(self, batch: ChunkBatch) -> None:
        assert len(batch.modules) == 1
        for chunk in batch:
            self._see(chunk)
            self.steps[chunk.module_id] += len(chunk)

    def open_episodes(self) -> set[tuple[str, str]]:
        """Begun, and neither finished nor aborted."""
        return set(self._last) - self.ended

    def _see(self, chunk: EpisodeChunk) -> None:
        life = (chunk.episode_id, chunk.agent_id)
        assert life not in self.ended, f"{chunk} after the end of its episode"
        last = self._last.get(life)
        if last is not None:
            assert chunk.module_id == last.module_id
            assert chunk.chunk_index == last.chunk_index + 1, f"{chunk} follows {last}"
            if len(last):
                assert chunk.t_start > last.env_t[-1], f"{chunk} follows {last}"
        elif len(chunk):
            assert chunk.chunk_index == 0, f"{chunk} is the first of its episode"
        self._last[life] = chunk
        if chunk.end is not ChunkEnd.ONGOING:
            self.ended.add(life)
        if chunk.end is ChunkEnd.ABORTED:
            self.markers[chunk.end_reason] += 1
