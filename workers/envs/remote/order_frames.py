"""Messages between a pool and one host: orders go out, answers come in. The pool has lanes, the host places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.errors import DecodeError
from headrace.schemas.frames.wire import Buffer, MessageKind, encode
from headrace.schemas.messages.env_messages import EnvAnswers
from headrace.workers.envs.backend import Replies
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.process.control import Command
from headrace.workers.envs.process.error_json import error_from_json
from headrace.workers.envs.remote.columns import RemoteColumns
from headrace.workers.envs.remote.peer import EnvHostPeer


def encode_orders(host: EnvHostPeer, places: Sequence[int], columns: RemoteColumns) -> list[Buffer]:
    """Return the frames of the orders under way at `places`. A second call gives the same frames."""
    orders, stepping = [], []
    for place in places:
        order, lane = host.under_way[place], host.lanes[place]
        assert lane is not None, "only a place with a lane is ordered anything"
        orders.append((place, order.number, int(order.command), order.seed, lane))
        if order.command is Command.STEP:
            stepping.append(lane)
    header = {"life": host.life, "orders": orders}  # an `EnvOrders`, not validated, because that costs time each step
    return encode(MessageKind.ENV_ORDERS, header, columns.action_rows(stepping) if stepping else None)


def take_replies(
    host: EnvHostPeer,
    told: EnvAnswers,
    arrays: Mapping[str, NDArray[Any]],
    columns: RemoteColumns,
    replies: Replies,
) -> None:
    """Add the answers to orders under way to `replies`. Ignore other answers, which are repeats.

    Raises `DecodeError` for a bad message. Some of the host's orders may then count as answered.
    """
    rows = columns.check(told, arrays)
    errors = [(place, at, returned, _error(error)) for place, at, returned, error in told.failures]
    lanes: dict[int, int] = {}
    for place, number in told.answers:
        if place < len(host.lanes) and (lane := host.lanes[place]) is not None and host.settle(place, number):
            lanes[place] = lane
    columns.write(rows, lanes)
    failed = {place for place, at, _, _ in errors if at == "step"}
    replies.stepped += [lanes[place] for place in told.stepped if place in lanes and place not in failed]
    replies.infos += [(lanes[place], info) for place, info in told.infos if place in lanes and place not in failed]
    replies.ended += [(lanes[place], ChunkEnd(end)) for place, end in told.ended if place in lanes]
    replies.began += [(lanes[place], info or {}) for place, info in told.began if place in lanes]
    replies.built += [lanes[place] for place in told.built if place in lanes]
    replies.failures += [
        Failure(lanes[place], error, stepped=returned, at=at) for place, at, returned, error in errors if place in lanes
    ]


def _error(told: Mapping[str, Any]) -> Exception:
    try:
        return error_from_json(told)
    except (KeyError, TypeError, ValueError) as error:
        raise DecodeError("bad_message", f"a failure that tells no error: {told!r:.200}") from error
