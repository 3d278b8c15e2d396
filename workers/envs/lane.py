"""One place of a vector: its env, the env's episode, how envs are closed, and how seeds to come are saved."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.chunk import UNSEEDED
from headrace.schemas.chunks.task import Task
from headrace.schemas.settings.sampling_settings import ENV_CLOSE_TIMEOUT_S
from headrace.workers.envs.restarts import RestartBudget
from headrace.workers.randomness.seeds import EPISODE_BITS, EnvSeeds, check_array, read_streams, write_streams

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Episode:
    """One episode, and the counts of the part that was already cut into chunks."""

    env_index: int
    number: int
    seed: int
    """Seed of its reset, or UNSEEDED."""
    reset_info: dict[str, Any]
    started_at: float = field(default_factory=time.perf_counter)
    ended_at: float = 0.0
    """Time at which it terminated or was truncated, in `perf_counter` seconds. It may be cut much later."""
    chunks: int = 0
    steps: int = 0
    episode_return: float = 0.0
    seam_info: dict[str, Any] | None = None
    """The info of the observation at which the last chunk was cut."""
    custom_data: dict[str, Any] = field(default_factory=dict)
    """Data that callbacks keep with the episode."""
    trains: bool = True
    """False: its steps are counted, but no learner gets them."""
    last_steps: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Columns of the last steps before the last cut, at most `episode_lookback_horizon`."""
    task: Task | None = None
    """The task with which the env was reset."""
    trail: list[Any] = field(default_factory=list)
    """Its pieces of earlier cuts, if they are kept to repeat it."""

    @property
    def reset_seed(self) -> int | None:
        """The seed for the env's reset; None for UNSEEDED."""
        return None if self.seed == UNSEEDED else self.seed

    @property
    def duration_s(self) -> float:
        """Duration in seconds of an episode that has ended."""
        return self.ended_at - self.started_at

    @property
    def id_low(self) -> int:
        """The lower 64 bits of the episode's id."""
        return self.env_index << EPISODE_BITS | self.number


AnyEpisode = TypeVar("AnyEpisode", bound=Episode)


@dataclass(slots=True, eq=False)
class Lane:
    """A place in the vector. `env` is None before it is built and while it waits to be rebuilt."""

    index: int
    seeds: EnvSeeds
    budget: RestartBudget
    env: gym.Env[Any, Any] | None = None
    episode: Episode | None = None
    episodes_begun: int = 0
    failures: int = 0
    due_at: float | None = None
    """Monotonic time in seconds from which the env may be rebuilt; None while no rebuild is due."""

    def is_due(self, now: float) -> bool:
        """Return whether the lane has waited long enough to be rebuilt; `now` is in monotonic seconds."""
        return self.due_at is not None and self.due_at <= now

    def release(self) -> gym.Env[Any, Any] | None:
        """Return the env, to be closed. The lane has no env and no episode afterwards."""
        env, self.env, self.episode = self.env, None, None
        return env

    def create_episode(self, seed: int | None, kind: type[AnyEpisode]) -> AnyEpisode:
        """Return the episode that a reset with `seed` begins. Its number is used up even if the reset fails."""
        self.episodes_begun += 1
        return kind(self.index, self.episodes_begun - 1, UNSEEDED if seed is None else seed, {})

    def begin_episode(self, episode: Episode, info: dict[str, Any]) -> None:
        """Set `episode`, for which the env was reset, as the lane's episode."""
        episode.reset_info = info
        self.episode = episode


@dataclass(slots=True, eq=False)
class EnvSlot:
    """The env of one lane, None while the lane has none, and its bound `step`."""

    index: int
    env: Any = None
    step: Any = None

    def adopt(self, env: Any) -> None:
        """Take a newly built env."""
        self.env, self.step = env, env.step

    def release(self) -> Any:
        """Return the env, and leave the slot empty."""
        env, self.env, self.step = self.env, None, None
        return env


def close_envs(envs: Iterable[Any], timeout_s: float | None = None) -> None:
    """Close each env in a thread of its own, all within 5 s, or `timeout_s`. Log errors and timeouts as warnings.

    Where no thread can be started, as without memory, abandon the env.
    """
    threads = [
        threading.Thread(target=_close, args=(env,), name=f"close-{type(env).__name__}", daemon=True)
        for env in envs
        if env is not None
    ]
    started = []
    for thread in threads:
        try:
            thread.start()
            started.append(thread)
        except (RuntimeError, MemoryError) as error:
            logger.warning("%s failed (%s); the env is abandoned", thread.name, error)
    limit_s = ENV_CLOSE_TIMEOUT_S if timeout_s is None else timeout_s
    deadline = time.monotonic() + limit_s
    for thread in started:
        thread.join(max(deadline - time.monotonic(), 0.0))
        if thread.is_alive():
            logger.warning("%s did not return within %g s; the env is abandoned", thread.name, limit_s)


def _close(env: Any) -> None:
    try:
        env.close()
    except BaseException as error:  # noqa: BLE001 - a user's env
        logger.warning("closing %s failed (%s: %s); going on without", env, type(error).__name__, error)


def read_lanes(lanes: Sequence[Lane], unstepped: Sequence[bool]) -> dict[str, Any]:
    """Return seeds and episode numbers to come. An `unstepped` episode with a seed is still to come.

    Its number is used again.

    streams: uint64 (lanes, 6). seeds: int64, drawn but unused, lane after lane; each lane's next seed comes last.
    `ahead`, int64 (lanes,), is the number of these seeds for each lane. episodes: int64 (lanes,), numbers used up.
    """
    ahead, numbers = [], []
    for lane, is_unstepped in zip(lanes, unstepped, strict=True):
        episode = lane.episode if is_unstepped and lane.episode and lane.episode.reset_seed is not None else None
        if episode is not None and episode.task is not None and episode.task.group is not None:
            episode = None  # its seed is the group's, not the lane's
        ahead.append([*lane.seeds.ahead, episode.seed] if episode is not None else lane.seeds.ahead)
        numbers.append(lane.episodes_begun if episode is None else episode.number)
    return {
        "streams": read_streams([lane.seeds.stream for lane in lanes]),
        "seeds": np.array([seed for row in ahead for seed in row], np.int64),
        "ahead": np.array([len(row) for row in ahead], np.int64),
        "episodes": np.array(numbers, np.int64),
    }


def write_lanes(lanes: Sequence[Lane], state: Mapping[str, Any]) -> None:
    """Continue `lanes` from the state of `read_lanes`. Episode numbers never decrease, because ids must stay unique.

    The next reset of each env gets a seed, since the env's own random numbers are not part of the state.
    """
    write_streams([lane.seeds.stream for lane in lanes], state["streams"])
    rows = np.split(state["seeds"], np.cumsum(state["ahead"])[:-1])
    for lane, row, number in zip(lanes, rows, state["episodes"].tolist(), strict=True):
        lane.seeds.ahead = row.tolist()
        lane.seeds.renew()
        lane.episodes_begun = max(lane.episodes_begun, number)


def check_lanes(lanes: Sequence[Lane], state: Any) -> None:
    """Raise `StateError` unless `write_lanes` can take `state`."""
    ahead = check_array(state, "lanes", "ahead", np.int64, (len(lanes),))
    check_array(state, "lanes", "streams", np.uint64, (len(lanes), 6))
    check_array(state, "lanes", "episodes", np.int64, (len(lanes),))
    check_array(state, "lanes", "seeds", np.int64, (int(ahead.sum()),))
