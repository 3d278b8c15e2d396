"""Messages between a pool and one host: orders go out, answers come in. The pool has lanes, the host places.

`RemoteColumns` hold the rows of the lanes, which messages carry by place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.spaces import Spaces, column_dtype, leaf_shape, leaves
from headrace.schemas.errors import DecodeError
from headrace.schemas.frames.wire import Buffer, MessageKind, encode
from headrace.workers.envs.backend import Replies
from headrace.workers.envs.bounds import unsound_rewards
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.process.control import Command
from headrace.workers.envs.process.error_json import error_from_json
from headrace.workers.envs.remote.env_messages import EnvAnswers
from headrace.workers.envs.remote.peer import EnvHostPeer

Rows = list[tuple[NDArray[Any], list[int], NDArray[Any]]]
"""(column, places, one row for each place)."""


class RemoteColumns:
    """The columns of `width` lanes. Columns of observations have the names by which the policy knows them."""

    def __init__(self, spaces: Spaces, width: int) -> None:
        def columns(root: str, space: Any) -> dict[str, NDArray[Any]]:
            return {
                name: np.zeros((width, *leaf_shape(leaf)), column_dtype(leaf)) for name, leaf in leaves(space, root)
            }

        self.observations = columns("obs", spaces.observation)
        self.first = columns("obs", spaces.observation)
        self.actions = columns("actions", spaces.action)
        self.rewards = np.zeros(width, np.float64)

    def action_rows(self, lanes: Sequence[int]) -> dict[str, NDArray[Any]]:
        """Return a copy of the actions of `lanes`, in order."""
        return {name: column[lanes] for name, column in self.actions.items()}

    def check(self, told: EnvAnswers, arrays: Mapping[str, NDArray[Any]]) -> Rows:
        """Return the arrays of a message as rows of the columns. Raises `DecodeError` for arrays that do not fit."""
        began = [place for place, _ in told.began]
        rows: Rows = []
        expected = {"rewards": (self.rewards, told.stepped)} if told.stepped else {}
        if told.stepped:
            expected |= {name: (column, told.stepped) for name, column in self.observations.items()}
        if began:
            expected |= {f"first{name[3:]}": (column, began) for name, column in self.first.items()}
        if arrays.keys() != expected.keys():
            raise DecodeError(
                "bad_message", f"answers with arrays {sorted(arrays)!r:.200}, not {sorted(expected)!r:.200}"
            )
        for name, (column, places) in expected.items():
            given, shape = arrays[name], (len(places), *column.shape[1:])
            if given.shape != shape or given.dtype != column.dtype:
                seen, due = f"{given.dtype} {given.shape}", f"{column.dtype} {shape}"
                raise DecodeError("bad_message", f"array {name!r:.80} of answers is {seen}, not {due}")
            rows.append((column, places, given))
        if told.stepped and len(unsound_rewards(arrays["rewards"])):
            raise DecodeError("bad_message", "rewards of answers are not finite, or too large")
        return rows

    def write(self, rows: Rows, lanes: Mapping[int, int]) -> None:
        """Write the rows of the places in `lanes`, each to the place's lane."""
        for column, places, given in rows:
            known = [i for i, place in enumerate(places) if place in lanes]
            column[[lanes[places[i]] for i in known]] = given[known]


def encode_orders(
    host: EnvHostPeer, places: Sequence[int], columns: RemoteColumns, tasks: Mapping[int, Mapping[str, Any]]
) -> list[Buffer]:
    """Return the frames of the orders under way at `places`. A second call gives the same frames."""
    orders, stepping = [], []
    for place in places:
        order, lane = host.under_way[place], host.lanes[place]
        assert lane is not None, "only a place with a lane is ordered anything"
        orders.append((place, order.number, int(order.command), order.seed, lane))
        if order.command is Command.STEP:
            stepping.append(lane)
    # An `EnvOrders`, not validated, because that costs time each step.
    header: dict[str, Any] = {"life": host.life, "orders": orders}
    if tasks:
        header["tasks"] = [(order[0], tasks[order[4]]) for order in orders if order[4] in tasks]
    return encode(MessageKind.ENV_ORDERS, header, columns.action_rows(stepping) if stepping else None)


def take_replies(
    host: EnvHostPeer,
    told: EnvAnswers,
    arrays: Mapping[str, NDArray[Any]],
    columns: RemoteColumns,
    replies: Replies,
) -> None:
    """Add the answers to orders under way to `replies`. Ignore repeated answers.

    Raises `DecodeError` for arrays that do not fit.
    """
    rows = columns.check(told, arrays)
    errors = [(place, at, returned, error_from_json(error)) for place, at, returned, error in told.failures]
    lanes: dict[int, int] = {}
    for place, number in told.answers:
        lane = host.lanes[place] if place < len(host.lanes) else None
        if lane is not None and host.settle(place, number):
            lanes[place] = lane
    columns.write(rows, lanes)
    failed = {place for place, at, _, _ in errors if at == "step"}
    host.has_stepped = host.has_stepped or not failed.issuperset(told.stepped)
    replies.stepped += [lanes[place] for place in told.stepped if place in lanes and place not in failed]
    replies.infos += [(lanes[place], info) for place, info in told.infos if place in lanes and place not in failed]
    replies.ended += [(lanes[place], ChunkEnd(end)) for place, end in told.ended if place in lanes]
    terminated = {place for place, end in told.ended if ChunkEnd(end) is ChunkEnd.TERMINATED}
    replies.also_truncated += [lanes[place] for place in terminated.intersection(told.also_truncated) if place in lanes]
    replies.began += [(lanes[place], info or {}) for place, info in told.began if place in lanes]
    replies.built += [lanes[place] for place in told.built if place in lanes]
    replies.failures += [
        Failure(lanes[place], error, stepped=returned, at=at) for place, at, returned, error in errors if place in lanes
    ]
