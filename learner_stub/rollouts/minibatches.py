"""Minibatches of a rollout: row by row, or chunk by chunk for a recurrent module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.learner_stub.rollouts.interruption import StopDeadline
from headrace.learner_stub.rollouts.module import TrainableModule, check_answer
from headrace.learner_stub.rollouts.rollout import Rollout
from headrace.schemas.chunks.chunk import map_arrays
from headrace.schemas.chunks.episodes import ranges
from headrace.schemas.errors import ConfigError, ModuleError

_FORWARD_ROWS = 4096
"""Observations in one forward pass without gradients; it bounds the memory that images take."""


@dataclass(frozen=True, slots=True)
class Minibatch:
    """Input of one training step.

    - batch: the argument of `forward_train`.
    - steps: int64 (n,), the rollout's steps that are trained on.
    - answers: the row of the module's output for each of them.
    """

    batch: dict[str, Any]
    steps: Tensor
    answers: Tensor | slice


def minibatches(steps: int, size: int) -> list[Tensor]:
    """Return the numbers below `steps` in random order, in parts of about `size`, as int64 tensors on the CPU.

    The sizes differ by at most one. None is above `size` or below two, unless there is no other way: a fleet's updates
    have no fixed size, and the `std()` of a last minibatch of one step would be NaN. torch's own generator draws.

    Raises `ConfigError` for a size below 1.
    """
    if size < 1:
        raise ConfigError(f"minibatches of {size!r:.40} steps; give 2 or more", key="size")
    parts = max(min(-(-steps // size), steps // 2), 1)
    return list(torch.randperm(steps).tensor_split(parts)) if steps else []


def minibatches_for(module: Any, rollout: Rollout) -> Minibatches:
    """Return minibatches of whole chunks for a module with `initial_state`, else of rows.

    Raises `ModuleError` for a recurrent module when another module sampled the batches.
    """
    if not hasattr(module, "initial_state"):
        return RowMinibatches(rollout)
    if not rollout.state_in:
        raise ModuleError(
            f"{type(module).__name__} is recurrent, and the batches carry no state_in: they were sampled by another "
            "module; name the same one for workers and learner"
        )
    return ChunkMinibatches(rollout)


class RowMinibatches:
    """Minibatches of rows in any order: {"obs": ...}."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout

    def all_rows(self, rows: int) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield (`forward_train`'s batch, its rows), `rows` observations at a time, in the order of `rollout.obs`."""
        total = int(self._rollout.obs_offsets[-1])
        for start in range(0, total, rows):
            part = slice(start, min(start + rows, total))
            yield {"obs": take(self._rollout.obs, part)}, part.stop - part.start

    def shuffled(self, random: np.random.Generator, steps: int) -> Iterator[Minibatch]:
        """Yield each step once, `steps` at a time, in an order drawn from `random`. The last part has what is left."""
        step_rows = torch.from_numpy(self._rollout.episodes.step_rows)
        for some in torch.split(torch.from_numpy(random.permutation(len(self._rollout))), steps):
            yield Minibatch({"obs": take(self._rollout.obs, step_rows[some])}, some, slice(None))


class ChunkMinibatches:
    """Minibatches of whole chunks, each from the state that was stored with it.

    A batch is a dict:

    - "obs": (rows, ...), each chunk's T+1 observations one after another.
    - "lengths": int64 (chunks,), the T+1 of each chunk.
    - "state_in": {name: (chunks, ...)}.
    - "step_rows": int64 (steps,), the row that each step was taken from.
    """

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout
        self._lengths = np.diff(rollout.episodes.offsets)

    def all_rows(self, rows: int) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield (`forward_train`'s batch, its rows), about `rows` observations at a time. No chunk is divided."""
        chunks = np.arange(len(self._lengths))
        for some in _groups(chunks, self._lengths + 1, rows):
            batch = self._batch(some)
            yield batch, int(batch["lengths"].sum())

    def shuffled(self, random: np.random.Generator, steps: int) -> Iterator[Minibatch]:
        """Yield each step once, about `steps` at a time, in chunks drawn from `random`, which keep the order within."""
        chunks = random.permutation(len(self._lengths))
        for some in _groups(chunks, self._lengths[chunks], steps):
            batch = self._batch(some)
            own = ranges(self._rollout.episodes.offsets[some], self._lengths[some])
            yield Minibatch(batch, torch.from_numpy(own), batch["step_rows"])

    def _batch(self, chunks: NDArray[np.intp]) -> dict[str, Any]:
        lengths = self._lengths[chunks] + 1
        rows = torch.from_numpy(ranges(self._rollout.obs_offsets[chunks], lengths))
        taken = np.ones(len(rows), np.bool_)
        taken[np.cumsum(lengths) - 1] = False
        picked = torch.from_numpy(chunks)
        return {
            "obs": take(self._rollout.obs, rows),
            "lengths": torch.from_numpy(lengths),
            "state_in": {name: state[picked] for name, state in self._rollout.state_in.items()},
            "step_rows": torch.from_numpy(np.flatnonzero(taken)),
        }


Minibatches = RowMinibatches | ChunkMinibatches
"""Minibatches of one rollout in the form that its module needs."""


def forward_all(
    module: TrainableModule, feed: Minibatches, interruption: StopDeadline
) -> tuple[Tensor, NDArray[np.float64]]:
    """Return (action_dist_inputs (rows, ...), values (rows,)) of the module as it is, without gradients."""
    answers = []
    with torch.no_grad():
        for batch, rows in feed.all_rows(_FORWARD_ROWS):
            answers.append(check_answer(module.forward_train(batch), rows))
            interruption.check()
    dist_inputs, values = zip(*answers, strict=True)
    return torch.cat(dist_inputs), torch.cat(values).double().cpu().numpy()


def seed_torch(seed: int, update: int) -> None:
    """Seed torch's own generator for one update, for modules that draw from it, as for dropout."""
    state = np.random.SeedSequence((seed, update)).generate_state(1, np.uint64)[0]
    torch.manual_seed(int(state >> np.uint64(1)))


def take(value: Any, rows: slice | Tensor) -> Any:
    """Return `rows` of each tensor in a nested `value`."""
    return map_arrays(lambda tensor: tensor[rows], value)


def _groups(chunks: NDArray[np.intp], sizes: NDArray[np.int64], size: int) -> list[NDArray[np.intp]]:
    """Group `chunks` in their order, about `size` rows to a group.

    A chunk goes into the group where its first row falls.
    """
    group = (np.cumsum(sizes) - sizes) // size
    return np.split(chunks, np.flatnonzero(np.diff(group)) + 1)
