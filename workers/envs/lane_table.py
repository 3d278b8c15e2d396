"""The lanes of a vector, and its records of begun episodes and failures, which all vectors share."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from headrace.workers.callbacks import CallbackList
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.checks import heard_info, own_info, own_masks
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.failures import Failure, name_of
from headrace.workers.envs.lane import AnyEpisode, Lane
from headrace.workers.envs.observations import NoteOutside
from headrace.workers.envs.restarts import RestartBudget
from headrace.workers.metrics.totals import RunnerTotals
from headrace.workers.randomness.seeds import EnvSeeds, SeedTree
from headrace.workers.randomness.tasks import TaskDraws

WAIT_SLICE_S = 0.02
"""The longest sleep between two calls of `on_wait`, in seconds."""


class LaneTable:
    """`num_envs` lanes. A lane is live while it has an episode."""

    def __init__(
        self,
        config: EnvRunnerConfig,
        worker_index: int,
        seeds: SeedTree,
        totals: RunnerTotals,
        callbacks: CallbackList | None = None,
    ) -> None:
        self.config = config
        """The config by which the envs were last built."""
        self.worker_index = worker_index
        self.totals = totals
        self.hear = partial(heard_info, totals.note_left_out)
        """Returns an info that came as JSON."""
        self.lanes = [
            Lane(
                i,
                EnvSeeds(stream, config.max_env_seed, every_episode=config.seed_every_episode),
                RestartBudget(config.env_restart_attempts, config.max_env_seed, i),
            )
            for i, stream in enumerate(seeds.resets)
        ]
        self.tasks = TaskDraws(config, worker_index, seeds)
        self.failed: list[Failure] = []
        """Failures that wait for `try_restart`."""
        self.started: list[int] = []
        """Lanes that began an episode since `take_started`."""
        self.contexts: dict[int, EnvContext] = {}
        """The newest context of each lane's env."""
        self._seeds = seeds
        self._callbacks = callbacks

    @property
    def tell(self) -> Callable[[Any], dict[str, Any]]:
        """Return the function that copies what is wanted of an info: all of it, or its masks alone."""
        return partial(own_info if self.config.infos == "all" else own_masks, self.totals.note_left_out)

    @property
    def note_outside(self) -> NoteOutside | None:
        """Return the function that hears of observations outside their Box; None where they are refused."""
        config = self.config
        return None if config.strict_bounds else partial(self.totals.note_outside, name_of(config.env))

    def forget(self) -> None:
        """Drop the records of failures and begun episodes, because all envs are closed."""
        self.failed.clear()
        self.started.clear()

    def disown(self) -> None:
        """Let other runners own the envs of all lanes, because they are closed."""
        for context in self.contexts.values():
            context.life.is_over = True

    def take_started(self) -> list[int]:
        """Return the lanes that began an episode since the last call."""
        started, self.started = self.started, []
        self.tasks.note_begun(started)
        return started

    def create_episode(
        self, lane: Lane, kind: type[AnyEpisode], draw: Callable[[], int | None] | None = None
    ) -> AnyEpisode:
        """Return the episode that the lane's next reset begins, with its seed and task; see `Lane.create_episode`.

        `draw` returns the seed of a lane that has none of its own.
        """
        draw = draw or lane.seeds.next
        if not self.tasks:
            return lane.create_episode(draw(), kind)
        seed, task, self.tasks.begun[lane.index] = self.tasks.peek(lane.index, lane.episodes_begun)
        episode = lane.create_episode(draw() if seed is None else seed, kind)
        episode.task = task
        return episode

    def next_due_s(self) -> float | None:
        """Return the seconds until a waiting lane may be rebuilt, or None if no lane waits."""
        due = [lane.due_at for lane in self.lanes if lane.due_at is not None]
        return max(min(due) - time.monotonic(), 0.0) if due else None

    def sleep_until_due(self) -> None:
        """Sleep until a waiting lane may be rebuilt, at most `WAIT_SLICE_S`."""
        time.sleep(min(self.next_due_s() or 0.0, WAIT_SLICE_S))

    def new_context(self, index: int, *, recreated: bool = False) -> EnvContext:
        """Return the context for the creator of env `index`, with a new seed each time."""
        config = self.config
        context = self.contexts[index] = EnvContext(
            config.env_config,
            worker_index=self.worker_index,
            num_workers=config.num_workers,
            vector_index=index,
            num_envs=config.num_envs,
            recreated=recreated,
            seed=self._seeds.makings.next(index, config.num_envs, config.max_env_seed),
        )
        return context

    def making_seed(self, index: int, recreated: bool) -> int:
        """Return the seed for the creator of env `index`, from a new context. For pools, which make their own."""
        seed = self.new_context(index, recreated=recreated).seed
        assert seed is not None, "a runner has seeds"
        return seed

    def tell_created(self, index: int) -> None:
        """Call `on_environment_created` for the env in lane `index`. Raises `CallbackError`."""
        env = self.lanes[index].env
        if self._callbacks is not None and env is not None:
            unwrapped = getattr(env, "unwrapped", env)
            self._callbacks.call("on_environment_created", env=unwrapped, env_context=self.contexts[index])
