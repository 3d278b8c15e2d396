"""Advantages and targets over the chunks of batches: GAE, and V-trace for data that older weights sampled.

Both walk back over each chunk. Where a chunk is cut and `Episodes.next_chunk` has the rest of the episode, the
walk goes on through it. Where it has not, the value of the last observation stands for all later rewards; 0 stands for
them where the episode terminated.

- GAE: Schulman et al., High-Dimensional Continuous Control Using Generalized Advantage Estimation (2016), equation 16.
- V-trace: Espeholt et al., IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner Architectures
  (2018), section 4.1: equation 1 for the targets, and the policy gradient of section 4.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.basics.tensor_array import array_of
from headrace.schemas.chunks.batch import OFF_POLICY
from headrace.schemas.chunks.episodes import Episodes, ranges
from headrace.schemas.errors import ModuleError


@dataclass(frozen=True, slots=True)
class Returns:
    """The result of `gae` or `vtrace`: float64 arrays (N,), or tensors as the values were, of their dtype and device.

    - advantages: how much better than expected each step turned out, to weight the log-probs of the policy.
    - targets: what the values of the steps' observations should have been.
    """

    advantages: Any
    targets: Any


def gae(episodes: Episodes, values: Any = None, *, gamma: float, gae_lambda: float) -> Returns:
    """Return generalized advantages, and the TD(lambda) returns as targets. No gradient flows through the result.

    - episodes: `batch.episodes()`, or `episodes_of` several batches; also as tensors of `to_torch`.
    - values: (N + C,), the value of each row of `episodes.obs`: an array or a tensor. None takes those that
      `with_own_logp` put into the batches.

    Raises `ModuleError` for values of another shape, and for None where the batches have none.
    """
    walk = _Walk.of(episodes, _own_values(episodes) if values is None else values)
    deltas = walk.rewards + gamma * walk.following(walk.values) - walk.values
    advantages = sum_backwards(deltas, np.full(len(deltas), gamma * gae_lambda), walk.offsets)
    return walk.returns(advantages, advantages + walk.values)


def vtrace(
    episodes: Episodes,
    values: Any,
    logp: Any,
    *,
    gamma: float,
    trace_lambda: float = 1.0,
    rho_max: float = 1.0,
    c_max: float = 1.0,
) -> Returns:
    """Return V-trace advantages and targets, however stale the steps are. No gradient flows through the result.

    - episodes: as of `gae`. Its column `logp` has the log-probs by the weights that chose the actions.
    - values: (N + C,), the value of each row of `episodes.obs`, by the module in training.
    - logp: (N,), the log-prob of each action, by the module in training.
    - rho_max, c_max: bounds of the importance ratios, rho-bar and c-bar of the paper. trace_lambda: its lambda.

    An action that the env logged is no sample of a policy, so its ratio is taken as 0. Its advantage is then 0, its
    target is its value, and nothing later counts for the steps before it. With all ratios 1 and both bounds 1, targets
    are those of `gae`.

    Raises `ModuleError` for values or log-probs of another shape, and for steps without a column `logp`.
    """
    walk = _Walk.of(episodes, values)
    if "logp" not in episodes.columns:
        raise ModuleError(
            "the batches have no column 'logp', which V-trace needs; return it from forward_exploration, and sample "
            "with explore = true"
        )
    ratios = np.exp(_float64(logp, "logp", len(episodes)) - _float64(episodes.columns["logp"], "logp", len(episodes)))
    if OFF_POLICY in episodes.columns:
        ratios[_numpy(episodes.columns[OFF_POLICY]).astype(np.bool_)] = 0.0
    ratios = ratios[walk.rows]
    rho, c = np.minimum(ratios, rho_max), trace_lambda * np.minimum(ratios, c_max)
    deltas = rho * (walk.rewards + gamma * walk.following(walk.values) - walk.values)
    targets = walk.values + sum_backwards(deltas, gamma * c, walk.offsets)
    return walk.returns(rho * (walk.rewards + gamma * walk.following(targets) - walk.values), targets)


@dataclass(frozen=True, slots=True)
class _Walk:
    """The steps in the order of the walk: chunks that follow each other stand together, as one run.

    - rows: int64 (N,), the step at each place; a slice of all where no chunk goes on in another.
    - offsets: int64 (R + 1,), where each run begins. bootstraps: float64 (R,), what stands for all after it.
    - rewards, values: float64 (N,), in the order of the walk.
    - like: the caller's values.
    """

    rows: NDArray[np.int64] | slice
    offsets: NDArray[np.int64]
    bootstraps: NDArray[np.float64]
    rewards: NDArray[np.float64]
    values: NDArray[np.float64]
    like: Any

    @classmethod
    def of(cls, episodes: Episodes, values: Any) -> _Walk:
        """Return the walk over all steps. Raises `ModuleError`."""
        step_rows, last_rows = _numpy(episodes.step_rows), _numpy(episodes.last_rows)
        own = _float64(values, "values", len(step_rows) + len(last_rows))
        bootstraps = np.where(_numpy(episodes.terminated), 0.0, own[last_rows])
        rows, offsets, last = _runs(_numpy(episodes.offsets), _numpy(episodes.next_chunk))
        rewards = _float64(episodes.rewards, "rewards", len(step_rows))
        return cls(rows, offsets, bootstraps[last], rewards[rows], own[step_rows][rows], values)

    def following(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return what follows each step in its run: the next value, or the bootstrap after the last step."""
        following = np.append(values[1:], 0.0)[: len(values)]
        following[self.offsets[1:] - 1] = self.bootstraps
        return following

    def returns(self, advantages: NDArray[np.float64], targets: NDArray[np.float64]) -> Returns:
        """Return both in the order of the steps, and in the caller's kind of array."""
        parts = []
        for walked in (advantages, targets):
            steps = np.empty_like(walked)
            steps[self.rows] = walked
            parts.append(self.like.new_tensor(steps) if hasattr(self.like, "new_tensor") else steps)
        return Returns(*parts)


def _runs(
    offsets: NDArray[np.int64], next_chunk: NDArray[np.int64]
) -> tuple[NDArray[np.int64] | slice, NDArray[np.int64], NDArray[np.int64] | slice]:
    """Return (steps in the order of the walk, where each run begins, the last chunk of each run)."""
    goes_on = next_chunk >= 0
    if not goes_on.any():
        return slice(None), offsets, slice(None)
    run, depth = np.empty_like(next_chunk), np.empty_like(next_chunk)
    first = np.ones(len(next_chunk), np.bool_)
    first[next_chunk[goes_on]] = False
    at = heads = np.flatnonzero(first)
    for passed in range(len(next_chunk)):
        run[at], depth[at] = heads, passed
        heads, at = heads[goes_on[at]], next_chunk[at[goes_on[at]]]
        if not len(at):
            break
    order = np.lexsort((depth, run))
    lengths = np.diff(offsets)[order]
    ends = ~goes_on[order]
    return ranges(offsets[order], lengths), np.append(0, np.cumsum(lengths)[ends]), order[ends]


def _own_values(episodes: Episodes) -> Any:
    """Return the value of each row of `episodes.obs` by the columns of `with_own_logp`, in their kind of array."""
    if "next_values" not in episodes.columns:
        raise ModuleError("the batches have no column 'next_values'; give gae the values, or batches of with_own_logp")
    values, after = episodes.columns["values"], _numpy(episodes.columns["next_values"])
    rows = np.empty(len(episodes) + len(_numpy(episodes.last_rows)), after.dtype)
    rows[_numpy(episodes.step_rows)] = _numpy(values)
    rows[_numpy(episodes.last_rows)] = after[_numpy(episodes.offsets)[1:] - 1]
    return values.new_tensor(rows) if hasattr(values, "new_tensor") else rows


def _numpy(array: Any) -> NDArray[Any]:
    return array_of(array) if hasattr(array, "detach") else np.asarray(array)


def _float64(array: Any, name: str, rows: int) -> NDArray[np.float64]:
    """Return `array` as float64 (rows,). Raises `ModuleError` for another shape."""
    found = (array.detach().cpu().double().numpy() if hasattr(array, "detach") else np.asarray(array)).astype(
        np.float64, copy=False
    )
    if found.shape != (rows,):
        raise ModuleError(
            f"{name} has shape {found.shape}, not ({rows},): give one of each "
            + ("row of episodes.obs, which has one more than steps for each chunk" if name == "values" else "step")
        )
    return found


def sum_backwards(
    terms: NDArray[np.float64], decays: NDArray[np.float64], offsets: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return sum[t] = terms[t] + decays[t] * sum[t + 1] within each run: float64 (N,)."""
    sums, shares = terms.tolist(), decays.tolist()  # Python's own numbers are read faster than numpy's, one by one
    for start, stop in pairwise(offsets.tolist()):
        for t in range(stop - 2, start - 1, -1):
            sums[t] += shares[t] * sums[t + 1]
    return np.array(sums, np.float64)
