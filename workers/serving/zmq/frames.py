"""The way in by ZeroMQ: frames of clients to requests, and replies to frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.schemas.errors import HeadraceError, WireError
from headrace.schemas.messages import read
from headrace.schemas.serving_errors import BadRequestError, MessageTooLargeError
from headrace.schemas.serving_messages import REQUESTS, ChunkShipment, ClientRequest
from headrace.schemas.single_frame import join_frames, split_frame
from headrace.schemas.wire import (
    Buffer,
    MessageKind,
    WireLimits,
    decode_arrays,
    decode_header,
    encode,
)
from headrace.workers.envs.remote.router_port import Door
from headrace.workers.serving.records import Reply, refusal_of
from headrace.workers.serving.sessions import Sessions
from headrace.workers.serving.space_values import SpaceValues
from headrace.workers.serving.values import Values

_NO_HEADER: dict[str, Any] = {}


class Route:
    """A connection, as an address."""

    __slots__ = ("joined", "route", "way")

    def __init__(self, route: bytes, way: FramesDoor, *, joined: bool) -> None:
        self.route, self.way = route, way
        self.joined = joined
        """Its messages come in one frame each, and so do answers."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Route) and self.route == other.route

    def __hash__(self) -> int:
        return hash(self.route)

    def send(self, reply: Reply) -> None:
        """See `Address`."""
        self.way.send(self, reply)


class _Step:
    """A step that was read; what is seen is looked at together with that of others."""

    __slots__ = ("action", "address", "packed", "request", "row")

    def __init__(self, address: Route, request: Any) -> None:
        self.address, self.request = address, request
        self.packed: Buffer | None = None
        """What is seen, where it lies as the layout has it."""
        self.row: Any = None
        """Otherwise what is seen, as a row."""
        self.action: Any = None


class FramesDoor:
    """Clients at a ROUTER. For whoever has the desk's turn."""

    def __init__(self, door: Door, values: SpaceValues, max_message_bytes: int) -> None:
        self._door = door
        self._values = values
        self._limits = WireLimits(payload_bytes=max_message_bytes)
        self._layout = values.observation.layout

    def watch(self, fd: int) -> None:
        """See `desk.Door`."""
        self._door.watch(fd)

    @property
    def fds(self) -> list[int]:
        """See `remote.door.Door`."""
        return self._door.fds

    def has_message(self) -> bool:
        """Whether one waits. Lets in who may come in."""
        return self._door.wait(0.0)

    def wait(self, timeout_s: float) -> None:
        """See `desk.Door`."""
        self._door.wait(timeout_s)

    def take_in(self, sessions: Sessions, now: float) -> None:
        """Each message is a request, or is refused where it came from."""
        steps: list[_Step] = []
        each_one = max(len(sessions), 1)  # clients ask one thing at a time: looking for more costs, and is in vain
        for route, frames in self._door.receive(each_one):
            address, header = Route(route, self, joined=len(frames) == 1), _NO_HEADER
            try:
                parts = split_frame(frames)
                kind, header = decode_header(parts, self._limits)
                if kind is MessageKind.EPISODE_STEP:
                    steps.append(self._read_step(header, parts, address))
                else:
                    self._give(steps, sessions, now)  # what came before it
                    self._hear(kind, header, parts, address, sessions, now)
            except HeadraceError as error:
                self.send(address, refusal_of(error, _number_of(header)))
        self._give(steps, sessions, now)

    def _read_step(self, header: dict[str, Any], parts: Sequence[Buffer], address: Route) -> _Step:
        step = _Step(address, read(self._values.step, header))
        if self._layout is not None:
            step.packed = self._layout.payload_of(header, parts)
        if step.packed is not None and not step.request.off_policy:
            return step
        arrays = decode_arrays(header, parts, self._limits)
        step.packed, step.row = None, self._values.observation.row_of(arrays)
        if step.request.off_policy:
            step.action = self._values.action.row_of(arrays)
        return step

    def _give(self, steps: list[_Step], sessions: Sessions, now: float) -> None:
        packed = [step.packed for step in steps if step.packed is not None]
        rows = iter(self._unpack(packed) if packed else ())
        for step in steps:
            row = step.row if step.packed is None else next(rows)
            if isinstance(row, HeadraceError):
                self.send(step.address, refusal_of(row, step.request.request))
            else:
                sessions.step(step.request, step.address, now, row, step.action)
        steps.clear()

    def _unpack(self, packed: list[Buffer]) -> Sequence[Any]:
        observation = self._values.observation
        assert isinstance(observation, Values), "of several agents nothing lies alike"
        return observation.unpack(packed)

    def _hear(
        self,
        kind: MessageKind,
        header: dict[str, Any],
        parts: Sequence[Buffer],
        address: Route,
        sessions: Sessions,
        now: float,
    ) -> None:
        arrays = decode_arrays(header, parts, self._limits)
        asked: type[ClientRequest] | None = REQUESTS.get(kind)
        if asked is None:
            raise BadRequestError(f"{kind.name} is nothing that a client says")
        request = read(asked, header)
        sessions.receive(request, address, now, arrays.get("batch") if asked is ChunkShipment else None)

    # -- out ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """See `desk.Door`."""
        self._door.close()

    def send(self, to: Route, reply: Reply) -> None:
        """Send it, unless nobody is there any more: then it will be asked for again."""
        frames = self._frames(reply)
        self._door.send(to.route, join_frames(frames) if to.joined else frames)

    def _frames(self, reply: Reply) -> list[Buffer]:
        values = self._values.action
        try:
            if reply.action is None:
                return encode(reply.kind, reply.fields, reply.arrays)
            arrays = values.arrays(reply.action)
            return (values.layout.encode if values.layout is not None else encode)(reply.kind, reply.fields, arrays)
        except WireError as error:
            refused = refusal_of(MessageTooLargeError(f"the answer cannot be sent: {error}"))
            return encode(refused.kind, refused.fields)


def _number_of(header: dict[str, Any]) -> int:
    """By which the client knows its request; 0 where it gave none."""
    number = header.get("request")
    return number if type(number) is int and 0 <= number < 1 << 63 else 0
