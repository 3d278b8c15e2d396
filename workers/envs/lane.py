"""One place of a vector: its env, the episode that the env is in, and how envs are closed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import gymnasium as gym
from numpy.typing import NDArray

from headrace.schemas.chunks.chunk import UNSEEDED
from headrace.schemas.settings.sampling_settings import ENV_CLOSE_TIMEOUT_S
from headrace.workers.envs.restarts import RestartBudget
from headrace.workers.randomness.seeds import EPISODE_BITS, EnvSeeds

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
