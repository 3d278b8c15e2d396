"""The pace of a vector's envs: all in one step, each when it is ready, or each when its caller drives it."""

from __future__ import annotations

from enum import Enum


class Pace(Enum):
    """The times at which the envs of a vector step."""

    LOCK_STEP = "lock_step"
    """Each poll steps every env that is up, and waits for all of them."""
    READY = "ready"
    """Each poll sends actions to the envs that are ready, and takes the answers that have come."""
    EXTERNAL = "external"
    """Episodes drive themselves: each poll takes their calls and answers them."""
