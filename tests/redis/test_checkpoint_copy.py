"""Copies of a checkpoint in Redis and the run directory: whole or absent, never older than the last, and bounded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from headrace.broker.redis.blob import PIECE_BYTES, ByteBudget
from headrace.broker.reports.report import Report
from headrace.broker.reports.reporter import RedisReporter
from headrace.deploy.fleet.checkpoint_copy import (
    CheckpointCopier,
    StartingPoint,
    choose_checkpoint,
    copied_to_redis,
    copies_in,
)
from headrace.deploy.run.run_dir import RunDir
from headrace.learner_stub.checkpoints.checkpoint import Checkpoint, previous_path, save_checkpoint
from headrace.schemas.accounts.ledger import LedgerRow
from headrace.schemas.accounts.redis_keys import CHECKPOINT_BLOB, CHECKPOINT_CURRENT, key_name
from headrace.schemas.settings.config import RedisSection
from support.waiting import wait_until

PLACE = {"slot": 0, "incarnation": 3, "settled": {"seq": 4, "committed": [256, 9], "dropped": {}}}
HOURLY = 1 << 40


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "learner.checkpoint"


@pytest.fixture
def reported_books(url: str, fleet_id: str, make_row: Callable[..., LedgerRow]) -> tuple[str, str]:
    """A fleet whose broker has reported two lives: (URL, fleet id)."""
    reporter = RedisReporter(url, fleet_id)
    report = Report(rows=[make_row(0, 1, 4, 4, closed=True), make_row(0, 2)], incarnations={0: 2}, lease={"epoch": 3})
    reporter.offer(report)
    assert reporter.close(30.0)
    return url, fleet_id


class Copying:
    """Copiers of a test; all of them end with it."""

    def __init__(self, path: Path, url: str, fleet_id: str, client: Any) -> None:
        self._path, self._url, self._fleet_id = path, url, fleet_id
        self.shelf = copies_in(client, fleet_id)
        self._started: list[CheckpointCopier] = []

    def start(self, hourly: int = HOURLY) -> CheckpointCopier:
        copier = CheckpointCopier(self._path, self._url, self._fleet_id, hourly, lambda: 65_536)
        self._started.append(copier)
        return copier

    def save(self, epoch: int = 1, size: int = 1000, **options: Any) -> None:
        array = np.random.default_rng(epoch).integers(0, 255, size, np.uint8)
        save_checkpoint(self._path, Checkpoint(epoch, [PLACE], {}, {"w": array}), **options)

    def wait_for(self, version: tuple[int, int]) -> None:
        wait_until(lambda: self.shelf.version() == version, f"copy {version}")

    def choose(self) -> StartingPoint:
        return choose_checkpoint(self._path, self._url, self._fleet_id, None)

    def close(self) -> None:
        for copier in self._started:
            copier.finish()
        wait_until(lambda: all(copier.finished for copier in self._started), "the end of all threads")


@pytest.fixture
def copying(path: Path, url: str, fleet_id: str, client: Any) -> Iterator[Copying]:
    copying = Copying(path, url, fleet_id, client)
    yield copying
    copying.close()


def test_a_lost_checkpoint_is_restored_from_redis_byte_for_byte(copying: Copying, path: Path) -> None:
    copying.save(size=3 * PIECE_BYTES)
    whole = path.read_bytes()
    copying.start()
    copying.wait_for((1, 1))
    path.unlink()
    point = copying.choose()
    assert path.read_bytes() == whole
    assert path.stat().st_mode & 0o777 == 0o600
    assert point.sentence.startswith(
        "the run directory has no learner.checkpoint; going on from the one in Redis, save 1 of learner epoch 1, "
    )
    assert "at env step 65,536" in point.sentence
    assert (point.epoch, {life: told.seq for life, told in point.settled.items()}) == (1, {(0, 3): 4})


def test_the_newer_checkpoint_is_used_and_the_older_one_is_kept_as_previous(copying: Copying, path: Path) -> None:
    copying.save(epoch=1)
    older = path.read_bytes()
    copying.save(epoch=2, claim=True)
    copying.start()
    copying.wait_for((2, 2))
    assert "Redis has the same" in copying.choose().sentence
    path.write_bytes(older)
    previous_path(path).unlink()
    assert "is older (save 1 of learner epoch 1) and kept as learner.checkpoint.previous" in copying.choose().sentence
    assert previous_path(path).read_bytes() == older
    copying.save(epoch=3, claim=True)
    assert "save 3 of learner epoch 3" in copying.choose().sentence


def test_a_damaged_checkpoint_is_replaced_by_the_copy_in_redis(copying: Copying, path: Path) -> None:
    copying.save()
    whole = path.read_bytes()
    copying.start()
    copying.wait_for((1, 1))
    path.write_bytes(whole[:100])
    assert "cannot be used" in copying.choose().sentence
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("key", "field", "value"),
    [
        (CHECKPOINT_BLOB, "0/0", b"\0" * 1240),
        (CHECKPOINT_BLOB, "0/0", b"shorter"),
        (CHECKPOINT_BLOB, "sizes", b"[99999999999]"),
        (CHECKPOINT_BLOB, "about", b"{}"),
        (CHECKPOINT_BLOB, "about", b"x" * 100_000),
        (CHECKPOINT_BLOB, "about", orjson.dumps({"digest": "0" * 32})),
        (CHECKPOINT_CURRENT, None, b"1/2"),
        (CHECKPOINT_CURRENT, None, b"9" * 40),
    ],
)
def test_a_damaged_copy_in_redis_is_ignored(
    copying: Copying, path: Path, client: Any, fleet_id: str, key: Any, field: str | None, value: bytes
) -> None:
    copying.save()
    copying.start()
    copying.wait_for((1, 1))
    copying.close()
    name = key_name(fleet_id, key, version="1-1")
    if field is None:
        client.set(name, value)
    else:
        client.hset(name, field, value)
    path.unlink()
    assert copying.choose() == StartingPoint()
    assert not path.exists()


def test_a_stale_learners_file_does_not_replace_a_newer_copy(
    copying: Copying, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copying.save(epoch=5)
    copying.start()
    copying.wait_for((5, 1))
    path.unlink()
    with caplog.at_level(logging.WARNING):
        copying.save(epoch=4)
        wait_until(lambda: "Redis has a newer one" in caplog.text, "the refusal")
    assert copying.shelf.version() == (5, 1)


def test_a_learner_copies_its_checkpoint_only_without_a_supervisor(
    copying: Copying, path: Path, url: str, fleet_id: str
) -> None:
    section = RedisSection(url=url)
    with RunDir(path.parent), copied_to_redis(path.parent, section, fleet_id):
        copying.save()
    assert copying.shelf.version() is None
    with copied_to_redis(path.parent, section, fleet_id):
        copying.save()
    assert copying.shelf.version() == (1, 2)
    whole = path.read_bytes()
    path.unlink()
    with copied_to_redis(path.parent, section, fleet_id):
        assert path.read_bytes() == whole


def test_an_emptied_redis_gets_the_copy_again(
    copying: Copying, client: Any, fleet_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.deploy.fleet.checkpoint_copy.CHECK_S", 0.1)
    copying.save()
    copying.start()
    copying.wait_for((1, 1))
    client.delete(key_name(fleet_id, CHECKPOINT_CURRENT), key_name(fleet_id, CHECKPOINT_BLOB, version="1-1"))
    copying.wait_for((1, 1))


def test_old_copies_are_removed(copying: Copying, client: Any, fleet_id: str) -> None:
    copying.save()
    copying.start()
    copying.wait_for((1, 1))
    copying.save()
    copying.wait_for((1, 2))
    blobs = client.keys(key_name(fleet_id, CHECKPOINT_BLOB, version="*"))
    assert blobs == [key_name(fleet_id, CHECKPOINT_BLOB, version="1-2").encode()]


def test_a_large_checkpoint_waits_for_its_budget_but_the_final_copy_does_not(copying: Copying) -> None:
    copying.save(size=PIECE_BYTES)
    copier = copying.start(hourly=PIECE_BYTES)  # the next copy is due in an hour
    copying.wait_for((1, 1))
    for _ in range(3):
        copying.save(size=PIECE_BYTES)
    copier.finish()
    wait_until(lambda: copier.finished, "the end of the thread")
    assert copying.shelf.version() == (1, 4), "none in between, and the newest at the end"


def test_a_budget_is_bytes_over_time() -> None:
    budget = ByteBudget(3600)
    budget.spend(10, now=100.0)
    budget.spend(5, now=100.0)
    assert budget.due == 115.0
    budget.spend(1, now=500.0)
    assert budget.due == 501.0
    assert ByteBudget(0).due == float("inf")
