"""Lifetime counters of runners: handed to the next broker by Redis, or by a file where Redis is empty, and checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.broker.batches.limits import BrokerLimits
from headrace.broker.files.lifetime_file import SHORTEST_PAUSE_S, Lifetime, LifetimeFile
from headrace.broker.reports.metrics import FleetMetrics
from headrace.broker.reports.report import Report, SavedState
from headrace.broker.reports.reporter import RedisReporter
from headrace.broker.sessions.core import BrokerCore
from headrace.schemas.accounts.env_errors import EnvErrorRow
from headrace.schemas.accounts.ledger import WorkerTotals
from headrace.schemas.accounts.logged_metrics import SumsOfLife
from headrace.schemas.accounts.redis_keys import RUNNER_STATE, key_name
from headrace.schemas.accounts.runner_counters import LARGEST_BYTES, Counters
from headrace.schemas.messages import Bye, Heartbeat, WorkerHello, WorkerWelcome
from support.pipeline.delivery import BrokerThread, feature

KNOWN: Counters = {"num_episodes_lifetime": 7, "num_agent_steps_sampled_lifetime": {"a": 12}}


def saved_by(url: str, fleet_id: str, *reports: Report) -> SavedState:
    """Return the state that Redis has after these reports."""
    reporter = RedisReporter(url, fleet_id)
    for report in reports:
        reporter.offer(report)
    assert reporter.close(30.0)
    following = RedisReporter(url, fleet_id)
    saved = following.take_saved(wait_s=30.0)
    following.close(1.0)
    assert saved is not None
    return saved


def test_the_next_broker_reads_the_reported_runner_state(url: str, fleet_id: str) -> None:
    assert saved_by(url, fleet_id, Report(runner_state={0: KNOWN, 3: {}})).runner_state == {0: KNOWN, 3: {}}
    assert saved_by(url, fleet_id, Report(runner_state={3: KNOWN})).runner_state == {0: KNOWN, 3: KNOWN}


@pytest.mark.parametrize("value", [b"[]", b'{"a": -1}', b"\x80\x04K\x01.", b'{"a": "' + b"x" * LARGEST_BYTES + b'"}'])
def test_malformed_runner_counters_are_logged_and_left_out(
    value: bytes, url: str, fleet_id: str, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client.hset(key_name(fleet_id, RUNNER_STATE), mapping={"0": value, "x": b"{}"})
    assert saved_by(url, fleet_id).runner_state == {}
    for field in ("0", "x"):
        assert f"left out a value in Redis: runner_state: field b'{field}'" in caplog.text


def welcome(core: BrokerCore, token: str, incarnation: int = 0) -> WorkerWelcome:
    """Return the welcome that a worker of slot 0 gets."""
    core.receive(token.encode(), WorkerHello(fleet_id="f", token=token, slot=0, incarnation=incarnation), 0.0)
    (answer,) = [send.content for send in core.take_outbox() if isinstance(send.content, WorkerWelcome)]
    return answer


def test_a_new_worker_gets_the_lifetime_counters_of_its_slot() -> None:
    core = BrokerCore("f", BrokerLimits())
    core.restore([], {0: 4}, 0, {0: KNOWN})
    first = welcome(core, "a")
    assert (first.incarnation, first.counters) == (5, KNOWN)
    beat = Heartbeat(slot=0, incarnation=5, totals=WorkerTotals(), counters={"num_episodes_lifetime": 9})
    core.receive(b"a", beat, 1.0)
    second = welcome(core, "b")
    assert second.counters == {**KNOWN, "num_episodes_lifetime": 9}
    beat = Heartbeat(slot=0, incarnation=5, totals=WorkerTotals(), counters={"num_episodes_lifetime": 99})
    core.receive(b"a", beat, 2.0)
    assert core.state.counters[0]["num_episodes_lifetime"] == 9, "a superseded life is not listened to"
    bye = Bye(
        slot=0, incarnation=6, totals=WorkerTotals(), settled=second.settled, counters={"num_episodes_lifetime": 11}
    )
    core.receive(b"b", bye, 3.0)
    assert welcome(core, "c").counters["num_episodes_lifetime"] == 11


FAILURES = EnvErrorRow(kind="env_exception", where="a", count=3, slots=[0], lives={"0/1": 3})
LIFETIME = Lifetime(
    {0: KNOWN},
    {"past": SumsOfLife(sums={"wins": 2.5}), "0": SumsOfLife(incarnation=1, sums={"wins": 1.0})},
    {FAILURES.fingerprint: FAILURES},
)


def write(file: LifetimeFile, lifetime: Lifetime = LIFETIME, *, last: bool = False) -> None:
    rows = {name: row.model_dump() for name, row in lifetime.env_errors.items()}
    file.write(lifetime.runner_state, lifetime.metric_sums, rows, last=last)


def known_by(broker: BrokerThread) -> Lifetime:
    def look(asked: Any) -> Lifetime:
        metrics = feature(asked, FleetMetrics)
        rows = metrics.env_errors.rows()
        failures = {name: EnvErrorRow.model_validate_json(orjson.dumps(row)) for name, row in rows.items()}
        return Lifetime(dict(asked.core.state.counters), metrics.workers.sums(), failures)

    return broker.ask(look)


def test_a_broker_at_an_empty_redis_goes_on_from_the_file(url: str, fleet_id: str, client: Any, tmp_path: Path) -> None:
    write(LifetimeFile(tmp_path, fleet_id))
    for _ in range(2):  # the second time Redis has all of it too, and nothing counts twice
        with BrokerThread(tmp_path, fleet_id, redis_url=url) as broker:
            assert known_by(broker) == LIFETIME
        assert client.hlen(key_name(fleet_id, RUNNER_STATE)) == 1
        assert LifetimeFile(tmp_path, fleet_id).read() == LIFETIME
    (tmp_path / "lifetime.json").unlink()
    with BrokerThread(tmp_path, fleet_id, redis_url=url) as broker:
        assert known_by(broker) == LIFETIME, "from Redis alone"
    assert LifetimeFile(tmp_path, fleet_id).read() == LIFETIME, "its last report is written there too"


def test_a_damaged_or_foreign_lifetime_file_is_logged_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, path = LifetimeFile(tmp_path, "f"), tmp_path / "lifetime.json"
    assert file.read() == Lifetime()
    assert not caplog.records
    for content in (b"{", b"[]", b'{"fleet_id": "f"}', b'{"fleet_id": "f", "runner_state": 1}'):
        path.write_bytes(content)
        damage = file.read().damage
        assert damage
        assert file.read() == Lifetime(damage=damage)
    assert caplog.text.count("cannot be used") == 8
    write(LifetimeFile(tmp_path, "another"))
    assert file.read() == Lifetime(damage="it is of fleet 'another'")
    assert "it is of fleet 'another'" in caplog.text
    foreign = path.read_bytes()
    write(file)
    assert file.set_aside.read_bytes() == foreign
    content = orjson.loads(path.read_bytes())
    content["runner_state"]["1"] = {"num_episodes_lifetime": -1}
    content["metric_sums"]["x"] = {"sums": 1}
    path.write_bytes(orjson.dumps(content))
    found = file.read()
    assert replace(found, damage="") == LIFETIME
    assert found.damage.count(";") == 1
    assert caplog.text.count("left out a value in lifetime.json") == 2
    write(file, last=True)
    assert file.set_aside.read_bytes() == foreign, "the first one stays"


def test_a_damaged_lifetime_file_that_is_deleted_once_it_was_read_is_written_again(tmp_path: Path) -> None:
    file, path = LifetimeFile(tmp_path, "f"), tmp_path / "lifetime.json"
    path.write_bytes(b"{")
    assert file.read().damage
    path.unlink()
    write(file)
    assert file.read() == LIFETIME
    assert not file.set_aside.exists()


def test_the_lifetime_file_is_written_after_a_pause_by_its_size(tmp_path: Path) -> None:
    now = [0.0]
    file, path = LifetimeFile(tmp_path, "f", lambda: now[0]), tmp_path / "lifetime.json"

    def is_written(lifetime: Lifetime, *, last: bool = False) -> bool:
        path.unlink(missing_ok=True)
        write(file, lifetime, last=last)
        return path.exists()

    assert is_written(LIFETIME)
    assert not is_written(Lifetime({0: {"a": 1}}))
    now[0] += SHORTEST_PAUSE_S
    assert not is_written(LIFETIME), "nothing has changed"
    assert is_written(Lifetime({0: {"a": 1}}), last=True)
    now[0] += SHORTEST_PAUSE_S
    large: Counters = {f"{number:0100}": 1 for number in range(100)}
    assert is_written(Lifetime(dict.fromkeys(range(50), large)))
    now[0] += 4 * SHORTEST_PAUSE_S
    assert not is_written(LIFETIME), "half a megabyte waits for five seconds"
    now[0] += 2 * SHORTEST_PAUSE_S
    assert is_written(LIFETIME)
