"""Books of consumer groups in Redis: exact through parts, folds, losses and removals; the audit finds what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import orjson
import pytest
from rich.console import Console

from headrace.broker.files.books_file import BooksFile
from headrace.broker.reports.mirror import MOST_ROWS_A_PART
from headrace.broker.reports.report import MergeScript, Part, Report, read_saved_state
from headrace.broker.reports.reporter import RedisReporter
from headrace.deploy.report.audit import _as_json, audit, render, warnings
from headrace.deploy.run.redis_view import FleetView, Snapshot
from headrace.schemas.accounts.consumer_groups import GroupBooks, GroupState
from headrace.schemas.accounts.folded_lives import FoldedLives, fold
from headrace.schemas.accounts.ledger import LedgerRow
from headrace.schemas.accounts.redis_keys import CONSUMER_GROUPS, GAUGES, GROUP_FOLDED, GROUP_LEDGER, key_name
from support.waiting import wait_until

pytestmark = pytest.mark.processes

MakeRow = Callable[..., LedgerRow]
Rows = Mapping[tuple[int, int], LedgerRow]


def by_life(*rows: LedgerRow) -> dict[tuple[int, int], LedgerRow]:
    return {(row.slot, row.incarnation): row for row in rows}


def folded_of(*rows: LedgerRow) -> FoldedLives:
    lives = None
    for row in rows:
        lives = fold(lives, row)
    assert lives is not None
    return lives


def read(url: str, fleet_id: str) -> Snapshot:
    with FleetView(url, fleet_id) as view:
        return view.read()


def offer(reporter: RedisReporter, rows: Rows, folded: Mapping[int, FoldedLives], **groups: GroupBooks) -> None:
    reporter.offer(Report(rows=list(rows.values()), folded=folded, groups=groups, gauges={"unix_s": 1.0}))
    wait_until(lambda: reporter.is_idle, "the report")


def test_redis_has_the_books_of_each_group_in_parts_and_again_after_it_was_emptied(
    url: str, fleet_id: str, client: Any, make_row: MakeRow
) -> None:
    slots = range(MOST_ROWS_A_PART + 1)
    rows = by_life(*(make_row(slot, 2, 9, 8) for slot in slots))
    behind = by_life(*(make_row(slot, 2, 9, 3) for slot in slots))
    lives = {slot: folded_of(make_row(slot, 1, 5, 5, closed=True)) for slot in slots}
    state = GroupState(on_slow="wait", connected=True, committed=(81920, 640), dropped={"overflow": (32, 2)})
    groups = {"record": GroupBooks(state, behind, lives), "watch": GroupBooks(GroupState(), rows, lives)}
    reporter = RedisReporter(url, fleet_id)
    for _ in range(2):
        offer(reporter, rows, lives, **groups)
        snapshot = read(url, fleet_id)
        assert (snapshot.groups, snapshot.rows, snapshot.folded) == (groups, rows, lives)
        assert read_saved_state(client, fleet_id).groups == groups
        assert (audit(snapshot), snapshot.garbage) == ([], ())
        client.delete(*client.keys(f"headrace:{{{fleet_id}}}:*"))
    assert reporter.close(30.0)


def test_a_row_of_a_folded_life_leaves_one_group_alone_and_does_not_come_back(
    url: str, fleet_id: str, client: Any, make_row: MakeRow
) -> None:
    ended, live = make_row(0, 1, 5, 5, closed=True), make_row(0, 2)
    reporter = RedisReporter(url, fleet_id)
    books = GroupBooks(rows=by_life(ended, live))
    offer(reporter, books.rows, {}, record=books, watch=books)
    old = client.hget(key_name(fleet_id, GROUP_LEDGER), "record/0/1")
    assert (reporter.take_closed_rows("record"), reporter.take_closed_rows()) == ([ended], [ended])
    lives = {0: folded_of(ended)}
    offer(reporter, {}, {}, record=GroupBooks(folded=lives), watch=GroupBooks())
    snapshot = read(url, fleet_id)
    assert snapshot.groups == {"record": GroupBooks(rows=by_life(live), folded=lives), "watch": books}
    assert audit(snapshot) == []

    late = Part(Report(groups={"record": GroupBooks(rows=by_life(ended)), "watch": GroupBooks()}))
    assert MergeScript(client, fleet_id)(late, [], 0) == {"record/0/1"}
    assert read(url, fleet_id).groups["record"].rows == by_life(live)
    client.hset(key_name(fleet_id, GROUP_LEDGER), "record/0/1", old)  # Redis has lost its newest writes
    client.hdel(key_name(fleet_id, GROUP_FOLDED), "record/0")
    offer(reporter, {}, {}, record=GroupBooks(), watch=GroupBooks())
    assert read(url, fleet_id).groups == snapshot.groups
    assert reporter.close(30.0)


def test_a_group_that_is_removed_leaves_redis_and_the_file_of_ended_lives(
    url: str, fleet_id: str, client: Any, make_row: MakeRow, tmp_path: Path
) -> None:
    ended, live = make_row(0, 1, 5, 5, closed=True), make_row(0, 2)
    books = GroupBooks(rows=by_life(live, ended), folded={1: folded_of(make_row(1, 1, 4, 4, closed=True))})
    file = BooksFile(tmp_path, fleet_id)
    reporter = RedisReporter(url, fleet_id, file)
    offer(reporter, {}, {}, rec=books, rec2=books)
    assert {name: (own.rows, own.folded) for name, own in file.read().groups.items()} == {
        name: ([ended], books.folded) for name in ("rec", "rec2")
    }
    reporter.offer(Report(rows=[live]))  # of a broker that does not know yet which groups Redis has
    wait_until(lambda: reporter.is_idle, "the report")
    assert read(url, fleet_id).groups.keys() == {"rec", "rec2"}
    offer(reporter, {}, {}, rec2=GroupBooks())
    assert reporter.close(30.0)
    assert read(url, fleet_id).groups == {"rec2": books}
    assert file.read().groups.keys() == {"rec2"}


def test_a_state_that_no_broker_wrote_is_named_and_the_books_are_still_read(
    url: str, fleet_id: str, client: Any, make_row: MakeRow
) -> None:
    books = GroupBooks(GroupState(on_slow="wait", connected=True, waiting=True), by_life(make_row()))
    MergeScript(client, fleet_id)(Part(Report(groups={"record": books})), [], 0)
    client.delete(key_name(fleet_id, GAUGES))
    assert read(url, fleet_id).groups == {"record": books.unreported()}, "no broker reports"
    client.hset(key_name(fleet_id, CONSUMER_GROUPS), mapping={"record": '{"lag_steps":-1}', "No/Group": "{}"})
    client.hset(key_name(fleet_id, GROUP_LEDGER), mapping={"record/1/1": "{}", "record/x": "{}"})
    snapshot = read(url, fleet_id)
    assert snapshot.groups == {"record": GroupBooks(rows=books.rows)}
    assert len(snapshot.garbage) == 4


FIVE, SIX = (4, 5), (4, 6)
"""(slot, incarnation)."""


@pytest.mark.parametrize(
    ("said", "change"),
    [
        ("slot 4 incarnation 6: accepted (320, 20) != held", {"rows": {"held": (0, 0)}}),
        ("all lives: stepped is 7 steps more", {"rows": {"stepped": 7}}),
        ("slot 4 incarnation 6: accepted (352, 22), where the ledger has (320, 20)", {"rows": {"batches": 11}}),
        ("slot 4 incarnation 6: the ledger has 350 steps of this life, but the group lacks its row", {"lacks": SIX}),
        ("slot 4 incarnation 7: the ledger does not know this life", {"rows": {"incarnation": 7}}),
        ("slot 4: its lives have 350 steps, 320 accepted steps, 20 accepted chunks, but those in", {"folded": {}}),
        ("slot 4, its 1 folded lives: accepted (160, 10) != held", {"folded": {"held": (32, 2)}}),
    ],
    ids=["row", "fleet", "accepted", "lacks a life", "another life", "no folded lives", "folded"],
)
def test_the_audit_names_the_group_and_what_is_wrong(make_row: MakeRow, said: str, change: dict[str, Any]) -> None:
    older, row = make_row(*FIVE, 5, 5, closed=True), make_row(*SIX)
    balanced = GroupBooks(rows=by_life(row), folded={4: folded_of(older)})
    snapshot = Snapshot(reported_unix_s=1.0, rows=balanced.rows, folded=balanced.folded, groups={"record": balanced})
    assert not any(one.startswith("group ") for one in audit(snapshot))
    books = balanced
    if (changes := change.get("rows")) is not None:
        wrong = make_row(4, changes.get("incarnation", 6), changes.get("batches", 10))
        if "stepped" in changes:
            totals = wrong.totals.model_copy(update={"stepped": wrong.totals.stepped + 7})
            wrong = wrong.model_copy(update={"totals": totals})
        wrong = wrong.model_copy(update={name: changes[name] for name in ("held",) if name in changes})
        books = replace(books, rows={**books.rows, **by_life(wrong)})
    if "folded" in change:
        lives = balanced.folded[4]
        row_of_lives = lives.row.model_copy(update=change["folded"])
        kept = {4: lives.model_copy(update={"row": row_of_lives})} if change["folded"] else {}
        books = replace(books, folded=kept)
    if "lacks" in change:
        books = replace(books, rows={})
    found = audit(replace(snapshot, groups={"record": books, "watch": balanced}))
    assert any(one.startswith(f"group record: {said}") for one in found), found
    assert not any(one.startswith("group watch") for one in found)


def test_the_audit_shows_groups_only_where_there_are_any(make_row: MakeRow) -> None:
    row = make_row()
    rows = by_life(row)
    alone = Snapshot(reported_unix_s=1.0, rows=rows)
    stuck = GroupState(on_slow="wait", oldest_s=90.0)
    both = replace(
        alone, groups={"record": GroupBooks(stuck, rows), "watch": GroupBooks(GroupState(oldest_s=90.0), rows)}
    )
    assert [one.rpartition("; ")[2] for one in warnings(both)] == [
        "check that a reader of group record is connected and commits"
    ]
    texts = []
    for snapshot in (alone, both):
        console = Console(file=StringIO(), width=200)
        console.print(render(snapshot, [], []))
        assert isinstance(console.file, StringIO)
        texts.append(console.file.getvalue())
    assert "group" not in texts[0]
    assert "group record: stepped 350 = committed 192 + queued 101 + dropped[oversize] 16" in texts[1]
    told = [orjson.loads(orjson.dumps(_as_json(snapshot, [], []))) for snapshot in (alone, both)]
    assert "groups" not in told[0]
    assert told[1]["groups"]["record"]["rows"] == told[1]["rows"]
    assert told[1]["groups"]["record"]["state"]["oldest_s"] == 90.0
