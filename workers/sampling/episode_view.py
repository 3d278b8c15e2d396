"""A view of an episode for callbacks, read from the sampler's buffers only on access."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunk import ChunkEnd, format_episode_id
from headrace.schemas.spaces import Spaces, nest
from headrace.workers.envs.lane import Episode
from headrace.workers.sampling.fragment import ChunkInfos


@dataclass(frozen=True, slots=True)
class OpenRows:
    """The part of an episode that is not cut yet: rows `start:stop` of lane `lane` in a fragment's columns.

    If `hangs`, row `stop` has an action that no step has answered yet.
    """

    columns: Mapping[str, NDArray[Any]]
    observations: Mapping[str, NDArray[Any]]
    infos: ChunkInfos
    lane: int
    start: int
    stop: int
    pending: bool = False


@dataclass(frozen=True, slots=True)
class AnyEpisodeView(ABC):
    """Base of the views of an episode of one or several agents. `end` is ONGOING except in on_episode_end."""

    episode: Episode
    id_high: int
    end: ChunkEnd = field(default=ChunkEnd.ONGOING, kw_only=True)
    made_at: float = field(default_factory=time.perf_counter, kw_only=True)

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of steps since the reset."""

    @property
    @abstractmethod
    def episode_return(self) -> float:
        """Sum of all rewards since the reset."""

    def ended(self, end: ChunkEnd) -> Self:
        """Return this view with its `end`."""
        return replace(self, end=end)

    @property
    def episode_id(self) -> str:
        """The id that the episode's chunks have."""
        return format_episode_id(self.id_high, self.episode.id_low)

    @property
    def env_index(self) -> int:
        """Index of the episode's env in the vector."""
        return self.episode.env_index

    @property
    def seed(self) -> int | None:
        """Seed of the env's reset; None where the reset got none, as of `EpisodeChunk.seed`."""
        return self.episode.reset_seed

    @property
    def custom_data(self) -> dict[str, Any]:
        """The user's own data, kept with the episode until it is over."""
        return self.episode.custom_data

    @property
    def age_s(self) -> float:
        """Seconds since the reset."""
        return self.made_at - self.episode.started_at

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class EpisodeView(AnyEpisodeView):
    """One episode of one agent as it was when the view was made. Do not keep it after the callback.

    `open_rows` is None before the reset and between two samplings.
    """

    spaces: Spaces
    open_rows: OpenRows | None = None

    def __len__(self) -> int:
        """Return the number of steps since the reset."""
        rows = self.open_rows
        return self.episode.steps + (rows.stop - rows.start if rows is not None else 0)

    @property
    def episode_return(self) -> float:
        """Sum of all rewards since the reset."""
        return self.episode.episode_return + float(self.rewards.sum())

    @property
    def rewards(self) -> NDArray[np.float64]:
        """float64 (steps since the last cut,): a copy."""
        rows = self.open_rows
        if rows is None:
            return np.empty(0)
        return rows.columns["rewards"][rows.lane, rows.start : rows.stop].copy()

    @property
    def reward(self) -> float | None:
        """Reward of the newest step; None if there was no step since the last cut."""
        rewards = self.rewards
        return float(rewards[-1]) if len(rewards) else None

    @property
    def observation(self) -> Any:
        """Copy of the newest observation, nested as the space is; None before the reset."""
        rows = self.open_rows
        if rows is None:
            return None
        return nest(self.spaces.observation, {n: c[rows.lane].copy() for n, c in rows.observations.items()}, "obs")

    @property
    def action(self) -> Any:
        """Copy of the policy's newest action, nested as the space is; None if there was none since the last cut."""
        rows = self.open_rows
        if rows is None or rows.stop + rows.pending == rows.start:
            return None
        at = rows.stop - 1 + rows.pending
        newest = {n: c[rows.lane, at] for n, c in rows.columns.items() if n.startswith("actions")}
        return nest(self.spaces.action, {n: value.copy() for n, value in newest.items()}, "actions")

    @property
    def info(self) -> dict[str, Any]:
        """Info of the newest observation; also empty where the config says that infos are not kept."""
        rows = self.open_rows
        return rows.infos.get(rows.stop - rows.start, {}) if rows is not None else {}
