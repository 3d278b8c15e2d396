"""The audit finds any number of the books that was changed, and names the row it stands in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import orjson
import pytest
from rich.console import Console

from headrace.broker.report import Report
from headrace.broker.reporter import RedisReporter
from headrace.deploy.audit import audit, equation, find_books, render, warnings
from headrace.deploy.redis_view import FleetView, Snapshot
from headrace.schemas.errors import RunDirError
from headrace.schemas.ledger import LedgerRow
from headrace.schemas.redis_keys import LEDGER, SOURCES, TOTALS, key_name


@pytest.fixture
def reported(url: str, fleet_id: str, make_row: Callable[..., LedgerRow]) -> FleetView:
    """A fleet of three rows whose books balance; one incarnation is dead."""
    reporter = RedisReporter(url, fleet_id)
    rows = [make_row(0, 1, 4, 4, closed=True), make_row(0, 2, 10, 7), make_row(1, 1, 3, 0)]
    reporter.offer(Report(rows=rows, counters={(0, 2): {"bytes_total": 1000}}, gauges={"oldest_unsettled_age_s": 2.0}))
    assert reporter.close(30.0)
    return FleetView(url, fleet_id)


def read(view: FleetView) -> Snapshot:
    with view:
        return view.read()


def test_balanced_books_pass(reported: FleetView) -> None:
    snapshot = read(reported)
    assert audit(snapshot) == []
    assert warnings(snapshot) == []
    assert snapshot.totals["env_steps_total"] == sum(row.accepted[0] for row in snapshot.rows.values()) == 17 * 32
    assert snapshot.totals["bytes_total"] == 1000


def numbers(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from numbers(inner, (*path, key))
    if type(value) is int:
        yield path


def changed(row: dict[str, Any], path: tuple[str | int, ...], by: int) -> bytes:
    copy: Any = orjson.loads(orjson.dumps(row))
    inner = copy
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] += by
    return orjson.dumps(copy)


@pytest.mark.parametrize("field", ["0/1", "0/2", "1/1"])
def test_each_number_of_a_row_changed_in_turn_is_found_and_its_row_named(
    reported: FleetView, fleet_id: str, client: Any, field: str
) -> None:
    ledger = key_name(fleet_id, LEDGER)
    good = client.hget(ledger, field)
    row = orjson.loads(good)
    paths = list(numbers(row))
    assert len(paths) >= 18
    slot, incarnation = field.split("/")
    with reported:
        for path in paths:
            for by in (1, 32, -1):
                client.hset(ledger, field, changed(row, path, by))
                problems = audit(reported.read())
                named = [p for p in problems if f"slot {slot} incarnation {incarnation}" in p or repr(field)[1:-1] in p]
                assert named, f"{path} changed by {by} went unnoticed: {problems}"
        client.hset(ledger, field, good)
        assert audit(reported.read()) == []


def test_a_row_that_disappeared_is_missed(reported: FleetView, fleet_id: str, client: Any) -> None:
    client.hdel(key_name(fleet_id, LEDGER), "0/1")
    assert "slot 0 incarnation 1: 128 steps were counted, but its ledger row is missing" in audit(read(reported))


def test_each_lifetime_counter_changed_in_turn_is_found(reported: FleetView, fleet_id: str, client: Any) -> None:
    for key in (TOTALS, SOURCES):
        name = key_name(fleet_id, key)
        for field, value in client.hgetall(name).items():
            client.hset(name, field, int(value) + 1)
            assert any(field.decode().split("/")[-1] in problem for problem in audit(reported.read())), field
            client.hset(name, field, value)
    assert audit(read(reported)) == []


def test_a_row_that_cannot_be_read_is_a_problem(reported: FleetView, fleet_id: str, client: Any) -> None:
    client.hset(key_name(fleet_id, LEDGER), "0/1", b"\x80\x04K\x01.")
    problems = audit(read(reported))
    assert any("ledger" in problem and "0/1" in problem for problem in problems)


def test_a_fleet_that_never_reported_does_not_pass(url: str) -> None:
    assert audit(read(FleetView(url, "nobody"))) == [
        "Redis has no report of fleet 'nobody', so there is nothing to audit"
    ]


def test_a_batch_held_too_long_is_a_warning_and_no_problem() -> None:
    snapshot = Snapshot(gauges={"oldest_unsettled_age_s": 61.0}, reported_unix_s=1.0)
    assert audit(snapshot) == []
    (warning,) = warnings(snapshot)
    assert "held for 61 s" in warning
    assert warnings(snapshot, oldest_unsettled_s=100.0) == []


def test_batches_that_a_broker_and_their_worker_died_with_are_no_contradiction(
    url: str, fleet_id: str, make_row: Callable[..., LedgerRow]
) -> None:
    row = make_row(batches=5, settled=4)
    reporter = RedisReporter(url, fleet_id)
    reporter.offer(Report(rows=[row]))
    assert reporter.close(30.0)
    update = {"open": 0, "discarded": {"env_exception": 9, "worker_killed": 5}, "module_steps": {"one": 120, "two": 8}}
    totals = row.totals.model_copy(update=update)
    fifth_batch_lost = {"accepted": (128, 8), "held": (0, 0), "lost": {"worker_killed": (32, 2)}}
    after_both_died = RedisReporter(url, fleet_id)
    after_both_died.offer(Report(rows=[row.model_copy(update={**fifth_batch_lost, "totals": totals, "closed": True})]))
    assert after_both_died.close(30.0)
    snapshot = read(FleetView(url, fleet_id))
    assert snapshot.rows[0, 1].closed
    assert snapshot.totals["env_steps_total"] == 160
    assert audit(snapshot) == []


def test_the_rendering_says_the_equation_and_names_the_problem(reported: FleetView, fleet_id: str, client: Any) -> None:
    ledger = key_name(fleet_id, LEDGER)
    row = orjson.loads(client.hget(ledger, "1/1"))
    client.hset(ledger, "1/1", changed(row, ("held", 0), 1))
    snapshot = read(reported)
    console = Console(file=StringIO(), width=150)
    console.print(render(snapshot, audit(snapshot), ["a doubt"]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "✗ slot 1 incarnation 1: accepted (96, 6) != held (97, 6)" in text
    assert "! a doubt" in text
    assert "≠ committed 288 + queued " in equation(snapshot.fleet)
    assert "dropped[stale] 64" in text
    assert "discarded[env_exception] 27" in text


def test_open_fleet_reads_the_run_directory(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"no fleet\.json"):
        find_books(tmp_path)
    (tmp_path / "fleet.json").write_text("{")
    with pytest.raises(RunDirError, match="damaged"):
        find_books(tmp_path)
    (tmp_path / "fleet.json").write_text('{"redis_url": ""}')
    with pytest.raises(RunDirError, match="damaged"):
        find_books(tmp_path)
    (tmp_path / "fleet.json").write_text('{"redis_url": "redis://h:1", "fleet_id": "f"}')
    assert find_books(tmp_path) == ("redis://h:1", "f")
