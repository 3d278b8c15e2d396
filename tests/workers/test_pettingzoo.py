"""PettingZoo's own envs: the steps of each agent equal those of a plain loop over the env with the same actions."""

from __future__ import annotations

import warnings
from collections import defaultdict
from importlib import import_module
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from pettingzoo import ParallelEnv
from pettingzoo.utils.conversions import parallel_to_aec

from headrace.schemas.chunks.chunk import ChunkEnd, EpisodeChunk
from headrace.schemas.errors import EnvContractError
from headrace.workers import EnvRunnerConfig, MultiAgentEnvRunner, SingleAgentEnvRunner

# PettingZoo, Gymnasium's checks and pygame warn about one another.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

CLASSIC = {
    "pettingzoo.classic.tictactoe_v3": 30,
    "pettingzoo.classic.connect_four_v3": 12,
    "pettingzoo.classic.leduc_holdem_v4": 40,
    "pettingzoo.classic.rps_v2": 4,
    "pettingzoo.classic.hanabi_v5": 4,
}
OTHERS = {
    "mpe2.simple_spread_v3": 3,
    "mpe2.simple_tag_v3": 2,
    "mpe2.simple_speaker_listener_v4": 3,
    "pettingzoo.sisl.pursuit_v5": 2,
    "pettingzoo.butterfly.pistonball_v6": 2,
}
SHORT = {
    "pettingzoo.sisl.pursuit_v5": {"max_cycles": 40},
    "pettingzoo.butterfly.pistonball_v6": {"n_pistons": 4, "max_cycles": 20},
}
LARGEST_SEED = 2**31 - 1


def _make(name: str, kind: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(import_module(name), kind)(**SHORT.get(name, {}))


def _runner(name: str, kind: str, **settings: Any) -> MultiAgentEnvRunner:
    """One policy for each kind of agent."""
    probe = _make(name, kind)
    kinds: dict[Any, str] = {}
    module_of = {}
    for agent in probe.possible_agents:
        spaces = repr((probe.observation_space(agent), probe.action_space(agent)))
        module_of[agent] = kinds.setdefault(spaces, f"kind_{len(kinds)}")
    config = EnvRunnerConfig(
        env=lambda context: _make(name, kind),
        policies=list(kinds.values()),
        policy_mapping_fn=lambda agent, episode_id: module_of[agent],
        restart_failed_sub_environments=False,
        max_env_seed=LARGEST_SEED,
        seed=11,
        **settings,
    )
    return MultiAgentEnvRunner(config)


def _by_episode(chunks: Any) -> dict[int, dict[str, EpisodeChunk]]:
    episodes: dict[int, dict[str, EpisodeChunk]] = defaultdict(dict)
    for chunk in chunks:
        if len(chunk):
            assert chunk.is_done
            episodes[chunk.seed][chunk.agent_id] = chunk
    return episodes


class _Life:
    """The observations, actions and rewards of one agent in a plain loop."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.rewards: list[float] = []
        self.got = 0.0
        self.end = ChunkEnd.ONGOING

    def saw(self, observation: Any, reward: float, terminated: bool, truncated: bool, acted: bool) -> None:
        self.seen.append(observation)
        self.got += float(reward)  # what came before its first action is part of the first reward
        if acted:
            self.rewards.append(self.got)
            self.got = 0.0
        if terminated or truncated:
            self.end = ChunkEnd.TERMINATED if terminated else ChunkEnd.TRUNCATED


def _play_turns(env: Any, seed: int, actions: dict[str, Any]) -> dict[str, _Life]:
    """A loop with `env.last()`."""
    lives: dict[str, _Life] = defaultdict(_Life)
    at: dict[str, int] = defaultdict(int)
    env.reset(seed=seed)
    for agent in env.agent_iter():
        observation, reward, terminated, truncated, _ = env.last()
        lives[agent].saw(observation, reward, terminated, truncated, at[agent] > 0)
        if terminated or truncated:
            env.step(None)
            continue
        env.step(actions[agent][at[agent]])
        at[agent] += 1
    return lives


def _play_together(env: Any, seed: int, actions: dict[str, Any]) -> dict[str, _Life]:
    """A loop with `env.step` of all agents."""
    lives: dict[str, _Life] = defaultdict(_Life)
    observations, _ = env.reset(seed=seed)
    for agent, observation in observations.items():
        lives[agent].saw(observation, 0.0, False, False, False)
    t = 0
    while env.agents:
        sent = {agent: actions[agent][t] for agent in env.agents}
        observations, rewards, terminateds, truncateds, _ = env.step(sent)
        for agent in sent:
            lives[agent].saw(observations[agent], rewards[agent], terminateds[agent], truncateds[agent], True)
        t += 1
    return lives


def _leaves(value: Any) -> list[Any]:
    return [leaf for key in sorted(value) for leaf in _leaves(value[key])] if isinstance(value, dict) else [value]


def _compare(chunk: EpisodeChunk, life: _Life) -> None:
    assert chunk.end is life.end
    np.testing.assert_array_equal(chunk.rewards, life.rewards)
    assert chunk.episode_return == pytest.approx(sum(life.rewards), abs=1e-9)
    seen = [np.stack(leaf) for leaf in zip(*map(_leaves, life.seen), strict=True)]
    for ours, theirs in zip(_leaves(chunk.obs), seen, strict=True):
        np.testing.assert_array_equal(ours, theirs.astype(ours.dtype))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "kind", "play"),
    [(name, "env", _play_turns) for name in (*CLASSIC, *OTHERS)]
    + [(name, "parallel_env", _play_together) for name in ("pettingzoo.classic.rps_v2", *OTHERS)],
)
def test_the_runner_gives_the_same_transitions_and_returns_as_a_plain_loop(name: str, kind: str, play: Any) -> None:
    with _runner(name, kind, num_envs=2) as sampler:
        sampler.sample(num_timesteps=7, random_actions=True)  # other cuts and episodes before
        episodes = _by_episode(sampler.sample(num_episodes={**CLASSIC, **OTHERS}[name], random_actions=True))
        assert sampler.totals.env_failures == 0
    env = _make(name, kind)
    for seed, chunks in episodes.items():
        lives = play(env, seed, {agent: chunk.actions for agent, chunk in chunks.items()})
        assert {agent for agent, life in lives.items() if life.rewards} == set(chunks)
        for agent, chunk in chunks.items():
            _compare(chunk, lives[agent])


@pytest.mark.parametrize(
    ("explore", "steps"), [(None, 2_000), (True, 1_000), pytest.param(None, 25_000, marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize("name", [name for name in CLASSIC if "rps" not in name])  # it has no mask
def test_masked_random_steps_are_all_legal(name: str, explore: bool | None, steps: int) -> None:
    """25,000 steps of each game, 100,000 together: no illegal action, neither at random nor from the policy."""
    with _runner(name, "env", num_envs=4, rollout_fragment_length=64) as sampler:
        while sampler.totals.stepped < steps:
            for chunk in sampler.sample(random_actions=explore is None):
                if len(chunk):
                    legal = chunk.obs["action_mask"][np.arange(len(chunk)), chunk.actions]
                    assert legal.all()


def test_a_single_agent_runner_refuses_a_multi_agent_env() -> None:
    name = "pettingzoo.classic.rps_v2"
    with pytest.raises(EnvContractError, match="MultiAgentEnvRunner"):
        SingleAgentEnvRunner(EnvRunnerConfig(env=lambda context: _make(name, "env")))


class _Clock(ParallelEnv[str, Any, Any]):
    """Agent "a" has 3 steps and agent "b" 5; `ends` are the flags, terminated or truncated, of each at its end."""

    metadata = {"name": "clock"}  # noqa: RUF012 - as PettingZoo's own envs do
    possible_agents = ["a", "b"]  # noqa: RUF012

    def __init__(self, ends: dict[str, str]) -> None:
        self.ends = ends

    def observation_space(self, agent: str) -> Any:
        return gym.spaces.Box(-1, 1, (1,))

    def action_space(self, agent: str) -> Any:
        return gym.spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.t = ["a", "b"], 0
        return {agent: np.zeros(1, np.float32) for agent in "ab"}, {"a": {}, "b": {}}

    def step(self, actions: dict[str, Any]) -> Any:
        self.t, here = self.t + 1, self.agents
        over = {agent for agent in here if self.t >= {"a": 3, "b": 5}[agent]}
        self.agents = [agent for agent in here if agent not in over]
        flags = [{agent: agent in over and self.ends[agent] == flag for agent in here} for flag in ("term", "trunc")]
        seen, rewards = {agent: np.zeros(1, np.float32) for agent in here}, dict.fromkeys(here, 1.0)
        return seen, rewards, *flags, {agent: {} for agent in here}


@pytest.mark.parametrize("adapted", [lambda env: env, parallel_to_aec], ids=["parallel", "aec"])
@pytest.mark.parametrize(("a", "b"), [("term", "trunc"), ("trunc", "trunc"), ("trunc", "term")])
def test_an_episode_ends_as_its_last_agents_do(a: str, b: str, adapted: Any) -> None:
    told = []
    callbacks = [{"on_episode_end": lambda episode: told.append(episode.end)}]
    env = lambda context: adapted(_Clock({"a": a, "b": b}))  # noqa: E731
    config = EnvRunnerConfig(env=env, policies={"shared": None}, callbacks=callbacks)
    with MultiAgentEnvRunner(config) as sampler:
        ends = {c.agent_id: c.end for c in sampler.sample(num_episodes=1, random_actions=True)}
    names = {"term": ChunkEnd.TERMINATED, "trunc": ChunkEnd.TRUNCATED}
    assert ends == {"a": names[a], "b": names[b]}
    assert told == [names[b]]
