"""The keys `fleet` and `events` in Redis, by which a reader marks starts, restarts, scaling and ends of a fleet."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.files.state_file import read_broker_file
from headrace.deploy.run.redis_view import FleetView, Snapshot
from headrace.learner_stub import EpisodeStream
from headrace.schemas.accounts import redis_keys as keys
from support.pipeline.delivery import FLEET, Envs, Feeder, Process, broker_process
from support.waiting import wait_until

pytestmark = pytest.mark.processes

MakeServer = Callable[..., Any]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes all contexts that a test entered, in reverse order."""
    with ExitStack() as stack:
        yield stack


def test_a_broker_writes_each_event_once_and_the_time_of_its_end(
    tmp_path: Path, make_server: MakeServer, stack: ExitStack
) -> None:
    server = make_server().start()
    brokers: list[Process] = []

    def start() -> str:
        brokers.append(stack.enter_context(broker_process(tmp_path, server.url, report_interval_s=0.05)))
        state = read_broker_file(tmp_path)
        assert state is not None
        return state.endpoints.worker

    def snapshot() -> Snapshot:
        with FleetView(server.url, FLEET) as view:
            return view.read()

    def told() -> list[tuple[str, ...]]:
        with server.client() as client:
            entries = [fields for _, fields in client.xrange(keys.key_name(FLEET, keys.EVENTS))]
        assert all(abs(float(fields[b"unix_s"]) - time.time()) < 1000 for fields in entries)
        names = (b"event", b"slot", b"incarnation", b"epoch")
        return [tuple(fields[name].decode() for name in names if name in fields) for fields in entries]

    def until(*expected: tuple[str, ...]) -> None:
        wait_until(lambda: len(told()) >= len(expected), f"{len(expected)} events")
        assert told() == list(expected)

    def end(number: int) -> None:
        brokers[-1].signal(number)
        brokers[-1].wait()

    seen = [("broker",)]
    worker = start()
    state = read_broker_file(tmp_path)
    assert state is not None
    learner = state.endpoints.learner
    until(*seen)
    with Feeder(worker, slot=0) as first:
        seen.append(("joined", "0", "1"))
        until(*seen)
        with EpisodeStream(learner) as stream:
            seen.append(("learner", "1"))
            until(*seen)
            end(signal.SIGKILL)
            assert snapshot().ended_unix_s is None, "it did not stop in order"
            start()
            seen.append(("broker",))
            until(*seen)
            back = brokers[-1].popen.pid
            wait_until(lambda: (stream.pump(), snapshot().lease.get("connected") == 1.0)[1], f"the learner at {back}")
            wait_until(lambda: snapshot().workers.keys() == {0}, f"the worker at {back}")
        with EpisodeStream(learner):
            seen.append(("learner", "2"))
            until(*seen)
        first.leave()
        seen.append(("shutdown", "0", "1"))
        until(*seen)
    with Feeder(worker, slot=0):
        seen.append(("joined", "0", "2"))
        until(*seen)
    assert snapshot().ended_unix_s is None
    end(signal.SIGTERM)
    ended = snapshot()
    assert ended.ended_unix_s == pytest.approx(ended.reported_unix_s, abs=5.0)
    assert (ended.env, ended.version) == ("CartPole-v1", version("headrace"))
    start()
    wait_until(lambda: snapshot().ended_unix_s is None, "the next broker's report")
    end(signal.SIGTERM)
    assert [event for event in told() if event[0] == "broker"] == [("broker",)] * 3
    assert snapshot().ended_unix_s is not None


@pytest.mark.parametrize(("first", "second"), [(signal.SIGTERM, signal.SIGKILL), (signal.SIGKILL, signal.SIGTERM)])
def test_a_life_is_marked_as_stopped_by_the_end_of_the_broker_that_held_its_batches(
    tmp_path: Path, make_server: MakeServer, first: signal.Signals, second: signal.Signals
) -> None:
    server = make_server().start()

    def snapshot() -> Snapshot:
        with FleetView(server.url, FLEET) as view:
            return view.read()

    with broker_process(tmp_path, server.url, report_interval_s=0.05) as broker:
        state = read_broker_file(tmp_path)
        assert state is not None
        with Feeder(state.endpoints.worker, Envs(1).fragments(2), slot=0) as worker:
            wait_until(worker.all_shipped, "both batches")
            worker.leave()
            wait_until(lambda: (row := snapshot().rows.get((0, 1))) is not None and row.closed, "the closed row")
        broker.signal(first)
        broker.wait()
    with broker_process(tmp_path, server.url, report_interval_s=0.05) as broker:
        reported = snapshot().reported_unix_s
        wait_until(lambda: snapshot().reported_unix_s != reported, "the next broker's report")
        broker.signal(second)
        broker.wait()
    row = snapshot().rows[0, 1]
    assert row.held[0] > 0
    assert row.stopped == (first == signal.SIGTERM)
