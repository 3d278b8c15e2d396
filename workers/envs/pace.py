"""When the envs of a vector are stepped."""

from __future__ import annotations

from enum import Enum


class Pace(Enum):
    """When the envs of a vector are stepped. A sampler chooses how it polls by this value."""

    LOCK_STEP = "all envs step together, and a poll waits for all of them"
    READY = "each env steps when it has replied, and a poll takes those that have"
    EXTERNAL = "episodes drive themselves, and a poll takes the observations that have come"
