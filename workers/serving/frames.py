"""The way in by ZeroMQ: frames of clients to requests, and replies to frames."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headrace.schemas.errors import HeadraceError, WireError
from headrace.schemas.joined import join, split
from headrace.schemas.messages import read
from headrace.schemas.serving_errors import BadRequestError, MessageTooLargeError
from headrace.schemas.serving_messages import REQUESTS, AnyStep, ChunkShipment, EpisodeStep
from headrace.schemas.wire import Buffer, Caps, WireMessage, decode, encode
from headrace.workers.envs.remote.door import Door
from headrace.workers.serving.records import Reply, refusal_of
from headrace.workers.serving.sessions import Sessions
from headrace.workers.serving.space_values import SpaceValues


@dataclass(frozen=True, slots=True)
class Route:
    """A connection, as an address."""

    route: bytes
    way: FramesDoor = field(compare=False, repr=False)
    joined: bool = field(compare=False, default=False)
    """Its messages come in one frame each, and so do answers."""

    def send(self, reply: Reply) -> None:
        """See `Address`."""
        self.way.send(self, reply)


class FramesDoor:
    """Clients at a ROUTER. For whoever has the desk's turn."""

    def __init__(self, door: Door, values: SpaceValues, max_message_bytes: int) -> None:
        self._door = door
        self._values = values
        self._caps = Caps(payload_bytes=max_message_bytes)

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
        for route, frames in self._door.receive():
            address, request = Route(route, self, joined=len(frames) == 1), 0
            try:
                message = decode(split(frames), self._caps)
                number = message.header.get("request")
                request = number if type(number) is int and 0 <= number < 1 << 63 else 0
                self._hear(message, address, sessions, now)
            except HeadraceError as error:
                self.send(address, refusal_of(error, request))

    def _hear(self, message: WireMessage, address: Route, sessions: Sessions, now: float) -> None:
        kind = REQUESTS.get(message.kind)
        if kind is None:
            raise BadRequestError(f"{message.kind.name} is nothing that a client says")
        request = read(self._values.step if kind is EpisodeStep else kind, message.header)
        observation: Any = None
        action = None
        if isinstance(request, AnyStep):
            observation = self._values.observation.row_of(message.arrays)
            if request.off_policy:
                action = self._values.action.row_of(message.arrays)
        elif isinstance(request, ChunkShipment):
            observation = message.arrays.get("batch")
        sessions.receive(request, address, now, observation, action)

    def close(self) -> None:
        """See `desk.Door`."""
        self._door.close()

    def send(self, to: Route, reply: Reply) -> None:
        """Send it, unless nobody is there any more: then it will be asked for again."""
        frames = self._frames(reply)
        self._door.send(to.route, join(frames) if to.joined else frames)

    def _frames(self, reply: Reply) -> list[Buffer]:
        arrays = {} if reply.action is None else self._values.action.arrays(reply.action)
        try:
            return encode(reply.message.KIND, vars(reply.message), {**arrays, **reply.arrays})
        except WireError as error:
            return refusal_of(MessageTooLargeError(f"the answer cannot be sent: {error}")).message.frames()
