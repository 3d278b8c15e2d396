"""A simulator that asks a policy server for actions: CartPole, for a number of episodes or until the server is gone.

    python -m headrace.deploy.clients.cartpole tcp://HOST:PORT [GAMES]            by ZeroMQ, with Headrace's client
    python -m headrace.deploy.clients.cartpole DIR/rendezvous.json [GAMES]        the same, with any worker of a fleet
    python -m headrace.deploy.clients.cartpole http://HOST:PORT [GAMES] [TOKEN]   by HTTP, with the standard library

GAMES are played at once, each in a thread. Every few seconds a line says how they go. Of Headrace it uses only the
client.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence

import gymnasium as gym

from headrace.deploy.clients.games import PATIENCE_S, ByHttp, ByZmq, Games, LostError
from headrace.deploy.clients.http_client import PolicyServer
from headrace.workers.serving.client import PolicyClient

PROGRESS_S = 5.0
_NEWEST = 100


class Tally:
    """The returns of all games. `stopped` is set once there are enough of them, or a game cannot go on."""

    def __init__(self, episodes: int | None) -> None:
        self.stopped = threading.Event()
        self.failure: Exception | None = None
        self._wanted = episodes
        self._lock = threading.Lock()
        self._returns: deque[float] = deque(maxlen=_NEWEST)
        self._finished = self._lost = 0

    def add(self, total: float) -> None:
        """Count an episode that has ended with this return."""
        with self._lock:
            self._finished += 1
            self._returns.append(total)
            if self._wanted is not None and self._finished >= self._wanted:
                self.stopped.set()

    def add_lost(self) -> None:
        """Count an episode that the server no longer knows."""
        with self._lock:
            self._lost += 1

    def in_words(self) -> str:
        """Return how the games go."""
        with self._lock:
            count, lost = len(self._returns), f", {self._lost} lost" if self._lost else ""
            newest = f", mean return of the newest {count}: {sum(self._returns) / count:.1f}" if count else ""
            return f"{self._finished} episodes{newest}{lost}"


def play(games: Games, tally: Tally) -> None:
    """Play one game after another. The steps of a lost episode do not count."""
    env = gym.make("CartPole-v1")
    while not tally.stopped.is_set():
        observation, _ = env.reset()
        total, reward, terminated, truncated = 0.0, 0.0, False, False
        try:
            games.start()
            while not (terminated or truncated):
                observation, earned, terminated, truncated, _ = env.step(games.act(observation, reward))
                reward = float(earned)
                total += reward
            games.end(observation, reward, truncated=not terminated)
        except LostError:
            tally.add_lost()
            tally.stopped.wait(0.2)
        else:
            tally.add(total)


def main(arguments: Sequence[str] | None = None) -> None:
    """Play until there are enough episodes, or one of the games cannot go on."""
    asked = _parser().parse_args(arguments)
    if asked.endpoint.endswith(".json"):
        shared = PolicyClient.of(asked.endpoint, timeout_s=PATIENCE_S)
        players: list[Games] = [ByZmq(shared) for _ in range(asked.games)]
    elif asked.endpoint.startswith("http"):
        players = [ByHttp(PolicyServer(asked.endpoint, asked.token)) for _ in range(asked.games)]
    else:
        client = PolicyClient(asked.endpoint, timeout_s=PATIENCE_S)
        players = [ByZmq(client) for _ in range(asked.games)]
    tally = Tally(asked.episodes)

    def until_it_ends(games: Games) -> None:
        try:
            play(games, tally)
        except Exception as error:  # noqa: BLE001 - the program prints the error and ends
            tally.failure = error
        finally:
            tally.stopped.set()

    began = time.monotonic()
    for games in players:
        threading.Thread(target=until_it_ends, args=(games,), daemon=True).start()
    while not tally.stopped.wait(PROGRESS_S):
        print(f"{time.monotonic() - began:.0f} s: {tally.in_words()}", flush=True)  # noqa: T201
    print(tally.in_words(), flush=True)  # noqa: T201
    if tally.failure is not None:
        sys.exit(f"the server at {asked.endpoint} is gone, or refuses: {tally.failure}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m headrace.deploy.clients.cartpole", description="Play CartPole with a policy server's actions."
    )
    parser.add_argument("endpoint", help="tcp://HOST:PORT for ZeroMQ, http://HOST:PORT for HTTP, a rendezvous")
    parser.add_argument("games", nargs="?", type=int, default=1, help="games played at once (default: 1)")
    parser.add_argument("token", nargs="?", help="token of the HTTP server, if it wants one")
    parser.add_argument("--episodes", type=int, help="end after so many; without it, play until the server is gone")
    return parser


if __name__ == "__main__":
    main()
