r"""A game of two agents, two poles side by side, played at a policy server by HTTP with the standard library alone.

    headrace up --env headrace.workers.agents.examples:two_carts --workers 1 --num-envs 8 --run-dir runs/two \
        --set sampling.policies='{"short": {}, "long": {}}' --serve --set serving.http_port=8000
    python -m support.fleets.two_carts_by_http http://127.0.0.1:8000 EPISODES [GAMES] [TOKEN]

Agent "short" has the pole of CartPole, "long" one that is three times as long and as heavy. An agent whose
pole has fallen leaves, and the other plays on. GAMES are played at once; prints one line of JSON an episode.
"""

from __future__ import annotations

import json
import math
import random
import secrets
import sys
import threading
import time
from typing import Any

from headrace.deploy.clients.http_client import PolicyServer, ServerRefusedError

LONGEST = 500
"""The most steps of an episode."""
_LOST = ("aborted", "unknown_session", "unknown_episode", "closed")
"""Codes of a server that no longer knows an episode; the next one may go well."""


class Cart:
    """A cart with a pole on it: the equations of Barto, Sutton and Anderson (1983), in steps of 20 ms. SI units."""

    def __init__(self, half_length: float) -> None:
        self.half_length, self.mass = half_length, 0.1 * half_length / 0.5
        self.state = [random.uniform(-0.05, 0.05) for _ in range(4)]
        """Position, velocity, angle, angular velocity: the observation."""

    def push(self, action: int) -> None:
        """Push with 10 N, to the right if `action` is 1, else to the left."""
        x, speed, angle, turning = self.state
        total = 1.0 + self.mass
        push = (10.0 if action == 1 else -10.0) + self.mass * self.half_length * turning**2 * math.sin(angle)
        fall = 9.8 * math.sin(angle) - math.cos(angle) * push / total
        twist = fall / (self.half_length * (4 / 3 - self.mass * math.cos(angle) ** 2 / total))
        thrust = (push - self.mass * self.half_length * twist * math.cos(angle)) / total
        self.state = [x + 0.02 * speed, speed + 0.02 * thrust, angle + 0.02 * turning, turning + 0.02 * twist]

    def has_fallen(self) -> bool:
        """Return whether the pole has fallen or the cart has left its track."""
        return abs(self.state[0]) > 2.4 or abs(self.state[2]) > math.radians(12)


def play(server: PolicyServer) -> dict[str, int]:
    """Play one episode; return how many steps each agent took."""
    episode = f"{server.session}/episodes/pair-{secrets.token_hex(8)}"
    server.ask("PUT", server.session)
    server.ask("PUT", episode)
    carts = {"short": Cart(0.5), "long": Cart(1.5)}
    steps = dict.fromkeys(carts, 0)
    body: dict[str, Any] = {"observation": {agent: cart.state for agent, cart in carts.items()}}
    for step in range(LONGEST):
        # of agents with an observation that are not done
        actions = server.ask("PUT", f"{episode}/steps/{step}", body)["action"]
        for agent, action in actions.items():
            carts[agent].push(action)
            steps[agent] += 1
        body = {
            "observation": {agent: carts[agent].state for agent in actions},
            "reward": dict.fromkeys(actions, 1.0),
            "terminated": {agent: carts[agent].has_fallen() for agent in actions},
        }
        if all(body["terminated"].values()):
            break
    body["end"] = "terminated" if all(body["terminated"].values()) else "truncated"
    server.ask("PUT", f"{episode}/steps/{step + 1}", body)
    return steps


def main(url: str, episodes: str, games: str = "1", token: str | None = None) -> None:
    """Play `episodes` episodes in each of `games` games."""

    def play_all() -> None:
        server, left = PolicyServer(url, token), int(episodes)
        while left:
            try:
                sys.stdout.write(json.dumps(play(server)) + "\n")
                left -= 1
            except ServerRefusedError as refusal:
                if refusal.code not in _LOST:
                    raise
                time.sleep(0.2)
        server.ask("DELETE", server.session)
        server.close()

    players = [threading.Thread(target=play_all) for _ in range(int(games))]
    for player in players:
        player.start()
    for player in players:
        player.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
