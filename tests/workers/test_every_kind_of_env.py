"""The contract that every kind of env keeps towards a sampler, whichever driver steps the envs.

A new kind adds itself to `DRIVERS`: what makes the settings of a runner whose envs are its own, of a given env class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import dm_env
import numpy as np
import pytest
from dm_env import specs
from gymnasium.vector import AutoresetMode

from headrace.schemas.chunks.chunk import ChunkEnd, to_episode
from headrace.schemas.errors import EnvRaisedError, EnvRestartBudgetError
from headrace.workers import RunnerCallback, VectorEnv
from support.envs.counting import LENGTHS, Broken, Counted, Drawing, Flier, Unsound
from support.envs.native_vectors import vector_of
from support.envs.toy import check_books, runner
from support.fleets.env_hosts import EnvHosts

# Gymnasium's AsyncVectorEnv tells of an env's error by warnings too, before it raises it.
pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore:.*ERROR:UserWarning")]

Settings = dict[str, Any]


def _wrapped(env: Any) -> Settings:
    return {"env": lambda context: VectorEnv.wrap(lambda i: env(context.at(i)), num_envs=context.num_envs)}


def _native(kind: str, mode: AutoresetMode) -> Callable[[Any], Settings]:
    return lambda env: {"env": vector_of(env, kind, mode)}


def _named(**settings: Any) -> Callable[[Any], Settings]:
    return lambda env: {"env": f"support.envs.counting:{env.__name__}", **settings}


class Hosts:
    """An env host for each class of envs, which serves one runner after another."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._hosts: dict[str, EnvHosts] = {}

    def at(self, env: Any) -> Settings:
        """Return the settings of a runner for which a host of this class waits."""
        name = f"support.envs.counting:{env.__name__}"
        if name not in self._hosts:
            folder = self._folder / env.__name__
            folder.mkdir()
            self._hosts[name] = self._stack.enter_context(EnvHosts(folder))
            # Other tests may come between two that use this host, for minutes.
            patient = "worker.connect_timeout_s=100000"
            self._hosts[name].start(name, 4, "sampling.envs_per_process=4", patient)
        return self._hosts[name].at


_hosts: list[Hosts] = []


@pytest.fixture(scope="module", autouse=True)
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with ExitStack() as stack:
        _hosts.append(Hosts(tmp_path_factory.mktemp("hosts"), stack))
        yield
        _hosts.clear()


def _remote(env: Any) -> Settings:
    return {**_named(env_placement="remote")(env), **_hosts[0].at(env)}


class OfDeepMind(dm_env.Environment):
    """Any of them in DeepMind's protocol, which knows no seeds but the one at its making."""

    def __init__(self, env: Counted, seed: int) -> None:
        self._env, self._seed = env, [seed]

    def observation_spec(self) -> Any:
        space = self._env.observation_space
        return specs.BoundedArray((2,), np.float32, space.low, space.high)

    def action_spec(self) -> Any:
        return specs.DiscreteArray(3)

    def reset(self) -> dm_env.TimeStep:
        return dm_env.restart(self._env.reset(seed=self._seed.pop() if self._seed else None)[0])

    def step(self, action: Any) -> dm_env.TimeStep:
        seen, reward, over, _, _ = self._env.step(action)
        return dm_env.termination(reward, seen) if over else dm_env.transition(reward, seen)

    def close(self) -> None:
        self._env.close()


IN_PROCESSES = {"env_placement": "process", "envs_per_process": 2}
DRIVERS: dict[str, Callable[[Any], Settings]] = {
    "by themselves": lambda env: {"env": env},
    "a VectorEnv of ours": _wrapped,
    "dm_env": lambda env: {"env": lambda context: OfDeepMind(env(context), context.seed)},
    "sync": lambda env: {"env": env, "gym_env_vectorize_mode": "sync"},
    "async": lambda env: {"env": env, "gym_env_vectorize_mode": "async"},
    "sync, next step": _native("sync", AutoresetMode.NEXT_STEP),
    "sync, same step": _native("sync", AutoresetMode.SAME_STEP),
    "async, next step": _native("async", AutoresetMode.NEXT_STEP),
    "async, same step": _native("async", AutoresetMode.SAME_STEP),
    "process": _named(**IN_PROCESSES),
    "process, whoever is ready": _named(**IN_PROCESSES, remote_env_batch_wait_ms=1),
    "process, by halves": _named(**IN_PROCESSES, double_buffering=True),
    "remote": _remote,
}
ELSEWHERE = {kind for kind in DRIVERS if kind.startswith(("process", "remote"))}
"""In these kinds an env's exception comes as an `EnvRaisedError`, and envs are rebuilt while others go on."""

every_kind = pytest.mark.parametrize("kind", DRIVERS)


def _runner(kind: str, env: Any = Counted, **settings: Any) -> Any:
    settings = {"num_envs": 4, "rollout_fragment_length": 6, **settings}
    return runner(**DRIVERS[kind](env), **settings)


def _check_true(chunk: Any) -> None:
    """Of Counted: each observation is its time in the episode, and each reward too."""
    times = np.arange(chunk.t_start, chunk.t_start + len(chunk) + 1)
    assert chunk.obs[:, 0].tolist() == times.tolist()
    assert (chunk.obs[:, 1] == chunk.env_index).all()
    assert chunk.rewards.tolist() == times[1:].tolist()
    over = chunk.t_start + len(chunk) == LENGTHS[chunk.env_index]
    assert chunk.end is (ChunkEnd.TERMINATED if over else ChunkEnd.ONGOING)


@every_kind
def test_chunks_are_correct_and_continue_from_call_to_call(kind: str) -> None:
    with _runner(kind) as sampler:
        chunks = [chunk for _ in range(5) for chunk in sampler.sample_fragment()]
        check_books(sampler)
        assert sampler.totals.stepped == sampler.totals.delivered == sum(map(len, chunks))
        assert len(sampler.running_episodes()) <= 4
    parts: dict[str, list[Any]] = {}
    for chunk in chunks:
        _check_true(chunk)
        parts.setdefault(chunk.episode_id, []).append(chunk)
    for episode in parts.values():
        to_episode(episode)  # which compares what meets at the seams
    assert sum(chunk.end is ChunkEnd.TERMINATED for chunk in chunks) == sampler.totals.episodes > 15


@every_kind
def test_sample_obeys_random_actions_explore_and_force_reset(kind: str) -> None:
    with _runner(kind) as sampler:
        sampler.sample(num_timesteps=20, random_actions=True)
        sampler.sample(num_timesteps=20, explore=False)
        chunks = sampler.sample(num_timesteps=8, force_reset=True)
        assert {chunk.t_start for chunk in chunks if len(chunk)} == {0}
        whole = [chunk for chunk in sampler.sample(num_episodes=7) if len(chunk)]
        assert 7 <= len(whole) <= 10
        for chunk in whole:
            _check_true(chunk)
            assert chunk.t_start == 0
            assert chunk.end is ChunkEnd.TERMINATED
        check_books(sampler)
        assert set(sampler.totals.discarded) == {"reset"}


@every_kind
def test_whole_episodes_stay_open_from_fragment_to_fragment(kind: str) -> None:
    with _runner(kind, batch_mode="complete_episodes") as sampler:
        for _ in range(4):
            batch = sampler.sample_fragment()
            assert len(batch) >= 4
            for chunk in batch:
                _check_true(chunk)
            check_books(sampler)


@pytest.mark.one_in(3)
@every_kind
def test_under_random_faults_every_lost_step_has_a_reason(kind: str) -> None:
    attempts = {"env_restart_attempts": 100}
    length = 12 if "async" in kind else 30 if kind in ELSEWHERE else 60
    with _runner(kind, Unsound, rollout_fragment_length=length, **attempts) as sampler:
        last: dict[str, Any] = {}
        for _ in range(4):
            for chunk in sampler.sample_fragment():
                before = last.get(chunk.episode_id)
                assert chunk.chunk_index == (before.chunk_index + 1 if before else 0)
                assert before is None or before.end is ChunkEnd.ONGOING
                last[chunk.episode_id] = chunk
                if chunk.end is not ChunkEnd.ABORTED:
                    _check_true(chunk)
            check_books(sampler)
        assert sampler.totals.env_failures == sampler.totals.env_rebuilds > 0
        assert set(sampler.totals.discarded) <= {"env_exception", "env_bad_data"}
        open_now = {view.episode_id for view in sampler.running_episodes()}
        assert {episode for episode, chunk in last.items() if chunk.end is ChunkEnd.ONGOING} <= open_now


@every_kind
def test_observations_outside_their_box_are_delivered_and_counted_once(kind: str) -> None:
    seen: dict[tuple[str, int], float] = {}
    with _runner(kind, Flier) as sampler:
        for _ in range(5):
            for chunk in sampler.sample_fragment():
                assert chunk.obs[:, 0].tolist() == [*range(chunk.t_start, chunk.t_start + len(chunk) + 1)]
                for t, value in zip(
                    range(chunk.t_start, chunk.t_start + len(chunk) + 1), chunk.obs[:, 1].tolist(), strict=True
                ):
                    seen[chunk.episode_id, t] = value
                assert chunk.rewards.tolist() == [t - 1000.0 * (value > 99) for t, value in chunk.obs[1:].tolist()]
        assert sampler.totals.discarded == {}
        assert sampler.totals.env_failures == 0
        outside = sum(value > 99 for value in seen.values())
        ahead = sampler.config.num_envs if kind in ELSEWHERE else 0  # steps that no chunk has yet
        assert 0 < outside <= sampler.totals.observations_outside <= outside + ahead
        named = {part: excess for (_, part), excess in sampler.totals.named_excess.items()}
        assert named == {"observation": 1e4 + 2 - 99}


class Account(RunnerCallback):
    """A callback that records every created, started, ended and aborted episode."""

    def __init__(self) -> None:
        self.created, self.started, self.over = list[str](), list[str](), list[str]()
        self.failed = 0

    def on_episode_created(self, episode: Any, **_: Any) -> None:
        self.created.append(episode.episode_id)

    def on_episode_start(self, episode: Any, **_: Any) -> None:
        self.started.append(episode.episode_id)

    def on_episode_end(self, episode: Any, **_: Any) -> None:
        self.over.append(episode.episode_id)

    def on_episode_aborted(self, episode: Any, **_: Any) -> None:
        self.over.append(episode.episode_id)

    def on_env_failed(self, **_: Any) -> None:
        self.failed += 1


@pytest.mark.parametrize("kind", [kind for kind in DRIVERS if "async" not in kind])
def test_callbacks_get_each_episode_once(kind: str) -> None:
    account = Account()
    attempts = {"env_restart_attempts": 100}
    length = 40 if kind in ELSEWHERE else 100
    with _runner(kind, Unsound, callbacks=[account], rollout_fragment_length=length, **attempts) as sampler:
        sampler.sample_fragment()
        running = [view.episode_id for view in sampler.running_episodes()]
    told = account.over + running
    assert len(set(told)) == len(told)
    assert len(set(account.created)) == len(account.created)
    assert set(account.started) <= set(told) <= set(account.created)
    assert kind in ELSEWHERE or len(told) == len(account.created)  # elsewhere a reset may be under way
    assert account.failed > 0


@pytest.mark.one_in(3)
@every_kind
def test_an_env_that_always_fails_ends_sampling_with_a_typed_error(kind: str) -> None:
    with _runner(kind, Broken, env_restart_attempts=2) as sampler:
        for _ in range(2):
            with pytest.raises(EnvRestartBudgetError, match="always"):
                sampler.sample(num_timesteps=40)
            check_books(sampler)
    with _runner(kind, Broken, restart_failed_sub_environments=False) as sampler:
        with pytest.raises(EnvRaisedError if kind in ELSEWHERE else KeyError, match="always") as caught:
            sampler.sample(num_timesteps=40)
        assert kind not in ELSEWHERE or str(caught.value) == "KeyError: 'always'"
        check_books(sampler)


def _seeded_first(chunks: list[Any]) -> bool:
    """Return whether only the first episode of each env began with a seed."""
    first = {index: min(c.episode_id for c in chunks if c.env_index == index) for index in range(4)}
    return all((c.seed is not None) == (c.episode_id == first[c.env_index]) for c in chunks)


def _shows_its_seeds(chunks: list[Any]) -> bool:
    """Return whether the seeds of chunks are true of `Drawing`."""
    return all((chunk.obs[:, 0] == (chunk.seed is not None)).all() for chunk in chunks if len(chunk))


@pytest.mark.one_in(3)
@every_kind
def test_without_seed_every_episode_only_the_first_reset_gets_a_seed(kind: str) -> None:
    runs = []
    for _ in range(2):
        with _runner(kind, Drawing, seed_every_episode=False) as sampler:
            chunks = [chunk for _ in range(5) for chunk in sampler.sample_fragment()]
            chunks += sampler.sample(num_timesteps=8, force_reset=True)
        assert _shows_its_seeds(chunks)
        assert _seeded_first(chunks)
        runs.append({(c.episode_id, c.t_start): c.obs[0].tolist() for c in chunks})
    assert len({number for _, number in runs[0].values()}) > 20
    # Envs that step when ready may be further in one run than in the other.
    assert all(seen == runs[1].get(where, seen) for where, seen in runs[0].items())


@pytest.mark.parametrize("kind", ["by themselves", "a VectorEnv of ours", "sync", "process"])
def test_an_env_that_is_built_again_begins_with_a_seed(kind: str) -> None:
    seeds: list[int | None] = []
    settings = {"env_config": {"fails": True}, "env_restart_attempts": 100}
    settings["callbacks"] = [{"on_episode_start": lambda episode: seeds.append(episode.seed)}]
    with _runner(kind, Drawing, seed_every_episode=False, **settings) as sampler:
        chunks = [chunk for _ in range(8) for chunk in sampler.sample_fragment()]
        rebuilt = sampler.totals.env_rebuilds * (4 if kind == "sync" else 1)
    assert rebuilt > 4
    assert _shows_its_seeds(chunks)
    given = [seed for seed in seeds if seed is not None]
    assert len(given) == len(set(given))
    assert rebuilt <= len(given) <= rebuilt + 4 < len(seeds)


def test_an_env_that_moves_to_a_new_process_begins_with_a_seed() -> None:
    with _runner("process", Drawing, seed_every_episode=False, env_process_max_episodes=8) as sampler:
        chunks = [chunk for _ in range(6) for chunk in sampler.sample_fragment()]
    assert _shows_its_seeds(chunks)
    seeds = {chunk.episode_id: chunk.seed for chunk in chunks}
    given = [seed for seed in seeds.values() if seed is not None]
    assert 4 < len(given) == len(set(given)) < len(seeds) / 2


@pytest.mark.one_in(6)
@every_kind
def test_a_runner_may_be_stopped_twice_and_build_its_envs_again(kind: str) -> None:
    sampler = _runner(kind)
    ids = {chunk.episode_id for chunk in sampler.sample(num_timesteps=24)}
    sampler.make_env()
    again = [chunk for chunk in sampler.sample(num_timesteps=24) if len(chunk)]
    assert not ids & {chunk.episode_id for chunk in again}
    for chunk in again:
        _check_true(chunk)
    sampler.stop()
    sampler.stop()
    assert sampler.env is None
