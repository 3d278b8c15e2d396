"""PPO on batches in which some actions were not the policy's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from headrace.learner_stub.rollouts.rollout import join, on_policy
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import ChunkEnd

MakeBatch = Callable[..., ChunkBatch]
ENDS = [ChunkEnd.ONGOING, ChunkEnd.TERMINATED, ChunkEnd.TRUNCATED]
LOGGED = [0, 1, 0, 0, 1, 1, 1, 0, 0, 1, 0]
"""Which steps are logged, in chunks of 5, 2 and 4 steps. The learner keeps steps 0, 2-3, 7-8 and 10."""


def with_logged(batch: ChunkBatch, **columns: np.ndarray) -> ChunkBatch:
    logged = np.array(LOGGED, np.bool_)
    logp = np.where(logged, np.nan, batch.columns["logp"]).astype(np.float32)
    return replace(batch, arrays={**batch.arrays, "off_policy": logged, "logp": logp, **columns})


def test_a_chunk_is_split_around_logged_actions(make_batch: MakeBatch) -> None:
    batch = with_logged(make_batch([5, 2, 4], ENDS))
    runs = on_policy(batch)
    whole = list(batch)
    expected = [(0, 0, 1), (0, 2, 4), (2, 0, 2), (2, 3, 4)]
    assert len(runs) == 4
    for run, (chunk, start, stop) in zip(runs, expected, strict=True):
        assert run.obs.tolist() == whole[chunk].obs[start : stop + 1].tolist()
        assert run.actions.tolist() == whole[chunk].actions[start:stop].tolist()
        assert run.rewards.tolist() == whole[chunk].rewards[start:stop].tolist()
        assert run.t_start == whole[chunk].t_start + start
    assert [run.end for run in runs] == [ChunkEnd.ONGOING] * 3 + [ChunkEnd.TRUNCATED]
    nothing_logged = replace(batch, arrays={**batch.arrays, "off_policy": np.zeros(11, np.bool_)})
    assert on_policy(nothing_logged) is nothing_logged


def test_a_part_of_a_chunk_begins_at_the_env_step_of_its_first_row(make_batch: MakeBatch) -> None:
    env_t = np.array([0, 2, 4, 6, 8, 1, 3, 5, 7, 9, 11])  # of agents that act at every other step
    runs = on_policy(with_logged(make_batch([5, 2, 4], ENDS), env_t=env_t))
    assert [run.t_start for run in runs] == [run.env_t[0] for run in runs] == [0, 4, 5, 11]


def test_a_recurrent_chunk_keeps_only_the_run_at_its_beginning(make_batch: MakeBatch) -> None:
    state = np.array([[1.0], [2.0], [3.0]], np.float32)
    runs = on_policy(with_logged(make_batch([5, 2, 4], ENDS), **{"state_in/h": state}))
    assert [chunk.state_in["h"].tolist() for chunk in runs] == [[1.0], [3.0]]
    assert [len(chunk) for chunk in runs] == [1, 2]


@pytest.mark.parametrize("logp", [np.nan, -5.0])
def test_the_ratio_of_a_logged_action_is_never_taken(make_batch: MakeBatch, logp: float) -> None:
    batch = with_logged(make_batch([5, 2, 4], ENDS))
    batch = replace(batch, arrays={**batch.arrays, "logp": np.where(LOGGED, logp, batch.columns["logp"])})
    rollout = join([batch])
    assert rollout is not None
    assert len(rollout) == 6
    assert np.isfinite(rollout.logp.numpy()).all()
    assert rollout.episodes.terminated.tolist() == [False] * 4
    assert join([with_logged(make_batch([5, 2, 4], ENDS), off_policy=np.ones(11, np.bool_))]) is None
