"""A client of a policy server: the simulator is here, the policy there."""

from __future__ import annotations

import logging
import secrets
import threading
import time
import uuid
import weakref
from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import zmq
from numpy.typing import NDArray

from headrace.schemas.basics.closable import Closable
from headrace.schemas.chunks.spaces import Spaces, nest
from headrace.schemas.credentials.keys import CLIENT, ClientKeys, client_keys
from headrace.schemas.errors import EncodeError, EnvContractError, HeadraceError, UnreachableError
from headrace.schemas.errors.episodes import (
    EpisodeAbortedError,
    EpisodeError,
    EpisodesClosedError,
    NoFreePlaceError,
)
from headrace.schemas.errors.serving import ServingError, UnknownSessionError, code_of
from headrace.schemas.peers.sockets import OwnSockets
from headrace.workers.serving.client.connection import Connection, ServerPlace, find_server, request_of
from headrace.workers.serving.client.logged_returns import Dones, LoggedReturns, LoggedReturnsByAgent, no_returns
from headrace.workers.serving.episode_codec import EpisodeCodec
from headrace.workers.serving.serving_messages import (
    ClientBye,
    ClientHeartbeat,
    ClientHello,
    ClientRequest,
    ClientWelcome,
    EpisodeAbort,
    EpisodeAnswer,
    EpisodeStart,
    another_request_error,
    bytes_of,
    served_spaces_from_json,
)

_BEFORE_WELCOME_BYTES = 4096
_OVER = ("aborted", "already_completed", "unknown_episode", "unknown_session")
"""Codes of errors that mean that the episode is over at the server."""
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Episode:
    returns: LoggedReturns | LoggedReturnsByAgent
    task: dict[str, Any] | None
    step: int = 0
    unanswered: _Unanswered | None = None


@dataclass(slots=True)
class _Unanswered:
    """A step without an answer. The server may have taken it, so that only the same call may follow.

    `returns` went out with it. The episode's own are of later: they go out with the next step.
    """

    fields: dict[str, Any]
    arrays: Mapping[str, NDArray[Any]]
    returns: LoggedReturns | LoggedReturnsByAgent

    def is_same(self, fields: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bool:
        """Return whether these are its own."""
        return fields == self.fields and bytes_of(arrays) == bytes_of(self.arrays)


class PolicyClient(Closable):
    """Drives episodes whose actions a policy server chooses. With several agents, values are dicts by agent id.

    Any thread may call, but only one at a time for the same episode. Calls block until they are answered, at most
    `timeout_s`. The client repeats requests when a connection breaks. Requests are idempotent: a retry gets the same
    answer and is not a second step.

    Calls raise the error with which the server refuses them (`errors/serving.py` and `errors/episodes.py` in
    `schemas/`), and `UnreachableError`, which says so if the server lives, but its worker took no step in time; it
    may wait for the learner. The same call may be repeated, with the same values; another one is refused, because the
    first may count. A server that has restarted does not know the old episodes: the next call of each raises
    `EpisodeAbortedError`.
    """

    @classmethod
    def of(
        cls,
        where: str | Path | None = None,
        *,
        slot: int | None = None,
        keys: ClientKeys | str | None = None,
        connect_timeout_s: float = 60.0,
        **options: Any,
    ) -> Self:
        """Open a session with a worker at the rendezvous `where`, and follow it when it moves; see `find_server`.

        A worker that is gone for longer than its lease is replaced by another one, unless `slot` names it. `options`
        are those of the constructor, whose errors this raises too.
        """
        found = client_keys(keys, CLIENT)
        place = find_server(where, found, slot, connect_timeout_s)
        return cls(place, keys=found, connect_timeout_s=connect_timeout_s, **options)

    def __init__(
        self,
        endpoint: str | ServerPlace,
        *,
        session: str | None = None,
        keys: ClientKeys | str | None = None,
        timeout_s: float = 300.0,
        connect_timeout_s: float = 60.0,
        reopens: bool = True,
    ) -> None:
        """Open a session at `endpoint`, "ipc:///path" on this machine, or "tcp://host:port".

        `session` is its name in the server's log; None takes a random one. `keys`, for TCP, is a folder with
        client.secret and worker.public; None takes the folder of HEADRACE_KEYS__DIR. With `reopens`, the client opens a
        session that has ended again; otherwise only `open_new_session` does.
        """
        self.session = session or f"client-{secrets.token_hex(8)}"
        self._token = secrets.token_hex(16)
        self._reopens = reopens
        self._place = endpoint if isinstance(endpoint, ServerPlace) else ServerPlace(endpoint)
        self._keys = client_keys(keys, CLIENT)
        self._timeout_s = timeout_s
        self._own = OwnSockets(zmq.Context(), f"the policy client {self.session}", 0.2)
        self._connections: list[Connection] = []
        """Idle connections. Each call takes one, so that calls of several threads can wait at the same time."""
        self._episodes: dict[str, _Episode] = {}
        self._lost_starts: dict[str, bool] = {}
        """Own ids of starts without an answer -> `training_enabled`. The server may have started these episodes."""
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._own.before_end.append(self._closing.set)
        self.max_message_bytes = _BEFORE_WELCOME_BYTES
        self._admitted = False
        try:
            welcome = self._open(connect_timeout_s)
        except BaseException:
            self._own.close()
            raise
        self.spaces: Spaces | dict[str, Spaces] = served_spaces_from_json(welcome.spaces)
        """The spaces of the one agent, or of each agent by the text of its id."""
        self._codec = EpisodeCodec.of(self.spaces, check_bounds=False)  # the server checks, if its config says so
        self._heartbeats = threading.Thread(
            target=_send_heartbeats,
            args=(weakref.ref(self), self._closing, welcome.lease_s / 4),
            name="heartbeats",
            daemon=True,
        )
        self._heartbeats.start()

    # -- episodes -----------------------------------------------------------------------------------------------------

    def start_episode(self, episode_id: str | None = None, training_enabled: bool = True) -> str:
        """Open an episode and return its id. Waits for a free place; raises `NoFreePlaceError` after `timeout_s`.

        A call without an id repeats an earlier one that got no answer, so that only one place is taken.
        """
        lost = None if episode_id else self._take_lost_start(training_enabled)
        is_own, episode_id = not episode_id, episode_id or lost or uuid.uuid4().hex
        until = time.monotonic() + self._timeout_s
        while True:
            try:
                answer, _ = self.ask(EpisodeStart, episode=episode_id, training_enabled=training_enabled)
                break
            except NoFreePlaceError:
                if time.monotonic() >= until or self._closing.wait(0.1):
                    raise
            except EpisodeError:
                if lost is None:
                    raise
                lost, episode_id = None, uuid.uuid4().hex  # that one ended with its session
            except BaseException:
                if is_own:
                    with self._lock:
                        self._lost_starts[episode_id] = training_enabled
                raise
        with self._lock:
            self._episodes[episode_id] = _Episode(no_returns(self.spaces), answer.task)
        return episode_id

    def _take_lost_start(self, training_enabled: bool) -> str | None:
        with self._lock:
            ids = (lost for lost, trains in self._lost_starts.items() if trains == training_enabled)
            if (found := next(ids, None)) is not None:
                del self._lost_starts[found]
        return found

    def task_of(self, episode_id: str) -> dict[str, Any] | None:
        """Return the task with which the episode is to begin, as a teacher published it; None without one."""
        return self._find(episode_id).task

    def get_action(self, episode_id: str, observation: Any) -> Any:
        """Return the action of the current policy, in the nesting of the action space. Arrays are read-only.

        With several agents, return a dict with the action of each agent that is observed and not done.
        """
        _, arrays = self._step(episode_id, observation)
        if isinstance(self.spaces, Spaces):
            return nest(self.spaces.action, arrays, "actions")
        ids = {str(agent): agent for agent in observation}
        return {ids.get(agent, agent): action for agent, action in self._codec.action.from_arrays(arrays).items()}

    def log_action(self, episode_id: str, observation: Any, action: Any) -> None:
        """Log an action that the caller chose; with several agents, one for each that is observed and not done."""
        codec = self._codec.action
        self._step(episode_id, observation, codec.to_arrays(codec.read(action)), off_policy=True)

    def log_returns(
        self,
        episode_id: str,
        reward: Any,
        info: dict[Any, Any] | None = None,
        multiagent_done_dict: Dones | None = None,
        multiagent_truncated_dict: Dones | None = None,
    ) -> None:
        """Add to the reward since the last action. It goes out with the next call. With several agents, pass dicts.

        The next call may observe an agent that is done or truncated for the last time. Raises `EnvContractError` for a
        reward that is not a finite number, for an unknown agent, and for an agent that is done. Raises
        `EpisodeError` before the first action. After an error nothing of the call counts. Between a call without an
        answer and its repetition, it adds to the reward of the action that the repetition returns or logs.
        """
        episode = self._find(episode_id)
        if not episode.step:
            raise EpisodeError(episode_id, "no_action")
        if episode.unanswered is not None and "end" in episode.unanswered.fields:  # no step will follow to take them
            raise EpisodeError(episode_id, "busy")
        episode.returns.add(reward, info, multiagent_done_dict, multiagent_truncated_dict)

    def end_episode(self, episode_id: str, observation: Any, truncated: bool = False) -> None:
        """End the episode with its last observation."""
        self._step(episode_id, observation, end="truncated" if truncated else "terminated")
        self._forget(episode_id)

    def abort_episode(self, episode_id: str, reason: str = "") -> None:
        """Abort an episode that will never finish."""
        self._find(episode_id)
        self._ask_about(episode_id, EpisodeAbort, reason=str(reason)[:200])
        self._forget(episode_id)

    def _step(
        self, episode_id: str, observation: Any, arrays: Mapping[str, NDArray[Any]] | None = None, **fields: Any
    ) -> tuple[EpisodeAnswer, dict[str, NDArray[Any]]]:
        episode = self._find(episode_id)
        codec, before = self._codec.observation, episode.unanswered
        arrays = {**codec.to_arrays(codec.read(observation)), **(arrays or {})}
        if before is not None and not before.is_same(fields, arrays):
            raise another_request_error(episode_id, episode.step)
        returns = episode.returns if before is None else before.returns
        try:
            kind, told = self._codec.step_message, {**fields, **returns.fields()}
            answer, found = self._ask_about(episode_id, kind, arrays, step=episode.step, **told)
        except (EpisodeError, ServingError, EnvContractError, EncodeError) as error:  # not taken
            if before is not None and code_of(error) in ("not_in_space", "cannot_log"):  # nor the first time
                returns.add(*episode.returns.fields().values())
                episode.returns, episode.unanswered = returns, None
            raise
        except BaseException:  # no answer
            if before is None:
                episode.unanswered, episode.returns = _Unanswered(fields, arrays, returns), copy(returns)
                episode.returns.settle()
            raise
        assert isinstance(answer, EpisodeAnswer)
        episode.step = answer.next_step
        if before is None:
            returns.settle()
        episode.unanswered = None
        return answer, found

    def _ask_about(
        self,
        episode_id: str,
        kind: type[ClientRequest],
        arrays: Mapping[str, NDArray[Any]] | None = None,
        **fields: Any,
    ) -> tuple[Any, dict[str, NDArray[Any]]]:
        """Send a request about an open episode. Forget the episode if the server says that it is over there."""
        try:
            return self.ask(kind, arrays, episode=episode_id, **fields)
        except (EpisodeError, ServingError) as error:
            code = code_of(error)
            if code in _OVER:
                self._forget(episode_id)
            if code in ("unknown_episode", "unknown_session"):
                raise EpisodeAbortedError(episode_id, str(error)) from error
            raise

    def _find(self, episode_id: str) -> _Episode:
        episode = self._episodes.get(episode_id)
        if episode is None:
            raise EpisodeError(episode_id, "unknown_episode")
        return episode

    def _forget(self, episode_id: str) -> None:
        with self._lock:
            self._episodes.pop(episode_id, None)

    # -- the session --------------------------------------------------------------------------------------------------

    def ask(
        self,
        kind: type[ClientRequest],
        arrays: Mapping[str, NDArray[Any]] | None = None,
        *,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> tuple[Any, dict[str, NDArray[Any]]]:
        """Send any request of this session and return the answer, (message, arrays). For clients built on this one.

        Raises what other calls raise, and `UnknownSessionError` when the session has ended.
        """
        if self._closing.is_set() and kind is not ClientBye:
            raise EpisodesClosedError(fields.get("episode", ""), "this client is closed")
        request = request_of(kind, session=self.session, token=self._token, **fields)
        try:
            return self._send_request(request, timeout_s or self._timeout_s, arrays)
        except UnknownSessionError:
            if not self._reopens:
                raise
            self._open(self._timeout_s)
            if not isinstance(request, EpisodeStart):
                raise
            return self._send_request(request, self._timeout_s)

    def open_new_session(self, timeout_s: float) -> None:
        """Open a session under a new name. Late requests of the old session cannot reach it."""
        self.session, self._token = f"client-{secrets.token_hex(8)}", secrets.token_hex(16)
        self._open(timeout_s)

    def _open(self, timeout_s: float) -> ClientWelcome:
        hello = request_of(ClientHello, session=self.session, token=self._token)
        welcome, _ = self._send_request(hello, timeout_s)
        assert isinstance(welcome, ClientWelcome)
        self._admitted, self.max_message_bytes = True, welcome.max_message_bytes
        return welcome

    def _send_request(
        self, request: ClientRequest, timeout_s: float, arrays: Mapping[str, NDArray[Any]] | None = None
    ) -> tuple[Any, dict[str, NDArray[Any]]]:
        with self._lock:
            connection = self._connections.pop() if self._connections else None
        if connection is None:
            connection = Connection(self._own, self._place, self._keys, agreed=self._admitted)
        try:
            return connection.ask(request, timeout_s, arrays, self.max_message_bytes)
        finally:
            with self._lock:
                self._connections.append(connection)

    def _send_heartbeat(self, timeout_s: float) -> bool:
        """Send a heartbeat. Return whether to send more."""
        try:
            self._send_request(ClientHeartbeat(session=self.session, token=self._token), timeout_s)
        except UnknownSessionError:
            with suppress(HeadraceError):
                if self._reopens:
                    self._open(timeout_s)
        except UnreachableError as error:
            log.warning("%s; the client retries", error)
        except HeadraceError as error:
            log.error("the client stops its heartbeats: %s", error)
            return False
        return True

    # -- leaving ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the session; its open episodes are aborted. Call it when no other call is under way."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._heartbeats.join()
        with suppress(HeadraceError):  # a server that is gone has ended the session already
            self._send_request(ClientBye(session=self.session, token=self._token), 1.0)
        self._own.close()


def _send_heartbeats(client: weakref.ref[PolicyClient], closing: threading.Event, interval_s: float) -> None:
    """Send heartbeats until `close`: a step of the simulator may take longer than the lease.

    Between them this thread does not hold the client, which may be dropped without `close`.
    """
    while not closing.wait(interval_s):
        found = client()
        if found is None or not found._send_heartbeat(interval_s):
            return
        del found
