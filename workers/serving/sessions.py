"""Sessions of a policy server's clients: who may do what, and what becomes of requests that come twice. Does no I/O.

A request goes in with the time and the address to answer at; answers come out of `take_outbox`. Each step of an episode
goes to the sampler once, however often it is asked for and on whatever connection: while it is under way the newest
request is the one that is answered, and afterwards the answer is remembered until the next step is taken. A session
that was silent for its lease has ended, and its episodes are aborted. All that is remembered is bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from headrace.schemas.chunk import ChunkEnd
from headrace.schemas.episode_errors import (
    EpisodeAbortedError,
    EpisodeCompletedError,
    EpisodesClosedError,
    EpisodeStartedError,
    UnknownEpisodeError,
)
from headrace.schemas.errors import HeadraceError
from headrace.schemas.serving_errors import (
    BadRequestError,
    ServerFullError,
    SessionTakenError,
    StepOrderError,
    SupersededError,
    UnknownSessionError,
)
from headrace.schemas.serving_messages import (
    AnyStep,
    ChunkShipment,
    ClientAck,
    ClientBye,
    ClientHeartbeat,
    ClientHello,
    ClientPull,
    ClientRequest,
    ClientWelcome,
    EpisodeAbort,
    EpisodeAnswer,
    EpisodeStart,
)
from headrace.schemas.wire import MessageKind
from headrace.workers.serving.acting_clients import ActingClients
from headrace.workers.serving.episodes import Answer, Episodes
from headrace.workers.serving.records import (
    Address,
    EpisodeRecord,
    Reply,
    ServingLimits,
    SessionRecord,
    find,
    over_error,
    refusal_of,
)

CLIENT_LOST, CLIENT_LEFT = "client_lost", "client_left"
"""Why episodes are aborted: the client was silent for its lease, or ended its session."""

_GONE = (EpisodeAbortedError, EpisodeCompletedError, EpisodesClosedError, UnknownEpisodeError)
"""What the table says of an episode that it has lost, or given up by itself."""
_ENDS = {"no": ChunkEnd.ONGOING, "terminated": ChunkEnd.TERMINATED, "truncated": ChunkEnd.TRUNCATED}


class Sessions:
    """All sessions of one server. `post` brings an answer of the sampler to the thread that calls `answered`."""

    def __init__(
        self,
        episodes: Episodes,
        spaces: dict[str, Any],
        post: Callable[[EpisodeRecord, Answer], None],
        limits: ServingLimits | None = None,
        acting: ActingClients | None = None,
    ) -> None:
        self.limits = limits or ServingLimits()
        self._episodes = episodes
        self._spaces = spaces
        self._post = post
        self._acting = acting
        self._sessions: OrderedDict[str, SessionRecord] = OrderedDict()
        """The one that has been silent for longest first."""
        self._outbox: list[tuple[Address, Reply]] = []
        self._ticked_at: float | None = None
        self._judge_at = 0.0

    def __len__(self) -> int:
        """How many are open."""
        return len(self._sessions)

    def counts(self) -> dict[str, int]:
        """What is held: sessions, their open episodes, and finished ones that are remembered."""
        sessions = self._sessions.values()
        return {
            "sessions": len(self._sessions),
            "episodes": sum(len(session.open) for session in sessions),
            "remembered": sum(len(session.ended) for session in sessions),
        }

    # -- in and out ---------------------------------------------------------------------------------------------------

    def receive(
        self, request: ClientRequest, address: Address, now: float, observation: Any = None, action: Any = None
    ) -> None:
        """Do what is asked. `observation` and `action`, of a step, are rows of their spaces; of a shipment of chunks
        `observation` is the array "batch"."""
        if isinstance(request, AnyStep):
            self.step(request, address, now, observation, action)
            return
        try:
            reply = self._do(request, address, now, observation)
        except HeadraceError as error:
            reply = refusal_of(error, request.request)
        if reply is not None:
            self._outbox.append((address, reply))

    def step(self, step: AnyStep, address: Address, now: float, observation: Any, action: Any = None) -> None:
        """`receive`, of a step."""
        try:
            reply = self._step(self._session_of(step, now), step, address, observation, action)
        except HeadraceError as error:
            reply = refusal_of(error, step.request)
        if reply is not None:
            self._outbox.append((address, reply))

    def answered(self, episode: EpisodeRecord, answer: Answer) -> None:
        """The sampler has said what comes of the step that is under way."""
        address, episode.asked_at = episode.asked_at, None
        if address is None or episode.over is not None:
            return
        episode.step += 1
        if answer.error is not None:
            episode.last = refusal_of(answer.error, episode.asked_as)
            self._end(episode, str(answer.error))
        else:
            episode.last = _answer(episode, answer)
            if episode.ends:
                self._end(episode, "")
        self._outbox.append((address, episode.last))

    def say(self, told: tuple[Address, Reply] | None) -> None:
        """Have this sent with what else is to be sent; None: nothing."""
        if told is not None:
            self._outbox.append(told)

    def tick(self, now: float) -> None:
        """End the sessions that were silent for too long. After a pause in which nobody called, all get some time: what
        they said meanwhile may still lie in a socket."""
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
        """End all sessions, as when their clients leave."""
        for name in list(self._sessions):
            self._close(name, CLIENT_LEFT)

    def take_outbox(self) -> list[tuple[Address, Reply]]:
        """What is to be sent now, and where."""
        taken, self._outbox = self._outbox, []
        return taken

    # -- requests -----------------------------------------------------------------------------------------------------

    def _do(self, request: ClientRequest, address: Address, now: float, batch: Any) -> Reply | None:
        if isinstance(request, ClientHello):
            return self._open(request, now)
        if isinstance(request, ClientBye) and request.session not in self._sessions:
            return Reply.of(ClientAck(request=request.request))  # it came again
        session = self._session_of(request, now)
        match request:
            case EpisodeStart():
                return self._start(session, request)
            case EpisodeAbort():
                self._abort(session, request)
            case ClientBye():
                self._close(request.session, CLIENT_LEFT)
            case ClientPull() | ChunkShipment():
                if self._acting is None:
                    raise BadRequestError("clients do not act by themselves here; set serving.client_inference = true")
                if isinstance(request, ClientPull):
                    return self._acting.part(request)
                return self._acting.ship(session, request, address, batch)
            case ClientHeartbeat():
                pass
            case _:
                raise BadRequestError(f"{type(request).__name__} is no request of a client")
        return Reply.of(ClientAck(request=request.request))

    def _open(self, hello: ClientHello, now: float) -> Reply:
        if hello.session not in self._sessions:
            if len(self._sessions) >= self.limits.max_sessions:
                raise ServerFullError(f"all {len(self._sessions)} sessions are taken; come again later")
            self._sessions[hello.session] = SessionRecord(hello.token, now)
        session = self._session_of(hello, now)
        return Reply.of(
            ClientWelcome(
                request=hello.request,
                spaces=self._spaces,
                lease_s=self.limits.lease_s,
                max_message_bytes=self.limits.max_message_bytes,
                episodes={id: episode.step for id, episode in session.open.items()},
            )
        )

    def _session_of(self, request: ClientRequest, now: float) -> SessionRecord:
        session = self._sessions.get(request.session)
        if session is None:
            raise UnknownSessionError(
                f"session {request.session!r} is not open; it may have been silent for {self.limits.lease_s:g} s, or "
                "the server has begun anew: open it, and start episodes anew"
            )
        if session.token != request.token:
            raise SessionTakenError(
                f"session {request.session!r} belongs to another client; take another name, or wait until it has been "
                f"silent for {self.limits.lease_s:g} s"
            )
        session.heard_at = now
        self._sessions.move_to_end(request.session)
        return session

    def _start(self, session: SessionRecord, start: EpisodeStart) -> Reply:
        episode = session.open.get(start.episode)
        if episode is None:
            if start.episode in session.ended:
                raise over_error(start.episode, session.ended[start.episode].over)
            if len(session.open) >= self.limits.max_episodes:
                raise ServerFullError(f"this session has {len(session.open)} open episodes, the most it may have")
            self._episodes.start(start.episode, training_enabled=start.training_enabled)
            session.open[start.episode] = EpisodeRecord(session, start.episode, start.training_enabled)
        elif episode.step or episode.asked_at is not None or episode.training_enabled != start.training_enabled:
            raise EpisodeStartedError(start.episode)
        return Reply.of(EpisodeAnswer(request=start.request, episode=start.episode, next_step=0))

    def _step(
        self, session: SessionRecord, step: AnyStep, address: Address, observation: Any, action: Any
    ) -> Reply | None:
        episode = find(session, step.episode)
        if step.step == episode.step and episode.over is None and episode.asked_at is None:
            episode.asked_at, episode.asked_as = address, step.request
            self._give(episode, step, observation, action)
            return None
        return self._step_again(episode, step, address)

    def _step_again(self, episode: EpisodeRecord, step: AnyStep, address: Address) -> Reply | None:
        """What was asked for before, or cannot be."""
        if step.step == episode.step - 1 and episode.last is not None:
            last = episode.last
            return Reply(last.kind, {**last.fields, "request": step.request}, last.action)
        if episode.over is not None:
            raise over_error(step.episode, episode.over)
        if step.step != episode.step:
            raise StepOrderError(
                f"step {step.step} of episode {step.episode!r} is not the next one, which is {episode.step}"
            )
        earlier, episode.asked_at = episode.asked_at, address
        earlier_as, episode.asked_as = episode.asked_as, step.request
        if earlier is not None and earlier != address:
            detail = f"step {step.step} of episode {step.episode!r} was asked for again, and is answered there"
            self._outbox.append((earlier, refusal_of(SupersededError(detail), earlier_as)))
        return None

    def _give(self, episode: EpisodeRecord, step: AnyStep, observation: Any, action: Any) -> None:
        """To the sampler, which answers in time."""
        end = _ENDS[step.end]
        episode.ends = end is not ChunkEnd.ONGOING
        episode.tells_action = not (episode.ends or step.off_policy)
        on_answer = partial(self._post, episode)
        try:
            self._episodes.take_step(episode.id, step.news, observation, on_answer, action=action, end=end)
        except HeadraceError as error:
            episode.asked_at = None
            if isinstance(error, _GONE):
                self._end(episode, str(error))
            raise

    def _abort(self, session: SessionRecord, abort: EpisodeAbort) -> None:
        episode = find(session, abort.episode)
        if episode.over == "":
            raise EpisodeCompletedError(abort.episode)
        if episode.over is None:
            reason = abort.reason or CLIENT_LEFT
            self._give_up(episode, reason)
            self._end(episode, reason)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _end(self, episode: EpisodeRecord, reason: str) -> None:
        ended = episode.session.ended
        episode.over = reason
        ended[episode.id] = episode.session.open.pop(episode.id)
        if len(ended) > self.limits.remembered_episodes:
            ended.popitem(last=False)

    def _close(self, name: str, reason: str) -> None:
        session = self._sessions.pop(name)
        for episode in session.open.values():
            self._give_up(episode, reason)
        if self._acting is not None:
            self._acting.gone(session)

    def _give_up(self, episode: EpisodeRecord, reason: str) -> None:
        with suppress(HeadraceError):  # the sampler may have lost it already
            self._episodes.abort(episode.id, reason)
        address, episode.asked_at = episode.asked_at, None
        if address is not None:
            self._outbox.append((address, refusal_of(EpisodeAbortedError(episode.id, reason), episode.asked_as)))


def _answer(episode: EpisodeRecord, answer: Answer) -> Reply:
    """An `EpisodeAnswer`, without a check of what was made here."""
    fields = {
        "request": episode.asked_as,
        "episode": episode.id,
        "next_step": episode.step,
        "weights": answer.weights,
    }
    return Reply(MessageKind.EPISODE_ANSWER, fields, answer.action if episode.tells_action else None)
