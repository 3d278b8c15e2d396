"""Generalized advantage estimation over many chunks of different lengths at once.

Schulman et al., High-Dimensional Continuous Control Using Generalized Advantage Estimation (2016), equation 16. Each
chunk's sum is cut at its last step, where the value of the observation after it stands for all later rewards.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def advantages(
    rewards: NDArray[np.float64],
    values: NDArray[np.float64],
    bootstraps: NDArray[np.float64],
    offsets: NDArray[np.int64],
    *,
    gamma: float,
    gae_lambda: float,
) -> NDArray[np.float64]:
    """Estimate how much better than expected each step turned out: float64 (N,).

    - rewards, values: (N,), all chunks' steps one after another.
    - offsets: (C + 1,), where each chunk's steps begin; no chunk may be empty.
    - bootstraps: (C,), the value of each chunk's last observation, 0 where the episode terminated.

    Adding `values` to the result gives the TD(lambda) returns.
    """
    lengths = np.diff(offsets)
    if len(lengths) == 0:
        return np.zeros(0)
    next_values = np.append(values[1:], 0.0)
    next_values[offsets[1:] - 1] = bootstraps
    deltas = rewards + gamma * next_values - values
    return sum_backwards(deltas, np.full(len(deltas), gamma * gae_lambda), offsets)


def sum_backwards(
    terms: NDArray[np.float64], decays: NDArray[np.float64], offsets: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return sum[t] = terms[t] + decays[t] * sum[t + 1] within each chunk: float64 (N,). No chunk may be empty."""
    result, lengths = terms.copy(), np.diff(offsets)
    if len(lengths) == 0:
        return result
    # All chunks walk back from their last step together, the longest first, so that those still walking are a prefix.
    order = np.argsort(-lengths, kind="stable")
    last = (offsets[1:] - 1)[order]
    walking = np.searchsorted(-lengths[order], -np.arange(int(lengths.max())), side="left")
    for back in range(1, len(walking)):
        row = last[: walking[back]] - back
        result[row] += decays[row] * result[row + 1]
    return result
