"""Rates and counters of env steps, of agent steps, and of the steps of one module's agents."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.broker.batches.limits import BrokerLimits
from headrace.broker.batches.source import Source, StoredBatch
from headrace.broker.reports.metrics import FleetMetrics
from headrace.broker.sessions.core import BrokerCore
from headrace.schemas.accounts.ledger import HeldBatch, LedgerRow, Settled, WorkerTotals
from headrace.schemas.accounts.lifetime_counters import row_counters
from headrace.schemas.accounts.logged_metrics import LoggedMetric
from headrace.schemas.accounts.redis_keys import QUANTILES, labelled
from headrace.schemas.chunks.batch import BatchHeader
from headrace.schemas.messages import (
    Bye,
    Commit,
    Heartbeat,
    LearnerFigures,
    LearnerHello,
    Obituary,
    SupervisorHello,
    WorkerHello,
)


def header(seq: int, steps: int, **totals: Any) -> BatchHeader:
    return BatchHeader(
        fleet_id="f", slot=0, incarnation=1, seq=seq, steps=steps, chunks=1, totals=WorkerTotals(seq=seq, **totals)
    )


def beat(**fields: Any) -> Heartbeat:
    return Heartbeat(slot=0, incarnation=1, totals=WorkerTotals(), **fields)


def accept(metrics: FleetMetrics, told: BatchHeader, *, nbytes: int = 1, at: float = 0.0) -> None:
    """Let the metrics hear of a batch."""
    metrics.accepted(Source(0, 1), StoredBatch(told.seq, told.steps, told.chunks, nbytes, None, 0, at), told)


def rate(*headers: BatchHeader) -> float:
    """Env steps a second of batches that came at seconds 0, 1, 2 and so on, at the end of the last of these."""
    metrics = FleetMetrics(BrokerCore("f", BrokerLimits()))
    for second, each in enumerate(headers):
        accept(metrics, each, at=float(second))
    return metrics.report(float(len(headers))).gauges["env_steps_per_s"]


def test_the_report_has_each_peers_version_or_an_empty_string() -> None:
    core = BrokerCore("f", BrokerLimits())
    for slot, told in enumerate(("0.2.0", "")):
        hello = WorkerHello(fleet_id="f", token=f"{slot}", slot=slot, headrace_version=told)
        core.receive(b"%d" % slot, hello, 0.0)
    assert "headrace_version" not in FleetMetrics(core).report(0.0).lease
    core.receive(b"l", LearnerHello(token="l", channel="stream", headrace_version="0.3.0"), 0.0)
    report = FleetMetrics(core).report(0.0)
    assert {slot: row["headrace_version"] for slot, row in report.workers.items()} == {0: "0.2.0", 1: ""}
    assert report.lease["headrace_version"] == "0.3.0"


def test_the_report_has_each_change_of_a_life_as_one_event() -> None:
    core = BrokerCore("f", BrokerLimits())
    metrics = FleetMetrics(core)

    def events() -> list[tuple[object, ...]]:
        told = metrics.report(0.0).events
        return [(event["event"], event["slot"], event["incarnation"]) for event in told]

    core.receive(b"w", WorkerHello(fleet_id="f", token="w", slot=3, incarnation=2), 0.0)
    assert events() == [("joined", 3, 2)]
    assert events() == []
    core.receive(b"w", Bye(slot=3, incarnation=2, totals=WorkerTotals(), settled=Settled()), 0.0)
    assert events() == [("shutdown", 3, 2)]


def test_lives_that_ended_before_the_run_went_on_are_not_fenced() -> None:
    core = BrokerCore("f", BrokerLimits())
    metrics, totals = FleetMetrics(core), WorkerTotals(seq=1, stepped=128, shipped=128, shipped_chunks=2)
    before = {"totals": totals, "accepted": (128, 2), "held": (128, 2), "settled": Settled(), "closed": True}

    def fenced() -> list[tuple[int, int]]:
        return [key for key, one in core.store.sources.items() if metrics.counters_of(one).get("fenced_lives_total")]

    def events() -> list[tuple[str, int, int]]:
        told = [event for event in metrics.report(0.0).events if "slot" in event]
        return [(event["event"], event["slot"], event["incarnation"]) for event in told]

    for slot in range(3):
        core.store.restore(LedgerRow(slot=slot, incarnation=1, **before))
        hello = WorkerHello(fleet_id="f", token=f"{slot}", slot=slot, incarnation=2)
        core.receive(b"%d" % slot, hello, 0.0)
    assert (sorted(events()), fenced()) == ([("joined", 0, 2), ("joined", 1, 2), ("joined", 2, 2)], [])
    core.receive(b"s", SupervisorHello(fleet_id="f", token="s"), 0.0)
    core.receive(b"l", LearnerHello(token="l", channel="stream"), 0.0)
    for slot, reason in enumerate(("shutdown", "worker_killed", "fenced")):
        words = Obituary(slot=slot, incarnation=1, totals=totals, settled=Settled(), reason=reason)
        core.receive(b"s", words, 0.0)
    assert {slot: core.store.source(slot, 1).end_reason for slot in range(3)} == {
        0: "shutdown",
        1: "worker_killed",
        2: "fenced",  # its worker was stopped while the brokers changed, and came back
    }
    assert (events(), fenced()) == ([("worker_killed", 1, 1)], [(2, 1)])


def ended(seq: int, finished: int, aborted: int, **counts: Any) -> BatchHeader:
    told = {"episodes": [(1.0, 2)] * finished, "aborted": [(0.0, 2)] * aborted}
    return header(seq, 10, **counts).model_copy(update=told)


def test_the_window_has_the_episodes_that_were_aborted_while_it_filled() -> None:
    metrics = FleetMetrics(BrokerCore("f", BrokerLimits()))

    def window(finished: int, aborted: int, **counts: Any) -> tuple[float, float, bool]:
        accept(metrics, ended(1, finished, aborted, **counts))
        gauges = metrics.report(0.0).gauges
        return gauges["episodes_window"], gauges["episodes_window_aborted"], metrics.mean_return() == 1.0

    assert window(0, 3) == (0, 3, False)
    assert window(60, 2) == (60, 5, False)
    assert window(40, 0) == (100, 5, True), "5 of 105"
    assert window(0, 1) == (100, 6, False), "6 of 106"
    assert window(0, 64, discarded={"shutdown": 9}) == (100, 6, False), "their worker leaves in order"
    assert window(60, 0) == (100, 3, True), "the first ones are of the time before"
    assert window(500, 1) == (100, 1, True)


def test_a_killed_worker_aborts_an_episode_in_each_of_its_envs_and_one_that_leaves_does_not() -> None:
    core = BrokerCore("f", BrokerLimits())
    metrics = FleetMetrics(core)
    for slot in range(3):
        core.receive(b"%d" % slot, WorkerHello(fleet_id="f", token=f"{slot}", slot=slot, num_envs=16), 0.0)
    core.receive(b"s", SupervisorHello(fleet_id="f", token="s"), 0.0)
    core.receive(b"l", LearnerHello(token="l", channel="stream"), 0.0)
    assert metrics.report(0.0).gauges["episodes_window_aborted"] == 0
    for slot, reason in ((0, "shutdown"), (1, "worker_killed")):
        words = Obituary(slot=slot, incarnation=1, totals=WorkerTotals(), settled=Settled(), reason=reason)
        core.receive(b"s", words, 0.0)
        assert metrics.report(0.0).gauges["episodes_window_aborted"] == 16 * slot
        assert metrics.report(0.0).gauges["episodes_window_aborted"] == 16 * slot


def told_learner(core: BrokerCore, now: float) -> dict[str, Any]:
    """Return program, process, host and threads of the learner that came last, and for how long it is silent."""
    lease = FleetMetrics(core).report(now).lease
    about = {name: lease.get(name) for name in ("program", "pid", "host", "torch_threads", "cores", "connected")}
    return about | {"silent_s": round(lease["unix_s"] - lease["heard_unix_s"], 1)} if "program" in lease else about


def test_the_lease_names_the_learner_that_came_last_and_when_it_was_heard() -> None:
    core = BrokerCore("f", BrokerLimits())
    assert set(told_learner(core, 0.0).values()) == {None, 0}
    mine = {"program": "/home/me/ppo.py", "pid": 7, "host": "box"}
    core.receive(b"1", LearnerHello(token="1", channel="stream", **mine), 1.0)
    figures = LearnerFigures(torch_threads=8, cores=4)
    core.receive(b"1", Commit(epoch=1, figures=figures), 5.0)
    seen = told_learner(core, 6.0)
    assert seen == {**mine, "torch_threads": 8, "cores": 4, "connected": 1, "silent_s": 1.0}
    core.gone(b"1")
    assert told_learner(core, 65.0) == {**seen, "connected": 0, "silent_s": 60.0}
    newer = {"program": "python -m mine", "pid": 8, "host": 255 * "a"}
    core.receive(b"2", LearnerHello(token="2", channel="stream", **{**newer, "host": 999 * "a"}), 66.0)
    core.receive(b"1", Commit(epoch=1), 67.0)
    expected = {**newer, "torch_threads": 0, "cores": 0, "connected": 1, "silent_s": 2.0}
    assert told_learner(core, 68.0) == expected, "the older one counts no more"


def test_the_lease_says_whether_the_learner_waits_for_a_batch_and_none_is_on_its_way() -> None:
    core = BrokerCore("f", BrokerLimits())

    def waiting(now: float) -> int:
        return int(FleetMetrics(core).report(now).lease["waiting"])

    core.receive(b"l", LearnerHello(token="l", channel="stream"), 1.0)
    assert waiting(1.0) == 0
    core.receive(b"l", Commit(epoch=1, waiting=True), 5.0)
    assert (waiting(6.0), waiting(7.0)) == (1, 0), "while it waits it says so twice a second"
    core.receive(b"l", Commit(epoch=1), 8.0)
    assert waiting(8.0) == 0
    core.receive(b"l", Commit(epoch=1, waiting=True), 9.0)
    assert waiting(9.0) == 1
    lease = core.learners.lease
    assert lease is not None
    lease.sent(10)
    assert waiting(9.0) == 0, "it may have the batch by now"
    core.receive(b"l", Commit(epoch=1, waiting=True, consumed_batches=1), 9.5)
    assert waiting(9.5) == 1
    core.receive(b"m", LearnerHello(token="l", channel="stream"), 9.6)
    assert waiting(9.6) == 0, "another connection has said nothing yet"


def test_the_rate_counts_env_steps_not_agent_steps() -> None:
    assert rate(header(1, 60, stepped=60, env_steps=30), header(2, 40, stepped=100, env_steps=50)) == 25.0


def test_without_env_steps_the_rate_counts_agent_steps() -> None:
    assert rate(header(1, 60, stepped=60), header(2, 40, stepped=100)) == 50.0


def test_steps_before_the_broker_first_heard_a_worker_add_nothing_to_the_rate() -> None:
    assert rate(header(7, 60, stepped=10**6), header(8, 40, stepped=10**6 + 40)) == 20.0


def test_steps_count_by_weights_lag_and_an_earlier_learners_lag_is_infinite() -> None:
    core = BrokerCore("f", BrokerLimits())
    metrics = FleetMetrics(core)
    core.store.weights = (2, 70)
    seen = [(2, 70), (2, 71), (2, 69), (2, 66), (2, 6), (2, 5), (1, 900), (0, 0), (3, 1)]
    for seq, (epoch, weights_seq) in enumerate(seen, start=1):
        told = header(seq, 10**seq).model_copy(update={"learner_epoch": epoch, "weights_seq": weights_seq})
        accept(metrics, told)
    gauges = metrics.report(0.0).gauges
    at_most = {"0": 10**1 + 10**2 + 10**9, "1": 10**3, "2": 0, "4": 10**4, "8": 0, "16": 0, "32": 0, "64": 10**5}
    total = 0
    for le, steps in {**at_most, "+Inf": 10**6 + 10**7 + 10**8}.items():
        total += steps
        assert gauges[labelled("accepted_lag_agent_steps_bucket", "le", le)] == total, le


@pytest.mark.parametrize("workers", [16, 17])
def test_the_spread_of_workers_rates_is_told_from_seventeen_workers_on(workers: int) -> None:
    core = BrokerCore("f", BrokerLimits())
    for slot in range(workers):
        core.receive(b"%d" % slot, WorkerHello(fleet_id="f", token=f"{slot}", slot=slot), 0.0)
    for source in core.live():
        for second in (0, 1):
            source.figures.stepped(100 * source.slot * second, float(second))
    spread = [
        FleetMetrics(core).report(1.0).gauges.get(labelled("worker_env_steps_per_s_quantile", "quantile", at))
        for at in ("0.05", "0.25", "0.5", "0.75", "0.95")
    ]
    assert spread == ([None] * 5 if workers == 16 else pytest.approx([80.0, 400.0, 800.0, 1200.0, 1520.0]))


@pytest.mark.parametrize("count", [1, 2, 7, 100, 250])
def test_quantiles_cover_the_newest_hundred_episodes(count: int) -> None:
    episodes = [(float(value), 1000 - value) for value in np.random.default_rng(count).permutation(count).tolist()]
    metrics = FleetMetrics(BrokerCore("f", BrokerLimits()))
    told = header(1, 1).model_copy(
        update={"episodes": episodes, "modules": ["one"], "agent_returns": [reward for reward, _ in episodes]}
    )
    accept(metrics, told)
    report = metrics.report(0.0)
    for values, name in zip(zip(*episodes[-100:], strict=True), ("return", "len"), strict=True):
        expected = np.quantile(values, [float(at) for at in QUANTILES])
        found = [report.gauges[labelled(f"episode_{name}_quantile", "quantile", at)] for at in QUANTILES]
        assert found == pytest.approx(expected)
        if name == "return":
            assert list(report.policies["one"]["quantiles"].values()) == pytest.approx(expected)


def test_the_last_words_of_a_worker_have_its_newest_metrics() -> None:
    core = BrokerCore("f", BrokerLimits())
    metrics = FleetMetrics(core)
    core.receive(b"w", WorkerHello(fleet_id="f", token="w", slot=0, incarnation=1), 0.0)
    core.receive(b"w", beat(metrics={"goals": LoggedMetric(reduce="sum", value=1.0)}), 1.0)
    bye = Bye(
        slot=0,
        incarnation=1,
        totals=WorkerTotals(),
        settled=Settled(),
        metrics={"goals": LoggedMetric(reduce="sum", value=3.0)},
    )
    core.receive(b"w", bye, 2.0)
    assert metrics.report(2.0).metrics["goals"].value == 3.0


def committed_bytes(metrics: FleetMetrics, source: Source) -> int:
    return metrics.counters_of(source).get("committed_bytes_total", 0)


def test_committed_bytes_leave_out_what_the_broker_drops_and_chunks_the_learner_leaves_out() -> None:
    core = BrokerCore("f", BrokerLimits())
    metrics, store, source = FleetMetrics(core), core.store, core.store.source(0, 1)
    core.observers.append(metrics)
    for seq, nbytes in enumerate((100, 40, 8, 16), start=1):
        store.accept(source, StoredBatch(seq, 10, 2, nbytes, [], seq, 0.0), header(seq, 10))
    store.merge_settled(source, Settled(seq=1, committed=(10, 2)))
    assert committed_bytes(metrics, source) == 100
    source.drop(source.held[2], "stale")
    store.merge_settled(source, Settled(seq=3, committed=(20, 4), dropped={"stale": (10, 2)}))
    assert committed_bytes(metrics, source) == 108
    store.merge_settled(source, Settled(seq=4, committed=(25, 5), dropped={"stale": (10, 2), "gap": (5, 1)}))
    assert committed_bytes(metrics, source) == 116


def test_batches_of_which_only_the_learner_has_the_bytes_count_none() -> None:
    core = BrokerCore("f", BrokerLimits())
    metrics, source = FleetMetrics(core), core.store.source(0, 1)
    core.observers.append(metrics)
    source.with_learner[1] = HeldBatch(seq=1, steps=10, chunks=2)
    source.adopt_with_learner(0.0)
    core.store.merge_settled(source, Settled(seq=1, committed=(10, 2)))
    assert (source.accepted_count, committed_bytes(metrics, source)) == ((10, 2), 0)


def test_counters_of_lives_go_on_from_those_of_an_earlier_broker() -> None:
    metrics, source = FleetMetrics(BrokerCore("f", BrokerLimits())), Source(0, 1)
    wait = labelled("worker_wait_s_total", "reason", "round")
    known = {"accepted_bytes_total": 100, "aborted_episodes_total": 1, wait: 7, "sampled_bytes_total": 5000}
    metrics.continue_from({(0, 1): {**known, "env_steps_total": 9}})
    assert metrics.counters_of(source) == known
    told = header(1, 10).model_copy(update={"aborted": [(1.0, 2), (3.0, 4)]})
    accept(metrics, told, nbytes=50)
    source.end_reason, source.met_at = "fenced", 0.0
    source.figures.take(beat(bytes_shipped=(4000, 4000), waited_s={"round": 8.9}), 0.0)
    more = {"accepted_bytes_total": 150, "aborted_episodes_total": 3, wait: 8, "fenced_lives_total": 1}
    assert metrics.counters_of(source) == {**known, **more}


@pytest.mark.parametrize(("env_steps", "expected"), [(50, 50), (0, 0), (None, 100)])
def test_the_counters_separate_env_steps_from_agent_steps(env_steps: int | None, expected: int) -> None:
    totals = WorkerTotals(stepped=100, shipped=90, open=10, env_steps=env_steps, module_steps={"one": 60, "two": 30})
    row = LedgerRow(slot=0, incarnation=1, totals=totals, accepted=(90, 3), held=(90, 3), settled=Settled())
    counters = row_counters(row)
    assert (counters["env_steps_total"], counters["agent_steps_total"]) == (expected, 100)
    assert (
        counters['accepted_module_agent_steps_total{module="one"}'],
        counters['accepted_module_agent_steps_total{module="two"}'],
    ) == (60, 30)


def test_a_batch_updates_its_workers_weights_version_and_never_lowers_it() -> None:
    source = Source(0, 1, weights=(1, 80))
    source.accept(StoredBatch(1, 8, 1, 9, None, 1, 0.0, weights=(1, 93)), WorkerTotals(seq=1))
    assert source.weights == (1, 93)
    source.accept(StoredBatch(2, 8, 1, 9, None, 2, 0.0, weights=(1, 92)), WorkerTotals(seq=2))
    assert source.weights == (1, 93)
