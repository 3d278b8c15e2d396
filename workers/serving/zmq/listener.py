"""The ZeroMQ listener: clients' frames become requests for the sessions, and replies become frames."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace.schemas.basics.bounds import MOST_COUNT
from headrace.schemas.basics.counted_warnings import CountedWarnings
from headrace.schemas.errors import EncodeError, HeadraceError
from headrace.schemas.errors.serving import FAILED, MessageTooLargeError, ServingError
from headrace.schemas.frames.wire import (
    Buffer,
    MessageKind,
    WireLimits,
    decode_arrays,
    decode_header,
    encode,
)
from headrace.schemas.messages import read
from headrace.workers.envs.remote.router_port import RouterPort
from headrace.workers.serving.client_sessions import ClientSessions
from headrace.workers.serving.episode_codec import EpisodeCodec
from headrace.workers.serving.serving_messages import REQUESTS, AnyStep, ChunkShipment, ClientRequest
from headrace.workers.serving.session_records import Reply, refusal_of
from headrace.workers.serving.single_frame import join_frames, split_frame
from headrace.workers.serving.space_codec import SpaceCodec, read_each

log = logging.getLogger(__name__)


class ZmqAddress:
    """The route of a connection, and the number of a request. Two addresses with the same route are equal."""

    __slots__ = ("joined", "listener", "number", "route")

    def __init__(self, route: bytes, listener: ZmqListener, *, joined: bool) -> None:
        self.route, self.listener = route, listener
        self.joined = joined
        """True if the request came in one frame; its answer goes out in one frame, too."""
        self.number = 0
        """The client's number of its request; 0 if the header has none that an answer may bear."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ZmqAddress) and self.route == other.route

    def __hash__(self) -> int:
        return hash(self.route)

    def send(self, reply: Reply | Exception) -> None:
        """Encode a reply and send it without waiting."""
        self.listener.send(self, reply)


class _ReceivedStep(NamedTuple):
    """A step whose observation is not checked yet. The observations of all steps are checked together."""

    address: ZmqAddress
    request: AnyStep
    packed: Buffer | None
    """The observation's bytes, if they have the layout of the codec."""
    row: Any = None
    """The observation as a row, otherwise."""
    action: Any = None


class ZmqListener:
    """A `Listener` for the clients of one ROUTER socket."""

    def __init__(self, router_port: RouterPort, codec: EpisodeCodec, max_message_bytes: int) -> None:
        self.router_port = router_port
        self._codec = codec
        self._caps = WireLimits(payload_bytes=max_message_bytes)
        self._layout = codec.observation.layout
        self._warnings = CountedWarnings(log)

    def watch(self, fd: int) -> None:
        """Have `wait` return when `fd` is readable, too."""
        self.router_port.watch(fd)

    def wait(self, timeout_s: float) -> None:
        """Block until a message or a watched descriptor is ready, at most `timeout_s`."""
        self.router_port.wait(timeout_s)

    def deliver_to(self, sessions: ClientSessions, now: float) -> None:
        """Hand all requests that have arrived to the sessions, and refuse messages that cannot be read."""
        steps: list[_ReceivedStep] = []
        most = max(len(sessions), 1)  # a client has one request under way; to look for more costs time for nothing
        for route, frames in self.router_port.receive(most, has_news=lambda: bool(steps)):
            address = ZmqAddress(route, self, joined=len(frames) == 1)
            try:
                parts = split_frame(frames)
                kind, header = decode_header(parts, self._caps)
                number = header.get("request")
                address.number = number if type(number) is int and 0 <= number <= MOST_COUNT else 0
                if kind is MessageKind.EPISODE_STEP:
                    steps.append(self._read_step(header, parts, address))
                else:
                    self._deliver_steps(steps, sessions, now)  # requests stay in order
                    request, batch = self._read_other(kind, header, parts)
                    sessions.receive(request, address, now, batch)
            except Exception as error:  # noqa: BLE001  one client's message must not end the thread that serves all
                address.send(error)
        self._deliver_steps(steps, sessions, now)

    def _read_step(self, header: dict[str, Any], parts: Sequence[Buffer], address: ZmqAddress) -> _ReceivedStep:
        request = read(self._codec.step_message, header)
        packed = self._layout.payload_of(header, parts) if self._layout is not None else None
        if packed is not None and not request.off_policy:
            return _ReceivedStep(address, request, packed)
        arrays = decode_arrays(header, parts, self._caps)
        action = self._codec.action.row_from_arrays(arrays) if request.off_policy else None
        return _ReceivedStep(address, request, None, self._codec.observation.row_from_arrays(arrays), action)

    def _deliver_steps(self, steps: list[_ReceivedStep], sessions: ClientSessions, now: float) -> None:
        packed = [step.packed for step in steps if step.packed is not None]
        rows = iter(self._read_packed(packed) if packed else ())
        for step in steps:
            row = step.row if step.packed is None else next(rows)
            try:
                if isinstance(row, Exception):
                    raise row
                sessions.step(step.request, step.address, now, row, step.action)
            except Exception as error:  # noqa: BLE001  as in `deliver_to`
                step.address.send(error)
        steps.clear()

    def _read_packed(self, packed: list[Buffer]) -> Sequence[Any]:
        """Return the row, or the error, of each observation."""
        observation = self._codec.observation
        assert isinstance(observation, SpaceCodec), "a codec of several agents has no layout"
        return read_each(observation.rows_from_payloads, packed)

    def _read_other(
        self, kind: MessageKind, header: dict[str, Any], parts: Sequence[Buffer]
    ) -> tuple[ClientRequest, Any]:
        arrays = decode_arrays(header, parts, self._caps)
        expected: type[ClientRequest] | None = REQUESTS.get(kind)
        if expected is None:
            raise ServingError(f"{kind.name} is not a message that a client sends", "bad_request")
        return read(expected, header), arrays.get("batch") if expected is ChunkShipment else None

    # -- sending ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the port."""
        self.router_port.close()

    def send(self, to: ZmqAddress, reply: Reply | Exception) -> None:
        """Send a reply without waiting. Drop it if the connection is gone: the client will repeat its request.

        An error that is not for the client is logged, and the client is told of that.
        """
        if isinstance(reply, Exception) and not isinstance(reply, HeadraceError):
            self._warnings.failed("a request of a client was dropped: the server failed at it", reply)
            reply = ServingError(FAILED)
        frames = self._frames(refusal_of(reply) if isinstance(reply, HeadraceError) else reply, to.number)
        self.router_port.send(to.route, join_frames(frames) if to.joined else frames)

    def _frames(self, reply: Reply, number: int) -> list[Buffer]:
        codec, fields = self._codec.action, {**reply.fields, "request": number}
        try:
            if reply.action is None:
                return encode(reply.kind, fields, reply.arrays)
            arrays = codec.to_arrays(reply.action)
            return (codec.layout.encode if codec.layout is not None else encode)(reply.kind, fields, arrays)
        except EncodeError as error:
            refused = refusal_of(MessageTooLargeError(f"the answer cannot be sent: {error}"))
            return encode(refused.kind, {**refused.fields, "request": number})
