"""The sessions of a policy server's clients. All I/O is the addresses'.

A request comes in with the time and the address for its answer.
`session_episodes.py` handles the requests about an episode. A session that is silent for its lease
ends, and its episodes are aborted. All memory is bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from headrace.schemas.accounts.worker_figures import ServingFigures
from headrace.schemas.credentials.tokens import same_token
from headrace.schemas.errors.serving import (
    ServingError,
    UnknownSessionError,
)
from headrace.workers.serving.acting_channel import ActingChannel
from headrace.workers.serving.serving_messages import (
    AnyStep,
    ChunkShipment,
    ClientBye,
    ClientHeartbeat,
    ClientHello,
    ClientPull,
    ClientRequest,
    ClientWelcome,
    EpisodeAbort,
    EpisodeStart,
)
from headrace.workers.serving.session_episodes import CLIENT_LEFT, ServedEpisodes, SessionEpisodes
from headrace.workers.serving.session_records import (
    Address,
    Reply,
    ServingLimits,
    SessionRecord,
    ack_of,
)

CLIENT_LOST = "client_lost"
"""The reason of aborted episodes whose client was silent for its lease."""


class ClientSessions:
    """All sessions of one server.

    One thread at a time may call. `post` has that thread call what another thread gives it, such as the sampler's.
    `waiting_for` says what the sampler waits for while it takes no steps; "" while it takes them.
    """

    def __init__(
        self,
        episodes: ServedEpisodes,
        spaces: dict[str, Any],
        post: Callable[[Callable[[], None]], None],
        limits: ServingLimits | None = None,
        channel: ActingChannel | None = None,
        waiting_for: Callable[[], str] = str,
    ) -> None:
        self.limits = limits or ServingLimits()
        self._episodes = SessionEpisodes(episodes, post, self.limits)
        self._spaces = spaces
        self._post, self._channel = post, channel
        self._waiting_for = waiting_for
        self._sessions: OrderedDict[str, SessionRecord] = OrderedDict()
        """Ordered by the time of their last request, oldest first."""
        self.requests = 0
        """Number of requests, heartbeats of clients left out."""
        self._ticked_at: float | None = None
        self._judge_at = 0.0

    def __len__(self) -> int:
        """Return the number of open sessions."""
        return len(self._sessions)

    def counts(self) -> dict[str, int]:
        """Return the numbers of sessions, of their open episodes, and of finished episodes that are remembered."""
        sessions = self._sessions.values()
        return {
            "sessions": len(self._sessions),
            "episodes": sum(len(session.open) for session in sessions),
            "remembered": sum(len(session.ended) for session in sessions),
        }

    def figures(self) -> ServingFigures:
        """Return what was served so far. Another thread may call it."""
        p50, p95 = self._episodes.latency_quantiles()
        return ServingFigures(clients=len(self._sessions), requests=self.requests, latency_p50_s=p50, latency_p95_s=p95)

    # -- in and out ---------------------------------------------------------------------------------------------------

    def receive(self, request: ClientRequest, address: Address, now: float, batch: Any = None) -> None:
        """Handle any request but a step. `batch` is the array of that name in a shipment of chunks.

        Raises the `HeadraceError` with which the request is refused.
        """
        self.requests += not isinstance(request, ClientHeartbeat)
        reply = self._do(request, address, now, batch)
        if reply is not None:
            address.send(reply)

    def step(self, step: AnyStep, address: Address, now: float, observation: Any, action: Any = None) -> None:
        """Take a step. `observation`, and `action` where the client chose one, are rows of their spaces.

        Raises as `receive` does.
        """
        self.requests += 1
        reply = self._episodes.step(self._session_of(step, now), step, address, observation, action)
        if reply is not None:
            address.send(reply)

    def tick(self, now: float) -> None:
        """End the sessions that were silent for too long. Call it several times per lease.

        After a pause between two calls no session ends for a while: requests may still lie unread in a socket.
        """
        pause = self.limits.lease_s / 4
        if self._ticked_at is not None and now - self._ticked_at > pause:
            self._judge_at = now + pause
        self._ticked_at = now
        while self._sessions and now >= self._judge_at:
            name, session = next(iter(self._sessions.items()))
            if now - session.heard_at <= self.limits.lease_s:
                return
            self._close(name, CLIENT_LOST)

    def close(self) -> None:
        """End all sessions, as if their clients had left."""
        for name in list(self._sessions):
            self._close(name, CLIENT_LEFT)

    # -- requests -----------------------------------------------------------------------------------------------------

    def _do(self, request: ClientRequest, address: Address, now: float, batch: Any) -> Reply | None:
        if isinstance(request, ClientHello):
            return self._open(request, now)
        if isinstance(request, ClientBye) and request.session not in self._sessions:
            return ack_of()  # a repeated goodbye
        session = self._session_of(request, now)
        match request:
            case EpisodeStart():
                return self._episodes.start(session, request)
            case EpisodeAbort():
                self._episodes.abort(session, request)
            case ClientBye():
                self._close(request.session, CLIENT_LEFT)
            case ClientPull() | ChunkShipment():
                if self._channel is None:
                    message = "clients do not act by themselves here; set serving.client_inference = true"
                    raise ServingError(message, "bad_request")
                if isinstance(request, ClientPull):
                    return self._channel.part(request)
                return self._ship(self._channel, session, request, address, batch)
            case ClientHeartbeat():
                return ack_of(self._waiting_for())
            case _:
                raise ServingError(f"{type(request).__name__} is no request of a client", "bad_request")
        return ack_of()

    def _open(self, hello: ClientHello, now: float) -> Reply:
        if hello.session not in self._sessions:
            if len(self._sessions) >= self.limits.max_sessions:
                raise ServingError(f"all {len(self._sessions)} sessions are taken; try again later", "server_full")
            self._sessions[hello.session] = SessionRecord(hello.token, now)
        session = self._session_of(hello, now)
        return Reply.of(
            ClientWelcome(
                spaces=self._spaces,
                lease_s=self.limits.lease_s,
                max_message_bytes=self.limits.max_message_bytes,
                episodes={id: episode.step for id, episode in session.open.items()},
            )
        )

    def _ship(
        self, channel: ActingChannel, session: SessionRecord, shipment: ChunkShipment, address: Address, batch: Any
    ) -> Reply | None:
        """Take a shipment, once. The reply follows when the chunks are in the worker's stream."""
        if shipment.number == session.shipped:
            return ack_of()
        if shipment.number != session.shipped + 1:
            raise ServingError(
                f"shipment {shipment.number} is not the next one, which is {session.shipped + 1}", "step_order"
            )

        def shipped() -> None:
            session.shipped += 1
            reply_to, session.shipment_reply_to = session.shipment_reply_to, None
            if reply_to is not None:
                reply_to.send(ack_of())

        if session.shipment_reply_to is None:
            channel.accept(session, shipment, batch, lambda: self._post(shipped))
        session.shipment_reply_to = address
        return None

    def _session_of(self, request: ClientRequest, now: float) -> SessionRecord:
        session = self._sessions.get(request.session)
        if session is None:
            raise UnknownSessionError(
                f"session {request.session!r} is not open; it may have been silent for {self.limits.lease_s:g} s, or "
                "the server has restarted: open it, and start new episodes"
            )
        if not same_token(session.token, request.token):
            raise ServingError(
                f"session {request.session!r} belongs to another client; take another name, or wait until it has been "
                f"silent for {self.limits.lease_s:g} s",
                "session_taken",
            )
        session.heard_at = now
        self._sessions.move_to_end(request.session)
        return session

    def _close(self, name: str, reason: str) -> None:
        session = self._sessions.pop(name)
        for episode in session.open.values():
            self._episodes.give_up(episode, reason)
        if self._channel is not None:
            self._channel.lost(session)
