"""A client that does nothing wrong, beside those that do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace.schemas.credentials.keys import ClientKeys
from headrace.workers.serving.client import PolicyClient
from support.serving.plain_episodes import rule
from support.serving.served import Served
from support.waiting import TIMEOUT_S


@contextmanager
def somebody_else(server: Served, keys: ClientKeys | None = None) -> Iterator[Callable[[], None]]:
    """Another client's episode, of which a call takes a step; at the end it is what that client lived through."""
    with PolicyClient(server.endpoint, keys=keys, timeout_s=TIMEOUT_S) as client:
        episode, steps = client.start_episode(), 0

        def go_on() -> None:
            nonlocal steps
            assert client.get_action(episode, [steps % 50, 1]) == rule([steps % 50, 1])
            client.log_returns(episode, 1.0)
            steps += 1

        go_on()
        yield go_on
        client.end_episode(episode, [0, 1])
    kept = server.episodes.episodes[episode]
    assert kept.seen == [float(step % 50) for step in range(steps)] + [0.0]
    assert kept.rewards == [0.0] + [1.0] * steps
