"""Books of consumer groups in Redis: exact through parts, folds, losses and removals; the audit finds what is wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from bench.books import FLEET, STEPS, Sessions
from headrace.broker.files.books_file import BooksFile, EndedLives
from headrace.broker.reports.mirror import MOST_ROWS_A_PART
from headrace.broker.reports.report import MergeScript, Part, Report, read_saved_state
from headrace.broker.reports.reporter import RedisReporter
from headrace.deploy.annexes.chaos.deep_audit import Sources, disagreements
from headrace.deploy.command.cli import app
from headrace.deploy.report.audit import _as_json, audit, render, warnings
from headrace.deploy.run.redis_view import FleetView, Snapshot
from headrace.deploy.terminal.console import PrintableConsole
from headrace.schemas.accounts.consumer_groups import GroupBooks, GroupRow
from headrace.schemas.accounts.folded_lives import FoldedLives, fold
from headrace.schemas.accounts.ledger import LedgerRow
from headrace.schemas.accounts.redis_keys import CONSUMER_GROUPS, GAUGES, GROUP_FOLDED, GROUP_LEDGER, key_name
from headrace.schemas.messages import Commit, GroupHello, SourcePosition, WorkerHello
from headrace.schemas.settings.config import BrokerSection, FleetConfig
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
    state = GroupRow(on_slow="wait", connected=True, committed=(81920, 640), dropped={"overflow": (32, 2)})
    groups = {"record": GroupBooks(state, behind, lives), "watch": GroupBooks(GroupRow(), rows, lives)}
    reporter = RedisReporter(url, fleet_id)
    for _ in range(2):
        offer(reporter, rows, lives, **groups)
        snapshot = read(url, fleet_id)
        assert (snapshot.groups, snapshot.rows, snapshot.folded) == (groups, rows, lives)
        assert read_saved_state(client, fleet_id).groups == groups
        assert (audit(snapshot), snapshot.garbage) == ([], ())
        client.delete(*client.keys(f"headrace:{{{fleet_id}}}:*"))
    assert reporter.close(30.0)


def test_headrace_groups_list_shows_each_reader_and_what_it_lacks(
    url: str, fleet_id: str, tmp_path: Path, make_row: MakeRow
) -> None:
    rows = by_life(make_row(0, 2))
    state = GroupRow(connected=True, host="[box]", pid=7, lag_steps=1200, oldest_s=3.5, committed=(81920, 640))
    gone = GroupRow(on_slow="wait", dropped={"overflow": (32, 2), "before_group": (64, 4)})
    reporter = RedisReporter(url, fleet_id)
    offer(reporter, rows, {}, watch=GroupBooks(state, rows), record=GroupBooks(gone, rows))
    config = tmp_path / "fleet.toml"
    config.write_text(f'[redis]\nurl = "{url}"\n[fleet]\nfleet_id = "{fleet_id}"\n')

    def listed(*options: str) -> str:
        return CliRunner().invoke(app, ["groups", "list", "--config", str(config), *options]).stdout

    lines = listed().splitlines()
    shown = {cells[1]: cells[2:-1] for line in lines if len(cells := [cell.strip() for cell in line.split("│")]) > 2}
    assert shown["watch"] == ["drop", "pid 7 on [box]", "1,200", "4", "81,920", "0"]
    assert shown["record"] == ["wait", "away", "0", "0", "0", "32"]
    told = orjson.loads(listed("--json"))
    assert (told["fleet_id"], told["groups"]["record"]["lost"]) == (fleet_id, 32)
    assert GroupRow.model_validate_json(orjson.dumps(told["groups"]["watch"])) == state
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
    books = GroupBooks(GroupRow(on_slow="wait", connected=True, waiting=True), by_life(make_row()))
    MergeScript(client, fleet_id)(Part(Report(groups={"record": books})), [], 0)
    client.delete(key_name(fleet_id, GAUGES))
    assert read(url, fleet_id).groups == {"record": books.unreported()}, "no broker reports"
    client.hset(key_name(fleet_id, CONSUMER_GROUPS), mapping={"record": '{"lag_steps":-1}'})
    client.hset(key_name(fleet_id, GROUP_LEDGER), mapping={"record/1/1": "{}", "record/x": "{}"})
    snapshot = read(url, fleet_id)
    assert snapshot.groups == {"record": GroupBooks(rows=books.rows)}
    assert len(snapshot.garbage) == 3


FIVE, SIX = (4, 5), (4, 6)
"""(slot, incarnation)."""


@pytest.mark.parametrize(
    ("said", "change"),
    [
        ("slot 4 incarnation 6: accepted (320, 20) != held", {"rows": {"held": (0, 0)}}),
        ("all lives: stepped is 7 steps more", {"rows": {"stepped": 7}}),
        (
            "slot 4 incarnation 6: accepted (352, 22) and totals are not those of the ledger, (320, 20)",
            {"rows": {"batches": 11}},
        ),
        ("slot 4 incarnation 6: the ledger has 350 steps of this life, but the group lacks its row", {"lacks": SIX}),
        ("slot 4 incarnation 7: the ledger does not know this life", {"rows": {"incarnation": 7}}),
        ("slot 4: its lives have 350 steps, 320 shipped steps, 20 shipped chunks, but those in", {"folded": {}}),
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
    stuck = GroupRow(on_slow="wait", oldest_s=90.0)
    both = replace(
        alone, groups={"record": GroupBooks(stuck, rows), "watch": GroupBooks(GroupRow(oldest_s=90.0), rows)}
    )
    assert [one.rpartition("; ")[2] for one in warnings(both)] == [
        "check that a reader of group record is connected and commits"
    ]
    texts = []
    for snapshot in (alone, both):
        console = PrintableConsole(StringIO())
        console.print(render(snapshot, [], []))
        assert isinstance(console.file, StringIO)
        texts.append(console.file.getvalue())
    assert "group" not in texts[0]
    assert "group record: stepped 350 = committed 192 + queued 101 + dropped[oversize] 16" in texts[1]
    told = [orjson.loads(orjson.dumps(_as_json(snapshot, [], []))) for snapshot in (alone, both)]
    assert "groups" not in told[0]
    assert told[1]["groups"]["record"]["rows"] == told[1]["rows"]
    assert told[1]["groups"]["record"]["state"]["oldest_s"] == 90.0


def test_the_deep_audit_compares_each_group_with_the_file_of_ended_lives(make_row: MakeRow) -> None:
    ended = make_row(0, 1, 5, 5, closed=True)
    own = EndedLives(rows=[ended], counters=[{}])
    rows = by_life(ended)
    ledger = Snapshot(reported_unix_s=1.0, rows=rows, groups={"record": GroupBooks(rows=rows)})

    def of_the_file(file: EndedLives) -> list[str]:
        found = disagreements(Sources(books=file, books_after=file, ledger=ledger))
        return [one.partition(" has ")[0] for one in found if "books.json" in one]

    assert of_the_file(own.model_copy(update={"groups": {"record": own}})) == []
    assert of_the_file(own) == ["group record: slot 0: books.json"]


class Readers(Sessions):
    """A broker with a learner that commits all, and readers of other groups, which commit when they are told to."""

    def __init__(self, run_dir: Path, url: str, slots: int = 2) -> None:
        self._url = url
        super().__init__(run_dir, url, slots, FleetConfig(broker=BrokerSection(consumer_groups={"record": "wait"})))

    def _hello(self, slot: int) -> WorkerHello:
        hello, known = super()._hello(slot), self._settled.get((slot, self._life))
        return hello.model_copy(update={"groups": {"record": known[1]}}) if known else hello

    def hello(self, group: str, channel: str = "stream") -> None:
        hello = GroupHello(token=group, channel=channel, group=group, host="box", pid=7, program="/rec.py")  # type: ignore[arg-type]
        self._say(b"l" + group.encode(), hello.model_copy(update={"window_batches": 1 << 16, "window_bytes": 1 << 40}))

    def commit(self, group: str) -> None:
        """Commit what the learner has committed, and the ends of lives."""
        own = self.core.groups.by_name[group].store.sources
        position = [
            SourcePosition(slot=slot, incarnation=life, settled=told, ended=life < self._life)
            for (slot, life), (_, told) in self._settled.items()
            if (slot, life) in own
        ]
        self._say(b"l" + group.encode(), Commit(epoch=1, position=position, consumed_batches=1 << 40))

    def seen(self) -> Snapshot:
        """Report twice, so that lives whose rows Redis has may fold. Return what Redis has: its books balance."""
        for _ in range(2):
            self.core.tick(time.monotonic())
            self.report()
            self.await_redis()
        snapshot = read(self._url, FLEET)
        assert (audit(snapshot), snapshot.garbage) == ([], ())
        return snapshot


def counts(snapshot: Snapshot, group: str) -> tuple[int, int, dict[str, int]]:
    """(committed, lag, dropped by reason) in batches, which are equal in the state and in the sum of the books."""
    state, fleet = snapshot.groups[group].state, snapshot.groups[group].fleet()
    assert (fleet.committed, fleet.queued, fleet.dropped) == (state.committed, state.lag_steps, state.dropped)
    gauges = {name: snapshot.gauges[f'{name}{{group="{group}"}}'] for name in state.figures()}
    assert gauges == state.figures()
    return fleet.committed[1], state.lag_steps // STEPS, {reason: n for reason, (_, n) in state.dropped.items()}


def test_groups_have_books_over_lives_restarts_and_an_empty_redis(url: str, client: Any, tmp_path: Path) -> None:
    client.delete(*client.keys(f"headrace:{{{FLEET}}}:*"), "none")
    fleet = Readers(tmp_path, url)
    for _ in range(2):
        fleet.live()
    snapshot = fleet.seen()
    assert (counts(snapshot, "record"), snapshot.groups["record"].state.connected) == ((0, 4, {}), False)
    for _ in range(2):
        fleet.live()
        snapshot = fleet.seen()
    assert snapshot.folded.keys() == {0, 1}
    assert not snapshot.groups["record"].folded, "its reader has taken no end"
    fleet.hello("record")
    fleet.hello("watch")
    fleet.commit("record")
    fleet.live()
    fleet.commit("watch")
    snapshot = fleet.seen()
    assert counts(snapshot, "record") == (8, 2, {})
    assert counts(snapshot, "watch") == (2, 0, {"before_group": 8})
    record, watch = snapshot.groups["record"], snapshot.groups["watch"]
    assert (record.state.on_slow, record.state.declared, record.state.connected) == ("wait", True, True)
    assert (watch.state.on_slow, watch.state.declared, watch.state.lost_steps) == ("drop", False, 0)
    assert (watch.state.host, watch.state.pid, watch.state.program) == ("box", 7, "/rec.py")
    now = snapshot.reported_unix_s or 0.0
    assert all(
        at is not None and now - 60 < at <= now + 1 for at in (watch.state.since_unix_s, watch.state.heard_unix_s)
    )
    assert {slot: lives.lives for slot, lives in record.folded.items()} == {0: 3, 1: 3}

    fleet.commit("record")
    before = fleet.seen()
    for empties in (False, True):
        fleet.broker.close()
        if empties:
            client.delete(*client.keys(f"headrace:{{{FLEET}}}:*"))
        fleet.restart()
        snapshot = fleet.seen()
        assert counts(snapshot, "record") == (10, 0, {})
        assert counts(snapshot, "watch") == (0 if empties else 2, 0, {"before_group": 8})
        assert snapshot.groups["record"].folded == before.groups["record"].folded
        watch = snapshot.groups["watch"]
        assert (watch.state.behind, watch.state.connected) == (True, False)
    assert not watch.rows[0, 5].totals.stepped, "neither the worker nor the file knows of its batch"
    fleet.hello("watch")
    own = fleet.core.groups.by_name["watch"].store.sources
    wait_until(lambda: fleet.core.tick(time.monotonic()) or own[0, 5].accepted, "the broker to pass over a batch")
    snapshot = fleet.seen()
    assert not snapshot.groups["watch"].state.behind
    assert counts(snapshot, "watch") == (0, 0, {"before_group": 8, "broker_lost": 2})

    fleet.hello("watch", "remove")
    assert fleet.seen().groups.keys() == {"record"}
    fleet.restart()
    assert fleet.seen().groups.keys() == {"record"}
    fleet.close()
