"""Lag is counted alike for a batch of one lag, which is counted at once, and for one of several."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

import numpy as np
import pytest
from golden_samples import SPACES, make_batch

from headrace.learner_stub.streaming.lag import LagMonitor
from headrace.schemas.accounts.lag_buckets import LAG_BOUNDS, LAG_BUCKETS


@pytest.mark.parametrize("chosen_by", [[9] * 6, [9, 9, 9, 9, 9, 8], [1, 9, 4, 4, 12, 9], [12] * 6])
@pytest.mark.parametrize("epoch", [0, 1, 2])
@pytest.mark.parametrize("newest", [9, 12, 200])
def test_each_step_counts_in_the_bucket_of_its_lag(chosen_by: list[int], epoch: int, newest: int) -> None:
    batch = make_batch(SPACES["box"])
    columns = {**batch.arrays, "weights_seq": np.array(chosen_by)}
    batch = replace(batch, arrays=columns, learner_epoch=epoch, newest=(2, newest))
    monitor, counts = LagMonitor(None), [0] * LAG_BUCKETS
    monitor.observe(batch, update_steps=6)
    lags = [max(0, newest - seq) if epoch == 2 else newest for seq in chosen_by]
    for lag in lags:
        counts[bisect_left(LAG_BOUNDS, lag)] += 1
    assert monitor.counts == counts
    assert monitor.recent == ((sum(lags), 6) if epoch else (0, 0))  # random actions have no weights
