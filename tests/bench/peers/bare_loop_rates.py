"""The bare loops that every rate is compared to: `bench.limits`, a bare proxy, and a loop that forwards.

PYTHONPATH=tests python tests/bench/peers/bare_loop_rates.py (sampling | workers | transport) CASE SECONDS
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from measuring import Take, main

from bench import limits, pipeline, transport
from bench.processes import Processes


@contextmanager
def sampling(case: str) -> Iterator[Take]:
    """Run limit 2."""
    torch.set_num_threads(1)
    width = int(case)
    env, policy, record = limits.sync_vector(width), limits.TorchPolicy(), limits.arrays(width, limits.HORIZON)
    seen = {"obs": env.reset(seed=0)[0]}

    def take() -> int:
        for t in range(limits.HORIZON):
            seen["obs"] = limits.record_step(env, policy, seen["obs"], record, t)
        return limits.HORIZON * width

    yield take


@contextmanager
def workers(case: str) -> Iterator[Take]:
    """Receive what two such loops push through a bare proxy."""
    with Processes() as processes, pipeline.Proxied(int(case), processes) as limit:
        limit.begin()
        yield limit.take


@contextmanager
def carrying(case: str) -> Iterator[Take]:
    """Receive what a loop in Python forwards."""
    with Processes() as processes, transport.Forwarding(first_load(case), processes, processes.folder) as bare:
        yield bare.take


def first_load(case: str) -> transport.Load:
    """Return the first load of this kind: the one of as many chunks in a message as `chunks_to_carry` has."""
    return next(load for load in transport.LOADS if load.name.startswith(case))


if __name__ == "__main__":
    main(sampling=sampling, workers=workers, transport=carrying)
