"""Where a runner's random streams stand, as arrays: what a restored runner needs to go on as the first would have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.errors import StateError
from headrace.workers.envs.lane import Lane
from headrace.workers.policy.seat_noise import SeatNoise
from headrace.workers.randomness.seeds import BLOCK, NoiseBlocks

LaneNoise = NoiseBlocks | SeatNoise
"""Numbers for lanes in lock-step, or for such as act each in its own time."""

_LOW = (1 << 64) - 1


def read_lanes(lanes: Sequence[Lane], unstepped: Sequence[bool]) -> dict[str, Any]:
    """Seeds and episode numbers to come; an episode that is `unstepped` is yet to come, with its seed and number.

    streams: uint64 (lanes, 6). seeds: int64, those drawn and not used, lane after lane, each lane's next one last; of
    these each lane has `ahead` (int64). episodes: int64 (lanes,), numbers used up.
    """
    ahead, numbers = [], []
    for lane, is_unstepped in zip(lanes, unstepped, strict=True):
        episode = lane.episode if is_unstepped else None
        ahead.append([*lane.seeds.ahead, episode.seed] if episode is not None else lane.seeds.ahead)
        numbers.append(lane.episodes_begun if episode is None else episode.number)
    return {
        "streams": read_streams([lane.seeds.stream for lane in lanes]),
        "seeds": np.array([seed for row in ahead for seed in row], np.int64),
        "ahead": np.array([len(row) for row in ahead], np.int64),
        "episodes": np.array(numbers, np.int64),
    }


def write_lanes(lanes: Sequence[Lane], state: Mapping[str, Any]) -> None:
    """Go on as `read_lanes` found it; episode numbers never go back, since ids are unique for ever."""
    write_streams([lane.seeds.stream for lane in lanes], state["streams"])
    rows = np.split(state["seeds"], np.cumsum(state["ahead"])[:-1])
    for lane, row, number in zip(lanes, rows, state["episodes"].tolist(), strict=True):
        lane.seeds.ahead = row.tolist()
        lane.episodes_begun = max(lane.episodes_begun, number)


def check_lanes(lanes: Sequence[Lane], state: Any) -> None:
    """Raise `StateError` unless `write_lanes` can take `state`."""
    ahead = check_array(state, "lanes", "ahead", np.int64, (len(lanes),))
    check_array(state, "lanes", "streams", np.uint64, (len(lanes), 6))
    check_array(state, "lanes", "episodes", np.int64, (len(lanes),))
    check_array(state, "lanes", "seeds", np.int64, (int(ahead.sum()),))


def read_noise(noise: LaneNoise) -> dict[str, Any]:
    """streams: uint64 (lanes, 6). ahead: float32 (passes, lanes, size), drawn and not used yet.

    Of lanes that act each in its own time, what `SeatNoise.read` gives stands in place of `ahead`.
    """
    drawn = {"ahead": noise.ahead.copy()} if isinstance(noise, NoiseBlocks) else noise.read()
    return {"streams": read_streams(noise.streams), **drawn}


def write_noise(noise: LaneNoise, state: Mapping[str, Any]) -> None:
    """Go on as `read_noise` found it."""
    write_streams(noise.streams, state["streams"])
    if isinstance(noise, NoiseBlocks):
        noise.ahead = state["ahead"]
    else:
        noise.write(np.arange(len(noise.streams)), state["numbers"], state["used"])


def check_noise(noise: LaneNoise, name: str, state: Any) -> None:
    """Raise `StateError` unless `write_noise` can take `state`."""
    lanes = len(noise.streams)
    check_array(state, name, "streams", np.uint64, (lanes, 6))
    if not isinstance(noise, NoiseBlocks):
        check_array(state, name, "numbers", np.float32, (lanes, BLOCK, noise.size))
        used = check_array(state, name, "used", np.int64, (lanes,))
        if (used < 0).any() or (used >= BLOCK).any():
            raise StateError(f"random_streams/{name}/used should be from 0 to below {BLOCK}, got {used!r:.80}")
        return
    ahead = check_array(state, name, "ahead", np.float32, (None, *noise.ahead.shape[1:]))
    if len(ahead) > BLOCK:
        raise StateError(f"random_streams/{name}/ahead has {len(ahead)} passes; {BLOCK} are drawn at once")


def check_array(state: Any, name: str, array: str, dtype: Any, shape: tuple[int | None, ...]) -> NDArray[Any]:
    """`state[array]` if it is of this dtype and shape, where None is any number; raises `StateError`."""
    found = state.get(array) if isinstance(state, Mapping) else None
    if (
        isinstance(found, np.ndarray)
        and found.dtype == dtype
        and len(found.shape) == len(shape)
        and all(wanted in (None, seen) for wanted, seen in zip(shape, found.shape, strict=True))
    ):
        return found
    seen = f"{found.dtype} {found.shape}" if isinstance(found, np.ndarray) else repr(found)
    raise StateError(
        f"random_streams/{name}/{array} should be {np.dtype(dtype)} {shape}, got {seen:.80}: the state is of a runner "
        "with another module or other spaces"
    )


def read_streams(streams: Sequence[np.random.Generator]) -> NDArray[np.uint64]:
    """uint64 (streams, 6): high and low half of state and increment, and the half word that PCG64 may hold back."""
    rows = []
    for stream in streams:
        known: Any = stream.bit_generator.state
        words, inc = known["state"]["state"], known["state"]["inc"]
        rows.append((words >> 64, words & _LOW, inc >> 64, inc & _LOW, known["has_uint32"], known["uinteger"]))
    return np.array(rows, np.uint64)


def write_streams(streams: Sequence[np.random.Generator], rows: NDArray[np.uint64]) -> None:
    """Go on as `read_streams` found them."""
    for stream, row in zip(streams, rows.tolist(), strict=True):
        stream.bit_generator.state = {
            "bit_generator": "PCG64",
            "state": {"state": row[0] << 64 | row[1], "inc": row[2] << 64 | row[3]},
            "has_uint32": row[4],
            "uinteger": row[5],
        }
