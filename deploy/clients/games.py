"""Episodes at a policy server, one after another, by ZeroMQ or by HTTP, behind one interface for a simulator."""

from __future__ import annotations

import secrets
from typing import Any, Protocol

from headrace.deploy.clients.http_client import PolicyServer, ServerRefusedError
from headrace.schemas.errors.episodes import EpisodeAbortedError, EpisodesClosedError
from headrace.workers.serving.client import PolicyClient

PATIENCE_S = 60.0
"""Seconds to wait for a server that does not answer: it may be restarting."""


class LostError(Exception):
    """The server no longer knows this episode. A new episode may work."""


class Games(Protocol):
    """Plays one episode after another. All methods raise `LostError`, and another error when no server answers."""

    def start(self) -> None:
        """Begin an episode."""

    def act(self, observation: Any, reward: float) -> int:
        """Return the action for this observation. `reward` is the reward of the previous action, 0 at first."""

    def end(self, observation: Any, reward: float, *, truncated: bool) -> None:
        """End the episode with its last observation."""


class ByZmq:
    """Plays by ZeroMQ. Several objects may share a client, which is one session."""

    def __init__(self, client: PolicyClient) -> None:
        self._client = client
        self._episode, self._steps = "", 0

    def start(self) -> None:
        """Begin an episode with a new id."""
        try:
            self._episode, self._steps = self._client.start_episode(), 0
        except EpisodesClosedError as error:
            raise LostError from error

    def act(self, observation: Any, reward: float) -> int:
        """Step at the server and return its action."""
        try:
            self._earn(reward)
            action = self._client.get_action(self._episode, observation)
        except (EpisodeAbortedError, EpisodesClosedError) as error:
            raise LostError from error
        self._steps += 1
        return int(action)

    def end(self, observation: Any, reward: float, *, truncated: bool) -> None:
        """End the episode at the server."""
        try:
            self._earn(reward)
            self._client.end_episode(self._episode, observation, truncated=truncated)
        except (EpisodeAbortedError, EpisodesClosedError) as error:
            raise LostError from error

    def _earn(self, reward: float) -> None:
        if self._steps:
            self._client.log_returns(self._episode, reward)


class ByHttp:
    """Plays by HTTP. Each object has its own session and keeps its connection."""

    def __init__(self, server: PolicyServer) -> None:
        self._server = server
        self._episode, self._steps = "", 0

    def start(self) -> None:
        """Open the session, or go on with it, and begin an episode with a new id."""
        self._ask(self._server.session)
        self._episode, self._steps = f"{self._server.session}/episodes/cart-{secrets.token_hex(8)}", 0
        self._ask(self._episode)

    def act(self, observation: Any, reward: float) -> int:
        """Step at the server and return its action."""
        return int(self._step(observation, reward)["action"])

    def end(self, observation: Any, reward: float, *, truncated: bool) -> None:
        """End the episode at the server."""
        self._step(observation, reward, end="truncated" if truncated else "terminated")

    def _step(self, observation: Any, reward: float, **more: Any) -> Any:
        body = {"observation": observation.tolist(), "reward": reward, **more}
        answer = self._ask(f"{self._episode}/steps/{self._steps}", body)
        self._steps += 1
        return answer

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            return self._server.ask("PUT", path, body, PATIENCE_S)
        except ServerRefusedError as refusal:
            if refusal.code in ("aborted", "unknown_session", "unknown_episode", "closed"):
                raise LostError from refusal
            raise
