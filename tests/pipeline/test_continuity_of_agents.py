"""Agents that come, go and change their module: each agent's episode is whole or ended, also when batches are lost."""

from __future__ import annotations

import random

import pytest

from headrace.learner_stub.streaming.continuity import SourceEpisodes
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import ChunkEnd
from support.pipeline.several_agents import AgentWitness, come_and_go


def batches_of(num_envs: int, length: int, seed: int, cuts: int = 25) -> list[ChunkBatch]:
    """All batches in the order in which a worker sends them, those that end its open episodes left out."""
    batches: list[ChunkBatch] = []
    with come_and_go(num_envs, length, seed) as runner:
        for _ in range(cuts):
            batches += [b for b in runner.sample_fragment(random_actions=True).batches.values() if len(b)]
    return batches


@pytest.mark.parametrize("seed", range(25))
def test_every_agents_episode_is_whole_or_ended_by_one_marker(seed: int) -> None:
    rng = random.Random(seed)
    batches = batches_of(rng.randrange(1, 4), rng.randrange(1, 12), seed)
    lost = {i for i in range(len(batches)) if rng.random() < (0.0 if seed == 0 else 0.2)}
    episodes, witness, missed, left_out = SourceEpisodes(), AgentWitness(), 0, 0
    for number, batch in enumerate(batches):
        if number in lost:
            episodes.gap_reason, missed = "overflow", missed + batch.steps
            continue
        sifted = episodes.take(batch)
        left_out += sifted.left_out[0]
        for part in (sifted.markers, sifted.batch):
            if part is not None:
                witness.see(part)
    for markers in episodes.end("worker_killed"):
        assert set(markers.table["end"]) == {ChunkEnd.ABORTED}
        witness.see(markers)
    assert not witness.open_episodes()
    assert witness.steps.total() + left_out + missed == sum(batch.steps for batch in batches)
    assert set(witness.markers) <= {"overflow", "worker_killed", "env_exception"}
    assert lost or not left_out


def test_a_marker_names_its_agent_its_module_and_the_env_step() -> None:
    episodes = SourceEpisodes()
    last = {}
    for batch in batches_of(2, 8, 3, cuts=4):
        for chunk in episodes.take(batch).batch:
            last[chunk.episode_id, chunk.agent_id] = chunk
    markers = [marker for batch in episodes.end("worker_killed") for marker in batch]
    assert {marker.module_id for marker in markers} == {"one", "two"}
    for marker in markers:
        before = last.pop((marker.episode_id, marker.agent_id))
        assert (marker.module_id, marker.chunk_index) == (before.module_id, before.chunk_index + 1)
        assert (marker.t_start, len(marker)) == (before.env_t[-1] + 1, 0)
        assert marker.episode_return == before.episode_return
    assert not [chunk for chunk in last.values() if chunk.end is ChunkEnd.ONGOING]
