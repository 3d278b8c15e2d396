"""Episodes of recorded batches are those of RLlib: its own checks accept them, and its PPO learner trains on them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace.learner_stub.adapters.rllib import to_episodes
from headrace.learner_stub.rollouts.own_logp import with_own_logp
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.errors import ConfigError
from headrace.workers import EnvRunnerConfig, MultiAgentEnvRunner, SingleAgentEnvRunner
from headrace.workers.modules import actor_critic
from support.envs.toy_agents import multi_runner, scheduled

MakeBatch = Callable[..., ChunkBatch]

MOST_CALLS_A_CHUNK = 20
"""Calls of Headrace's functions for one chunk more; with an `EpisodeChunk` for each there were 45."""


def own_calls(batch: ChunkBatch) -> int:
    """Calls of Headrace's own Python functions while `batch` becomes episodes."""
    calls = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_globals["__name__"].startswith("headrace.")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        to_episodes(batch)
    finally:
        sys.setprofile(before)
    return calls


@pytest.fixture
def rllib() -> Any:
    reason = "RLlib is not installed; pip install 'ray[rllib]'"
    return pytest.importorskip("ray.rllib.algorithms.ppo", reason=reason, exc_type=ImportError)


def test_without_rllib_the_error_says_what_to_install(make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'ray\[rllib\]'"):
        to_episodes(make_batch([2], [ChunkEnd.ONGOING]))


def test_each_chunk_is_an_episode_with_its_end_and_its_columns(rllib: Any, make_batch: MakeBatch) -> None:
    ends = [ChunkEnd.ONGOING, ChunkEnd.TERMINATED, ChunkEnd.TRUNCATED, ChunkEnd.ABORTED]
    batch = make_batch([3, 2, 4, 0], ends, weights_seq=7)
    episodes = to_episodes(batch)
    assert [len(episode) for episode in episodes] == [3, 2, 4]
    assert [episode.is_terminated for episode in episodes] == [False, True, False]
    assert [episode.is_truncated for episode in episodes] == [False, False, True]
    for episode, chunk in zip(episodes, batch, strict=False):
        episode.validate()
        assert episode.is_numpy
        assert (episode.id_, episode.t_started, episode.agent_id) == (chunk.episode_id, chunk.t_start, None)
        np.testing.assert_array_equal(episode.get_observations(), chunk.obs)
        np.testing.assert_array_equal(episode.get_actions(), chunk.actions)
        np.testing.assert_allclose(episode.get_rewards(), chunk.rewards, rtol=1e-6)
        np.testing.assert_array_equal(episode.get_extra_model_outputs("action_logp"), chunk.columns["logp"])
        assert set(episode.get_extra_model_outputs("weights_seq_no").tolist()) == {7}
        episode.get_observations()[:] = 0.0  # its own memory
    assert np.abs(batch.arrays["obs"]).min() > 0


def test_episodes_stand_in_the_order_of_the_batch_and_share_no_row(rllib: Any, make_batch: MakeBatch) -> None:
    batch = make_batch([3, 0, 2, 4], [ChunkEnd.ONGOING, ChunkEnd.ABORTED, ChunkEnd.ONGOING, ChunkEnd.ONGOING])
    batch = batch.select(np.array([3, 1, 0, 2]))
    episodes = to_episodes(batch)
    assert [len(episode) for episode in episodes] == [4, 3, 2]
    for episode in episodes:
        for buffer in (episode.observations, episode.actions, episode.rewards, *episode.extra_model_outputs.values()):
            buffer.data += 1
    for episode, chunk in zip(episodes, (chunk for chunk in batch if len(chunk)), strict=True):
        np.testing.assert_array_equal(episode.get_observations(), chunk.obs + 1)
        np.testing.assert_array_equal(episode.get_actions(), chunk.actions + 1)
        np.testing.assert_array_equal(episode.get_extra_model_outputs("weights_seq_no"), chunk.weights_seq + 1)


def test_a_chunk_more_takes_little_beside_rllibs_own_constructors(rllib: Any, make_batch: MakeBatch) -> None:
    few, many = (make_batch([4] * chunks, [ChunkEnd.TERMINATED] * chunks) for chunks in (10, 110))
    to_episodes(few)  # builds the spaces, which batches share
    assert (own_calls(many) - own_calls(few)) / 100 <= MOST_CALLS_A_CHUNK


@pytest.mark.parametrize("agents", [1, 3])
@pytest.mark.parametrize("horizon", [0, 3])
def test_chunks_of_one_episode_can_be_joined_by_rllib(rllib: Any, horizon: int, agents: int) -> None:
    """Of several agents each pauses in many env steps."""
    config = EnvRunnerConfig(env="CartPole-v1", num_envs=2, seed=0, episode_lookback_horizon=horizon)
    batches: list[Any]
    if agents == 1:
        with SingleAgentEnvRunner(config) as runner:
            batches = [runner.sample(num_timesteps=12) for _ in range(12)]
    else:
        with multi_runner(scheduled([], agents), num_envs=2, episode_lookback_horizon=horizon) as several:
            batches = [several.sample(num_timesteps=12).batches.get("shared") for _ in range(20)]
    parts: dict[str, list[Any]] = {}
    for episode in (episode for batch in batches if batch is not None for episode in to_episodes(batch)):
        parts.setdefault(episode.id_, []).append(episode)
    assert max(map(len, parts.values())) > 2
    for first, *others in parts.values():
        for other in others:
            assert other.t_started == first.t
            if horizon:
                back = other.get_rewards(slice(-3, 0), neg_index_as_lookback=True)
                np.testing.assert_array_equal(back, first.get_rewards(slice(-3, None)))
            first.concat_episode(other)  # checks ids, times and the observation at the seam
    assert any(first.is_terminated for first, *_ in parts.values())


def test_columns_of_with_own_logp_have_no_lookback(rllib: Any) -> None:
    """RLlib takes a lookback buffer of each column's own length, and would read made-up rows without a word."""
    config = EnvRunnerConfig(env="CartPole-v1", num_envs=2, seed=0, episode_lookback_horizon=3)
    with SingleAgentEnvRunner(config) as runner:
        module = actor_critic(runner.spaces)
        batches = [with_own_logp(module, runner.sample(num_timesteps=12)) for _ in range(4)]
    parts: dict[str, list[Any]] = {}
    for batch in batches:
        assert batch.steps
        for episode, chunk in zip(to_episodes(batch), (chunk for chunk in batch if len(chunk)), strict=True):
            episode.validate()
            names = {"vf_preds": "values", "action_logp": "logp"}
            for name in ("behaviour_logp", "next_values", "action_dist_inputs", *names):
                own = chunk.columns[names.get(name, name)]
                np.testing.assert_array_equal(episode.get_extra_model_outputs(name), own)
                back = episode.get_extra_model_outputs(name, slice(-3, 0), neg_index_as_lookback=True)
                assert len(back) == 0
            cut = episode.slice(slice(1, None), len_lookback_buffer=1)
            assert cut.get_extra_model_outputs("next_values").tolist() == chunk.columns["next_values"][1:].tolist()
            parts.setdefault(episode.id_, []).append(episode)
    for first, *others in parts.values():
        for other in others:
            first.concat_episode(other)


def test_infos_and_dict_spaces_stand_where_rllib_looks_for_them(rllib: Any) -> None:
    config = EnvRunnerConfig(
        env="support.envs.walks:SpaceWalk",
        env_config={"observation": "Dict", "action": "Dict"},
        num_envs=2,
        seed=0,
        episode_lookback_horizon=2,
    )
    with SingleAgentEnvRunner(config) as runner:
        batches = [runner.sample(num_timesteps=10) for _ in range(3)]
    for batch in batches:
        chunks = [chunk for chunk in batch if len(chunk)]
        for episode, chunk in zip(to_episodes(batch), chunks, strict=True):
            assert episode.get_infos() == (chunk.infos or [{}] * (len(chunk) + 1))
            np.testing.assert_array_equal(episode.get_observations()["at"], chunk.obs["at"])
            np.testing.assert_array_equal(episode.get_actions()["push"], chunk.actions["push"])
            assert episode.observation_space.contains(episode.get_observations(-1))
            if chunk.lookback is not None:
                told = episode.get_observations(slice(-len(chunk.lookback), 0), neg_index_as_lookback=True)
                np.testing.assert_array_equal(told["place"], chunk.lookback.obs["place"])


def test_agents_of_one_env_have_episodes_of_their_own(rllib: Any) -> None:
    config = EnvRunnerConfig(env="support.envs.toy_agents:Together", policies={"a": None}, num_envs=1, seed=0)
    with MultiAgentEnvRunner(config) as runner:
        sampled: Any = runner.sample(num_timesteps=10)
    episodes = to_episodes(sampled.batches["a"])
    assert {episode.agent_id for episode in episodes} == {"a0", "a1"}
    assert len({episode.id_ for episode in episodes}) == len(episodes)
    assert {episode.module_id for episode in episodes} == {"a"}
    assert len({episode.multi_agent_episode_id for episode in episodes}) < len(episodes)


@pytest.mark.long
def test_rllibs_ppo_learner_trains_on_the_episodes(rllib: Any) -> None:
    import gymnasium as gym

    with SingleAgentEnvRunner(EnvRunnerConfig(env="CartPole-v1", num_envs=4, seed=0)) as runner:
        episodes = to_episodes(runner.sample(num_timesteps=256))
    assert {"action_logp", "vf_preds", "action_dist_inputs"} <= episodes[0].extra_model_outputs.keys()
    settings = rllib.PPOConfig().environment("CartPole-v1")
    settings = settings.training(minibatch_size=64, num_epochs=2, train_batch_size_per_learner=256)
    env = gym.make("CartPole-v1")
    learner = settings.build_learner(env=env)
    before = {name: value.clone() for name, value in learner.module["default_policy"].state_dict().items()}
    learner.update(episodes=episodes, minibatch_size=64, num_epochs=2)
    after = learner.module["default_policy"].state_dict()
    assert any((after[name] != value).any() for name, value in before.items())
    assert all(value.isfinite().all() for value in after.values())
