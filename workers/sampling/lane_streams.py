"""Saves and restores the streams of a vector's lanes as arrays: seeds and episode numbers to come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.workers.envs.lane import Lane
from headrace.workers.randomness.seeds import check_array, read_streams, write_streams


def read_lanes(lanes: Sequence[Lane], unstepped: Sequence[bool]) -> dict[str, Any]:
    """Return seeds and episode numbers to come. An `unstepped` episode with a seed is still to come.

    Its number is used again.

    streams: uint64 (lanes, 6). seeds: int64, drawn but unused, lane after lane; each lane's next seed comes last.
    `ahead`, int64 (lanes,), is the number of these seeds for each lane. episodes: int64 (lanes,), numbers used up.
    """
    ahead, numbers = [], []
    for lane, is_unstepped in zip(lanes, unstepped, strict=True):
        episode = lane.episode if is_unstepped and lane.episode and lane.episode.reset_seed is not None else None
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
