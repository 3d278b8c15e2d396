"""The newest tasks are in the run directory and in Redis: either alone is enough for the next broker to go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.broker.reports.mirror import Mirror
from headrace.broker.reports.report import Report
from headrace.learner_stub import TaskPublisher
from headrace.schemas.accounts.redis_keys import TASKS, key_name
from headrace.schemas.errors import UnreachableError
from support.pipeline.delivery import BrokerThread, Feeder
from support.waiting import TIMEOUT_S, wait_until

LEVEL = {"level": 3}
StartOne = Callable[[], BrokerThread]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def start(stack: ExitStack, tmp_path: Path, url: str, fleet_id: str) -> StartOne:
    """`start()`: a broker that reports to Redis five times a second."""
    return lambda: stack.enter_context(BrokerThread(tmp_path, fleet_id, redis_url=url, report_interval_s=0.2))


def teacher(broker: BrokerThread, timeout_s: float = TIMEOUT_S) -> TaskPublisher:
    return TaskPublisher(broker.endpoints.learner, connect_timeout_s=timeout_s)


def publish(broker: BrokerThread) -> tuple[int, int]:
    """Publish `LEVEL` as a new teacher."""
    with teacher(broker) as publisher:
        return publisher.publish(LEVEL)


def in_redis(client: Any, fleet_id: str) -> Any:
    """The version in Redis; None for a damaged value."""
    text = client.hget(key_name(fleet_id, TASKS), "newest")
    with suppress(orjson.JSONDecodeError):
        return text and orjson.loads(text)["tasks"]["version"]


def assert_told(broker: BrokerThread, fleet_id: str, version: tuple[int, int]) -> None:
    """A worker that joins gets the tasks of `version`."""
    with Feeder(broker.endpoints.worker, fleet_id=fleet_id) as feeder:
        tasks = wait_until(lambda: feeder.session.tasks, "the tasks")
        assert tasks is not None
        assert (tasks.version, tasks.tasks[0].values) == (version, LEVEL)


@pytest.mark.parametrize("lost", ["the file", "Redis", "the value in Redis", "neither"])
def test_a_broker_goes_on_from_the_file_or_from_redis(
    start: StartOne, client: Any, fleet_id: str, tmp_path: Path, lost: str
) -> None:
    first, key = start(), key_name(fleet_id, TASKS)
    assert publish(first) == (1, 1)
    wait_until(lambda: in_redis(client, fleet_id) == [1, 1], "the tasks in Redis")
    first.stop()
    if lost == "the file":
        (tmp_path / "tasks.json").unlink()
    elif lost == "Redis":
        client.delete(key)
    elif lost == "the value in Redis":
        client.hset(key, "newest", b'{"epoch":7,"tasks":"' + b"x" * 100)
    second = start()
    assert_told(second, fleet_id, (1, 1))
    assert orjson.loads((tmp_path / "tasks.json").read_bytes())["tasks"]["version"] == [1, 1]
    wait_until(lambda: in_redis(client, fleet_id) == [1, 1], "the tasks in Redis again")
    assert publish(second) == (2, 1)


def test_the_newer_of_file_and_redis_wins(start: StartOne, client: Any, fleet_id: str, tmp_path: Path) -> None:
    """The file is that of an old copy of the run directory."""
    broker, file = start(), tmp_path / "tasks.json"
    publish(broker)
    old = file.read_bytes()
    assert publish(broker) == (2, 1)
    wait_until(lambda: in_redis(client, fleet_id) == [2, 1], "the tasks in Redis")
    broker.stop()
    file.write_bytes(old)
    assert_told(start(), fleet_id, (2, 1))


def test_a_redis_that_loses_all_gets_the_tasks_again(start: StartOne, client: Any, fleet_id: str) -> None:
    publish(start())
    wait_until(lambda: in_redis(client, fleet_id) == [1, 1], "the tasks in Redis")
    client.flushall()
    wait_until(lambda: in_redis(client, fleet_id) == [1, 1], "the tasks in Redis again")


def test_tasks_that_redis_has_are_not_sent_again() -> None:
    mirror = Mirror()
    mirror.take(Report(tasks={"newest": "{}"}))
    sent = []
    for _ in range(2):
        part = mirror.next_part()
        assert part is not None
        sent.append(part.report.tasks)
        mirror.confirm(part)
        mirror.take(Report(tasks={"newest": "{}"}))
    assert sent == [{"newest": "{}"}, {}]


def test_without_the_file_no_epoch_is_given_out_before_redis_has_answered(
    stack: ExitStack, make_server: Callable[..., Any], fleet_id: str, tmp_path: Path
) -> None:
    server = make_server("--appendonly", "yes").start()

    def start() -> BrokerThread:
        return stack.enter_context(BrokerThread(tmp_path, fleet_id, redis_url=server.url, report_interval_s=0.2))

    first = start()
    assert publish(first) == (1, 1)
    with server.client() as client:
        wait_until(lambda: in_redis(client, fleet_id) == [1, 1], "the tasks in Redis")
    first.stop()
    server.kill()
    with teacher(start_and_stop := start()) as publisher:  # the file is there
        assert publisher.publish(LEVEL) == (2, 1)
    start_and_stop.stop()
    (tmp_path / "tasks.json").unlink()
    second = start()
    with pytest.raises(UnreachableError, match="Redis, which may know of a newer publisher of tasks, has not answered"):
        teacher(second, 1.5)
    server.start()
    assert publish(second) == (2, 1)
