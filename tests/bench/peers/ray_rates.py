"""Ray's object store: one actor puts messages, and this process gets and reads them.

python tests/bench/peers/ray_rates.py transport (small | pixel) SECONDS
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from chunks_to_carry import messages
from measuring import Take, main
from numpy import uint8
from numpy.typing import NDArray

UNDER_WAY = 8
"""Messages that the actor makes ahead."""


@ray.remote(num_cpus=1)
class Producer:
    """Returns one message a call."""

    def __init__(self, size: str) -> None:
        self._messages, _ = messages(size)
        self._turn = 0

    def next(self) -> NDArray[uint8]:
        """Return the next message; Ray puts it into the object store."""
        self._turn += 1
        return self._messages[self._turn % len(self._messages)]


@contextmanager
def transport(case: str) -> Iterator[Take]:
    """Ask for some messages ahead, and read one after another."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    producer, (_, chunks) = Producer.remote(case), messages(case)
    waiting = deque(producer.next.remote() for _ in range(UNDER_WAY))

    def take() -> int:
        waiting.append(producer.next.remote())
        message = ray.get(waiting.popleft())
        assert message[-1] <= 255
        return chunks

    yield take
    ray.shutdown()


if __name__ == "__main__":
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    main(transport=transport)
