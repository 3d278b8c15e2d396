"""The listener in by ZeroMQ: frames of clients to requests, and replies to frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.schemas.errors import HeadraceError, WireError
from headrace.schemas.joined import join, split
from headrace.schemas.messages import read
from headrace.schemas.serving_errors import BadRequestError, MessageTooLargeError
from headrace.schemas.serving_messages import REQUESTS, ChunkShipment, ClientRequest
from headrace.schemas.wire import (
    Buffer,
    Caps,
    MessageKind,
    decode_arrays,
    decode_header,
    encode,
)
from headrace.workers.envs.remote.router_port import RouterPort
from headrace.workers.serving.client_sessions import ClientSessions
from headrace.workers.serving.episode_codec import EpisodeCodec
from headrace.workers.serving.session_records import Reply, refusal_of
from headrace.workers.serving.space_codec import SpaceCodec

_NO_HEADER: dict[str, Any] = {}


class ZmqAddress:
    """A connection, as an address."""

    __slots__ = ("joined", "listener", "route")

    def __init__(self, route: bytes, listener: ZmqListener, *, joined: bool) -> None:
        self.route, self.listener = route, listener
        self.joined = joined
        """Its messages come in one frame each, and so do answers."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ZmqAddress) and self.route == other.route

    def __hash__(self) -> int:
        return hash(self.route)

    def send(self, reply: Reply) -> None:
        """See `Address`."""
        self.listener.send(self, reply)


class _ReceivedStep:
    """A step that was read; what is seen is looked at together with that of others."""

    __slots__ = ("action", "address", "packed", "request", "row")

    def __init__(self, address: ZmqAddress, request: Any) -> None:
        self.address, self.request = address, request
        self.packed: Buffer | None = None
        """What is seen, where it lies as the layout has it."""
        self.row: Any = None
        """Otherwise what is seen, as a row."""
        self.action: Any = None


class ZmqListener:
    """Clients at a ROUTER. For whoever has the desk's turn."""

    def __init__(self, router_port: RouterPort, codec: EpisodeCodec, max_message_bytes: int) -> None:
        self._router_port = router_port
        self._codec = codec
        self._caps = Caps(payload_bytes=max_message_bytes)
        self._layout = codec.observation.layout

    def watch(self, fd: int) -> None:
        """See `Listener`."""
        self._router_port.watch(fd)

    @property
    def fds(self) -> list[int]:
        """See `RouterPort`."""
        return self._router_port.fds

    def has_message(self) -> bool:
        """Whether one waits. Lets in who may come in."""
        return self._router_port.wait(0.0)

    def wait(self, timeout_s: float) -> None:
        """See `Listener`."""
        self._router_port.wait(timeout_s)

    def deliver_to(self, sessions: ClientSessions, now: float) -> None:
        """Each message is a request, or is refused where it came from."""
        steps: list[_ReceivedStep] = []
        each_one = max(len(sessions), 1)  # clients ask one thing at a time: looking for more costs, and is in vain
        for route, frames in self._router_port.receive(each_one):
            address, header = ZmqAddress(route, self, joined=len(frames) == 1), _NO_HEADER
            try:
                parts = split(frames)
                kind, header = decode_header(parts, self._caps)
                if kind is MessageKind.EPISODE_STEP:
                    steps.append(self._read_step(header, parts, address))
                else:
                    self._deliver_steps(steps, sessions, now)  # what came before it
                    self._deliver_other(kind, header, parts, address, sessions, now)
            except HeadraceError as error:
                self.send(address, refusal_of(error, _number_of(header)))
        self._deliver_steps(steps, sessions, now)

    def _read_step(self, header: dict[str, Any], parts: Sequence[Buffer], address: ZmqAddress) -> _ReceivedStep:
        step = _ReceivedStep(address, read(self._codec.step_message, header))
        if self._layout is not None:
            step.packed = self._layout.payload_of(header, parts)
        if step.packed is not None and not step.request.off_policy:
            return step
        arrays = decode_arrays(header, parts, self._caps)
        step.packed, step.row = None, self._codec.observation.row_from_arrays(arrays)
        if step.request.off_policy:
            step.action = self._codec.action.row_from_arrays(arrays)
        return step

    def _deliver_steps(self, steps: list[_ReceivedStep], sessions: ClientSessions, now: float) -> None:
        packed = [step.packed for step in steps if step.packed is not None]
        rows = iter(self._read_packed(packed) if packed else ())
        for step in steps:
            row = step.row if step.packed is None else next(rows)
            if isinstance(row, HeadraceError):
                self.send(step.address, refusal_of(row, step.request.request))
            else:
                sessions.step(step.request, step.address, now, row, step.action)
        steps.clear()

    def _read_packed(self, packed: list[Buffer]) -> Sequence[Any]:
        observation = self._codec.observation
        assert isinstance(observation, SpaceCodec), "of several agents nothing lies alike"
        return observation.rows_from_payloads(packed)

    def _deliver_other(
        self,
        kind: MessageKind,
        header: dict[str, Any],
        parts: Sequence[Buffer],
        address: ZmqAddress,
        sessions: ClientSessions,
        now: float,
    ) -> None:
        arrays = decode_arrays(header, parts, self._caps)
        asked: type[ClientRequest] | None = REQUESTS.get(kind)
        if asked is None:
            raise BadRequestError(f"{kind.name} is nothing that a client says")
        request = read(asked, header)
        sessions.receive(request, address, now, arrays.get("batch") if asked is ChunkShipment else None)

    # -- out ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """See `Listener`."""
        self._router_port.close()

    def send(self, to: ZmqAddress, reply: Reply) -> None:
        """Send it, unless nobody is there any more: then it will be asked for again."""
        frames = self._frames(reply)
        self._router_port.send(to.route, join(frames) if to.joined else frames)

    def _frames(self, reply: Reply) -> list[Buffer]:
        codec = self._codec.action
        try:
            if reply.action is None:
                return encode(reply.kind, reply.fields, reply.arrays)
            arrays = codec.to_arrays(reply.action)
            return (codec.layout.encode if codec.layout is not None else encode)(reply.kind, reply.fields, arrays)
        except WireError as error:
            refused = refusal_of(MessageTooLargeError(f"the answer cannot be sent: {error}"))
            return encode(refused.kind, refused.fields)


def _number_of(header: dict[str, Any]) -> int:
    """By which the client knows its request; 0 where it gave none."""
    number = header.get("request")
    return number if type(number) is int and 0 <= number < 1 << 63 else 0
