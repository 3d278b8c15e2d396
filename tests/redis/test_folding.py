"""Totals are the sum of all lives, in any order of folds, crashes, lost replies and lost data."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import books
from headrace.broker.files.books_file import BooksFile, EndedLives
from headrace.broker.files.lifetime_file import LifetimeFile
from headrace.broker.reports.mirror import Mirror
from headrace.broker.reports.report import MergeScript, Part, Report, read_saved_state
from headrace.broker.reports.reporter import RedisReporter
from headrace.deploy.annexes.watch.exporter.metrics_text import metrics_text
from headrace.deploy.monitoring.facts import FactsReader
from headrace.deploy.report.audit import audit
from headrace.deploy.run.redis_view import FleetView, Snapshot
from headrace.schemas.accounts.folded_lives import FoldedLives, fold
from headrace.schemas.accounts.ledger import LedgerRow, add_up
from headrace.schemas.accounts.logged_metrics import LoggedMetric, SumsOfLife
from headrace.schemas.accounts.redis_keys import (
    FOLDED,
    GAUGES,
    LEASE,
    LEDGER,
    METRIC_SUMS,
    METRICS,
    POLICIES,
    SOURCES,
    TOTALS,
    WORKERS,
    key_name,
)
from headrace.schemas.errors import RunDirError
from support.waiting import wait_until

pytestmark = pytest.mark.processes

MakeRow = Callable[..., LedgerRow]
SLOTS = 3


class Lives:
    """The truth to compare with: the newest row of every life of every slot."""

    def __init__(self, make_row: MakeRow) -> None:
        self._make_row = make_row
        self.rows = {(slot, 1): make_row(slot, 1, 1, 1) for slot in range(SLOTS)}

    def newest(self, slot: int) -> LedgerRow:
        return self.rows[max(life for life in self.rows if life[0] == slot)]

    def work(self, slot: int) -> LedgerRow:
        row = self.newest(slot)
        batches = row.accepted[1] // 2 + 1
        return self._note(self._make_row(slot, row.incarnation, batches, batches))

    def end(self, slot: int) -> list[LedgerRow]:
        row = self.newest(slot)
        batches = row.accepted[1] // 2
        last = self._make_row(slot, row.incarnation, batches, batches, closed=True)
        return [self._note(last), self._note(self._make_row(slot, row.incarnation + 1, 1, 1))]

    def _note(self, row: LedgerRow) -> LedgerRow:
        self.rows[row.slot, row.incarnation] = row
        return row


class Reports:
    """A broker with its reporter's mirror, in one thread, and what survives it: a file and Redis."""

    def __init__(self, client: Any, fleet_id: str, folder: Path, lives: Lives) -> None:
        self.client, self.fleet_id, self.lives = client, fleet_id, lives
        self.file = BooksFile(folder, fleet_id)
        self.begin()

    def begin(self) -> None:
        """Begin as a broker does: from the file and Redis, and from what live workers tell."""
        self.mirror, self.merge = Mirror(), MergeScript(self.client, self.fleet_id)
        saved = read_saved_state(self.client, self.fleet_id)
        ended = self.file.read()
        self.folded = dict(ended.folded)
        for slot, lives in saved.folded.items():
            if slot not in self.folded or not self.folded[slot].covers(lives):
                self.folded[slot] = lives
        rows = {(row.slot, row.incarnation): row for row in ended.rows} | saved.rows
        rows = {life: row for life, row in rows.items() if row.closed and not self.is_folded(life)}
        self.closed = {life: row for life, row in rows.items() if life in saved.rows}
        rows |= {life: row for life, row in self.lives.rows.items() if not row.closed}
        self.mirror.take(Report(rows=list(rows.values()), folded=self.folded))

    def is_folded(self, life: tuple[int, int]) -> bool:
        return life[0] in self.folded and life[1] in self.folded[life[0]]

    def fold(self, slot: int) -> None:
        """Fold the oldest life that Redis has as closed."""
        ready = sorted(life for life in self.closed if life[0] == slot)
        if ready:
            lives = fold(self.folded.get(slot), self.closed.pop(ready[0]))
            assert lives is not None
            self.folded[slot] = lives
            self.mirror.take(Report(folded={slot: lives}))

    def send(self, most: int = 1000, lost: Callable[[], bool] = lambda: False) -> None:
        """Report, which sends up to so many parts; some replies are lost."""
        self.mirror.take(Report())
        if self.mirror.has_new_ends:
            self.file.write(self.mirror.ended())
            self.mirror.ends_written()
        for _ in range(most):
            if self.mirror.is_whole:
                names = self.client.hkeys(key_name(self.fleet_id, LEDGER))
                self.mirror.remove_folded([tuple(map(int, name.split(b"/"))) for name in names])
            part = self.mirror.next_part()
            if part is None:
                self.mirror.is_whole = False
                return
            newer = self.merge(part, [], 0, after_last=not (self.mirror.is_whole and part.is_first))
            if newer is None:
                self.mirror.forget_confirmed()
                continue
            if lost():  # Redis has the part, and the next call finds that it knows more than was confirmed
                continue
            self.mirror.confirm(part)
            closed = {(row.slot, row.incarnation): row for row in part.report.rows if row.closed}
            self.closed |= {life: row for life, row in closed.items() if not self.is_folded(life)}


def test_a_life_that_is_folded_before_its_row_was_written_is_sent_as_folded_alone(make_row: MakeRow) -> None:
    mirror, row = Mirror(), make_row(0, 1, 5, 5, closed=True)
    mirror.take(Report(rows=[row]))
    lives = fold(None, row)
    assert lives is not None
    mirror.take(Report(folded={0: lives}))
    mirror.ends_written()
    parts: list[Part] = []
    while (part := mirror.next_part()) is not None:
        parts.append(part)
        mirror.confirm(part)
    assert [(part.report.rows, part.report.folded) for part in parts] == [([], {0: lives})]


def read(url: str, fleet_id: str) -> Snapshot:
    with FleetView(url, fleet_id) as view:
        return view.read()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(12))
def test_totals_are_the_sum_of_all_lives_in_any_order_of_folds_and_losses(
    url: str, fleet_id: str, client: Any, make_row: MakeRow, tmp_path: Path, seed: int
) -> None:
    chance, lives = random.Random(seed), Lives(make_row)
    reports = Reports(client, fleet_id, tmp_path, lives)
    reports.send()
    earlier: list[Part] = []
    for _ in range(60):
        slot, event = chance.randrange(SLOTS), chance.random()
        if event < 0.3:
            reports.mirror.take(Report(rows=[lives.work(slot)]))
        elif event < 0.5:
            reports.send()  # a life's end must reach Redis before its broker dies; its recorder stays until then
            reports.mirror.take(Report(rows=lives.end(slot)))
            reports.send(lost=lambda: chance.random() < 0.3)
            reports.send()
        elif event < 0.8:
            reports.fold(slot)
        elif event < 0.85:
            for key in client.keys(f"headrace:{{{fleet_id}}}:*"):
                client.delete(key)
            if chance.random() < 0.5:
                reports.begin()
            reports.send(lost=lambda: chance.random() < 0.3)
        elif event < 0.9 and (part := reports.mirror.next_part()) is not None:
            earlier.append(part)
        elif earlier:  # a call of an earlier broker that comes late
            MergeScript(client, fleet_id)(chance.choice(earlier), [], 0)
        if chance.random() < 0.3:
            reports.send(chance.randrange(3), lost=lambda: chance.random() < 0.3)
            if chance.random() < 0.5:
                reports.begin()
    reports.send(lost=lambda: chance.random() < 0.3)
    reports.send()
    snapshot = read(url, fleet_id)
    assert audit(snapshot) == []
    for life, row in lives.rows.items():
        assert snapshot.is_folded(life) or snapshot.rows.get(life) == row
    assert snapshot.fleet == add_up(lives.rows)
    assert snapshot.totals["committed_agent_steps_total"] == snapshot.fleet.committed[0]
    assert snapshot.totals["agent_steps_total"] == snapshot.fleet.stepped
    assert sum(folded.lives for folded in snapshot.folded.values()) + len(snapshot.rows) == len(lives.rows)


def test_a_late_row_of_a_folded_life_is_not_written_again(
    url: str, fleet_id: str, client: Any, make_row: MakeRow
) -> None:
    row = make_row(0, 1, 5, 5, closed=True)
    merge = MergeScript(client, fleet_id)
    merge(Part(Report(rows=[row])), [], 0)
    lives = fold(None, row)
    assert lives is not None
    part = Part(Report(folded={0: lives}), lives={0: [1]}, counters=[*read(url, fleet_id).sources[0, 1]])
    before = read(url, fleet_id).totals
    for _ in range(3):
        merge(part, [], 0)
        assert merge(Part(Report(rows=[row], counters={(0, 1): {"accepted_bytes_total": 7}})), [], 0) == {"0/1"}
    snapshot = read(url, fleet_id)
    assert (snapshot.rows, snapshot.totals) == ({}, before)
    assert snapshot.folded == {0: lives}
    assert audit(snapshot) == []


def test_counters_that_only_an_earlier_broker_knew_fold_too(
    url: str, fleet_id: str, client: Any, make_row: MakeRow
) -> None:
    """A recorder has no steps by module: a life that a broker did not see alive is closed without them."""

    def end(incarnation: int) -> LedgerRow:
        row = make_row(0, incarnation, 5, 5, closed=True)
        return row.model_copy(update={"totals": row.totals.model_copy(update={"module_steps": {}})})

    def report(reporter: RedisReporter, **news: Any) -> None:
        reporter.offer(Report(**news))
        wait_until(lambda: reporter.is_idle)

    earlier = RedisReporter(url, fleet_id)
    report(earlier, rows=[make_row(0, 1, 4, 4), make_row(0, 2, 4, 4)])
    assert earlier.close(30.0)
    later = RedisReporter(url, fleet_id)
    report(later, rows=[end(1)])
    folded = fold(None, end(1))
    report(later, folded={0: folded})
    assert set(read(url, fleet_id).sources) == {(0, 0), (0, 2)}
    assert audit(read(url, fleet_id)) == []
    report(later, rows=[make_row(0, 2, 5, 5, closed=True)])
    report(later, folded={0: fold(folded, make_row(0, 2, 5, 5, closed=True))})
    assert later.close(30.0)
    snapshot = read(url, fleet_id)
    assert set(snapshot.sources) == {(0, 0)}
    assert snapshot.sources[0, 0]['accepted_module_agent_steps_total{module="one"}'] == (4 + 5) * 32 - 2 * 8
    assert audit(snapshot) == []
    for name in (SOURCES, TOTALS):
        field = 'accepted_module_agent_steps_total{module="one"}'
        client.hincrby(key_name(fleet_id, name), f"0/0/{field}" if name is SOURCES else field, 1000)
    assert any(
        'accepted_module_agent_steps_total{module="one"} was counted as 1272' in problem
        for problem in audit(read(url, fleet_id))
    )


def test_the_bench_of_the_books_measures_all_its_cases(url: str) -> None:
    """The bench checks the audit and the totals, also after its broker's restart."""
    rows = {row.case: row for row in books.measure(slots=4, lives=8)}
    assert len(rows) == 11


def test_an_empty_redis_gets_the_books_of_all_ended_lives_from_a_new_broker(
    url: str, client: Any, tmp_path: Path
) -> None:
    client.delete(*client.keys(f"headrace:{{{books.FLEET}}}:*"), "none")  # those of another test
    with closing(books.Sessions(tmp_path, url, slots=3)) as fleet:
        for _ in range(5):
            fleet.live()
            fleet.report()
            fleet.await_redis()
        fleet.report()
        fleet.await_redis()
        before = read(url, books.FLEET)
        assert {slot: lives.lives for slot, lives in before.folded.items()} == {0: 3, 1: 3, 2: 3}
        assert len(before.rows) == 6
        assert audit(before) == []
        of_lives = {life: counters.get("accepted_bytes_total") for life, counters in before.sources.items()}
        assert of_lives == {(slot, life): 3000 if life == 0 else 1000 for slot in range(3) for life in (0, 4, 5)}
        fleet.broker.close()
        for key in client.keys(f"headrace:{{{books.FLEET}}}:*"):
            client.delete(key)
        fleet.restart()
        snapshot = read(url, books.FLEET)
    assert audit(snapshot) == []
    assert (snapshot.folded, snapshot.rows) == (before.folded, before.rows)
    of_live = dict.fromkeys(("accepted_bytes_total", "committed_bytes_total"), 3 * 1000)  # no worker knows them
    assert snapshot.totals == {name: total - of_live.get(name, 0) for name, total in before.totals.items()}


def test_a_report_has_only_changed_rows_until_redis_is_emptied(
    url: str, fleet_id: str, client: Any, make_row: MakeRow
) -> None:
    reporter = RedisReporter(url, fleet_id)
    ledger = key_name(fleet_id, LEDGER)

    def report(*rows: LedgerRow) -> None:
        reporter.offer(Report(rows=list(rows)))
        wait_until(lambda: reporter.is_idle)

    report(*(make_row(slot, 1, 4, 4) for slot in range(3)))
    client.hdel(ledger, "2/1")
    report(make_row(0, 1, 5, 5))
    assert set(client.hkeys(ledger)) == {b"0/1", b"1/1"}, "a row that did not change was sent again"
    for key in client.keys(f"headrace:{{{fleet_id}}}:*"):
        client.delete(key)
    report()
    assert set(client.hkeys(ledger)) == {b"0/1", b"1/1", b"2/1"}
    assert audit(read(url, fleet_id)) == []
    assert reporter.close(30.0)


def shown_by_the_exporter(url: str, fleet_id: str) -> str:
    with FactsReader(redis_url=url, fleet_id=fleet_id) as reader:
        return metrics_text({fleet_id: reader.read()}, "text/plain")[0].decode()


@pytest.mark.parametrize("ended_unix_s", [None, 1_795_280_000.0], ids=["killed", "ended in order"])
def test_what_is_of_a_moment_expires_and_books_and_the_epoch_stay(
    url: str, fleet_id: str, client: Any, make_row: MakeRow, ended_unix_s: float | None
) -> None:
    report = Report(
        rows=[make_row()],
        gauges={"held_batches": 1.0},
        workers={0: {"pid": 1}},
        policies={"short": {"return_mean": 2.0}},
        metrics={"goals": LoggedMetric(reduce="sum", value=3.0)},
        metric_sums={"0": SumsOfLife(incarnation=1, sums={"goals": 3.0})},
        lease={"unix_s": 1_795_280_000.0, "epoch": 3, "connected": 1},
        ended_unix_s=ended_unix_s,
    )
    shown = ("headrace_policy_return{", "headrace_callback_metric{")
    MergeScript(client, fleet_id)(Part(report), [], 0)
    text = shown_by_the_exporter(url, fleet_id)
    assert all(name in text for name in (*shown, "headrace_learner_connected{"))
    MergeScript(client, fleet_id, live_s=0.2)(Part(report), [], 0)
    of_a_moment, final = [GAUGES, WORKERS], [POLICIES, METRICS]
    for key in of_a_moment if ended_unix_s else of_a_moment + final:
        wait_until(lambda key=key: not client.exists(key_name(fleet_id, key)))
    stay = [LEDGER, TOTALS, SOURCES, METRIC_SUMS, LEASE, *(final if ended_unix_s else ())]
    assert all(client.ttl(key_name(fleet_id, key)) == -1 for key in stay)
    text = shown_by_the_exporter(url, fleet_id)
    assert [name in text for name in shown] == [ended_unix_s is not None] * 2
    assert "headrace_learner_connected{" not in text
    lease = read(url, fleet_id).lease
    assert (lease["epoch"], lease["unix_s"], "connected" in lease) == (3, 1_795_280_000.0, False)
    MergeScript(client, fleet_id)(Part(replace(report, ended_unix_s=None)), [], 0)
    assert all(client.ttl(key_name(fleet_id, key)) > 0 for key in of_a_moment + final), "of a fleet that goes on"
    assert read(url, fleet_id).lease["connected"] == 1


def test_a_new_broker_keeps_what_is_known_of_the_learner_until_a_newer_one_comes(
    url: str, fleet_id: str, client: Any
) -> None:
    def report(**lease: Any) -> dict[str, Any]:
        MergeScript(client, fleet_id)(Part(Report(lease=lease)), [], 0)
        return dict(read(url, fleet_id).lease)

    known = {"host": "box", "pid": 7, "program": "/ppo.py", "heard_unix_s": 1.79e9, "torch_threads": 8, "cores": 4}
    assert report(epoch=3, unix_s=1.0, **known) == {"epoch": 3, "unix_s": 1.0, **known}
    assert report(epoch=3, unix_s=2.0) == {"epoch": 3, "unix_s": 2.0, **known}
    assert report(epoch=2, unix_s=3.0) == {"epoch": 3, "unix_s": 2.0, **known}
    assert report(epoch=4, unix_s=4.0) == {"epoch": 4, "unix_s": 4.0}


@pytest.mark.parametrize("damage", [b'"highest":2', b'"stepped":4', b'"settled":{"seq":1'])
def test_the_audit_finds_a_changed_number_of_folded_lives(
    url: str, fleet_id: str, client: Any, make_row: MakeRow, damage: bytes
) -> None:
    lives = fold(fold(None, make_row(0, 1, 5, 5, closed=True)), make_row(0, 2, 5, 5, closed=True))
    assert lives is not None
    MergeScript(client, fleet_id)(Part(Report(folded={0: lives}, incarnations={0: 2})), [], 0)
    assert audit(read(url, fleet_id)) == []
    name = key_name(fleet_id, FOLDED)
    good = client.hget(name, "0")
    assert damage in good
    client.hset(name, "0", good.replace(damage, damage + b"7"))
    assert any("slot 0" in problem and "fold" in problem for problem in audit(read(url, fleet_id)))


def test_folded_lives_know_each_life_in_any_order(make_row: MakeRow) -> None:
    for seed in range(50):
        chance = random.Random(seed)
        order = chance.sample(range(1, 30), 20)
        lives: FoldedLives | None = None
        for count, incarnation in enumerate(order):
            before, lives = lives, fold(lives, make_row(0, incarnation, 2, 2, closed=True))
            assert lives is not None
            assert {n for n in range(40) if n in lives} == set(order[: count + 1])
            assert (lives.lives, list(lives.problems())) == (count + 1, [])
            assert before is None or (lives.covers(before) and not before.covers(lives))
            assert fold(lives, make_row(0, incarnation, 2, 2, closed=True)) is None, "a life was added twice"


def test_a_lifetime_file_that_cannot_be_written_is_said_once(
    url: str, fleet_id: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Attempts between two writes are pauses, and no success."""
    now = 0.0
    file = LifetimeFile(tmp_path / "absent", fleet_id, clock=lambda: now)
    reporter = RedisReporter(url, fleet_id, lifetime_file=file)
    for steps in range(1, 9):
        reporter.offer(Report(runner_state={0: {"num_episodes_lifetime": steps}}, metric_sums={}))
        wait_until(lambda: reporter.is_idle, "the report")
        now += 0.6
    assert reporter.close(30.0)
    assert caplog.text.count("lifetime.json cannot be written") == 1


def test_redis_gets_the_row_of_an_ended_life_only_once_the_books_file_has_it(
    url: str, fleet_id: str, client: Any, make_row: MakeRow, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, ended, live = tmp_path / "absent", make_row(0, 1, 4, 4, closed=True), make_row(0, 2)
    reporter = RedisReporter(url, fleet_id, BooksFile(folder, fleet_id))
    for _ in range(2):
        reporter.offer(Report(rows=[ended, live]))
        wait_until(lambda: reporter.is_idle, "the report")
        assert set(read(url, fleet_id).rows) == {(0, 2)}, "its recorder is kept"
        assert reporter.take_closed_rows() == []
        client.delete(*client.keys(f"*{fleet_id}*"))  # so that all is reported again
    assert caplog.text.count("books.json cannot be written") == 1
    folder.mkdir()
    reporter.offer(Report())
    assert reporter.close(30.0)
    assert read(url, fleet_id).rows == {(0, 1): ended, (0, 2): live}
    assert reporter.take_closed_rows() == [ended]
    assert BooksFile(folder, fleet_id).read().rows == [ended]


def test_a_damaged_or_foreign_books_file_gives_an_error(tmp_path: Path) -> None:
    (tmp_path / "books.json").write_text("{")
    with pytest.raises(RunDirError, match="remove it only if Redis has the books"):
        BooksFile(tmp_path, "f").read()
    BooksFile(tmp_path, "another").write(EndedLives())
    with pytest.raises(RunDirError, match="of fleet 'another'"):
        BooksFile(tmp_path, "f").read()
