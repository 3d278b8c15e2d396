"""Brokers and feeders for tests of the delivery path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from headrace.learner_stub import WeightPublisher
from headrace.schemas.credentials.keys import BrokerKeys
from support.pipeline.delivery import BrokerThread, Feeder, StartBroker, StartFeeder, end_worker_forks
from support.waiting import TIMEOUT_S


@pytest.fixture(scope="session", autouse=True)
def no_server_of_workers_is_left() -> Iterator[None]:
    """End the process that has forked the workers of all tests."""
    yield
    end_worker_forks()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes all contexts that a test entered, in reverse order."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def start_broker(stack: ExitStack, tmp_path: Path) -> StartBroker:
    """`start_broker(**settings)`: a broker in a thread, with the settings of the section [broker]."""

    def start(
        run_dir: Path = tmp_path,
        fleet_id: str = "fleet",
        keys: BrokerKeys | None = None,
        **settings: object,
    ) -> BrokerThread:
        return stack.enter_context(BrokerThread(run_dir, fleet_id, keys, **settings))

    return start


@pytest.fixture
def broker(start_broker: StartBroker) -> BrokerThread:
    """A broker with default settings."""
    return start_broker()


@pytest.fixture
def publisher(broker: BrokerThread, stack: ExitStack) -> WeightPublisher:
    """A publisher to `broker`."""
    return stack.enter_context(WeightPublisher(broker.endpoints.learner, connect_timeout_s=TIMEOUT_S))


@pytest.fixture
def start_feeder(stack: ExitStack) -> StartFeeder:
    """`start_feeder(endpoint, batches, ...)`: a worker's session on real sockets, which ships ready-made batches."""

    def start(endpoint: str, batches: object = (), **settings: object) -> Feeder:
        return stack.enter_context(Feeder(endpoint, batches, **settings))  # type: ignore[arg-type]

    return start
