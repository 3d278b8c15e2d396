"""A worker with envs that have faults, run until enough was seen of it, drained, and its books checked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from headrace.learner_stub import EpisodeStream
from headrace.schemas.accounts.ledger import add_up
from headrace.schemas.chunks.chunk import ChunkEnd, EpisodeChunk
from support.pipeline.delivery import BrokerThread
from support.pipeline.worker_threads import WorkerThread, closed_row
from support.waiting import PATIENCE, wait_until

ENOUGH = 96
"""Steps of a lane after which a test has seen enough."""

LONGEST_S = 200.0 * PATIENCE
"""For that, on a machine with much else to do."""


def lives_of(
    broker: BrokerThread, worker: WorkerThread, lanes: Iterable[int], has_seen_all: Callable[[], bool] = lambda: True
) -> dict[int, list[EpisodeChunk]]:
    """All chunks by lane, of a run until each of `lanes` has made enough steps and `has_seen_all`, and of the drain."""
    lives: dict[int, list[EpisodeChunk]] = defaultdict(list)
    with EpisodeStream(broker.endpoints.learner) as stream, worker:

        def take() -> None:
            for chunk in stream.next(0.05) or ():
                lives[chunk.env_index].append(chunk)

        def has_enough() -> bool:
            take()
            worker.check()
            return has_seen_all() and all(sum(map(len, lives[lane])) >= ENOUGH for lane in lanes)

        wait_until(has_enough, "enough steps of every env", LONGEST_S)
        worker.stopping.set()
        row = closed_row(broker, take=take)
    worker.check()
    assert row.totals.open == 0
    assert add_up(broker.rows()).balance() == 0
    assert row.settled.committed[0] == sum(len(chunk) for life in lives.values() for chunk in life)
    return lives


def brief(life: Iterable[EpisodeChunk]) -> list[Any]:
    """What an env lived through, without the markers of episodes that it lost."""
    return [
        (c.episode_id, c.chunk_index, c.t_start, c.end, c.obs.tobytes(), c.actions.tobytes(), c.rewards.tobytes())
        for c in life
        if c.end is not ChunkEnd.ABORTED
    ]


def check_alike(found: list[Any], expected: list[Any]) -> None:
    """Both lives are the same as far as the shorter one goes. A drain may have cut the last chunk of either."""
    last = min(len(found), len(expected)) - 1
    assert (last + 1) * 8 >= ENOUGH // 2
    assert found[:last] == expected[:last]
    assert found[last][:3] == expected[last][:3]
    for one, other in zip(found[last][4:], expected[last][4:], strict=True):
        assert one.startswith(other) or other.startswith(one)
