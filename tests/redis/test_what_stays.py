"""Keys of a fleet in Redis through 100 lives of a worker, FLUSHALL, and restarts of Redis and of the broker."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.deploy.report.audit import audit
from headrace.deploy.report.evidence import read_evidence
from headrace.deploy.run.redis_view import FleetView, Snapshot
from headrace.learner_stub import EpisodeStream
from headrace.schemas.accounts import redis_keys as keys
from headrace.schemas.errors import RedisUnavailableError
from support.pipeline.delivery import FLEET, BrokerThread, Envs, Feeder
from support.waiting import TIMEOUT_S, wait_until

pytestmark = pytest.mark.processes

LIVES = 100
FLUSH, REDIS, BROKER = 25, 50, 75
"""Lives before which Redis is emptied, and Redis or the broker is restarted."""


class Reader(threading.Thread):
    """Takes each batch from the broker, as a learner does, until it is stopped."""

    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self.stopping = threading.Event()
        self._stream = EpisodeStream(endpoint)

    def run(self) -> None:
        with self._stream as stream:
            while not self.stopping.is_set():
                stream.next(0.02)

    def stop(self) -> None:
        self.stopping.set()
        self.join(TIMEOUT_S)


def test_counters_never_go_back_history_stays_and_no_key_is_left_behind(
    tmp_path: Path, make_server: Callable[..., Any]
) -> None:
    server = make_server("--appendfsync", "always").start()
    highest: dict[str, int] = {}

    def start() -> BrokerThread:
        broker = BrokerThread(tmp_path, redis_url=server.url, report_interval_s=0.02, heartbeat_interval_s=0.05)
        broker.__enter__()
        return broker

    def snapshot() -> Snapshot:
        try:
            with FleetView(server.url, FLEET) as view:
                seen = view.read()
        except RedisUnavailableError:
            return Snapshot()
        for name, value in seen.totals.items():
            assert value >= highest.get(name, 0), f"{name} went back"
            highest[name] = value
        return seen

    def history() -> list[float]:
        with FleetView(server.url, FLEET) as view:
            return [at for at, _ in view.history(5)]

    broker = start()
    learner = Reader(broker.endpoints.learner)
    learner.start()
    steps = 0
    try:
        for life in range(1, LIVES + 1):
            if life == FLUSH:
                with server.client() as client:
                    client.flushall()
                wait_until(lambda: snapshot().rows or snapshot().folded, "the next report")
            elif life == REDIS:
                before = history()
                server.kill()
                server.start()
                assert before
                assert history()[: len(before)] == before
            elif life == BROKER:
                before = history()
                broker.stop()
                broker = start()
                assert history()[: len(before)] == before
            with Feeder(broker.endpoints.worker, Envs(life).fragments(2), slot=0) as worker:
                wait_until(worker.all_settled, f"the batches of life {life}")
                worker.leave()
                wait_until(lambda: worker.session.over, f"the end of life {life}")
                steps += sum(worker.steps.values())
            if life % 5 == 0:
                snapshot()
        wait_until(lambda: snapshot().totals["committed_agent_steps_total"] == steps, "the steps of all lives")
        wait_until(lambda: 0 in snapshot().folded and snapshot().folded[0].lives >= LIVES - 2, "folded lives")
        last = snapshot()
    finally:
        learner.stop()
        broker.stop()
    assert audit(last) == []
    assert last.totals["agent_steps_total"] == last.fleet.stepped == steps
    assert len(last.sources) <= 3, "counters of folded lives are left"
    with server.client() as client:
        names = [name.decode().removeprefix(f"headrace:{{{FLEET}}}:") for name in client.scan_iter()]
    assert set(names) <= {key.name for key in keys.TABLE}


@pytest.mark.parametrize(
    "lost",
    [
        ("books.json",),
        ("redis",),
        ("books.json", "redis"),
        ("half of lifetime.json",),
        ("half of lifetime.json", "books.json", "redis"),
    ],
    ids=" and ".join,
)
def test_the_audit_is_red_for_good_once_books_json_and_redis_are_lost_together(
    tmp_path: Path, make_server: Callable[..., Any], lost: tuple[str, ...]
) -> None:
    server = make_server("--appendfsync", "always").start()
    settings: dict[str, Any] = {"redis_url": server.url, "report_interval_s": 0.02, "heartbeat_interval_s": 0.05}

    def problems() -> list[str]:
        evidence = read_evidence(tmp_path, FLEET)
        with FleetView(server.url, FLEET) as view:
            return audit(view.read(), evidence)

    def live(numbers: range) -> None:
        with BrokerThread(tmp_path, **settings) as broker:
            learner = Reader(broker.endpoints.learner)
            learner.start()
            try:
                for life in numbers:
                    with Feeder(broker.endpoints.worker, Envs(life).fragments(2), slot=0) as worker:
                        wait_until(worker.all_settled, f"the batches of life {life}")
                        worker.leave()
                        wait_until(lambda: worker.session.over, f"the end of life {life}")
            finally:
                learner.stop()

    live(range(1, 5))
    assert problems() == []
    if "books.json" in lost:
        (tmp_path / "books.json").unlink()
    if "redis" in lost:
        with server.client() as client:
            client.flushall()
    if "half of lifetime.json" in lost:
        os.truncate(tmp_path / "lifetime.json", (tmp_path / "lifetime.json").stat().st_size // 2)
        assert "lifetime.json is damaged (" in " ".join(problems())
    for lives in (range(5, 6), range(6, 10)):  # as many again do not hide the loss
        live(lives)
        found = problems()
        if "half of lifetime.json" in lost:
            (sentence,) = found
            assert f"kept it as {tmp_path / 'lifetime.json.damaged'}; " in sentence
            continue
        if len(lost) == 1:
            assert found == []
            continue
        assert [sentence[:7] for sentence in found] == ["slot 0:"]
        assert f"{lives[-1]} of its lives had ended" in found[0]
        assert f"the ledger knows {lives[-1] - 4} ended lives" in found[0]
