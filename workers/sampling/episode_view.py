"""A view of an episode for callbacks, read from the sampler's buffers only on access."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.chunk import ChunkEnd, format_episode_id
from headrace.schemas.chunks.spaces import Spaces, nest
from headrace.schemas.chunks.task import Task
from headrace.workers.envs.lane import Episode
from headrace.workers.sampling.fragment import ChunkInfos

Indices = int | slice | Sequence[int] | None
"""Indices of an episode's steps since the last cut: one, several or all (None). Negative ones count from the newest."""

_ELSEWHERE = {
    "t": "len(episode)",
    "t_started": "len(episode) in on_episode_start, and t_start of the chunks in on_sample_end",
    "total_reward": "episode.episode_return",
    "length": "len(episode)",
    "user_data": "episode.custom_data",
    "add_temporary_timestep_data": "episode.custom_data",
    "get_temporary_timestep_data": "episode.custom_data",
    "get_duration_s": "episode.age_s",
    "duration_s": "episode.age_s",
    "observations": "episode.get_observations()",
    "actions": "episode.get_actions()",
    "infos": "episode.get_infos()",
    "get_extra_model_outputs": "chunk.columns of the chunks in on_sample_end",
    "extra_model_outputs": "chunk.columns of the chunks in on_sample_end",
    "get_state": "the chunks in on_sample_end; a view is for reading only",
    "to_numpy": "the chunks in on_sample_end, whose arrays are NumPy's",
    "finalize": "the chunks in on_sample_end, whose arrays are NumPy's",
    "cut": "the chunks in on_sample_end, which the sampler has cut",
    "concat_episode": "headrace.schemas.chunks.chunk.to_episode(chunks)",
    "slice": "chunk[a:b] of the chunks in on_sample_end",
    "agent_episodes": "episode.agents",
    "get_agents_to_act": "episode.agents_to_act",
    "get_rewards": "episode.agents[agent_id].get_rewards()",
    "get_observations": "episode.agents[agent_id].get_observations()",
    "get_actions": "episode.agents[agent_id].get_actions()",
    "get_infos": "episode.agents[agent_id].get_infos()",
}
"""Names that RLlib's episodes have and a view lacks -> what to take instead."""


@dataclass(frozen=True, slots=True)
class OpenRows:
    """The part of an episode that is not cut yet: rows `start:stop` of lane `lane` in a fragment's columns.

    If `pending`, row `stop` has an action without an answer.
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
    """Base of the views of an episode of one or several agents.

    `end` is ONGOING until the last step. During on_episode_step and on_episode_end of that step, `end` says how the
    episode ends. Where RLlib's episodes have the same attribute, a view also has it under RLlib's name. For other RLlib
    names the AttributeError names the replacement.
    """

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
    def task(self) -> Task | None:
        """The task with which the env was reset; None without one."""
        return self.episode.task

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

    # -- by RLlib's names ---------------------------------------------------------------------------------------------

    @property
    def id_(self) -> str:
        """The same as `episode_id`."""
        return self.episode_id

    @property
    def is_done(self) -> bool:
        """Return whether the episode has terminated or was truncated."""
        return self.end is not ChunkEnd.ONGOING

    @property
    def is_terminated(self) -> bool:
        """Return whether the episode has terminated."""
        return self.end is ChunkEnd.TERMINATED

    @property
    def is_truncated(self) -> bool:
        """Return whether the episode was truncated."""
        return self.end is ChunkEnd.TRUNCATED

    def env_steps(self) -> int:
        """Return the number of steps since the reset, as `len` does. RLlib's counts from the last cut."""
        return len(self)

    def get_return(self) -> float:
        """Return the sum of all rewards since the reset. RLlib's counts from the last cut."""
        return self.episode_return

    def __getattr__(self, name: str) -> Any:
        hint = f"; take {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{hint}", name=name, obj=self)


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
        """Reward of the newest step; None without a step since the last cut."""
        rewards = self.rewards
        return float(rewards[-1]) if len(rewards) else None

    @property
    def observation(self) -> Any:
        """Copy of the newest observation, nested as the space is; None before the reset."""
        return self._observation_at(self._open_steps) if self.open_rows is not None else None

    @property
    def action(self) -> Any:
        """Copy of the policy's newest action, nested as the space is; None without an action since the last cut."""
        return self._action_at(self._open_actions - 1) if self._open_actions else None

    @property
    def info(self) -> dict[str, Any]:
        """Info of the newest observation; also empty where the config says that infos are not kept."""
        return self.open_rows.infos.get(self._open_steps, {}) if self.open_rows is not None else {}

    def get_rewards(self, indices: Indices = None) -> Any:
        """Return rewards since the last cut: float64 (steps,), or that of one index."""
        return self.rewards if indices is None else self.rewards[indices]

    def get_observations(self, indices: Indices = None) -> Any:
        """Return a list of the observations since the last cut, or the observation at one index.

        They are copies, as the module sees them. The list has one more item than there are steps.
        """
        return _pick(self._observation_at, self._open_observations, indices)

    def get_actions(self, indices: Indices = None) -> Any:
        """Return a list of the policy's actions since the last cut, or that of one index, copied."""
        return _pick(self._action_at, self._open_actions, indices)

    def get_infos(self, indices: Indices = None) -> Any:
        """Return a list of the infos that came with `get_observations`, or that of one index."""
        infos = self.open_rows.infos if self.open_rows is not None else {}
        return _pick(lambda at: infos.get(at, {}), self._open_observations, indices)

    @property
    def _open_steps(self) -> int:
        return 0 if self.open_rows is None else self.open_rows.stop - self.open_rows.start

    @property
    def _open_observations(self) -> int:
        return 0 if self.open_rows is None else self._open_steps + 1

    @property
    def _open_actions(self) -> int:
        return 0 if self.open_rows is None else self._open_steps + self.open_rows.pending

    def _observation_at(self, at: int) -> Any:
        """Return the observation before step `at`, counted from the last cut. The newest has no step yet."""
        rows = self.open_rows
        assert rows is not None, "callers ask for steps that are there"
        if at == self._open_steps:
            seen = {name: column[rows.lane].copy() for name, column in rows.observations.items()}
        else:
            seen = {name: rows.columns[name][rows.lane, rows.start + at].copy() for name in rows.observations}
        return nest(self.spaces.observation, seen, "obs")

    def _action_at(self, at: int) -> Any:
        rows = self.open_rows
        assert rows is not None, "callers ask for steps that are there"
        chosen = {n: c[rows.lane, rows.start + at].copy() for n, c in rows.columns.items() if n.startswith("actions")}
        return nest(self.spaces.action, chosen, "actions")


def _pick(item: Callable[[int], Any], count: int, indices: Indices) -> Any:
    """Return item(i) for one index i of `count`, or a list of them for several."""
    if indices is None:
        indices = slice(None)
    if isinstance(indices, slice):
        return [item(at) for at in range(count)[indices]]
    places = [indices] if isinstance(indices, int) else indices
    for place in places:
        if not -count <= place < count:
            raise IndexError(f"index {place} of {count} since the last cut")
    found = [item(place % count) for place in places]
    return found[0] if isinstance(indices, int) else found
