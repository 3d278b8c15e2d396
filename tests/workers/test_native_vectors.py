"""Any gymnasium vector gives the same episodes as separate envs, for every kind of vector and autoreset mode."""

from __future__ import annotations

import multiprocessing.forkserver
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.errors import ConfigError, EnvContractError, EnvError
from headrace.workers import EnvContext, EnvRunnerConfig, MultiAgentEnvRunner
from headrace.workers.connectors import ClipActions, MeanStd
from support.envs.native_vectors import EVERY_KIND, CountsInTensors, InTensors, Telling, lives, vector_of
from support.envs.toy import Counting, Walk, check_books, runner

UNEQUAL = {"lengths": {0: 3, 1: 5, 2: 4}}


def _seen(episode: Any) -> Any:
    return episode.obs.tolist(), episode.rewards.tolist(), episode.end


def _same(a: Any, b: Any, *, seeds: bool = True) -> None:
    """Of batches of two runners: the same to the bit."""
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        assert (one.episode_id, one.chunk_index, one.t_start, one.end) == (
            other.episode_id,
            other.chunk_index,
            other.t_start,
            other.end,
        )
        assert one.obs.tobytes() == other.obs.tobytes()
        assert one.actions.tobytes() == other.actions.tobytes()
        assert one.rewards.tobytes() == other.rewards.tobytes()
        assert not seeds or one.seed == other.seed


@pytest.mark.parametrize(("kind", "mode"), EVERY_KIND)
def test_a_vector_gives_the_same_episodes_as_separate_envs(kind: str, mode: AutoresetMode) -> None:
    settings = {"num_envs": 3, "env_config": UNEQUAL, "rollout_fragment_length": 7}
    with runner(Counting, **settings) as plain, runner(vector_of(Counting, kind, mode), **settings) as sampler:
        expected, found = lives(plain, 4), lives(sampler, 4)
        check_books(sampler)
        assert sampler.totals.stepped == sum(len(e) for episodes in found.values() for e in episodes)
        asked = 4 * 7 * 3
        assert asked <= sampler.totals.stepped <= asked + (4 * 2 if mode is AutoresetMode.NEXT_STEP else 0)
    for index, episodes in found.items():
        ours, theirs = (
            [_seen(episode) for episode in runs if episode.end is not ChunkEnd.ONGOING]
            for runs in (episodes, expected[index])
        )
        both = min(len(ours), len(theirs))
        assert both >= 4
        assert ours[:both] == theirs[:both]


@pytest.mark.parametrize(("kind", "mode"), EVERY_KIND)
def test_envs_that_end_together_give_the_same_chunks_and_seeds_in_every_mode(kind: str, mode: AutoresetMode) -> None:
    settings = {"num_envs": 2, "env_config": {"length": 3, "truncate": True}, "rollout_fragment_length": 8}
    with runner(Counting, **settings) as plain, runner(vector_of(Counting, kind, mode), **settings) as sampler:
        for _ in range(3):
            _same(sampler.sample_fragment(), plain.sample_fragment())


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_vectors_reset_by_the_runner_are_bit_identical_to_separate_envs(kind: str) -> None:
    settings = {"num_envs": 3, "rollout_fragment_length": 50, "env_to_module": [MeanStd]}
    with runner(Walk, **settings) as plain, runner(Walk, gym_env_vectorize_mode=kind, **settings) as sampler:
        for _ in range(4):
            batch = sampler.sample_fragment()
            _same(batch, plain.sample_fragment())
        assert sampler.totals.episodes > 3


def test_a_restored_runner_repeats_samples_if_it_resets_its_envs_itself() -> None:
    settings = {"num_envs": 3, "gym_env_vectorize_mode": "sync"}
    with runner(Walk, **settings) as sampler, runner(Walk, **settings) as restored:
        sampler.sample(num_timesteps=200)
        sampler.sample(num_episodes=1)
        restored.set_state(sampler.get_state())
        _same(sampler.sample(num_timesteps=90), restored.sample(num_timesteps=90))
    settings["env"] = vector_of(Walk, "sync", AutoresetMode.NEXT_STEP)
    del settings["gym_env_vectorize_mode"]
    with runner(**settings) as sampler, runner(**settings) as restored:
        sampler.sample(num_timesteps=200)
        restored.set_state(sampler.get_state())  # what its vector began by itself cannot be begun again
        assert all(chunk.seed is None or chunk.t_start == 0 for chunk in restored.sample(num_timesteps=90))


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_recurrent_modules_remember_each_lane_of_a_vector(kind: str) -> None:
    settings = {"num_envs": 2, "rollout_fragment_length": 30, "env_config": {"lengths": {0: 4, 1: 6}}}
    settings |= {"module": "headrace.workers.modules:lstm_actor_critic"}
    with runner(Counting, **settings) as plain, runner(Counting, gym_env_vectorize_mode=kind, **settings) as sampler:
        for one, other in zip(sampler.sample_fragment(), plain.sample_fragment(), strict=True):
            assert one.columns["values"].tobytes() == other.columns["values"].tobytes()


@pytest.mark.parametrize(("kind", "mode"), EVERY_KIND)
def test_a_vector_gives_the_nested_observations_and_infos_of_separate_envs(kind: str, mode: AutoresetMode) -> None:
    settings = {"num_envs": 2, "rollout_fragment_length": 12}
    with runner(Telling, **settings) as plain, runner(vector_of(Telling, kind, mode), **settings) as sampler:
        expected, found = lives(plain, 1), lives(sampler, 1)
        for index, episodes in found.items():
            for ours, theirs in zip(episodes, expected[index], strict=False):
                steps = min(len(ours), len(theirs)) + 1
                assert ours.infos[:steps] == theirs.infos[:steps]
                assert ours.infos[0] == {"began": index}
                assert ours.obs["t"].tolist()[:steps] == list(range(steps))
                assert (ours.obs["place"][0] == index).all()
    with runner(vector_of(Telling, kind, mode), infos="none", **settings) as sampler:
        assert not sampler.sample_fragment().infos


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("env", [Counting, Telling])
def test_a_vector_of_tensors_gives_the_chunks_of_one_of_arrays(env: Any, kind: str, mode: AutoresetMode) -> None:
    arrays, settings = vector_of(env, kind, mode), {"num_envs": 2, "rollout_fragment_length": 9}
    with runner(arrays, **settings) as plain, runner(lambda c: InTensors(arrays(c)), **settings) as sampler:
        for _ in range(3):
            for one, other in zip(sampler.sample_fragment(), plain.sample_fragment(), strict=True):
                assert one.infos == other.infos
                assert one.end == other.end
                assert all(one.columns[name].tobytes() == other.columns[name].tobytes() for name in other.columns)


@pytest.mark.parametrize("xp", [torch, np])
def test_a_partial_reset_leaves_the_rows_of_other_lanes_as_they_are(xp: Any) -> None:
    with runner(lambda context: CountsInTensors(context.num_envs, xp), num_envs=3) as sampler:
        chunks = [chunk for _ in range(3) for chunk in sampler.sample(num_timesteps=30)]
    assert len(chunks) > 20
    for chunk in chunks:
        assert chunk.obs[:, 0].tolist() == [*range(chunk.t_start + 1, chunk.t_start + len(chunk) + 2)]
        assert [entry["t"] for entry in chunk.infos] == chunk.obs[:, 0].tolist()[len(chunk.obs) - len(chunk.infos) :]


def test_statistics_of_a_vector_wrapper_are_infos_of_the_right_env() -> None:
    def create(context: EnvContext) -> Any:
        return RecordEpisodeStatistics(vector_of(Counting, "sync", AutoresetMode.NEXT_STEP)(context))

    with runner(create, num_envs=3, env_config=UNEQUAL, rollout_fragment_length=12) as sampler:
        batch = sampler.sample_fragment()
    done = [chunk for chunk in batch if chunk.end is ChunkEnd.TERMINATED]
    assert len(done) > 5
    assert all(any(info.get("episode", {}).get("l") == len(chunk) for info in chunk.infos) for chunk in done)


def test_each_episode_has_the_seed_of_its_reset_or_none() -> None:
    seeds: dict[int, list[Any]] = {0: [], 1: [], 2: []}

    def env(context: EnvContext) -> Counting:
        made = Counting(context)
        made.seeds = seeds[made.index]
        return made

    for mode in AutoresetMode:
        for given in seeds.values():
            given.clear()
        with runner(vector_of(env, "sync", mode), num_envs=3, env_config=UNEQUAL) as sampler:
            batch = sampler.sample(num_timesteps=120)
        for index, given in seeds.items():
            said = [chunk.seed for chunk in batch if chunk.env_index == index]
            assert said == given[: len(said)]
            assert (None in said) is (mode is not AutoresetMode.DISABLED)


def _follows(chunk: Any) -> None:
    """By CartPole's own equations, each observation comes of the one before and the action."""
    env: Any = gym.make("CartPole-v1").unwrapped
    env.reset(seed=0)
    for t in range(len(chunk)):
        env.state, env.steps_beyond_terminated = chunk.obs[t].astype(np.float64), None
        seen, _, terminated, _, _ = env.step(int(chunk.actions[t]))
        np.testing.assert_allclose(seen, chunk.obs[t + 1], atol=1e-5)
        assert terminated is (t + 1 == len(chunk) and chunk.end is ChunkEnd.TERMINATED)


def test_the_vector_entry_point_of_an_id_gives_only_real_steps() -> None:
    with runner("CartPole-v1", num_envs=5, gym_env_vectorize_mode="vector_entry_point") as sampler:
        batch = [*sampler.sample_fragment(), *sampler.sample_fragment()]
        check_books(sampler)
        ends = Counter(chunk.end for chunk in batch)
        assert ends[ChunkEnd.TERMINATED] == sampler.totals.episodes > 5
        for chunk in batch:
            _follows(chunk)
            assert (chunk.rewards == 1.0).all()
        first = [chunk for chunk in batch if chunk.t_start == 0]
        assert all(np.abs(chunk.obs[0]).max() <= 0.05 for chunk in first)
        assert {chunk.seed is None for chunk in first} == {True, False}
    with runner(
        "CartPole-v1", num_envs=2, gym_env_vectorize_mode="vector_entry_point", env_config={"max_episode_steps": 6}
    ) as sampler:
        batch = sampler.sample(num_episodes=4)
        assert {(len(chunk), chunk.end) for chunk in batch} == {(6, ChunkEnd.TRUNCATED)}


class Wary(SyncVectorEnv):
    """Takes no action outside its space, even for an env that it only resets."""

    def step(self, actions: Any) -> Any:
        assert self.action_space.contains(actions), actions
        return super().step(actions)


class Thrust(Counting):
    action_space = gym.spaces.Box(0.5, 1.0, (2,))  # type: ignore[assignment]


def test_a_vector_gets_actions_of_its_space_for_envs_that_it_only_resets() -> None:
    def wary(context: EnvContext) -> Any:
        return Wary([lambda i=i: Thrust(context.at(i)) for i in range(2)], autoreset_mode=AutoresetMode.NEXT_STEP)

    with runner(wary, num_envs=2, env_config={"lengths": {0: 3, 1: 5}}, module_to_env=[ClipActions]) as sampler:
        assert sum(map(len, sampler.sample(num_timesteps=60))) >= 60
        assert sampler.totals.env_failures == 0


def test_num_episodes_gives_at_least_that_many_whole_episodes() -> None:
    for mode in AutoresetMode:
        with runner(vector_of(Counting, "sync", mode), num_envs=3, env_config=UNEQUAL) as sampler:
            batch = sampler.sample(num_episodes=5)
            assert 5 <= len(batch) <= 7
            assert all(chunk.t_start == 0 and chunk.end is ChunkEnd.TERMINATED for chunk in batch)
            assert len(sampler.sample(num_episodes=1)) == 1
            check_books(sampler)


def test_make_env_rebuilds_a_vector_and_no_episode_id_repeats() -> None:
    vectors: list[Any] = []

    def create(context: EnvContext) -> Any:
        vectors.append(vector_of(Counting, "async", AutoresetMode.NEXT_STEP)(context))
        return vectors[-1]

    with runner(create, num_envs=2) as sampler:
        ids = {chunk.episode_id for chunk in sampler.sample(num_timesteps=20)}
        sampler.make_env()
        assert [vector.closed for vector in vectors] == [True, False]
        assert not any(process.is_alive() for process in vectors[0].processes)
        batch = sampler.sample(num_timesteps=20)
        assert not ids & {chunk.episode_id for chunk in batch if chunk.end is not ChunkEnd.ABORTED}
        sampler.config = sampler.config.model_copy(update={"env": Counting})
        with pytest.raises(EnvContractError, match=r"should be a gymnasium.vector.VectorEnv, got .*Counting"):
            sampler.make_env()
    assert all(vector.closed for vector in vectors)
    sampler.stop()


def test_a_vector_of_another_width_is_refused_with_both_numbers() -> None:
    def create(context: EnvContext) -> Any:
        return SyncVectorEnv([lambda: Counting(context)] * 2)

    with pytest.raises(EnvContractError, match=r"num_envs of .*SyncVectorEnv should be 3, .* got 2"):
        runner(create, num_envs=3)


def test_unusable_vectors_and_vector_settings_raise_errors_with_the_reason() -> None:
    class Silent(SyncVectorEnv):
        def __init__(self, context: EnvContext) -> None:
            super().__init__([lambda: Counting(context)])
            self.metadata = {}

    with pytest.raises(EnvContractError, match=r"metadata\['autoreset_mode'\] should be a gymnasium AutoresetMode"):
        runner(Silent)
    with pytest.raises(EnvContractError, match="shared memory"):
        runner(vector_of(Counting, "async", AutoresetMode.NEXT_STEP, shared_memory=False))
    with pytest.raises(ConfigError, match="vector_entry_point needs a gymnasium id that has one"):
        runner("Pendulum-v1", gym_env_vectorize_mode="vector_entry_point")
    with pytest.raises(EnvError, match=r"env 0 .* could not be built"):
        runner(vector_of(lambda context: 1 / 0, "sync", AutoresetMode.NEXT_STEP))
    with pytest.raises(ConfigError, match="for envs of one agent"):
        EnvRunnerConfig(env=Counting, gym_env_vectorize_mode="sync", policies={"p": None})
    with pytest.raises(ConfigError, match="SingleAgentEnvRunner"):
        MultiAgentEnvRunner(EnvRunnerConfig(env=Counting, gym_env_vectorize_mode="sync"))


class Draws(Counting):
    """Each observation is a number of each global generator. The first life of env 0 fails in its third step."""

    observation_space = gym.spaces.Box(0, 1, (3,), np.float64)

    def observe(self) -> Any:
        return np.array([np.random.rand(), random.random(), torch.rand((), dtype=torch.float64).item()])

    def step(self, action: Any) -> Any:
        if self.t == 2 and self.index == 0 and not self.config.recreated:
            raise RuntimeError("diverged")
        return super().step(action)


@pytest.fixture
def fork_server() -> Iterator[Any]:
    """The fork server of multiprocessing with modules loaded, as it has those of the main program since Python 3.14."""
    server = multiprocessing.forkserver._forkserver
    server._stop()
    server.set_forkserver_preload(["torch"])
    yield multiprocessing.get_context("forkserver")
    server._stop()
    server.set_forkserver_preload(["__main__"])


@pytest.mark.parametrize("kind", ["fork", "forkserver", "own"])
@pytest.mark.filterwarnings("ignore:.*(ERROR|Traceback):UserWarning")
def test_envs_in_forked_processes_share_no_numbers_of_global_generators(
    kind: str, fork_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    env: Any = Draws
    settings = {"gym_env_vectorize_mode": "async"}
    if kind == "own":
        env, settings = vector_of(Draws, "async", AutoresetMode.DISABLED, context="fork"), {}
    else:
        context = fork_server if kind == "forkserver" else multiprocessing.get_context("fork")
        monkeypatch.setattr(multiprocessing, "get_context", lambda name=None: context)
    with runner(env, num_envs=3, **settings) as sampler:
        chunks = sampler.sample(num_timesteps=30)
        assert sampler.totals.env_rebuilds == 1
    seen = np.concatenate([chunk.obs for chunk in chunks])
    assert len(seen) > 20
    for column in seen.T:
        assert len(set(column.tolist())) == len(seen)
