"""Chunks of an episode come in order without gaps, or one marker ends the episode, whichever batches are missing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.learner_stub.streaming.continuity import SourceEpisodes
from headrace.learner_stub.streaming.session import LearnerSession, StreamLimits
from headrace.schemas.accounts.ledger import Settled
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.messages import LearnerWelcome, SourceStart
from support.pipeline.delivery import Envs, Witness


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10_000),
    width=st.integers(1, 4),
    length=st.integers(1, 6),
    missing=st.sets(st.integers(0, 19)),
    fails=st.sampled_from([0.0, 0.1, 0.4]),
)
def test_every_episode_is_whole_or_ended_by_one_marker(
    seed: int, width: int, length: int, missing: set[int], fails: float
) -> None:
    batches = Envs(seed, width, fails=fails).fragments(20, length)
    episodes, witness, missed, left_out = SourceEpisodes(), Witness(), 0, 0
    for number, batch in enumerate(batches):
        if number in missing:
            episodes.gap_reason, missed = "overflow", missed + batch.steps
            continue
        sifted = episodes.take(batch)
        if sifted.markers is not None:
            witness.see(sifted.markers)
        witness.see(sifted.batch)
        left_out += sifted.left_out[0]
    for markers in episodes.end("worker_killed"):
        assert set(markers.table["end"]) == {ChunkEnd.ABORTED}
        witness.see(markers)
    assert not witness.open_episodes()
    assert witness.steps + left_out + missed == sum(batch.steps for batch in batches)
    assert set(witness.markers.values()) <= {"overflow", "worker_killed", "env_exception"}
    if not missing:
        assert left_out == 0


def test_markers_name_the_reason_and_continue_the_count() -> None:
    envs = Envs(width=1, ends=0.0, fails=0.0)
    episodes = SourceEpisodes()
    first = envs.fragment()
    episodes.take(first)
    (markers,) = episodes.end("worker_killed")
    (marker,) = markers
    assert (marker.end, marker.end_reason, len(marker)) == (ChunkEnd.ABORTED, "worker_killed", 0)
    assert (marker.episode_id, marker.chunk_index, marker.t_start) == (first[0].episode_id, 1, 5)
    assert markers.arrays.keys() == first.arrays.keys()


def test_a_source_without_batches_ends_without_markers() -> None:
    assert SourceEpisodes().end("worker_killed") == []


def test_an_end_marker_does_not_hide_the_episode_that_began_in_its_place() -> None:
    """A worker writes end markers last, after the chunks of the episode that began when the env was rebuilt."""
    envs = Envs(width=1, ends=0.0, fails=0.0)
    episodes, witness = SourceEpisodes(), Witness()
    witness.see(episodes.take(envs.fragment()).batch)
    marker = envs._lanes[0] | {"length": 0, "end": ChunkEnd.ABORTED, "reason": 1}
    envs._lanes[0] = envs._episode(0)
    second = envs.fragment()
    table = np.zeros(2, second.table.dtype)
    table[0] = second.table[0]
    for name, value in marker.items():
        table[1][name] = value
    witness.see(episodes.take(replace(second, table=table)).batch)
    (end,) = episodes.end("worker_killed")
    witness.see(end)
    assert not witness.open_episodes()
    assert sorted(map(str, witness.markers.values())) == ["env_exception", "worker_killed"]


def test_the_memory_of_broken_episodes_does_not_grow() -> None:
    envs, episodes = Envs(width=3, fails=0.2), SourceEpisodes()
    episodes.gap_reason = "overflow"
    for batch in envs.fragments(300)[::2]:
        episodes.take(batch)
    assert len(episodes._broken) <= 3


def test_a_gap_with_several_reasons_reports_the_reason_with_the_most_steps(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "headrace.learner")
    session = LearnerSession("token", StreamLimits())
    session.receive(LearnerWelcome(fleet_id="f", epoch=1), 0.0)
    before = Settled(seq=1, dropped={"stale": (30, 1)})
    after = Settled(seq=5, dropped={"stale": (34, 2), "overflow": (40, 3)})
    session.receive(SourceStart(slot=2, incarnation=3, settled=before), 0.0)
    session.receive(SourceStart(slot=2, incarnation=3, settled=after), 0.0)
    first, second = session.take(), session.take()
    assert first is not None
    assert second is not None
    assert (first.reason, first.lost) == ("stale", {"stale": (30, 1)})
    assert (second.reason, second.lost) == ("overflow", {"stale": (4, 1), "overflow": (40, 3)})
    assert [record.getMessage() for record in caplog.records] == [
        "worker 2 (incarnation 3): 44 steps will not come: 40 overflow, 4 stale"
    ]


def test_a_source_that_starts_again_where_the_learner_is_leaves_no_gap() -> None:
    session = LearnerSession("token", StreamLimits())
    session.receive(LearnerWelcome(fleet_id="f", epoch=1), 0.0)
    start = SourceStart(slot=2, incarnation=3, settled=Settled(seq=5))
    session.receive(start, 0.0)
    first = session.take()
    session.receive(start, 0.0)
    assert session.take() is None
    session.receive(SourceStart(slot=2, incarnation=3, settled=Settled(seq=6)), 0.0)
    later = session.take()
    assert (first, later is not None and later.reason) == (None, "gap")
