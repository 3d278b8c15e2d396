"""Weights in Redis are whole or absent, and never go back."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from headrace.broker.redis.blob import LARGEST_WEIGHTS, PIECE_BYTES, RedisBlob, weights_in
from headrace.broker.reports.report import Report
from headrace.broker.reports.reporter import RedisReporter
from headrace.schemas.accounts.redis_keys import FLEET, WEIGHTS_BLOB, WEIGHTS_CURRENT, key_name
from support.waiting import wait_until

FRAMES = [b"tag", b'{"a": 1}', bytes(range(256)) * 10_000, b"", bytes(PIECE_BYTES)]


@pytest.fixture
def shelf(client: Any, fleet_id: str) -> RedisBlob:
    return weights_in(client, fleet_id)


def blob(fleet_id: str, version: tuple[int, int]) -> str:
    return key_name(fleet_id, WEIGHTS_BLOB, version=f"{version[0]}-{version[1]}")


def test_stored_frames_are_read_back_unchanged(shelf: RedisBlob) -> None:
    assert shelf.load() is None
    assert shelf.store((2, 9), FRAMES) == "flipped"
    stored = shelf.load()
    assert stored is not None
    assert stored.version == (2, 9)
    assert stored.frames == FRAMES


def test_an_older_version_is_refused_and_the_replaced_blob_deleted(
    shelf: RedisBlob, client: Any, fleet_id: str
) -> None:
    assert shelf.store((2, 9), [b"second learner"]) == "flipped"
    assert shelf.store((1, 100), [b"first learner, stale"]) == "older"
    assert shelf.store((2, 9), [b"the same again"]) == "older"
    assert shelf.store((2, 10), [b"newer"]) == "flipped", "versions are numbers, not text"
    stored = shelf.load()
    assert stored is not None
    assert stored.frames == [b"newer"]
    assert not client.exists(blob(fleet_id, (2, 9)), blob(fleet_id, (1, 100)))
    assert client.ttl(blob(fleet_id, (2, 10))) == -1


def test_the_pointer_is_not_flipped_behind_another_writer(
    shelf: RedisBlob, client: Any, fleet_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = RedisBlob.stage

    def overtaken(self: RedisBlob, name: str, *what: Any) -> None:
        stage(self, name, *what)
        monkeypatch.undo()
        assert shelf.store((3, 1), [b"the newer learner"]) == "flipped"

    monkeypatch.setattr(RedisBlob, "stage", overtaken)
    assert shelf.store((2, 1), [b"the stale learner"]) == "moved"
    stored = shelf.load()
    assert stored is not None
    assert stored.version == (3, 1)
    assert 0 < client.ttl(blob(fleet_id, (2, 1))) <= 600, "a blob no pointer was flipped to expires"


def test_loading_weights_without_a_pointer_returns_none(shelf: RedisBlob, client: Any, fleet_id: str) -> None:
    shelf.stage(blob(fleet_id, (1, 1)), FRAMES)
    assert shelf.load() is None


@pytest.mark.parametrize("pointer", [b"", b"1", b"1/", b"-1/2", b"\x80\x04K\x01.", b"9" * 50 + b"/1", b"1/1\n"])
def test_a_malformed_pointer_counts_as_absent(shelf: RedisBlob, client: Any, fleet_id: str, pointer: bytes) -> None:
    client.set(key_name(fleet_id, WEIGHTS_CURRENT), pointer)
    assert shelf.load() is None
    assert shelf.store((1, 1), [b"x"]) == "flipped"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sizes", b"[5000000000]"),
        ("sizes", b"[]"),
        ("0/0", b"shorter"),
        ("1/0", bytes(PIECE_BYTES + 1)),
    ],
)
def test_a_damaged_blob_is_not_loaded(shelf: RedisBlob, client: Any, fleet_id: str, field: str, value: bytes) -> None:
    assert shelf.store((1, 1), [b"a frame of bytes", bytes(100)]) == "flipped"
    client.hset(blob(fleet_id, (1, 1)), field, value)
    assert shelf.load() is None


def test_the_reporter_stores_the_newest_weights_for_the_next_broker(url: str, fleet_id: str, client: Any) -> None:
    reporter = RedisReporter(url, fleet_id)
    reporter.offer_weights((1, 1), [b"one"])
    wait_until(lambda: client.exists(key_name(fleet_id, WEIGHTS_CURRENT)))
    for seq in range(2, 200):
        reporter.offer_weights((1, seq), [b"frame", bytearray(b"%d" % seq)])
    reporter.offer_weights((1, 5), [b"an old one, late"])
    assert reporter.close(30.0)
    following = RedisReporter(url, fleet_id)
    saved = following.take_saved(wait_s=30.0)
    assert saved is not None
    assert saved.weights is not None
    assert saved.weights.version == (1, 199)
    assert saved.weights.frames == [b"frame", b"199"]
    following.close(1.0)


def test_the_brokers_loop_copies_no_weights_for_redis(url: str, fleet_id: str, shelf: RedisBlob) -> None:
    reporter = RedisReporter(url, fleet_id, weights_per_hour=PIECE_BYTES)  # the second version is due in an hour
    reporter.offer_weights((1, 1), [b"tag", bytes(PIECE_BYTES)])
    wait_until(lambda: shelf.version() == (1, 1), "the first version")
    mapped = memoryview(bytes(8 * PIECE_BYTES))
    tracemalloc.start()
    try:
        reporter.offer_weights((1, 2), [b"tag", mapped])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < PIECE_BYTES
    assert reporter.close(30.0)
    stored = shelf.load()
    assert stored is not None
    assert (stored.version, stored.frames) == ((1, 2), [b"tag", bytes(mapped)])


def test_weights_beyond_64_mib_are_skipped_with_one_line(
    url: str, fleet_id: str, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    reporter = RedisReporter(url, fleet_id)
    for seq in (1, 2):
        reporter.offer_weights((1, seq), [bytes(LARGEST_WEIGHTS), b"x"])
    assert reporter.close(30.0)
    assert caplog.text.count("are not kept in Redis") == 1
    assert not client.exists(key_name(fleet_id, WEIGHTS_CURRENT))


@pytest.mark.parametrize(("weights_per_hour", "interval_s"), [(PIECE_BYTES, 0.0), (PIECE_BYTES << 30, 3600.0)])
def test_weights_wait_for_budget_and_interval_but_the_final_version_does_not(
    url: str,
    fleet_id: str,
    client: Any,
    shelf: RedisBlob,
    monkeypatch: pytest.MonkeyPatch,
    weights_per_hour: int,
    interval_s: float,
) -> None:
    monkeypatch.setattr("headrace.broker.reports.reporter.WEIGHTS_INTERVAL_S", interval_s)
    reporter = RedisReporter(url, fleet_id, weights_per_hour=weights_per_hour)  # the next ones are due in an hour
    reporter.offer_weights((1, 1), [bytes(PIECE_BYTES)])
    wait_until(lambda: shelf.version() == (1, 1), "the first version")
    for seq in (2, 3):
        reporter.offer_weights((1, seq), [bytes(PIECE_BYTES)])
    reporter.offer(Report(rows=[]))
    wait_until(
        lambda: client.hexists(key_name(fleet_id, FLEET), "reported_unix_s"), "a report, which waits for nothing"
    )
    assert shelf.version() == (1, 1)
    assert reporter.close(30.0)
    assert shelf.version() == (1, 3)


def test_without_a_budget_redis_gets_no_weights(url: str, fleet_id: str, shelf: RedisBlob) -> None:
    reporter = RedisReporter(url, fleet_id, weights_per_hour=0)
    reporter.offer_weights((1, 1), [b"weights"])
    assert reporter.close(30.0)
    assert shelf.version() is None


def test_without_a_budget_a_start_takes_no_weights_from_redis(url: str, fleet_id: str, shelf: RedisBlob) -> None:
    shelf.store((1, 1), [b"weights"])
    for weights_per_hour, found in ((PIECE_BYTES, True), (0, False)):
        reporter = RedisReporter(url, fleet_id, weights_per_hour=weights_per_hour)
        saved = reporter.take_saved(30.0)
        assert reporter.close(30.0)
        assert saved is not None
        assert (saved.weights is not None) == found
