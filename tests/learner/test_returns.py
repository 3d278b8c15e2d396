"""GAE and V-trace over recorded chunks equal a plain loop over each whole episode, and TorchRL's functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.learner_stub import episodes_of, gae, to_torch, vtrace
from headrace.learner_stub.rollouts.returns import Returns
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import ChunkEnd, EpisodeChunk, to_episode
from headrace.schemas.chunks.episodes import Episodes
from headrace.schemas.errors import ChunkError, ModuleError
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner

MakeBatch = Callable[..., ChunkBatch]
Array = NDArray[np.float64]
GAMMA, LAMBDA = 31 / 32, 29 / 32
"""Exact in float32, to which TorchRL rounds them."""


class Restless(gym.Env[Any, Any]):
    """A random walk that terminates, is truncated, or fails, each at random."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = self.np_random.normal(size=2)
        return self.at.copy(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at = 0.9 * self.at + self.np_random.normal(size=2)
        chance = self.np_random.random()
        if chance < 0.02:
            raise RuntimeError("fell over")
        return self.at.copy(), float(self.at[0] + action), bool(chance > 0.9), bool(0.8 < chance < 0.9), {}


def value_of(obs: Any) -> Array:
    """A value function that anyone can work out: the same for equal observations."""
    return np.asarray(np.sin(obs[..., 0]) + 0.3 * obs[..., 1], np.float64)


def logp_of(obs: Any, actions: Any) -> Array:
    """The log-probs of a policy that is newer than the one that acted."""
    return np.asarray(-1.0 + 0.5 * np.cos(obs[..., 1] + actions), np.float64)


def recorded(seed: int, batches: int, length: int = 7) -> list[ChunkBatch]:
    """Batches of real chunks: cut, terminated, truncated, and aborted ones with their markers."""
    config = EnvRunnerConfig(env=Restless, num_envs=3, rollout_fragment_length=length, seed=seed)
    with SingleAgentEnvRunner(config) as runner:
        return [runner.sample_fragment() for _ in range(batches)]


@pytest.fixture(scope="module")
def batches() -> list[ChunkBatch]:
    """Ten batches of one worker."""
    return recorded(seed=3, batches=10)


def whole_episodes(batches: Sequence[ChunkBatch]) -> list[EpisodeChunk]:
    """The chunks of each episode joined into one; an aborted one without its marker."""
    parts: dict[str, list[EpisodeChunk]] = defaultdict(list)
    for batch in batches:
        for chunk in batch:
            if len(chunk):
                parts[chunk.episode_id].append(chunk)
    return [to_episode(chunks) for chunks in parts.values()]


def loop_gae(episode: EpisodeChunk) -> tuple[Array, Array]:
    """Equation 16, step by step from the end."""
    values = value_of(episode.obs)
    values[-1] *= not episode.is_terminated
    advantages, carried = np.zeros(len(episode)), 0.0
    for t in reversed(range(len(episode))):
        delta = episode.rewards[t] + GAMMA * values[t + 1] - values[t]
        advantages[t] = carried = delta + GAMMA * LAMBDA * carried
    return advantages, advantages + values[:-1]


def loop_vtrace(
    episode: EpisodeChunk, rho_max: float = 1.0, c_max: float = 1.0, trace_lambda: float = 1.0
) -> tuple[Array, Array]:
    """v_s = V(x_s) + rho_s delta_s + gamma c_s (v_(s+1) - V(x_(s+1))), from the last step backwards."""
    values = value_of(episode.obs)
    values[-1] *= not episode.is_terminated
    ratios = np.exp(logp_of(episode.obs[:-1], episode.actions) - episode.columns["logp"])
    advantages, targets = np.zeros(len(episode)), np.append(np.zeros(len(episode)), values[-1])
    for t in reversed(range(len(episode))):
        rho, c = min(ratios[t], rho_max), trace_lambda * min(ratios[t], c_max)
        advantages[t] = rho * (episode.rewards[t] + GAMMA * targets[t + 1] - values[t])
        delta = rho * (episode.rewards[t] + GAMMA * values[t + 1] - values[t])
        targets[t] = values[t] + delta + GAMMA * c * (targets[t + 1] - values[t + 1])
    return advantages, targets[:-1]


def torchrl_gae(episode: EpisodeChunk) -> tuple[Array, Array]:
    functional = _torchrl()
    value, next_value, reward, done, terminated = _torchrl_arguments(episode)
    return _arrays(
        functional.generalized_advantage_estimate(GAMMA, LAMBDA, value, next_value, reward, done, terminated)
    )


def torchrl_vtrace(episode: EpisodeChunk) -> tuple[Array, Array]:
    functional = _torchrl()
    value, next_value, reward, done, terminated = _torchrl_arguments(episode)
    newer = torch.from_numpy(logp_of(episode.obs[:-1], episode.actions))[:, None]
    older = torch.from_numpy(episode.columns["logp"].astype(np.float64))[:, None]
    return _arrays(
        functional.vtrace_advantage_estimate(GAMMA, newer, older, value, next_value, reward, done, terminated)
    )


def _torchrl() -> Any:
    reason = "torchrl is not installed; pip install 'headrace[torchrl]'"
    return pytest.importorskip("torchrl.objectives.value.functional", reason=reason)


def _torchrl_arguments(episode: EpisodeChunk) -> list[torch.Tensor]:
    values = value_of(episode.obs)
    done, terminated = np.zeros(len(episode), np.bool_), np.zeros(len(episode), np.bool_)
    done[-1], terminated[-1] = True, episode.is_terminated
    return [torch.from_numpy(array)[:, None] for array in (values[:-1], values[1:], episode.rewards, done, terminated)]


def _arrays(pair: Any) -> tuple[Array, Array]:
    advantages, targets = (tensor[:, 0].numpy() for tensor in pair)
    return advantages, targets


def by_step(batches: Sequence[ChunkBatch], found: Returns) -> dict[tuple[str, int], tuple[float, float]]:
    """(episode, env step) -> (advantage, target), so that order does not matter."""
    steps = [(c.episode_id, int(t)) for batch in batches for c in batch for t in c.env_t]
    return dict(zip(steps, zip(found.advantages.tolist(), found.targets.tolist(), strict=True), strict=True))


def assert_equal_to(
    twin: Callable[[EpisodeChunk], tuple[Array, Array]], batches: Sequence[ChunkBatch], found: Returns
) -> None:
    ours, seen = by_step(batches, found), 0
    for episode in whole_episodes(batches):
        for t, *theirs in zip(episode.env_t, *twin(episode), strict=True):
            np.testing.assert_allclose(ours[episode.episode_id, int(t)], theirs, rtol=0.0, atol=1e-6)
            seen += 1
    assert seen == len(ours) == sum(batch.steps for batch in batches)


def newer_logp(episodes: Episodes) -> Array:
    return logp_of(episodes.obs[episodes.step_rows], episodes.actions)


def test_the_recorded_chunks_end_in_all_ways(batches: list[ChunkBatch]) -> None:
    ends = {(chunk.end, len(chunk) > 0) for batch in batches for chunk in batch}
    assert ends == {(end, end is not ChunkEnd.ABORTED) for end in ChunkEnd}
    episodes = episodes_of(batches)
    assert (episodes.next_chunk >= 0).sum() > 10
    assert len(whole_episodes(batches)) < len(episodes.terminated)


@pytest.mark.parametrize("twin", [loop_gae, torchrl_gae], ids=["plain_loop", "torchrl"])
def test_gae_goes_on_through_the_cuts_of_an_episode(batches: list[ChunkBatch], twin: Any) -> None:
    episodes = episodes_of(batches)
    assert_equal_to(twin, batches, gae(episodes, value_of(episodes.obs), gamma=GAMMA, gae_lambda=LAMBDA))


@pytest.mark.parametrize("twin", [loop_vtrace, torchrl_vtrace], ids=["plain_loop", "torchrl"])
def test_v_trace_goes_on_through_the_cuts_of_an_episode(batches: list[ChunkBatch], twin: Any) -> None:
    episodes = episodes_of(batches)
    found = vtrace(episodes, value_of(episodes.obs), newer_logp(episodes), gamma=GAMMA)
    assert_equal_to(twin, batches, found)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 5), st.floats(0.5, 2.0), st.floats(0.5, 2.0))
def test_batches_of_several_workers_in_any_order_are_the_plain_loops(
    seed: int, count: int, length: int, rho_max: float, c_max: float
) -> None:
    pairs = zip(recorded(seed, count, length), recorded(seed + 1, count), strict=True)
    mixed = [batch for pair in pairs for batch in pair]
    bounds = {"rho_max": rho_max, "c_max": c_max, "trace_lambda": LAMBDA}
    for batches in (mixed, mixed[::-1]):
        episodes = episodes_of(batches)
        values = value_of(episodes.obs)
        assert_equal_to(loop_gae, batches, gae(episodes, values, gamma=GAMMA, gae_lambda=LAMBDA))
        found = vtrace(episodes, values, newer_logp(episodes), gamma=GAMMA, **bounds)
        assert_equal_to(lambda episode: loop_vtrace(episode, **bounds), batches, found)


def test_v_trace_of_fresh_data_is_gae(batches: list[ChunkBatch]) -> None:
    episodes = episodes_of(batches)
    values = value_of(episodes.obs)
    found = vtrace(episodes, values, episodes.columns["logp"], gamma=GAMMA, trace_lambda=LAMBDA)
    expected = gae(episodes, values, gamma=GAMMA, gae_lambda=LAMBDA)
    np.testing.assert_allclose(found.targets, expected.targets, rtol=0, atol=1e-12)


def test_a_logged_action_teaches_nothing_and_ends_the_trace(make_batch: MakeBatch) -> None:
    batch = make_batch([4], [ChunkEnd.TERMINATED])
    logged = np.array([False, False, True, False])
    columns = {**batch.arrays, "off_policy": logged, "logp": np.where(logged, np.nan, batch.columns["logp"])}
    episodes = replace(batch, arrays=columns).episodes()
    values = np.arange(5.0)
    found = vtrace(episodes, values, batch.columns["logp"], gamma=GAMMA)
    assert (found.advantages[2], found.targets[2]) == (0.0, values[2])
    rewards = batch.columns["rewards"]
    assert found.targets[:2].tolist() == pytest.approx(
        [rewards[0] + GAMMA * (rewards[1] + GAMMA * values[2]), rewards[1] + GAMMA * values[2]]
    )


def test_a_chunk_goes_on_only_in_the_rest_of_its_own_agents_open_episode(make_batch: MakeBatch) -> None:
    """Sorted by episode and agent, each chunk is followed by one that starts where it stops."""
    first = make_batch([3, 3, 3], [ChunkEnd.ONGOING, ChunkEnd.ONGOING, ChunkEnd.TERMINATED])
    second = make_batch([2, 2, 2], [ChunkEnd.ONGOING] * 3)
    first, second = replace(first, agents=("a", "b")), replace(second, agents=("b", "a"))
    first.table["id_low"], first.table["agent"], first.table["episode_length"] = [1, 1, 2], [0, 1, 0], [3, 8, 3]
    second.table["id_low"], second.table["agent"], second.table["episode_length"] = [1, 2, 3], [1, 1, 1], [5, 5, 7]
    assert episodes_of([first, second]).next_chunk.tolist() == [3, -1, -1, -1, -1, -1]
    assert episodes_of([second, first]).next_chunk.tolist() == [-1, -1, -1, 0, -1, -1]


def test_episodes_of_one_batch_are_its_own_arrays(batches: list[ChunkBatch]) -> None:
    batch = next(batch for batch in batches if any(not len(chunk) for chunk in batch))
    episodes = batch.episodes()
    assert episodes.obs is batch.arrays["obs"]
    assert episodes.rewards is batch.columns["rewards"]
    assert episodes.columns["logp"] is batch.columns["logp"]
    chunks = [chunk for chunk in batch if len(chunk)]
    np.testing.assert_array_equal(episodes.obs[episodes.step_rows], np.concatenate([c.obs[:-1] for c in chunks]))
    np.testing.assert_array_equal(episodes.obs[episodes.last_rows], np.stack([c.obs[-1] for c in chunks]))
    assert np.diff(episodes.offsets).tolist() == [len(chunk) for chunk in chunks]
    assert episodes.terminated.tolist() == [chunk.is_terminated for chunk in chunks]
    assert episodes.truncated.tolist() == [chunk.is_truncated for chunk in chunks]


def test_tensors_give_tensors_without_a_gradient(batches: list[ChunkBatch]) -> None:
    arrays = episodes_of(batches)
    episodes = to_torch(arrays)
    values = torch.from_numpy(value_of(arrays.obs)).float().requires_grad_()
    found = gae(episodes, values, gamma=GAMMA, gae_lambda=LAMBDA)
    expected = gae(arrays, value_of(arrays.obs), gamma=GAMMA, gae_lambda=LAMBDA)
    assert (found.targets.dtype, found.targets.requires_grad) == (torch.float32, False)
    np.testing.assert_allclose(found.advantages.numpy(), expected.advantages, atol=1e-5)
    corrected = vtrace(episodes, values, episodes.columns["logp"].requires_grad_(), gamma=GAMMA)
    assert not corrected.advantages.requires_grad


def test_end_markers_alone_give_nothing(make_batch: MakeBatch) -> None:
    episodes = make_batch([0, 0], [ChunkEnd.ABORTED] * 2).episodes()
    assert len(episodes) == len(episodes.terminated) == 0
    assert gae(episodes, np.zeros(0), gamma=GAMMA, gae_lambda=LAMBDA).advantages.shape == (0,)
    assert vtrace(episodes, np.zeros(0), np.zeros(0), gamma=GAMMA).targets.shape == (0,)


def test_what_does_not_fit_is_named(make_batch: MakeBatch) -> None:
    batch = make_batch([3, 2], [ChunkEnd.ONGOING] * 2)
    episodes = batch.episodes()
    with pytest.raises(ModuleError, match=r"values has shape \(5,\), not \(7,\): give one of each row of episodes.obs"):
        gae(episodes, np.zeros(5), gamma=GAMMA, gae_lambda=LAMBDA)
    with pytest.raises(ModuleError, match=r"logp has shape \(7,\), not \(5,\)"):
        vtrace(episodes, np.zeros(7), np.zeros(7), gamma=GAMMA)
    del batch.arrays["logp"]
    with pytest.raises(ModuleError, match="no column 'logp', which V-trace needs"):
        vtrace(batch.episodes(), np.zeros(7), np.zeros(5), gamma=GAMMA)
    with pytest.raises(ChunkError, match="no batch was given"):
        episodes_of([])
    with pytest.raises(ChunkError, match="batches of the modules 'default_policy' and 'other'"):
        episodes_of([batch, replace(batch, modules=["other"])])
