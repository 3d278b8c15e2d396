"""`TwoCarts`, played at a policy server over ZeroMQ until the process is killed: play_two_carts.py ENDPOINT GAMES."""

from __future__ import annotations

import sys
import threading

from headrace.workers.agents.examples import TwoCarts
from headrace.workers.serving.client import PolicyClient


def play(client: PolicyClient, seed: int) -> None:
    """One game after another, until the server is gone."""
    env = TwoCarts()
    while True:
        observations, _ = env.reset(seed=seed)
        episode, over, seed = client.start_episode(), False, seed + 1
        while not over:
            actions = client.get_action(episode, observations)
            observations, rewards, terminateds, truncateds, _ = env.step(actions)
            over = terminateds.pop("__all__")
            client.log_returns(episode, rewards, None, terminateds, truncateds)
        client.end_episode(episode, observations)


if __name__ == "__main__":
    shared = PolicyClient(sys.argv[1])
    for number in range(int(sys.argv[2])):
        threading.Thread(target=play, args=(shared, 1000 * number)).start()
