"""Small multi-agent envs; the agents of one come, go, pause and return by chance, and it keeps the truth of them."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

from headrace import workers  # a runner needs torch, and processes of envs start sooner without it
from headrace.workers import EnvRunnerConfig, MultiAgentEnv

if TYPE_CHECKING:
    from headrace.workers import MultiAgentEnvRunner

BOX: Any = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
CHOICE: Any = gym.spaces.Discrete(3)


class Together(MultiAgentEnv):
    """All agents act in every step. Observation: (t, vector index, agent). Reward t + agent.

    `config["lengths"]`: env steps of each agent; the episode ends with the last.
    """

    def __init__(self, config: Any = None) -> None:
        config = config if config is not None else {}
        self.config = config
        self.index = getattr(config, "vector_index", 0)
        self.lengths: list[int] = config.get("lengths", [5, 5])
        self.truncate = config.get("truncate", False)
        self.possible_agents = [f"a{i}" for i in range(len(self.lengths))]
        self.observation_spaces = dict.fromkeys(self.possible_agents, BOX)
        self.action_spaces = dict.fromkeys(self.possible_agents, CHOICE)
        self.seeds: list[int | None] = config.get("seeds", [])
        self.closed = 0
        self.t = 0

    def observe(self, agent: int) -> Any:
        return np.array([self.t, self.index, agent], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.seeds.append(seed)
        self.t = 0
        return {agent: self.observe(i) for i, agent in enumerate(self.possible_agents)}, {}

    def step(self, actions: dict[Any, Any]) -> Any:
        playing = [i for i, length in enumerate(self.lengths) if self.t < length]
        assert set(actions) == {f"a{i}" for i in playing}
        self.t += 1
        over = {f"a{i}": self.t >= self.lengths[i] for i in playing}
        over["__all__"] = self.t >= max(self.lengths)
        never = dict.fromkeys(over, False)
        observations = {f"a{i}": self.observe(i) for i in playing}
        rewards = {f"a{i}": float(self.t + i) for i in playing}
        return observations, rewards, never if self.truncate else over, over if self.truncate else never, {}

    def close(self) -> None:
        self.closed += 1


class Schedule(MultiAgentEnv):
    """Draws in every step which agents are observed, rewarded and done; `truth` has what each agent did and got.

    Observation: (env step, agent, number of the agent's observation). Truncated agents always get their last one.
    """

    def __init__(self, index: int, truth: list[dict[str, Any]], agents: int, fails: float) -> None:
        self.index, self.truth, self.fails = index, truth, fails
        self.possible_agents = [f"a{i}" for i in range(agents)]
        self.observation_spaces = dict.fromkeys(self.possible_agents, BOX)
        self.action_spaces = dict.fromkeys(self.possible_agents, CHOICE)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.random = np.random.default_rng(seed)
        self.episode: dict[str, Any] = {
            "env": self.index, "seed": seed, "seen": defaultdict(list), "actions": defaultdict(list),
            "rewards": defaultdict(float), "over": False, "t": 0, "acted_at": defaultdict(list),
        }  # fmt: skip
        self.truth.append(self.episode)
        self.t = 0
        self.waiting: set[str] = set()
        self.done: set[str] = set()
        first = [agent for agent in self.possible_agents if self.random.random() < 0.6]
        return {agent: self._see(agent) for agent in first}, {}

    def _see(self, agent: str) -> Any:
        row = np.array([self.t, int(agent[1:]), len(self.episode["seen"][agent])], np.float32)
        self.episode["seen"][agent].append(row)
        if agent not in self.done:
            self.waiting.add(agent)
        return row

    def step(self, actions: dict[Any, Any]) -> Any:
        assert set(actions) == self.waiting, "those with an observation act, and nobody else"
        if self.random.random() < self.fails:
            raise RuntimeError("diverged")
        for agent, action in actions.items():
            self.episode["actions"][agent].append(int(action))
            self.episode["acted_at"][agent].append(self.t)
        self.waiting = set()
        self.t += 1
        self.episode["t"] = self.t
        over = self.random.random() < 0.04 or len(self.done) == len(self.possible_agents)
        observations, rewards, terminateds, truncateds = {}, {}, {"__all__": over}, {"__all__": False}
        for agent in self.possible_agents:
            if agent in self.done:
                continue
            if self.random.random() < 0.7:
                rewards[agent] = float(self.random.integers(-5, 6))
                self.episode["rewards"][agent] += rewards[agent]
            ends = self.random.random()
            if ends < 0.03:
                self.done.add(agent)
                (terminateds if ends < 0.015 else truncateds)[agent] = True
            truncated = truncateds.get(agent, False)
            if self.random.random() < 0.5 or (truncated and agent in self.episode["seen"]):
                observations[agent] = self._see(agent)
        self.episode["over"] = over
        if over:
            self.waiting = set()
        return observations, rewards, terminateds, truncateds, {}


def scheduled(truth: list[dict[str, Any]], agents: int = 3, fails: float = 0.0) -> Any:
    """A creator of `Schedule`s that keep their truth in `truth`; each step fails with probability `fails`."""
    return lambda context: Schedule(context.vector_index, truth, agents, fails)


def multi_runner(env: Any = Together, worker_index: int = 0, **settings: Any) -> MultiAgentEnvRunner:
    """A runner of `env` with one shared policy, a seed, and rebuilds that do not wait."""
    incarnation, run_uid = settings.pop("incarnation", 0), settings.pop("run_uid", "test")
    settings = {"seed": 7, "policies": {"shared": None}, **settings}
    config = EnvRunnerConfig(env=env, **settings)
    return workers.MultiAgentEnvRunner(config, worker_index, incarnation=incarnation, run_uid=run_uid)


def check_books(sampler: MultiAgentEnvRunner) -> None:
    """stepped = open + discarded + delivered."""
    t = sampler.totals
    assert t.stepped == t.open + sum(t.discarded.values()) + t.delivered
    assert t.open >= 0


class TakingTurns(Together):
    """Agents are observed one after another; `got` are the actions as they came."""

    got: list[tuple[str, int]]

    def _turn(self) -> dict[str, Any]:
        return {f"a{self.t % 2}": self.observe(self.t % 2)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self._turn(), {}

    def step(self, actions: dict[Any, Any]) -> Any:
        self.got += [(agent, int(action)) for agent, action in actions.items()]
        self.t += 1
        over = {"__all__": self.t == 7}
        return self._turn(), {}, over, {"__all__": False}, {}
