"""MiniGrid, Atari and MuJoCo give the same chunks wherever they are stepped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.schemas.chunks.chunk import ChunkEnd, EpisodeChunk, to_episode
from support.envs.toy import check_books, runner
from support.fleets.env_hosts import EnvHosts

pytestmark = pytest.mark.processes

NEEDS = {"minigrid": ("minigrid",), "atari": ("ale_py", "cv2"), "mujoco": ("mujoco",), "cheetah": ("mujoco",)}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "inline": {},
    "process": {"env_placement": "process", "envs_per_process": 2},
    "native": {"gym_env_vectorize_mode": "sync"},
    "remote": {"env_placement": "remote"},
}
NUM_ENVS, FRAGMENT = 2, 16


@pytest.fixture(params=NEEDS)
def env(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The creator's name; skips by name what is not installed."""
    name: str = request.param
    _need(*NEEDS[name])
    monkeypatch.chdir(tmp_path)
    return f"support.envs.real:{name}"


def _need(*modules: str) -> None:
    for module in modules:
        pytest.importorskip(module, reason=f"{module} is not installed; pip install 'headrace[envs]'")


def _brief(chunk: EpisodeChunk) -> tuple[Any, ...]:
    columns = {name: column.tobytes() for name, column in chunk.columns.items()}
    arrays = (chunk.obs.tobytes(), chunk.actions.tobytes(), chunk.rewards.tobytes())
    return (chunk.env_index, chunk.episode_id, chunk.t_start, chunk.end, chunk.seed, arrays, columns)


def _sampled(env: str, placement: str, hosts: EnvHosts) -> list[EpisodeChunk]:
    settings = {"num_envs": NUM_ENVS, "rollout_fragment_length": FRAGMENT, **hosts.at}
    with runner(env, **settings, **PLACEMENTS[placement]) as sampler:
        chunks = [chunk for _ in range(3) for chunk in sampler.sample_fragment()]
        check_books(sampler)
        assert sampler.totals.discarded == {}
        assert sampler.totals.env_failures == 0
        assert sampler.totals.delivered == sum(map(len, chunks)) == 3 * NUM_ENVS * FRAGMENT
    return chunks


@pytest.mark.one_in(2)
def test_chunks_are_bit_identical_in_every_placement_of_the_envs(env: str, tmp_path: Path) -> None:
    with EnvHosts(tmp_path) as hosts:
        hosts.start(env, NUM_ENVS)
        found = {placement: _sampled(env, placement, hosts) for placement in PLACEMENTS}
    expected = [_brief(chunk) for chunk in found["inline"]]
    assert len({chunk.episode_id for chunk in found["inline"]}) > NUM_ENVS, "some episodes ended"
    assert [_brief(chunk) for chunk in found["process"]] == expected
    assert [_brief(chunk) for chunk in found["native"]] == expected
    assert [_brief(chunk) for chunk in found["remote"]] == expected
    _check_seams(found["process"])


def _check_seams(chunks: list[EpisodeChunk]) -> None:
    parts: dict[str, list[EpisodeChunk]] = {}
    for chunk in chunks:
        parts.setdefault(chunk.episode_id, []).append(chunk)
    for episode in parts.values():
        to_episode(episode)  # which compares what meets at the seams


def test_ales_own_vector_is_used_by_an_id_with_the_registering_module() -> None:
    """ALE takes seeds that are signed 32-bit numbers, so the test sets `max_env_seed`."""
    _need("ale_py")
    settings = {"gym_env_vectorize_mode": "vector_entry_point", "max_env_seed": 2**31 - 1}
    with runner("ale_py:ALE/Breakout-v5", num_envs=3, **settings) as sampler:
        chunks = [chunk for _ in range(3) for chunk in sampler.sample(num_timesteps=300, random_actions=True)]
        check_books(sampler)
        assert sampler.totals.env_failures == 0
    assert sum(map(len, chunks)) >= 900
    assert any(chunk.end is ChunkEnd.TERMINATED for chunk in chunks)
    assert chunks[0].obs.shape[1:] == (4, 84, 84)
    _check_seams(chunks)
