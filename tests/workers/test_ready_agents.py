"""Multi-agent envs stepped independently: agents take the same steps as inline, and a cut loses no step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.chunks.chunk import ChunkEnd, EpisodeChunk, to_episode
from headrace.workers import EnvRunnerConfig, MultiAgentEnvRunner
from support.envs.crowd import policy_of
from support.envs.toy_agents import check_books
from support.fleets.env_hosts import EnvHosts
from support.runners.recurrent import LSTM

pytestmark = pytest.mark.processes

READY: dict[str, dict[str, Any]] = {
    "at once": {"remote_env_batch_wait_ms": 0},
    "after a wait": {"remote_env_batch_wait_ms": 2},
    "by halves": {"double_buffering": True},
}
Lives = dict[tuple[str, str], list[EpisodeChunk]]


def runner(ready: str, **settings: Any) -> MultiAgentEnvRunner:
    defaults: dict[str, Any] = {"num_envs": 4, "envs_per_process": 2, "seed": 3}
    defaults |= {"env": "support.envs.crowd:Crowd", "missing_final_observation": "repeat", "rollout_fragment_length": 7}
    defaults |= {"policies": ["masked", "pushes"], "policy_mapping_fn": policy_of, "env_config": {"late_ms": 4}}
    placed = {"env_placement": "process", **READY[ready]} if ready != "inline" else {"env_config": {}}
    return MultiAgentEnvRunner(EnvRunnerConfig(**{**defaults, **placed, **settings}), run_uid="test")


def pieced(chunks: Iterable[EpisodeChunk]) -> Lives:
    """Chunks by episode and agent, in order, without a gap."""
    lives: Lives = defaultdict(list)
    for chunk in chunks:
        lives[chunk.episode_id, chunk.agent_id].append(chunk)
    for parts in lives.values():
        to_episode(parts)  # which compares what meets at the seams
    return lives


def steps_of(parts: list[EpisodeChunk]) -> list[tuple[Any, ...]]:
    """Every step: what was seen, done, got and seen then."""
    steps = []
    for chunk in parts:
        seen = chunk.obs if not isinstance(chunk.obs, dict) else chunk.obs["at"]
        for t in range(len(chunk)):
            columns = {name: column[t].tobytes() for name, column in chunk.columns.items()}
            step = seen[t].tobytes(), chunk.actions[t].tobytes(), chunk.rewards[t], seen[t + 1].tobytes()
            steps.append((*step, int(chunk.env_t[t]), columns))
    return steps


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[EnvHosts]:
    with EnvHosts(tmp_path) as started:
        yield started


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("ready", "settings"),
    [
        ("after a wait", {}),
        ("by halves", {"module": LSTM}),
        ("at once", {"module": LSTM, "batch_mode": "complete_episodes"}),
    ],
)
def test_agents_take_the_same_steps_as_inline_in_any_order_of_ready_envs(ready: str, settings: dict[str, Any]) -> None:
    with runner("inline", **settings | {"batch_mode": "truncate_episodes", "rollout_fragment_length": 1}) as inline:
        expected = pieced(chunk for _ in range(150) for chunk in inline.sample_fragment())
    with runner(ready, **settings) as sampler:
        found = pieced(chunk for _ in range(9) for chunk in sampler.sample_fragment())
        check_books(sampler)
        assert sampler.totals.delivered == sum(len(chunk) for parts in found.values() for chunk in parts)
        assert not sampler.totals.discarded
    for who, parts in found.items():
        steps = steps_of(parts)
        assert steps == steps_of(expected[who])[: len(steps)]
    assert len(found) > 20


def test_failing_envs_lose_their_own_steps_and_no_step_of_other_envs() -> None:
    faults = {"faults": {"1": {"step": "exits"}, "3": {"step": "NaN reward"}}, "late_ms": 4}
    with runner("at once", env_config=faults) as sampler, runner("inline", rollout_fragment_length=1) as inline:
        reasons, chunks, fragments = {"env_crash", "env_bad_data"}, list[EpisodeChunk](), 0
        while fragments < 12 or (fragments < 40 and not reasons <= sampler.totals.discarded.keys()):
            chunks += sampler.sample_fragment()  # a cut just before a fault leaves nothing to discard
            fragments += 1
        found = pieced(chunks)
        check_books(sampler)
        assert reasons <= sampler.totals.discarded.keys()
        expected = pieced(chunk for _ in range(17 * fragments) for chunk in inline.sample_fragment())
    for who, parts in found.items():
        if parts[0].env_index == 2:
            steps = steps_of(parts)
            assert steps == steps_of(expected[who])[: len(steps)]


@pytest.mark.thorough
def test_agents_on_env_hosts_take_the_same_steps_as_inline(hosts: EnvHosts) -> None:
    hosts.start("support.envs.crowd:Crowd", 2, 'sampling.env_config={"late_ms": 4}')
    hosts.start("support.envs.crowd:Crowd", 2, 'sampling.env_config={"late_ms": 12}')
    with runner("inline", rollout_fragment_length=1) as inline:
        expected = pieced(chunk for _ in range(150) for chunk in inline.sample_fragment())
    with runner("at once", env_placement="remote", **hosts.at) as sampler:
        found = pieced(chunk for _ in range(9) for chunk in sampler.sample_fragment())
        check_books(sampler)
        assert not sampler.totals.discarded
    for who, parts in found.items():
        steps = steps_of(parts)
        assert steps == steps_of(expected[who])[: len(steps)]
    assert len(found) > 20


@pytest.mark.parametrize("ready", READY)
def test_every_episode_ends_in_a_final_chunk_or_an_abort_marker(ready: str) -> None:
    with runner(ready, rollout_fragment_length=3) as sampler:
        chunks = list(sampler.sample_fragment())
        whole = sampler.sample(num_episodes=6, end_markers=True)
        begun = {chunk.episode_id for chunk in chunks}
        assert len({chunk.episode_id for chunk in whole} - begun) >= 6
        chunks += whole
        chunks += sampler.sample(num_timesteps=20, random_actions=True, end_markers=True)
        chunks += sampler.sample(num_timesteps=20, end_markers=True)
        chunks += sampler.discard_open(Discard.SHUTDOWN)
        check_books(sampler)
        assert sampler.totals.open == 0
    for parts in pieced(chunks).values():
        assert parts[-1].is_done or parts[-1].end is ChunkEnd.ABORTED
