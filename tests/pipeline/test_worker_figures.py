"""Figures that a worker sends in heartbeats, as the broker reports them."""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.broker.batches.life_figures import WorkerFigures
from headrace.broker.reports.metrics import FleetMetrics
from headrace.broker.reports.report import Report
from headrace.broker.reports.worker_rows import fleet_figures, row_figures
from headrace.deploy.run.goal import EPISODES_NEEDED, Goal, RunNumbers
from headrace.learner_stub import EpisodeStream
from headrace.schemas.accounts.figures import WORKER_TABLE
from headrace.schemas.accounts.ledger import WorkerTotals
from headrace.schemas.accounts.lifetime_counters import (
    ACCEPTED_BYTES,
    COMMITTED_BYTES,
    SAMPLED_BYTES,
    WORKER_WAIT,
    row_counters,
)
from headrace.schemas.accounts.redis_keys import labelled
from headrace.schemas.accounts.worker_figures import TIME_PARTS, Ports
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.errors import ConfigError
from headrace.schemas.messages import Heartbeat
from headrace.schemas.peers.socket_folder import make_socket_folder
from headrace.schemas.settings.config_loading import build_config
from headrace.workers.fleet.worker import host_of_ports
from headrace.workers.serving.client import PolicyClient
from support.fleets.env_hosts import EnvHosts
from support.pipeline.delivery import BrokerThread, feature
from support.pipeline.worker_threads import AT_RANDOM, WorkerThread, closed_row, drain, in_run
from support.waiting import TIMEOUT_S, wait_until

WAIT = labelled(WORKER_WAIT, "reason", "window")


def figures(broker: BrokerThread) -> tuple[dict[str, Any], dict[str, float]]:
    """The row of the one worker, and the gauges."""

    def ask(asked: Any) -> tuple[dict[str, Any], dict[str, float]]:
        live, now = asked.core.live(), time.monotonic()
        return row_figures(live[0], now, time.time()) if live else {}, fleet_figures(live, now)

    return broker.ask(ask)


def counters(broker: BrokerThread) -> dict[str, int]:
    """The counters of the one life that its ledger row does not have."""

    def ask(asked: Any) -> dict[str, int]:
        sources = list(asked.core.store.sources.values())
        return feature(asked, FleetMetrics).counters_of(sources[0]) if sources else {}

    return broker.ask(ask)


def resident(pid: int) -> int:
    """The bytes of memory that a process has, without its children."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def ports(broker: BrokerThread) -> Ports | None:
    """The ports that the one worker tells."""
    return broker.ask(lambda asked: asked.core.live()[0].figures.beat.ports)


def test_the_row_and_the_gauges_report_a_worker_that_waits_for_a_stalled_learner(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    began = time.time()
    with (
        EpisodeStream(broker.endpoints.learner) as stream,
        WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, AT_RANDOM),
    ):
        while not figures(broker)[0].get("time_share"):
            assert stream.next(30.0) is not None
        wait_until(lambda: figures(broker)[0]["time_share"]["wait"] > 0.9, "a worker that only waits")
        wait_until(lambda: WAIT in counters(broker), "a wait of a second")
        row, gauges = figures(broker)
        waited = counters(broker)[WAIT]
        held = broker.ask(lambda it: (it.core.store.held_batches(), it.core.store.nbytes))
        told = broker.ask(
            lambda it: [
                it.core.learners.lease.hello.headrace_version,
                *(source.headrace_version for source in it.core.live()),
            ]
        )
    assert told == [version("headrace")] * 2
    assert sum(row["time_share"].values()) == pytest.approx(1.0, abs=0.01)
    assert set(row) <= {member.name for member in WORKER_TABLE}
    assert began - 1.0 < row["joined_unix_s"] < row["blocked_since_unix_s"] < time.time()
    assert (row["num_envs"], row["envs_lost"]) == (2, 0)
    assert row["env_steps"] > 0
    assert row["rss_bytes"] == pytest.approx(resident(os.getpid()), rel=0.2)
    assert 0 < row["cpu_share"] <= (os.cpu_count() or 1) + 1
    assert row["episodes"] >= 0
    assert (gauges["workers"], gauges['workers_blocked{reason="window"}']) == (1, 1)
    shares = {part: gauges[f'worker_time_share{{part="{part}"}}'] for part in TIME_PARTS}
    assert sum(shares.values()) == pytest.approx(1.0)
    assert 1 <= waited < time.time() - began
    assert (row["window_batches"], row["window_bytes"]) == held > (0, 0)
    assert (gauges["window_batches"], gauges["window_bytes"]) == held


def test_counters_of_bytes_agree_with_the_batches_that_the_learner_got(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    array_bytes = 0

    def see(batch: ChunkBatch) -> None:
        nonlocal array_bytes
        array_bytes += batch.nbytes

    with EpisodeStream(broker.endpoints.learner) as stream:
        with WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, AT_RANDOM):
            for _ in range(5):
                batch = stream.next(TIMEOUT_S)
                assert batch is not None
                see(batch)
            stream.commit()
            wait_until(
                lambda: 0 < (found := counters(broker)).get(COMMITTED_BYTES, 0) < found[ACCEPTED_BYTES],
                "the bytes of the first commits, and of further batches",
            )
        row = closed_row(broker, take=lambda: (drain(stream, see), stream.commit()))
    found = counters(broker)
    assert found[SAMPLED_BYTES] == array_bytes
    assert found[COMMITTED_BYTES] == found[ACCEPTED_BYTES] > array_bytes
    assert row_counters(row)["chunks_total"] == row.settled.committed[1] > 0


def test_a_worker_whose_batch_is_accepted_between_two_heartbeats_has_waited_only_since_then() -> None:
    told, since = WorkerFigures(), []
    waits, goes_on = (Heartbeat(slot=0, incarnation=1, totals=WorkerTotals(), blocked=by) for by in ("window", ""))
    told.take(goes_on, 0.0)
    for now in (1.0, 2.0, 3.0, 4.0):
        told.take(waits, now)
        since.append(told.blocked_since)
        if now == 2.0:
            told.stepped(64, 2.5)
    assert since == [1.0, 1.0, 2.5, 2.5]
    told.take(goes_on, 5.0)
    told.stepped(128, 5.5)
    assert told.blocked_since is None


def test_the_aborted_episodes_and_the_failures_of_a_worker_reach_the_report(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failing = {"env": "support.envs.fleet:three_of_eight", "num_envs": 2, "env_placement": "process"}
    sections = {**AT_RANDOM, "sampling": {**AT_RANDOM["sampling"], **failing}}

    def report() -> Report:
        return broker.report()

    with (
        EpisodeStream(broker.endpoints.learner) as stream,
        WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, sections),
    ):

        def is_told(seen: Report) -> bool:  # a report has the lives whose counters changed since the last one
            window = seen.gauges["aborted_window"]
            return bool(seen.env_errors and window and seen.counters.get((0, 1), {}).get("aborted_episodes_total"))

        seen = report()
        while not (is_told(seen) and figures(broker)[0].get("envs_cpu_share")):
            assert stream.next(30.0) is not None
            seen = report()
        row = figures(broker)[0]
    assert 10 << 20 < row["envs_rss_bytes"] < 10 << 30, "of two processes with an env each"
    assert row["envs_cpu_share"] <= (os.cpu_count() or 1) + 1
    for role in ("broker", "learner"):
        assert seen.gauges[labelled("process_rss_bytes", "role", role)] == pytest.approx(resident(os.getpid()), rel=0.2)
        assert 0 < seen.gauges[labelled("process_cpu_share", "role", role)] <= (os.cpu_count() or 1) + 1
    wait_until(
        lambda: labelled("process_rss_bytes", "role", "learner") not in report().gauges, "a learner that has left"
    )
    assert labelled("process_rss_bytes", "role", "broker") in report().gauges
    [group] = seen.env_errors.values()
    assert (group["kind"], group["exception"], group["slots"]) == ("env_exception", "RuntimeError", [0])
    assert group["env"] == "support.envs.fleet:three_of_eight"
    assert "fleet.py:" in group["where"]
    assert group["traceback"].rstrip().endswith("RuntimeError: the simulator diverged")
    assert seen.counters[0, 1]["aborted_episodes_total"] == seen.gauges["aborted_window"]
    assert seen.gauges["aborted_len_mean"] == seen.gauges["aborted_return_mean"] > 0  # CartPole gives 1 a step


def test_an_env_that_fails_in_its_bad_episodes_alone_reaches_no_goal_by_the_good_ones(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failing = {"env": "support.envs.fleet:FailsWhenBad", "env_restart_attempts": 1000}
    sections = {**AT_RANDOM, "sampling": {**AT_RANDOM["sampling"], **failing}}
    finished = aborted = 0
    with (
        EpisodeStream(broker.endpoints.learner) as stream,
        WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, sections),
    ):
        while (seen := broker.report().gauges)["episodes_window"] < EPISODES_NEEDED:
            batch = stream.next(30.0)
            assert batch is not None
            finished, aborted = finished + batch.episode_ends[0], aborted + batch.episode_ends[1]
    numbers, goal = replace(RunNumbers.of(seen, {}), steps=1), Goal(until_return=20.0)
    assert numbers.mean_return is not None
    assert numbers.mean_return > 20, "the bad ones are in no mean"
    assert numbers.aborted > 20
    assert f"({numbers.aborted} of {100 + numbers.aborted} aborted, " in numbers.show_mean_return()
    assert not goal.reached(numbers, RunNumbers())
    assert f"{numbers.aborted} of {100 + numbers.aborted} episodes were aborted" in goal.withheld(numbers, RunNumbers())
    assert broker.ask(lambda asked: feature(asked, FleetMetrics).mean_return()) == -math.inf
    assert finished > 0
    assert aborted > 0, "a learner of one's own is told of them too"


def test_a_policy_server_reports_its_clients_and_its_time_waiting_for_them(
    broker: BrokerThread, free_port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sections = {**AT_RANDOM, "serving": {"enabled": True, "host": "127.0.0.1", "port": free_port}}
    sections |= {"broker": {"allow_insecure": True}, "learner": {"enabled": False}}
    sections["worker"] = {**AT_RANDOM.get("worker", {}), "advertise": "localhost"}
    with (
        EpisodeStream(broker.endpoints.learner),
        WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, sections),
        PolicyClient(f"tcp://127.0.0.1:{free_port}", connect_timeout_s=TIMEOUT_S) as client,
    ):
        episode = client.start_episode()

        def is_told() -> bool:
            client.get_action(episode, np.zeros(4, np.float32))
            client.log_returns(episode, 1.0)
            serving = figures(broker)[0].get("serving", {})
            return bool(serving.get("clients") and serving["requests_per_s"] and serving["latency_p95_s"])

        wait_until(is_told, "a row with the client's requests")
        wait_until(lambda: figures(broker)[0]["time_share"]["wait"] > 0.9, "a worker that waits for its client")
        row, gauges = figures(broker)
        assert ports(broker) == Ports(clients=f"tcp://localhost:{free_port}")
    assert 0 < row["serving"]["latency_p50_s"] <= row["serving"]["latency_p95_s"]
    assert (row["serving"]["clients"], row["envs_lost"], gauges["clients"]) == (1, 0, 1)


@pytest.mark.parametrize(
    ("advertise", "words"),
    [
        ("no.such.name.invalid", r"'no\.such\.name\.invalid' cannot be resolved on this machine"),
        ("fe80::1%lo", r"peers cannot connect to 'fe80::1%lo'"),
    ],
)
def test_an_unreachable_advertise_name_is_refused(advertise: str, words: str) -> None:
    config = build_config({"serving": {"enabled": True}, "worker": {"advertise": advertise}})
    with pytest.raises(ConfigError, match=rf"worker\.advertise: .*{words}"):
        host_of_ports(config)


@pytest.mark.processes
def test_a_worker_reports_a_missing_env_host_and_later_the_hosts_version(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fleet, address = in_run(tmp_path, "envs")
    sections = {**AT_RANDOM, "fleet": fleet, "sampling": {**AT_RANDOM["sampling"], "env_placement": "remote"}}
    with WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, sections):
        told: dict[str, Any] = {"connected": 0, "wanted": 1, "versions": []}
        wait_until(lambda: figures(broker)[0].get("env_hosts") == told, "a row that says so")
        assert ports(broker) == Ports(envs=address)
        with EnvHosts(tmp_path, socket_dir=make_socket_folder(tmp_path)) as hosts:
            host = hosts.start("CartPole-v1", 2)
            told = {"connected": 1, "wanted": 1, "versions": [version("headrace")]}
            wait_until(lambda: figures(broker)[0].get("env_hosts") == told, "a row with the host")
            # Envs whose worker waits for a learner take next to no processor time.
            with EpisodeStream(broker.endpoints.learner) as stream:
                while not figures(broker)[0].get("envs_cpu_share"):
                    assert stream.next(30.0) is not None

            def is_told() -> bool:
                children = Path(f"/proc/{host.pid}/task/{host.pid}/children").read_text().split()
                sizes = [resident(pid) for pid in (host.pid, *map(int, children))]
                told = figures(broker)[0]["envs_rss_bytes"]
                return len(sizes) > 1 and bool(told == pytest.approx(sum(sizes), rel=0.1))

            wait_until(is_told, "the memory of the host and of the processes of its envs")
