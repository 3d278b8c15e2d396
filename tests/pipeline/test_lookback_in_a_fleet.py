"""Lookback on its way from a worker to a learner, through gaps as well."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from golden_samples import make_lookback_batch

from headrace.learner_stub import EpisodeStream
from headrace.learner_stub.streaming.continuity import SourceEpisodes
from headrace.schemas.chunks.chunk import EpisodeChunk, to_episode
from support.pipeline.delivery import BrokerThread
from support.pipeline.worker_threads import AT_RANDOM, SAMPLING, WorkerThread
from support.waiting import TIMEOUT_S

HORIZON = 5


def test_a_learner_gets_the_steps_before_each_chunk(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sampling = {**SAMPLING, "rollout_fragment_length": 3, "episode_lookback_horizon": HORIZON}
    episodes: dict[str, list[EpisodeChunk]] = defaultdict(list)
    with (
        EpisodeStream(broker.endpoints.learner) as stream,
        WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path / "recorders", {**AT_RANDOM, "sampling": sampling}),
    ):
        for _ in range(12):
            batch = stream.next(TIMEOUT_S)
            assert batch is not None
            for chunk in batch:
                episodes[chunk.episode_id].append(chunk)
    looked_back = 0
    for chunks in episodes.values():
        for chunk in chunks:
            assert len(chunk.lookback or ()) == (min(HORIZON, chunk.t_start) if len(chunk) else 0)
            looked_back += len(chunk.lookback or ())
        to_episode(chunks)
    assert looked_back > 2 * HORIZON


def test_chunks_kept_after_a_gap_have_correct_lookback_and_markers_have_none() -> None:
    batch = make_lookback_batch()
    episodes = SourceEpisodes()
    episodes.gap_reason = "overflow"
    sifted = episodes.take(batch)
    assert sifted.markers is not None
    assert not sifted.markers.table["lookback"].any()
    for rest in (sifted.batch, sifted.markers):
        for name, column in rest.arrays.items():
            assert len(column) == rest.offsets_of(name)[-1], name
        assert [chunk.lookback for chunk in rest if not len(chunk)] == [None] * int((rest.table["length"] == 0).sum())
    kept = batch.select(np.array([False, False, True, True]))
    assert [len(chunk.lookback or ()) for chunk in kept] == [2, 1]
    assert kept[1].lookback is not None
    assert kept[1].lookback.env_t.tolist() == batch[3].lookback.env_t.tolist()  # type: ignore[union-attr]
