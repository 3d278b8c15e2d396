"""Choice of the lanes that act next when each env has its own pace."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.workers.envs.driver import LaneDriver

Rows = NDArray[np.intp]


def idle_lanes(envs: LaneDriver, width: int) -> Rows:
    """Return the lanes with an episode whose last action was answered, in order."""
    return np.flatnonzero(_live_and_idle(envs, width)[1])


def next_to_act(envs: LaneDriver, width: int) -> Rows:
    """Return the lanes that can act, in order. With halves, return the whole half that waited longest, or no lane."""
    (live, idle), halves = _live_and_idle(envs, width), envs.halves
    if not halves:
        return np.flatnonzero(idle)
    for place, half in enumerate(halves):
        up = half[live[half]]
        if len(up) and idle[up].all():
            halves.append(halves.pop(place))
            return up
    return np.empty(0, np.intp)


def _live_and_idle(envs: LaneDriver, width: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    live = np.zeros(width, np.bool_)
    live[slice(None) if envs.live is None else envs.live] = True
    idle = live.copy()
    idle[list(envs.under_way)] = False
    return live, idle
