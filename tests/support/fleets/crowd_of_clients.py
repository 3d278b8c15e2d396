"""A process of several clients, each of which plays short episodes until standard input ends, then says how many.

    python -m support.fleets.crowd_of_clients KIND COUNT ENDPOINT URL SEED

Half of them come by ZeroMQ and half by HTTP. KIND is "plain", "repeating" (says everything again, on the same and on
other connections, and wants the same answer) or "slow".
"""

from __future__ import annotations

import json
import random
import sys
import threading
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from headrace.deploy.clients.cartpole import LOST, Play, play_by_http, play_by_zmq
from headrace.deploy.clients.http_client import PolicyServer, ServerRefusedError
from headrace.schemas.errors import UnreachableError
from headrace.schemas.errors.episodes import EpisodeError
from headrace.workers.serving.client import PolicyClient
from headrace.workers.serving.serving_messages import ClientRequest, EpisodeStep
from support.waiting import TIMEOUT_S


class RepeatingClient(PolicyClient):
    """Does not wait for the first answer, asks again, and again."""

    def _send_request(self, request: ClientRequest, timeout_s: float, arrays: Any = None) -> Any:
        if isinstance(request, EpisodeStep):
            with suppress(UnreachableError):
                super()._send_request(request, 0.001, arrays)
        answer, found = super()._send_request(request, timeout_s, arrays)
        if isinstance(request, EpisodeStep):
            again, found_again = super()._send_request(request, timeout_s, arrays)
            assert again.model_dump(exclude={"request"}) == answer.model_dump(exclude={"request"})
            assert {name: a.tolist() for name, a in found_again.items()} == {n: a.tolist() for n, a in found.items()}
        return answer, found


class RepeatingServer(PolicyServer):
    """Loses its connection after each request, before the answer, and then asks twice."""

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = 60.0) -> Any:
        if "/steps/" in path:
            with suppress(OSError):
                self._connection.request(method, path, json.dumps(body).encode(), self._headers)
            self._connection.close()
        answer = super().ask(method, path, body, timeout_s)
        if "/steps/" in path:
            assert super().ask(method, path, body, timeout_s) == answer
        return answer


class Walk:
    """Episodes of 2 to 8 steps, each of which earns 1, as an env has them."""

    def __init__(self, kind: str, seed: str, stopped: threading.Event) -> None:
        self._slow, self._rng, self._stopped = kind == "slow", random.Random(seed), stopped
        self.step_count = self._steps = 0

    def reset(self) -> tuple[Any, dict[str, Any]]:
        self.step_count, self._steps = 0, self._rng.randint(2, 8)
        return self._seen(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.step_count += 1
        if self._slow:
            self._stopped.wait(self._rng.uniform(0.1, 1.0))
        over, truncated = self.step_count == self._steps, self._rng.random() < 0.5
        return self._seen(), 1.0, over and not truncated, over and truncated, {}

    def _seen(self) -> Any:
        return np.array([self.step_count / 10, self._rng.random(), 0, 0], np.float32)


class Player(threading.Thread):
    """One client."""

    def __init__(self, play: Play, walk: Walk, stopped: threading.Event) -> None:
        super().__init__(daemon=True)
        self._play, self._walk, self._stopped = play, walk, stopped
        self.told = {"episodes": 0, "steps": 0, "lost": 0}
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._stopped.is_set():
                try:
                    self._play(self._walk)
                    self.told["steps"] += self._walk.step_count
                    self.told["episodes"] += 1
                except (EpisodeError, ServerRefusedError) as error:
                    if error.code not in LOST:
                        raise
                    self.told["lost"] += 1
        except BaseException as error:
            self.failure = error


def main(kind: str, count: int, endpoint: str, url: str, seed: str) -> None:
    """Play until standard input ends."""
    by_zmq, by_http = (RepeatingClient, RepeatingServer) if kind == "repeating" else (PolicyClient, PolicyServer)
    stopped, clients, players = threading.Event(), [], list[Player]()
    for number in range(count):
        if number % 2:
            play: Play = partial(play_by_http, by_http(url))
        else:
            clients.append(by_zmq(endpoint, timeout_s=TIMEOUT_S))
            play = partial(play_by_zmq, clients[-1])
        players.append(Player(play, Walk(kind, f"{seed}-{number}", stopped), stopped))
        players[-1].start()
    sys.stdin.read()
    stopped.set()
    for player in players:
        player.join()
    for client in clients:
        client.close()
    failures = [repr(player.failure) for player in players if player.failure is not None]
    totals = {name: sum(player.told[name] for player in players) for name in ("episodes", "steps", "lost")}
    sys.stdout.write(
        json.dumps({**totals, "clients": [player.told["episodes"] for player in players], "failures": failures})
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
