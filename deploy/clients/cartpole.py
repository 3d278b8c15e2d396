"""A simulator that asks a policy server for actions: CartPole, for a number of episodes or until the server is gone.

    python -m headrace.deploy.clients.cartpole ipc:///PATH [GAMES]                by ZeroMQ; or tcp://..., with its keys
    python -m headrace.deploy.clients.cartpole DIR/rendezvous.json [GAMES]        the same, with any worker of a fleet
    python -m headrace.deploy.clients.cartpole http://HOST:PORT [GAMES] [TOKEN]   by HTTP, with the standard library

GAMES are played at once, each in a thread. Every few seconds a line says how they go. Of Headrace it uses only the
client.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium as gym

from headrace.deploy.clients.http_client import PolicyServer, ServerRefusedError
from headrace.schemas.errors.episodes import EpisodeError
from headrace.workers.serving.client import PolicyClient

PATIENCE_S = 60.0
"""Seconds to wait for a server that does not answer: it may be restarting."""
LOST = ("aborted", "closed", "unknown_session", "unknown_episode")
"""Codes of a server that no longer knows an episode. A new episode may work."""
_PROGRESS_S = 5.0
_NEWEST = 100

Play = Callable[[Any], float]
"""Plays one episode of an env at a server; returns its return."""


def play_by_zmq(client: PolicyClient, env: Any) -> float:
    """Play one episode of `env` by ZeroMQ, and return its return. Several threads may share the client."""
    episode, total = client.start_episode(), 0.0
    (observation, _), terminated, truncated = env.reset(), False, False
    while not (terminated or truncated):
        action = int(client.get_action(episode, observation))
        observation, reward, terminated, truncated, _ = env.step(action)
        client.log_returns(episode, float(reward))
        total += float(reward)
    client.end_episode(episode, observation, truncated=not terminated)
    return total


def play_by_http(server: PolicyServer, env: Any) -> float:
    """Play one episode of `env` by HTTP, and return its return. Each thread has its own `server`."""
    episode, total, reward = f"{server.session}/episodes/cart-{secrets.token_hex(8)}", 0.0, 0.0
    server.ask("PUT", server.session)  # opens the session, or goes on with it
    server.ask("PUT", episode)
    (observation, _), step, end = env.reset(), 0, "no"
    while True:
        said = {"observation": observation.tolist(), "reward": reward, "end": end}
        answer = server.ask("PUT", f"{episode}/steps/{step}", said)
        if end != "no":
            return total
        observation, earned, terminated, truncated, _ = env.step(int(answer["action"]))
        step, reward = step + 1, float(earned)
        total += reward
        end = "terminated" if terminated else "truncated" if truncated else "no"


class Tally:
    """The returns of all games. `stopped` is set once there are enough of them, or a game cannot go on."""

    def __init__(self, episodes: int | None) -> None:
        self.stopped = threading.Event()
        self.failure: Exception | None = None
        self._wanted = episodes
        self._lock = threading.Lock()
        self._returns: deque[float] = deque(maxlen=_NEWEST)
        self._finished = self._lost = 0

    def play(self, play: Play) -> None:
        """Play one game after another. The steps of an episode that the server no longer knows do not count."""
        env = gym.make("CartPole-v1")
        try:
            while not self.stopped.is_set():
                try:
                    self._add(play(env))
                except (EpisodeError, ServerRefusedError) as error:
                    if error.code not in LOST:
                        raise
                    with self._lock:
                        self._lost += 1
                    self.stopped.wait(0.2)
        except Exception as error:  # noqa: BLE001 - the program prints the error and ends
            self.failure = error
        finally:
            self.stopped.set()

    def _add(self, total: float) -> None:
        with self._lock:
            self._finished += 1
            self._returns.append(total)
            if self._wanted is not None and self._finished >= self._wanted:
                self.stopped.set()

    def in_words(self) -> str:
        """Return how the games go."""
        with self._lock:
            count, lost = len(self._returns), f", {self._lost} lost" if self._lost else ""
            newest = f", mean return of the newest {count}: {sum(self._returns) / count:.1f}" if count else ""
            return f"{self._finished} episodes{newest}{lost}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Play until there are enough episodes, or one of the games cannot go on."""
    asked = _parser().parse_args(arguments)
    plays: Sequence[Play]
    where, is_rendezvous = asked.endpoint, asked.endpoint.endswith(".json")
    if where.startswith("http") and not is_rendezvous:
        plays = [partial(play_by_http, PolicyServer(where, asked.token)) for _ in range(asked.games)]
    elif is_rendezvous:
        plays = [partial(play_by_zmq, PolicyClient.of(where, timeout_s=PATIENCE_S))] * asked.games
    else:
        plays = [partial(play_by_zmq, PolicyClient(where, timeout_s=PATIENCE_S))] * asked.games
    tally, began = Tally(asked.episodes), time.monotonic()
    for play in plays:
        threading.Thread(target=tally.play, args=(play,), daemon=True).start()
    while not tally.stopped.wait(_PROGRESS_S):
        print(f"{time.monotonic() - began:.0f} s: {tally.in_words()}", flush=True)  # noqa: T201
    print(tally.in_words(), flush=True)  # noqa: T201
    if tally.failure is not None:
        sys.exit(f"the server at {asked.endpoint} is gone, or refuses: {tally.failure}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m headrace.deploy.clients.cartpole", description="Play CartPole with a policy server's actions."
    )
    parser.add_argument("endpoint", help="ipc:///PATH, tcp://HOST:PORT, http://HOST:PORT, or a rendezvous")
    parser.add_argument("games", nargs="?", type=int, default=1, help="games played at once (default: 1)")
    parser.add_argument("token", nargs="?", help="token of the HTTP server, if it wants one")
    parser.add_argument("--episodes", type=int, help="end after so many; without it, play until the server is gone")
    return parser


if __name__ == "__main__":
    main()
