"""The connector that scales observations to mean 0 and deviation 1. Runners can merge its statistics exactly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.spaces import Box, Leaf, Space, Spaces, map_leaves
from headrace.schemas.errors import ConfigError
from headrace.workers.connectors.connector import Columns, Connector, Rows, State, Tensors
from headrace.workers.envs.action_masks import is_mask

if TYPE_CHECKING:
    import torch

_LEAST_DEVIATION = 1e-8
_LARGEST = np.float64(1e100)
"""Largest magnitude that is learnt from: its square times any count stays finite."""


@dataclass(slots=True, eq=False)
class Moments:
    """Count, mean, and sum of squared deviations from it, float64.

    The arrays broadcast, so that one object holds one set of moments, or one set for each lane.
    """

    count: NDArray[np.float64]
    mean: NDArray[np.float64]
    m2: NDArray[np.float64]

    @classmethod
    def zeros(cls, shape: tuple[int, ...], lanes: tuple[int, ...] = ()) -> Moments:
        """Return the moments of no rows; `count` has length 1 along each axis of a row."""
        return cls(np.zeros((*lanes, *(1 for _ in shape))), np.zeros((*lanes, *shape)), np.zeros((*lanes, *shape)))

    def plus(self, other: Moments) -> Moments:
        """Return the moments of the rows of both together (Chan, Golub and LeVeque 1979).

        Exact but for rounding, in any order.
        """
        count = self.count + other.count
        share = other.count / np.maximum(count, 1.0)
        delta = other.mean - self.mean
        return Moments(count, self.mean + delta * share, self.m2 + other.m2 + delta * delta * (self.count * share))

    def at(self, lanes: NDArray[np.intp]) -> Moments:
        """Return a copy of the moments of some lanes."""
        return Moments(self.count[lanes], self.mean[lanes], self.m2[lanes])

    def above(self, other: Moments) -> Moments:
        """Return the lanes of both, with those of `other` after these."""
        pairs = zip((self.count, self.mean, self.m2), (other.count, other.mean, other.m2), strict=True)
        return Moments(*map(np.concatenate, pairs))

    def add(self, lanes: NDArray[np.intp], rows: NDArray[Any]) -> Moments:
        """Count one more row in each of `lanes` (Welford 1962) and return the new moments of those lanes.

        A row with an infinite number, or one beyond `_LARGEST`, is left out, because it would spoil all later sums.
        """
        if not np.abs(rows).max(initial=0.0) <= _LARGEST:
            sound = (np.abs(rows) <= _LARGEST).reshape(len(rows), -1).all(axis=1)
            self.add(lanes[sound], rows[sound])
            return self.at(lanes)
        now = self.at(lanes)
        now.count += 1.0
        delta = rows - now.mean
        now.mean += delta / now.count
        now.m2 += delta * (rows - now.mean)
        self.count[lanes], self.mean[lanes], self.m2[lanes] = now.count, now.mean, now.m2
        return now

    def scale(self, rows: NDArray[Any]) -> NDArray[np.float64]:
        """Return (rows - mean) / deviation."""
        scaled: NDArray[np.float64] = (rows - self.mean) / np.maximum(np.sqrt(self.variance()), _LEAST_DEVIATION)
        return scaled

    def variance(self) -> NDArray[np.float64]:
        """Return the variance, which is 1 while there are fewer than two rows."""
        return np.where(self.count > 1.0, self.m2 / np.maximum(self.count - 1.0, 1.0), 1.0)

    def together(self) -> Moments:
        """Return the moments of all lanes as one."""
        parts = (Moments(*arrays) for arrays in zip(self.count, self.mean, self.m2, strict=True))
        return _sum(parts, Moments.zeros(self.mean.shape[1:]))


class MeanStd(Connector):
    """Connector that scales every Box leaf to float32 in [-clip, clip]. Other leaves and action masks stay unchanged.

    A lane is scaled by the last state set, together with its own rows that this state does not contain, including the
    current row. Rows of other lanes never count, because a failure may take them away. Infinities are clipped but not
    learnt. To share what all lanes of all runners have seen, merge their updates and set the result. With `update`
    False nothing is learnt.
    """

    def __init__(self, clip: float = 10.0, update: bool = True) -> None:
        if not clip > 0:
            raise ConfigError(f"MeanStd(clip={clip}): give a positive number", key="env_to_module")
        self._clip, self._update = clip, update

    def connect(self, spaces: Spaces, width: int) -> Spaces:
        """Return the spaces with the same nesting; each Box becomes a float32 Box between the clips."""

        def scaled(name: str, leaf: Leaf) -> Space:
            if not isinstance(leaf, Box) or is_mask(name):
                return leaf
            shapes[name] = leaf.shape
            return Box(shape=leaf.shape, dtype="<f4", low=-self._clip, high=self._clip)

        shapes: dict[str, tuple[int, ...]] = {}
        observation = map_leaves(spaces.observation, scaled, "obs")
        self._width = width
        self._given = {name: Moments.zeros(shape) for name, shape in shapes.items()}
        self._told = dict(self._given)
        self._known = {name: Moments.zeros(shape, (width,)) for name, shape in shapes.items()}
        self._seen = {name: Moments.zeros(shape, (width,)) for name, shape in shapes.items()}
        return Spaces(observation=observation, action=spaces.action)

    def widen(self, width: int) -> None:
        """Make room for `width` lanes. New lanes begin with the last state set.

        They do not begin with rows that were taken as an update since, because those belong to other lanes.
        """
        more, self._width = width - self._width, width
        for name, given in self._given.items():
            shape = given.mean.shape
            self._known[name] = self._known[name].above(Moments.zeros(shape, (more,)).plus(given))
            self._seen[name] = self._seen[name].above(Moments.zeros(shape, (more,)))

    def process(self, rows: Rows) -> Columns:
        columns = dict(rows.columns)
        for name, known in self._known.items():
            arrived, seen = rows.columns[name], self._seen[name]
            own = seen.add(rows.lanes, arrived) if self._update else seen.at(rows.lanes)
            scaled = known.at(rows.lanes).plus(own).scale(arrived)
            columns[name] = np.clip(scaled, -self._clip, self._clip).astype(np.float32)
        return columns

    def freeze(self) -> None:
        """Stop learning. Keep scaling by the state and the rows seen so far."""
        self._update = False

    def torch_process(self, columns: Tensors, actions: Tensors) -> dict[str, torch.Tensor]:
        """Scale by the state alone, without the rows seen since it was set."""
        import torch

        scaled = dict(columns)
        for name, known in self._given.items():
            deviation = np.asarray(np.maximum(np.sqrt(known.variance()), _LEAST_DEVIATION))  # of shape () a number
            around = columns[name].double() - torch.from_numpy(np.asarray(known.mean))
            scaled[name] = (around / torch.from_numpy(deviation)).clamp(-self._clip, self._clip).float()
        return scaled

    def get_state(self) -> State:
        """Return "obs/count", "obs/mean", "obs/m2" and so on for each Box leaf, float64: of all rows known or seen."""
        return _written({name: told.plus(self._seen[name].together()) for name, told in self._told.items()})

    def set_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Scale by `state` from now on, in every lane. It is assumed to contain all updates taken before."""
        for name in self._told:
            self._given[name] = self._told[name] = given = _read(name, state)
            self._known[name] = Moments.zeros(given.mean.shape, (self._width,)).plus(given)

    def take_update(self) -> State:
        """Return what all lanes have seen since the last call, under the names of the state."""
        update = {name: seen.together() for name, seen in self._seen.items()}
        if not any(moments.count.any() for moments in update.values()):
            return {}
        for name, moments in update.items():
            self._told[name] = self._told[name].plus(moments)
            self._known[name] = self._known[name].plus(self._seen[name])
            self._seen[name] = Moments.zeros(moments.mean.shape, (self._width,))
        return _written(update)

    def merge(self, state: State, updates: Sequence[State]) -> State:
        """Return the moments of all rows at once, up to rounding.

        Raises `ValueError` for arrays that cannot be moments, or for moments of different shapes.
        """
        parts = [part for part in (state, *updates) if part]
        leaf_names = {name.rpartition("/")[0] for part in parts for name in part}
        merged = {}
        for name in sorted(leaf_names):
            first, *rest = (_read(name, part) for part in parts)
            for moments in (first, *rest):
                _check(name, moments, first)
            with np.errstate(all="ignore"):  # finite moments may overflow when added
                merged[name] = _sum(rest, first)
            _check(name, merged[name], first)
        return _written(merged)


def _sum(parts: Iterable[Moments], first: Moments) -> Moments:
    for part in parts:
        first = first.plus(part)
    return first


def _read(name: str, state: Mapping[str, NDArray[Any]]) -> Moments:
    return Moments(*(np.array(state[f"{name}/{part}"], np.float64) for part in ("count", "mean", "m2")))


def _check(name: str, moments: Moments, first: Moments) -> None:
    for part in ("count", "mean", "m2"):
        array = getattr(moments, part)
        if array.shape != getattr(first, part).shape:
            raise ValueError(
                f"{name}/{part} has shape {array.shape} in one state, and {getattr(first, part).shape} in another"
            )
        if not np.isfinite(array).all() or (part != "mean" and (array < 0).any()):
            raise ValueError(f"{name}/{part} is {array!r:.100}, which cannot come from any rows")
    if moments.mean.shape != moments.m2.shape or moments.count.shape != (1,) * moments.mean.ndim:
        raise ValueError(
            f"{name} has {moments.count.shape}, {moments.mean.shape}, {moments.m2.shape}; these do not fit together"
        )


def _written(moments: Mapping[str, Moments]) -> State:
    return {
        f"{name}/{part}": np.array(getattr(m, part)) for name, m in moments.items() for part in ("count", "mean", "m2")
    }
