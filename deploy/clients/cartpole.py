"""A simulator that asks a policy server for actions: CartPole, played until it is stopped or the server is gone.

    python -m headrace.deploy.clients.cartpole tcp://HOST:PORT [GAMES]            by ZeroMQ, with Headrace's client
    python -m headrace.deploy.clients.cartpole http://HOST:PORT [GAMES] [TOKEN]   by HTTP, with the standard library

GAMES are played at once, each in a thread. Of Headrace it uses only the client.
"""

from __future__ import annotations

import sys
import threading

import gymnasium as gym

from headrace.deploy.clients.games import PATIENCE_S, ByHttp, ByZmq, Games, LostError
from headrace.deploy.clients.http_client import PolicyServer
from headrace.workers.serving.client import PolicyClient


def play(games: Games, stopped: threading.Event) -> None:
    """Play one game after another. Steps of an episode that is lost are lost with it."""
    env = gym.make("CartPole-v1")
    while not stopped.is_set():
        observation, _ = env.reset()
        reward, terminated, truncated = 0.0, False, False
        try:
            games.start()
            while not (terminated or truncated):
                observation, earned, terminated, truncated, _ = env.step(games.act(observation, reward))
                reward = float(earned)
            games.end(observation, reward, truncated=not terminated)
        except LostError:
            stopped.wait(0.2)


def main(endpoint: str, count: str = "1", token: str | None = None) -> None:
    """Play until the process is killed, or one of the games cannot go on."""
    if endpoint.startswith("http"):
        players: list[Games] = [ByHttp(PolicyServer(endpoint, token)) for _ in range(int(count))]
    else:
        client = PolicyClient(endpoint, timeout_s=PATIENCE_S)
        players = [ByZmq(client) for _ in range(int(count))]
    stopped = threading.Event()

    def until_it_ends(games: Games) -> None:
        try:
            play(games, stopped)
        finally:
            stopped.set()

    for games in players:
        threading.Thread(target=until_it_ends, args=(games,), daemon=True).start()
    stopped.wait()
    sys.exit("the server is gone")


if __name__ == "__main__":
    main(*sys.argv[1:])
