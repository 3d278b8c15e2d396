"""Says when a sample is complete: enough steps were taken, or enough episodes have ended. Checks its size, too."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.schemas.errors import ConfigError
from headrace.workers.metrics.totals import RunnerTotals
from headrace.workers.sampling.sampler import Sampler

Enough = Callable[[], bool]
"""Asked before each poll; True ends the sample."""


def enough_steps(steps: int, sampler: Sampler[Any, Any], totals: RunnerTotals, *, of_agents: bool) -> Enough:
    """Return a function that says whether `steps` more env steps, or steps `of_agents`, were taken.

    In lock-step it counts polls and includes steps lost by failures, so that no cut depends on another env's failure.
    It leaves out the polls that a native vector uses to reset a lane. Where each lane has its own pace it counts
    answers. Agent steps are counted as they are taken, because polls do not tell their number.
    """
    if of_agents:
        goal = totals.stepped + steps
        return lambda: totals.stepped >= goal
    taken, width, begun = sampler.steps, len(sampler.envs.lanes), itertools.count()
    if taken.answered is not None:
        last = taken.answered + steps
        return lambda: (taken.answered or 0) >= last
    before = taken.reset_polls
    return lambda: next(begun) * width - (taken.reset_polls - before) >= steps


def enough_episodes(episodes: int, sampler: Sampler[Any, Any]) -> Enough:
    """Return a function that says whether `episodes` episodes have finished since the last cut."""
    return lambda: sampler.steps.episodes_ended >= episodes


class SampleSizeError(ConfigError, AssertionError):
    """`sample` was called with an invalid size."""


def check_size(num_timesteps: int | None, num_episodes: int | None) -> None:
    """Raise `SampleSizeError` if both sizes are given, or one is negative or not a whole number."""
    if num_timesteps is not None and num_episodes is not None:
        raise SampleSizeError(
            f"num_timesteps = {num_timesteps} and num_episodes = {num_episodes}: give only one of them"
        )
    for name, size in (("num_timesteps", num_timesteps), ("num_episodes", num_episodes)):
        if size is None:
            continue
        if isinstance(size, bool) or not isinstance(size, int | np.integer):
            raise SampleSizeError(f"{name} = {size!r:.80} is no whole number; give an int")
        if size < 0:
            raise SampleSizeError(f"{name} = {size} is negative; give 0 or more")
