"""V-trace targets over many chunks of different lengths at once, for data that older weights sampled.

Espeholt et al., IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner Architectures (2018),
section 4.1: equation 1 for the targets, and the policy gradient of section 4.2. Each chunk's sum is cut at its last
step, where the value of the observation after it stands for all later rewards.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.learner_stub.gae import sum_backwards


@dataclass(frozen=True, slots=True)
class VTrace:
    """The targets and advantages to train on.

    - targets: float64 (N,), what values should have been: v_s of equation 1.
    - advantages: float64 (N,), to weight the policy's log-probs: rho_s (r_s + gamma v_(s+1) - V(x_s)).
    """

    targets: NDArray[np.float64]
    advantages: NDArray[np.float64]


def vtrace(
    log_ratios: NDArray[np.float64],
    rewards: NDArray[np.float64],
    values: NDArray[np.float64],
    bootstraps: NDArray[np.float64],
    offsets: NDArray[np.int64],
    *,
    gamma: float,
    trace_lambda: float = 1.0,
    rho_max: float = 1.0,
    c_max: float = 1.0,
) -> VTrace:
    """Return the V-trace targets and advantages of N steps in C chunks.

    - log_ratios: (N,), log-prob of each action by the policy in training, less that by the policy that sampled it.
    - rewards, values: (N,), all chunks' steps one after another; values by the module in training.
    - offsets: (C + 1,), where each chunk's steps begin; no chunk may be empty.
    - bootstraps: (C,), the value of each chunk's last observation, 0 where the episode terminated.
    - rho_max, c_max: bounds of the importance ratios, rho-bar and c-bar of the paper. trace_lambda: its lambda.

    With all ratios 1 and both bounds 1, targets are the TD(lambda) returns of `advantages` in `gae.py`.
    """
    ratios = np.exp(log_ratios)
    rho, c = np.minimum(ratios, rho_max), trace_lambda * np.minimum(ratios, c_max)
    deltas = rho * (rewards + gamma * _next(values, bootstraps, offsets) - values)
    targets = values + sum_backwards(deltas, gamma * c, offsets)
    advantages = rho * (rewards + gamma * _next(targets, bootstraps, offsets) - values)
    return VTrace(targets, advantages)


def _next(
    values: NDArray[np.float64], bootstraps: NDArray[np.float64], offsets: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return what follows each step in its chunk: the next value, or the bootstrap after the last step."""
    following = np.append(values[1:], 0.0)[: len(values)]
    following[offsets[1:] - 1] = bootstraps
    return following
