"""Many clients of several agents at once: some vanish, repeat requests or are slow, and harm no other client."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from headrace.schemas.chunks.chunk import ChunkEnd
from support.serving.agent_lives import Life, check
from support.serving.served_agents import ByHttp, ByZmq, served_agents
from support.waiting import wait_until

pytestmark = pytest.mark.long

AGENTS = ("red", "blue", "late")
CLIENTS, EPISODES = 12, 3
VANISHES_AT = 7


class GoneError(Exception):
    """The client is killed."""


class Client:
    """A plain way that vanishes, repeats itself, or is slow, by its number."""

    def __init__(self, served: Any, number: int) -> None:
        self.way = (ByZmq, ByHttp)[number % 2](served, f"s-{number}")
        self.vanishes, self._repeats, self._slow = (number // 2 % 6 == kind for kind in (0, 1, 2))
        self.start, self._pause = self.way.start, threading.Event()

    def step(self, episode: str, step: int, observation: Any, **body: Any) -> Any:
        if self.vanishes and step == VANISHES_AT:
            raise GoneError
        if self._slow:
            self._pause.wait(0.02)
        answer = self.way.step(episode, step, observation, **body)
        if self._repeats:
            assert self.way.step(episode, step, observation, **body) == answer
        return answer


def live(served: Any, number: int) -> list[Life]:
    """The episodes of one client that came to their end."""
    client, lives = Client(served, number), []
    try:
        for episode in range(EPISODES):
            lives.append(Life(EPISODES * number + episode + 1, AGENTS).play(client))
    except GoneError:
        assert client.vanishes
    finally:
        client.way.close()
    return lives


def test_many_clients_give_exact_chunks_and_lost_clients_leave_no_open_episode() -> None:
    with served_agents(AGENTS, lease_s=5.0, num_envs=CLIENTS, rollout_fragment_length=4) as served:
        with ThreadPoolExecutor(CLIENTS) as pool:
            lives = [life for one in pool.map(lambda number: live(served, number), range(CLIENTS)) for life in one]
        wait_until(lambda: served.env.episodes.counts()["open"] == 0, what="the end of the clients' leases")
        counts = served.env.episodes.counts()
    assert (counts["waiting"], counts["free"]) == (0, CLIENTS)
    assert len(lives) == (CLIENTS - 2) * EPISODES
    aborted = {chunk.episode_id for chunk in served.chunks if chunk.end is ChunkEnd.ABORTED}
    assert len(aborted) == 2
    assert {chunk.end_reason for chunk in served.chunks if chunk.end is ChunkEnd.ABORTED} == {"client_lost"}
    check([chunk for chunk in served.chunks if chunk.episode_id not in aborted], lives)
    lost = [chunk for chunk in served.chunks if chunk.episode_id in aborted and len(chunk)]
    assert all(np.isfinite(chunk.rewards).all() and chunk.env_t[-1] < VANISHES_AT for chunk in lost)
