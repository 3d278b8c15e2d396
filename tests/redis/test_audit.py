"""The audit finds each changed number of the books, and names its row."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.broker.batches.limits import BrokerLimits
from headrace.broker.files.books_file import BooksFile, EndedLives
from headrace.broker.files.lifetime_file import LifetimeFile
from headrace.broker.reports.metrics import FleetMetrics
from headrace.broker.reports.report import MergeScript, Part, Report
from headrace.broker.reports.reporter import RedisReporter
from headrace.broker.sessions.core import BrokerCore
from headrace.deploy.report import audit as audits
from headrace.deploy.report.audit import audit, equation, find_books, once_caught_up, render, warnings
from headrace.deploy.report.evidence import read_evidence
from headrace.deploy.run.redis_view import FleetView, Snapshot
from headrace.deploy.terminal.console import PrintableConsole
from headrace.learner_stub.checkpoints.checkpoint import Checkpoint, save_checkpoint
from headrace.schemas.accounts.folded_lives import fold
from headrace.schemas.accounts.ledger import LedgerRow, Settled, WorkerTotals
from headrace.schemas.accounts.recorder import Recorder
from headrace.schemas.accounts.redis_keys import (
    FLEET,
    GAUGES,
    INCARNATIONS,
    LEDGER,
    SOURCES,
    TOTALS,
    key_name,
)
from headrace.schemas.chunks.batch import BatchHeader
from headrace.schemas.errors import RunDirError
from headrace.schemas.messages import LearnerHello, SourcePosition, WorkerHello
from support.waiting import TIMEOUT_S, wait_until

LIVE = Snapshot(gauges={"env_steps_per_s": 0.0})
"""The state of a fleet whose broker reports."""


@pytest.fixture
def reported(url: str, fleet_id: str, make_row: Callable[..., LedgerRow]) -> FleetView:
    """A fleet of three rows whose books balance; one incarnation is dead."""
    reporter = RedisReporter(url, fleet_id)
    rows = [make_row(0, 1, 4, 4, closed=True), make_row(0, 2, 10, 7), make_row(1, 1, 3, 0)]
    reporter.offer(
        Report(rows=rows, counters={(0, 2): {"accepted_bytes_total": 1000}}, gauges={"oldest_unsettled_age_s": 2.0})
    )
    assert reporter.close(30.0)
    return FleetView(url, fleet_id)


def read(view: FleetView) -> Snapshot:
    with view:
        return view.read()


def test_balanced_books_pass(reported: FleetView) -> None:
    snapshot = read(reported)
    assert audit(snapshot) == []
    assert warnings(snapshot) == []
    assert (
        snapshot.totals["accepted_agent_steps_total"]
        == sum(row.accepted[0] for row in snapshot.rows.values())
        == 17 * 32
    )
    assert snapshot.totals["accepted_bytes_total"] == 1000


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
def test_the_audit_finds_each_changed_number_of_a_row_and_names_the_row(
    reported: FleetView, fleet_id: str, client: Any, field: str
) -> None:
    ledger = key_name(fleet_id, LEDGER)
    good = client.hget(ledger, field)
    row = orjson.loads(good)
    paths = [path for path in numbers(row) if path not in (("slot",), ("incarnation",))]  # its field names them
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


def test_the_audit_reports_a_missing_row(reported: FleetView, fleet_id: str, client: Any) -> None:
    client.hdel(key_name(fleet_id, LEDGER), "0/1")
    assert "slot 0 incarnation 1: 128 steps were counted, but its ledger row is missing" in audit(read(reported))


def test_the_audit_finds_each_changed_lifetime_counter(reported: FleetView, fleet_id: str, client: Any) -> None:
    for key in (TOTALS, SOURCES):
        name = key_name(fleet_id, key)
        for field, value in client.hgetall(name).items():
            client.hset(name, field, int(value) + 1)
            assert any(field.decode().split("/")[-1] in problem for problem in audit(reported.read())), field
            client.hset(name, field, value)
    assert audit(read(reported)) == []


def test_the_audit_reports_an_unreadable_row(reported: FleetView, fleet_id: str, client: Any) -> None:
    client.hset(key_name(fleet_id, LEDGER), "0/1", b"\x80\x04K\x01.")
    problems = audit(read(reported))
    assert any("ledger" in problem and "0/1" in problem for problem in problems)


def test_a_fleet_that_never_reported_does_not_pass(url: str) -> None:
    assert audit(read(FleetView(url, "nobody"))) == [
        "Redis has no report of fleet 'nobody', so there is nothing to audit"
    ]


def test_the_audit_finds_a_live_row_with_a_newer_incarnation_in_its_slot(
    reported: FleetView, fleet_id: str, client: Any
) -> None:
    client.hset(key_name(fleet_id, INCARNATIONS), "1", 2)
    (problem,) = audit(read(reported))
    assert "slot 1 incarnation 1 claims to be live, although incarnation 2 has its slot" in problem


def test_the_audit_reports_when_the_books_of_a_lost_unsupervised_worker_close(url: str, fleet_id: str) -> None:
    """A worker that was started by hand and killed, with another one in its slot."""
    core, reporter = BrokerCore(fleet_id, BrokerLimits()), RedisReporter(url, fleet_id)
    metrics = FleetMetrics(core)
    told = WorkerTotals(stepped=10, shipped=10, shipped_chunks=1, seq=1)
    hello = WorkerHello(fleet_id=fleet_id, token="one", slot=0, incarnation=1)
    core.receive(b"one", hello, 0.0)
    core.receive(b"learner", LearnerHello(token="l", channel="stream"), 0.0)
    header = BatchHeader(fleet_id=fleet_id, slot=0, incarnation=1, seq=1, steps=10, chunks=1, totals=told)
    assert core.receive_batch(b"one", header, [b""], 100, 0.0)
    core.receive(b"two", hello.model_copy(update={"token": "two", "incarnation": 2}), 5.0)
    core.tick(6.0)
    reporter.offer(metrics.report(6.0))
    wait_until(lambda: bool(read(FleetView(url, fleet_id)).rows), "the first report")
    (problem,) = audit(read(FleetView(url, fleet_id)))
    assert "slot 0 incarnation 1 claims to be live" in problem
    assert "a running broker closes its books about a minute after its last word" in problem
    core.tick(core.workers.last_close_at + 1.0)
    reporter.offer(metrics.report(100.0))
    assert reporter.close(30.0)
    snapshot = read(FleetView(url, fleet_id))
    assert snapshot.rows[0, 1].closed
    assert "lost_lives_close_unix_s" not in snapshot.gauges
    assert audit(snapshot) == []


class Run:
    """A run directory whose evidence agrees with the fleet `reported`: every worker has ended."""

    def __init__(self, path: Path, url: str, fleet_id: str, view: FleetView) -> None:
        self.path = path
        (path / "recorders").mkdir()
        (path / "fleet.json").write_bytes(orjson.dumps({"redis_url": url, "fleet_id": fleet_id, "state": "stopped"}))
        with view:
            rows = view.read().rows
        self.row = rows[0, 1]
        self.leave_recorder(self.row.totals.stepped, 0, 1, self.row.totals.seq)
        place = SourcePosition(slot=0, incarnation=1, settled=rows[0, 1].settled).model_dump(mode="json")
        position = [{"fleet_id": fleet_id} | place]
        save_checkpoint(path / "learner.checkpoint", Checkpoint(1, position, {}, {}))
        ended = EndedLives(rows=[self.row], counters=[{}])
        BooksFile(path, fleet_id).write(ended)
        witness = LifetimeFile(path, fleet_id)
        witness.add_ended(ended)
        witness.write({}, {}, {}, last=True)

    def leave_recorder(self, stepped: int, slot: int, incarnation: int, seq: int = 0, more_episodes: int = 0) -> None:
        recorder = Recorder(self.path / "recorders" / f"worker-{slot}-{incarnation}.rec", slot, incarnation)
        episodes = more_episodes + (self.row.totals.episodes if seq else 0)
        recorder.totals(WorkerTotals(seq=seq, stepped=stepped, open=stepped, episodes=episodes))
        recorder.close()

    def audit(self, *how: str) -> tuple[int, str]:
        """Exit code and last line of `headrace audit`."""
        command = [sys.executable, "-m", "headrace.deploy", "audit", *how, str(self.path)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        return ran.returncode, ran.stderr.strip().rpartition("\n")[2]


def lose_the_ledger(run: Run, client: Any, fleet_id: str) -> None:
    client.delete(key_name(fleet_id, LEDGER), key_name(fleet_id, SOURCES), key_name(fleet_id, TOTALS))


def go_back(run: Run, client: Any, fleet_id: str) -> None:
    settled = Settled(seq=5, committed=(160, 10))
    place = SourcePosition(slot=0, incarnation=1, settled=settled).model_dump(mode="json")
    save_checkpoint(run.path / "learner.checkpoint", Checkpoint(1, [place], {}, {}))


def end_and_go_back(run: Run, client: Any, fleet_id: str) -> None:
    go_back(run, client, fleet_id)
    client.hset(key_name(fleet_id, FLEET), "ended_unix_s", "1")


def step_once_more(run: Run, client: Any, fleet_id: str) -> None:
    run.leave_recorder(10_000, 0, 1)


def die_unseen(run: Run, client: Any, fleet_id: str) -> None:
    run.leave_recorder(77, 3, 1)


def write_another_layout(run: Run, client: Any, fleet_id: str) -> None:
    (run.path / "recorders" / "worker-4-1.rec").write_bytes(b"a later one")


def lose_the_witness(run: Run, client: Any, fleet_id: str) -> None:
    (run.path / "lifetime.json").unlink()


def link_the_witness_to_nothing(run: Run, client: Any, fleet_id: str) -> None:
    lose_the_witness(run, client, fleet_id)
    (run.path / "lifetime.json").symlink_to(run.path / "nothing")


def take_the_sum_from_the_witness(run: Run, client: Any, fleet_id: str) -> None:
    path = run.path / "lifetime.json"
    path.write_bytes(orjson.dumps({k: v for k, v in orjson.loads(path.read_bytes()).items() if k != "ended"}))


def put_a_pipe_in_its_place(run: Run, client: Any, fleet_id: str) -> None:
    lose_the_witness(run, client, fleet_id)
    os.mkfifo(run.path / "lifetime.json")


def cut_the_checkpoint_short(run: Run, client: Any, fleet_id: str) -> None:
    os.truncate(run.path / "learner.checkpoint", 100)


def change_a_byte_of_the_checkpoint(run: Run, client: Any, fleet_id: str) -> None:
    path = run.path / "learner.checkpoint"
    path.write_bytes(path.read_bytes().replace(b'"epoch', b'"epocH'))


def name_a_role_by_a_list(run: Run, client: Any, fleet_id: str) -> None:
    (run.path / "summary.json").write_bytes(orjson.dumps({"processes": [{"role": ["broker"], "state": "failed"}]}))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (None, ""),
        (lose_the_witness, "lifetime.json is missing, or has no sum of ended lives, although books.json has such"),
        (link_the_witness_to_nothing, "lifetime.json is missing, or has no sum of ended lives"),
        (take_the_sum_from_the_witness, "lifetime.json is missing, or has no sum of ended lives"),
        (put_a_pipe_in_its_place, "lifetime.json is damaged ([Errno 22] lifetime.json is no regular file)"),
        (name_a_role_by_a_list, ""),
        (cut_the_checkpoint_short, "learner.checkpoint cannot be read (it ends within its header, after 100 bytes)"),
        (change_a_byte_of_the_checkpoint, "learner.checkpoint cannot be read (its bytes do not match their checksum)"),
        (lose_the_ledger, "the ledger is empty, although the learner has trained on 96 steps"),
        (go_back, "the learner has settled batches up to 5 (learner.checkpoint says so), but the ledger knows 4"),
        (
            end_and_go_back,
            "but the ledger knows 4; the broker had stopped before the learner committed them: the",
        ),
        (step_once_more, "its worker has ended after 10,000 steps, as its recorder says, but the ledger knows "),
        (die_unseen, "slot 3 incarnation 1: its worker has ended after 77 steps, as its recorder says, but the ledger"),
        (write_another_layout, "worker-4-1.rec is no recorder that this version can read"),
    ],
)
def test_the_audit_fails_balanced_books_that_the_run_directory_contradicts(
    reported: FleetView, url: str, fleet_id: str, client: Any, tmp_path: Path, damage: Any, words: str
) -> None:
    run = Run(tmp_path, url, fleet_id, reported)
    client.delete(key_name(fleet_id, GAUGES))  # no broker will report what is missing
    if damage is not None:
        damage(run, client, fleet_id)
    returncode, said = run.audit("--strict", "--run-dir")
    assert (returncode != 0) == bool(words), said
    assert words in said


def test_an_audit_between_the_brokers_two_writes_waits_for_the_second(
    tmp_path: Path, make_row: Callable[..., LedgerRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker writes books.json, and then the sum of the same lives to lifetime.json."""
    ended = EndedLives(rows=[make_row(closed=True)], counters=[{}])
    BooksFile(tmp_path, "f").write(ended)
    witness = LifetimeFile(tmp_path, "f")

    def writes(seconds: float) -> None:
        witness.add_ended(ended)
        witness.write({}, {}, {}, last=True)

    def read() -> list[str]:
        return list(read_evidence(tmp_path, "f").damage)

    monkeypatch.setattr(time, "sleep", writes)
    monkeypatch.setattr(audits, "CATCH_UP_S", 0.1)
    assert read()
    assert once_caught_up(read, lambda damage: (None, damage, LIVE)) == (None, [])


def test_an_audit_of_a_live_fleet_compares_what_it_read_with_later_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner saves its checkpoint before the broker reports the commit, so newer files would stay ahead."""
    saved, reported = iter(range(5, 1_000)), iter(range(1_000))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)

    def compare(position: int) -> tuple[int, list[str], Snapshot]:
        known = next(reported)
        return known, ["the ledger lacks batches"] if known < position else [], LIVE

    assert once_caught_up(lambda: next(saved), compare) == (5, [])


def test_an_audit_waits_for_the_next_report_of_a_broker_that_seldom_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that died has gauges for a while, so the wait ends. One that ended in order reports no more."""
    clock = iter(range(10_000))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    seldom = replace(LIVE, reported_unix_s=time.time() - 50, settings={"broker.report_interval_s": 60.0})
    reports = iter([seldom] * 55 + [replace(seldom, reported_unix_s=time.time())] * 1_000)

    def compare(files: None) -> tuple[None, list[str], Snapshot]:
        ledger = next(reports)
        return None, ["the ledger lacks batches"] if ledger is seldom else [], ledger

    assert once_caught_up(lambda: None, compare) == (None, [])
    assert once_caught_up(lambda: None, lambda files: (None, ["wrong"], seldom)) == (None, ["wrong"]), "it ends"
    for over in (replace(seldom, ended_unix_s=1.0), replace(seldom, gauges={})):
        ledgers = iter([over])

        def compare_once(files: None, ledgers: Iterator[Snapshot] = ledgers) -> tuple[None, list[str], Snapshot]:
            return None, ["wrong"], next(ledgers)

        assert once_caught_up(lambda: None, compare_once) == (None, ["wrong"])


def log_another_end(run: Run, client: Any, fleet_id: str) -> None:
    """The end that the ledger has comes after it, as where the books of a life were lost."""
    row = LedgerRow.model_validate_json(client.hget(key_name(fleet_id, LEDGER), "1/1"))
    said = (
        f"worker 1 incarnation 1 took {steps:,} steps, and the broker has\n" for steps in (60_713, row.totals.stepped)
    )
    (run.path / "logs").mkdir()
    (run.path / "logs" / "supervisor.log").write_text("".join(said))


def forget_a_life(run: Run, client: Any, fleet_id: str) -> None:
    (run.path / "broker.json").write_bytes(orjson.dumps({"incarnations": {"0": 1, "1": 1}}))


def commit_less(run: Run, client: Any, fleet_id: str) -> None:
    settled = Settled(seq=4, committed=(95, 6), dropped={"stale": (33, 2)})
    place = SourcePosition(slot=0, incarnation=1, settled=settled).model_dump(mode="json")
    save_checkpoint(run.path / "learner.checkpoint", Checkpoint(1, [place], {}, {}))


def revive(run: Run, client: Any, fleet_id: str) -> None:
    key = key_name(fleet_id, LEDGER)
    client.hset(key, "0/1", orjson.dumps(orjson.loads(client.hget(key, "0/1")) | {"closed": False}))
    for path in (run.path / "recorders").iterdir():
        path.unlink()


def greet_twice_and_leave(run: Run, client: Any, fleet_id: str) -> None:
    """A stranger that took a slot twice, and never a step."""
    for incarnation in (1, 2):
        row = LedgerRow(
            slot=9, incarnation=incarnation, totals=WorkerTotals(), accepted=(0, 0), held=(0, 0), settled=Settled()
        )
        client.hset(key_name(fleet_id, LEDGER), f"9/{incarnation}", row.model_dump_json())


def lose_a_life_in_the_file(run: Run, client: Any, fleet_id: str) -> None:
    BooksFile(run.path, fleet_id).write(EndedLives())


def count_less_in_the_file(run: Run, client: Any, fleet_id: str) -> None:
    totals = run.row.totals.model_copy(update={"episodes": run.row.totals.episodes - 1})
    BooksFile(run.path, fleet_id).write(EndedLives(rows=[run.row.model_copy(update={"totals": totals})]))


def tear_the_file(run: Run, client: Any, fleet_id: str) -> None:
    (run.path / "books.json").write_text('{"rows": ')


def finish_one_more_episode(run: Run, client: Any, fleet_id: str) -> None:
    run.leave_recorder(run.row.totals.stepped, 0, 1, run.row.totals.seq, more_episodes=1)


def take_the_end(run: Run, client: Any, fleet_id: str) -> None:
    place = SourcePosition(slot=0, incarnation=1, settled=run.row.settled, ended=True).model_dump(mode="json")
    save_checkpoint(run.path / "learner.checkpoint", Checkpoint(1, [place], {}, {}))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (None, ""),
        (lose_a_life_in_the_file, "slot 0: books.json has 0 ended lives, 0 steps, 0 committed steps, 0 batches"),
        (count_less_in_the_file, "11 episodes, but the ledger has 1 ended lives"),
        (tear_the_file, "books.json is damaged"),
        (cut_the_checkpoint_short, "learner.checkpoint cannot be read (it ends within its header, after 100 bytes)"),
        (finish_one_more_episode, "it finished 13 episodes, as its recorder says, but the ledger has 12"),
        (take_the_end, "the learner has the end of its open episodes as taken, but the ledger does not"),
        (greet_twice_and_leave, ""),
        (revive, "slot 0 incarnation 1 claims to be live, although incarnation 2 has its slot"),
        (lose_the_ledger, "slot 0 incarnation 1: its worker has ended after "),
        (go_back, "the learner has settled batches up to 5 (learner.checkpoint says so), but the ledger knows 4"),
        (commit_less, "trained on 95 steps of its first 4 batches, but the ledger has 96 of 4 as committed"),
        (step_once_more, "its worker has ended after 10,000 steps, as its recorder says, but the ledger knows "),
        (write_another_layout, "worker-4-1.rec is no recorder that this version can read"),
        (log_another_end, "slot 1 incarnation 1: it ended after 60,713 steps, as the supervisor's log says"),
        (forget_a_life, "slot 0 incarnation 2: broker.json knows only incarnations up to 1 of this slot"),
    ],
)
def test_the_deep_audit_names_two_sources_that_differ(
    reported: FleetView, url: str, fleet_id: str, client: Any, tmp_path: Path, damage: Any, words: str
) -> None:
    run = Run(tmp_path, url, fleet_id, reported)
    client.delete(key_name(fleet_id, GAUGES))
    if damage is not None:
        damage(run, client, fleet_id)
    for how in [["--deep"], ["--deep", "--run-dir"]] if damage is step_once_more else [["--deep"]]:
        returncode, said = run.audit(*how)
        assert (returncode != 0) == bool(words), said
        assert words in said


def fold_a_life(run: Run, client: Any, fleet_id: str) -> None:
    """Slot 0, incarnation 1 folds, as the broker does it."""
    row = LedgerRow.model_validate_json(client.hget(key_name(fleet_id, LEDGER), "0/1"))
    counters = [name.split(b"/")[2].decode() for name in client.hkeys(key_name(fleet_id, SOURCES))]
    lives = fold(None, row)
    assert lives is not None
    MergeScript(client, fleet_id)(Part(Report(folded={0: lives}), lives={0: [1]}, counters=counters), [], 0)
    client.delete(key_name(fleet_id, GAUGES))


def fold_and_log_another_end(run: Run, client: Any, fleet_id: str) -> None:
    fold_a_life(run, client, fleet_id)
    (run.path / "logs").mkdir()
    (run.path / "logs" / "supervisor.log").write_text("worker 0 incarnation 1 took 60,713 steps, and the broker has")


def fold_and_go_back(run: Run, client: Any, fleet_id: str) -> None:
    fold_a_life(run, client, fleet_id)
    go_back(run, client, fleet_id)


def fold_and_keep_the_row(run: Run, client: Any, fleet_id: str) -> None:
    row = client.hget(key_name(fleet_id, LEDGER), "0/1")
    fold_a_life(run, client, fleet_id)
    client.hset(key_name(fleet_id, LEDGER), "0/1", row)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("damage", "deep", "words"),
    [
        (fold_a_life, False, ""),
        (fold_a_life, True, ""),
        (fold_and_log_another_end, True, "its 1 folded lives: 1 of them took 60,713 steps, as the supervisor's log"),
        (fold_and_go_back, True, "its 1 folded lives: the learner was trained on 160 steps of 5 batches"),
        (fold_and_keep_the_row, True, "slot 0 incarnation 1 has a row, although it is folded"),
        (fold_and_keep_the_row, False, "slot 0 incarnation 1 has a row, although it is folded"),
    ],
)
def test_the_audit_compares_folded_lives_with_the_same_evidence(
    reported: FleetView, url: str, fleet_id: str, client: Any, tmp_path: Path, damage: Any, deep: bool, words: str
) -> None:
    run = Run(tmp_path, url, fleet_id, reported)
    damage(run, client, fleet_id)
    returncode, said = run.audit(*(["--deep"] if deep else ["--strict", "--run-dir"]))
    assert (returncode != 0) == bool(words), said
    assert words in said


def test_a_batch_held_too_long_is_a_warning_and_no_problem() -> None:
    snapshot = Snapshot(gauges={"oldest_unsettled_age_s": 61.0}, reported_unix_s=1.0)
    assert audit(snapshot) == []
    (warning,) = warnings(snapshot)
    assert "held for 61 s" in warning


def test_batches_lost_with_both_broker_and_worker_pass_the_audit(
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
    assert snapshot.totals["accepted_agent_steps_total"] == 160
    assert audit(snapshot) == []


def test_the_rendered_audit_shows_the_equation_and_the_problem(reported: FleetView, fleet_id: str, client: Any) -> None:
    ledger = key_name(fleet_id, LEDGER)
    row = orjson.loads(client.hget(ledger, "1/1"))
    client.hset(ledger, "1/1", changed(row, ("held", 0), 1))
    snapshot = read(reported)
    console = PrintableConsole(StringIO())
    console.print(render(snapshot, audit(snapshot), ["a doubt"]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "✗ slot 1 incarnation 1: accepted (96, 6) != held (97, 6)" in text
    assert "! a doubt" in text
    assert "≠ committed 288 + queued " in equation(snapshot.fleet)
    assert "dropped[stale] 64" in text
    assert "discarded[env_exception] 27" in text


def test_find_books_reads_fleet_json_and_refuses_a_missing_or_damaged_file(tmp_path: Path) -> None:
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
