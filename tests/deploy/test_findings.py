"""Each bad state gives its finding, with the limit and the command that helps; a healthy fleet has no finding."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.broker.files.report_file import RedisAway
from headrace.deploy.annexes.watch.state.fleet_state import ledger
from headrace.deploy.monitoring.facts import Facts
from headrace.deploy.monitoring.finding_kinds import KIND, KINDS
from headrace.deploy.monitoring.findings import awaited, find, notes, verdict
from headrace.deploy.monitoring.losses import losses_in_words
from headrace.deploy.monitoring.why import _as_json, _as_text
from headrace.deploy.report.progress import env_failures
from headrace.deploy.run.redis_view import LearnerRowView, Snapshot
from headrace.schemas.accounts.consumer_groups import GroupBooks, GroupRow
from headrace.schemas.accounts.env_errors import INFO_LEFT_OUT, EnvErrorRow
from headrace.schemas.accounts.ledger import FleetLedger, LedgerRow, Settled, WorkerTotals
from headrace.schemas.accounts.redis_keys import TOLD_SETTINGS
from headrace.schemas.accounts.user_calls import CallInProgress, UserCall
from headrace.schemas.settings.config import BrokerSection, FleetConfig, LearnerSection, ServingSection
from headrace.schemas.settings.config import SamplingSection as Sampling
from headrace.schemas.settings.config_loading import known_keys
from support.fleets.known_facts import (
    AT,
    LEASE,
    NOW,
    STILL,
    WORKER,
    blocked,
    by_redis_alone,
    having,
    healthy,
    of_own_learner,
    process,
    stalled,
    told,
    without,
)

LATE = {**WORKER, "host": "box", "unix_s": NOW - 8.0}
HEARD = {**LATE, "unix_s": NOW - 0.5}
REMOTE = FleetConfig(sampling=Sampling(env_placement="remote"))
SERVED = FleetConfig(serving=ServingSection(enabled=True))
SCRIPT = {"program": "/home/me/ppo.py", "pid": 71.0, "host": "box\x1b", "heard_unix_s": NOW - 9}
"""The facts that a learner of one's own reports."""
GREEDY = {"host": "here", "torch_threads": 8.0, "cores": 4.0}
SHORT = LearnerSection(steps_per_update=512)
TIGHT = FleetConfig(learner=SHORT, broker=BrokerSection(max_held_batches=2))
ROOMY = FleetConfig(learner=SHORT, broker=BrokerSection(max_held_batches=4))
DROPS = FleetConfig(broker=BrokerSection(max_held_batches=4, overflow="drop_oldest"))
NO_WEIGHTS = {0: {**WORKER, "weights_seq": 0}, 1: {**WORKER, "weights_seq": 0}}
HOSTLESS = {**WORKER, "env_silence_s": 15.0, "env_hosts": {"connected": 0, "wanted": 1}}
ONE_HOST = {**WORKER, "envs_lost": 4, "num_envs": 8, "env_steps": 9, "env_hosts": {"connected": 1, "wanted": 2}}
LEFT = LedgerRow(
    slot=1, incarnation=1, totals=WorkerTotals(), accepted=(0, 0), held=(0, 0), settled=Settled(), closed=True
)
OPEN = LedgerRow(slot=1000, incarnation=3, totals=WorkerTotals(), accepted=(0, 0), held=(0, 0), settled=Settled())
BEFORE = ((NOW - 50.0, {"messages_refused": 2.0, "env_steps_total": 9000.0}),)
ELSEWHERE = {**WORKER, "unix_s": NOW - 8, "pid": 3, "host": "\x1b[2Jbox"}
FAILS = {**WORKER, "env_failures": 9, "env_failure_age_s": 2.0, "env_failure": "boom\n", "joined_unix_s": NOW - 60}
FAILED_ONCE = {**FAILS, "env_failures": 1}
REFUSES = {**WORKER, "tasks_refused": "SyncVectorEnv resets its envs\x9bby itself; make it with DISABLED"}
ABORTED = {
    "episodes_window": 100.0,
    "episode_len_mean": 100.0,
    "episode_return_mean": 100.0,
    "aborted_window": 30.0,
    "aborted_len_mean": 50.0,
    "aborted_return_mean": 50.0,
}
HOLDS = GroupRow(on_slow="wait", declared=True, lag_steps=5120, oldest_s=44.0)
READS = {"connected": True, "pid": 71, "host": "box\x1b", "program": "/home/me/rec.py", "heard_unix_s": NOW - 3}
LOSES = GroupRow(lag_steps=100, committed=(700, 7), dropped={"overflow": (150, 2), "before_group": (50, 1)})
LOST_MORE = 'group_lost_agent_steps{group="watch"}'
LOST_CLIENT = {"env_steps_total": 9500, 'discarded_agent_steps_total{reason="client_lost"}': 7}


def in_groups(workers: dict[int, dict[str, Any]], recent: float | None = None, **groups: GroupRow) -> Facts:
    """The learner holds 100 agent steps; the group `watch` has lost 150, `recent` of them before the last minute."""
    gauges = {"held_agent_steps": 100.0, LOST_MORE: 150.0}
    facts = told(gauges=gauges, workers=workers, groups={name: GroupBooks(state) for name, state in groups.items()})
    return facts if recent is None else replace(facts, recent=((NOW - 50.0, {LOST_MORE: recent}),))


WRONG: dict[str, tuple[Facts, str, str, str]] = {
    "a group that nobody reads": (
        in_groups(blocked("group"), record=HOLDS, late=HOLDS.model_copy(update={"lag_steps": 200})),
        "no_group_reader",
        "waiting for a reader of consumer group record; none has come yet; 2 of 2 workers wait, since it has not "
        "committed 5,120 agent steps; start it",
        "",
    ),
    "a group of before that nobody reads": (
        in_groups(blocked("group"), record=HOLDS.model_copy(update={**READS, "connected": False, "declared": False})),
        "no_group_reader",
        r"last heard of 3 s ago \(/home/me/rec.py, pid 71 on box\\x1b\)",
        "headrace groups remove record --run-dir /runs/a",
    ),
    "a slow group that leaves no credit": (
        in_groups(
            {0: {**blocked()[0], "held_batches": 0}, 1: WORKER}, record=HOLDS.model_copy(update=READS), watch=LOSES
        ),
        "group_slow",
        "to commit; 1 of 2 workers wait, since it has not committed 5,120 agent steps, the oldest accepted 44 s ago",
        "",
    ),
    "a group that loses batches": (
        in_groups({0: WORKER, 1: WORKER}, 120.0, watch=LOSES),
        "group_loses",
        "consumer group watch has lost 150 agent steps, 16 %: no reader of it is connected",
        "headrace groups remove watch --run-dir /runs/a",
    ),
    "the supervisor died": (
        having("supervisor", state="gone"),
        "supervisor_gone",
        r"the supervisor \(pid 70\) and its processes are gone and noted no end; see its log",
        "headrace up --resume /runs/a",
    ),
    "Redis away": (
        healthy(redis_error="Connection refused", redis_age_s=12.0),
        "redis_away",
        r"waiting for Redis at \S*, silent for 12 s \(Connection refused\)",
        "",
    ),
    "Redis refuses the broker": (
        replace(told(away=RedisAway(NOW - 12.0, "READONLY")), redis_error="READONLY", redis_age_s=12.0),
        "redis_away",
        r"Redis at \S* takes no reports \(READONLY\); the fleet goes on, and reports later",
        "",
    ),
    "Redis garbage": (told(garbage=("totals: field x",)), "redis_garbage", "1 value that cannot be read", ""),
    "disk full": (healthy(disk_free_bytes=1 << 20), "disk_full", "is full: 1.0 MiB are left", "df -h /runs/a"),
    "a worker stopped": (
        having("worker-1", is_stopped=True, pid=71, silent_s=12.0),
        "process_stopped",
        r"waiting for worker-1 \(pid 71\), which is stopped",
        "kill -CONT 71",
    ),
    "a lost worker": (
        having("worker-1", state="restarting", pid=0, started_unix_s=0, last_words="signal SIGKILL"),
        "process_restarting",
        r"worker-1 to start again \(it ended with signal SIGKILL\)",
        "tail /runs/a/logs/worker-1.log",
    ),
    "restarts again and again": (
        having("worker-1", recent_deaths=4, restarts=9, started_unix_s=NOW - 2, last_words="exit code 1"),
        "crash_loop",
        "worker-1 has ended 4 times within 60 s of running; the last time it ended with exit code 1",
        "tail /runs/a/logs/worker-1.log",
    ),
    "a process that failed for good": (
        having("learner", state="failed", pid=0, last_words="exit code 3 (CONFIG)"),
        "process_failed",
        r"learner has failed: it ended with exit code 3 \(CONFIG\)",
        "tail /runs/a/logs/learner.log",
    ),
    "a fenced learner": (
        having("learner", state="fenced", pid=0),
        "learner_fenced",
        "a newer learner has taken over from the fleet's own",
        "",
    ),
    "a silent broker": (having("broker", silent_s=7.0), "broker_silent", "silent for 7 s", ""),
    "no reports": (
        replace(told(), snapshot=replace(told().snapshot, gauges={}, workers={}, reported_unix_s=NOW - 40)),
        "broker_silent",
        "reported nothing to Redis for 40 s",
        "",
    ),
    "a learner that hangs": (having("learner", silent_s=45.0), "learner_silent", "silent for 45 s", ""),
    "a silent env host": (
        replace(healthy(), processes={**healthy().processes, "h": process("h", "env-host", silent_s=6.0)}),
        "env_host_silent",
        "silent for 6 s",
        "",
    ),
    "an env that hangs": (
        having("worker-0", silent_s=8.0),
        "env_hangs",
        r"worker-0 \(pid 70\): its env or a callback has not returned for 8 s",
        "",
    ),
    "envs elsewhere that hang": (
        told(workers={0: {**WORKER, "env_silence_s": 8.0}, 1: WORKER}),
        "envs_silent",
        "none of its envs has answered for 8 s",
        "",
    ),
    "a slow rebuild": (
        having("worker-0", silent_s=20.0, doing="rebuilding"),
        "env_rebuilding",
        "building an env again for 20 s",
        "",
    ),
    "a worker that loads": (
        having("worker-0", doing="loading"),
        "worker_loading",
        r"waiting for worker-0 to load \(600 s so far\)",
        "",
    ),
    "a worker that builds": (
        having("worker-0", doing="building"),
        "worker_building",
        r"worker-0 to build 8 envs each \(600 s so far\)",
        "",
    ),
    "no env host ever": (
        having("worker-0", healthy(config=REMOTE), doing="building"),
        "no_env_hosts",
        "waiting for env hosts for worker-0",
        "headrace env-host --rendezvous /runs/a/rendezvous.json --env CartPole-v1",
    ),
    "all env hosts gone": (
        told(healthy(config=REMOTE), workers={0: HOSTLESS, 1: WORKER}),
        "no_env_hosts",
        "no env host serves its envs, for 15 s",
        "headrace env-host --rendezvous",
    ),
    "a worker the broker does not know": (
        told(workers={0: WORKER}),
        "worker_not_joined",
        r"waiting for worker-1 \(pid 70\) to join the broker",
        "",
    ),
    "a worker from elsewhere is lost": (
        told(rows={(1000, 3): OPEN}),
        "worker_lost",
        r"worker-1000 \(incarnation 3\) is lost",
        "",
    ),
    "a worker from elsewhere is late": (
        told(workers={0: WORKER, 1: WORKER, 1000: ELSEWHERE}),
        "worker_late",
        r"worker-1000 \(pid 3 on \\x1b\[2Jbox\), silent for 8 s: the network to \\x1b\[2Jbox is slow",
        "",
    ),
    "no worker": (
        told(without("worker-0", "worker-1"), workers={}),
        "no_worker",
        "waiting for a worker",
        "headrace worker --run-dir /runs/a",
    ),
    "a learner that does not connect": (
        told(gauges={**STILL, "weights_seq": 0.0}, workers=NO_WEIGHTS, lease={"connected": 0.0}),
        "learner_loading",
        r"waiting for first weights from the learner \(600 s so far\)",
        "",
    ),
    "no weights yet": (
        of_own_learner(told(gauges={**STILL, "weights_seq": 0.0}, workers=NO_WEIGHTS)),
        "no_weights",
        r"first weights from a learner at tcp://127.0.0.1:5702; it holds the lease \(epoch 1\) and has sent none",
        "",
    ),
    "learner gone": (
        of_own_learner(stalled(12.0, {"connected": 0.0})),
        "no_learner",
        "to come back; it has ended or cannot be reached; 2 of 2 workers wait with full windows",
        'EpisodeStream.of("/runs/a")',
    ),
    "a learner of one's own that is gone": (
        of_own_learner(stalled(12.0, {"connected": 0.0, **SCRIPT})),
        "no_learner",
        r"waiting for the learner /home/me/ppo.py \(pid 71 on box\\x1b\) to come back; it has ended or cannot be "
        "reached; last heard of 9 s ago; 2 of 2",
        "",
    ),
    "a learner of one's own that never came": (
        of_own_learner(told(gauges={**STILL, "weights_seq": 0.0}, workers=NO_WEIGHTS, lease={"connected": 0.0})),
        "no_learner",
        "waiting for first weights from a learner at tcp://127.0.0.1:5702; no learner is connected, and none was",
        'EpisodeStream.of("/runs/a")',
    ),
    "a learner of one's own that is slow": (
        of_own_learner(stalled(15.0, SCRIPT)),
        "learner_slow",
        r"the learner /home/me/ppo.py .* has not committed for 15 s; last heard of 9 s ago",
        "",
    ),
    "a learner with too many threads": (
        of_own_learner(told(lease={**LEASE, **GREEDY})),
        "learner_threads",
        "torch uses 8 threads in the learner, which shares 4 cores with 2 workers: both get slower",
        "torch.set_num_threads(1)",
    ),
    "learner slow": (
        stalled(15.0),
        "learner_slow",
        r"the learner to commit what it holds; it holds the lease \(epoch 1\) and has not committed for 15 s",
        "",
    ),
    "a loss that is NaN": (
        healthy(learner_row=LearnerRowView(1, 5, NOW, 9000, 7, {"kl": 0.5, "not_finite/loss": 1.0})),
        "metric_not_finite",
        "the learner does not learn: its newest loss is NaN or infinite",
        "",
    ),
    "no commits": (stalled(75.0), "no_commits", "the learner to commit what it holds.* for 75 s", ""),
    "a worker without credit": (
        told(healthy(config=TIGHT), workers=blocked(slots=(1,))),
        "no_credit",
        "waiting for credit for worker-1, for 20 s while others go on: the broker holds 2 of at most 2 batches",
        "",
    ),
    "a worker whose share of the broker's room is less than a batch": (
        told(healthy(config=ROOMY), gauges={"held_batches": 3.0}, workers=blocked(slots=(1,))),
        "no_credit",
        "the broker holds 3 of at most 4 batches",
        "",
    ),
    "a worker whose share of the broker's bytes is less than a batch": (
        told(gauges={"held_batches": 3.0, "held_bytes": 700 * 2.0**20}, workers=blocked(slots=(1,))),
        "no_credit",
        "the broker holds 700 of at most 1,024 MiB",
        "",
    ),
    "window full at a broker that always has room": (
        told(healthy(config=DROPS), gauges={"held_batches": 4.0}, workers=blocked(slots=(1,))),
        "window_full",
        "waiting for room in the window of worker-1",
        "",
    ),
    "window full": (
        told(workers=blocked(slots=(1,))),
        "window_full",
        "waiting for room in the window of worker-1, for 20 s while others go on; 16 batches of it are not committed",
        "",
    ),
    "a round that waits": (
        told(workers=blocked("round", 40.0, slots=(1,))),
        "round_waits",
        "worker-1 has shipped its share of the round and waits for other workers for 40 s",
        "",
    ),
    "a learner that a round waits for": (
        stalled(40.0, by="round"),
        "round_waits",
        "waiting for the learner to publish the weights of the next round",
        "",
    ),
    "clients idle": (
        told(
            healthy(config=SERVED, recent=BEFORE), STILL, workers={0: {**WORKER, "serving": {"clients": 3}}, 1: WORKER}
        ),
        "no_clients",
        "waiting for clients; of 3 connected, none takes steps",
        "tcp://127.0.0.1:5801",
    ),
    "envs that fail": (
        told(workers={0: FAILS, 1: WORKER}),
        "envs_failing",
        r"envs of worker-0 fail again and again: 9 in all, the newest 2 s ago: boom\\n",
        "tail /runs/a/logs/worker-0.log",
    ),
    "an env quarantined": (
        told(workers={0: {**FAILS, "envs_lost": 1, "num_envs": 8}, 1: WORKER}),
        "envs_failing",
        r"envs of worker-0 fail again and again: 9 in all, the newest 2 s ago: boom\\n; 1 of 8 envs are down",
        "tail /runs/a/logs/worker-0.log",
    ),
    "observations outside their Box": (
        told(totals={"agent_steps_total": 9000, "observations_outside_total": 91}),
        "bounds_left",
        "91 observations in 9,000 agent steps have values outside their Box; they were delivered as told",
        "grep -r 'its Box ends' /runs/a/logs",
    ),
    "envs that take no tasks": (
        told(workers={0: REFUSES, 1: REFUSES}),
        "tasks_refused",
        r"envs of worker-0, worker-1 refuse tasks: SyncVectorEnv resets its envs\\u009bby itself; make it with",
        "tail /runs/a/logs/worker-0.log",
    ),
    "many episodes are aborted": (
        told(gauges={"episodes_window": 100.0, "episodes_window_aborted": 6.0}),
        "episodes_aborted",
        r"6 of 106 episodes were aborted \(5.7 %\), more than 5 %, and are in no mean: fleet.until_return",
        "",
    ),
    "long episodes are aborted": (
        told(gauges={**ABORTED, "aborted_len_mean": 130.0}, workers={0: FAILED_ONCE, 1: WORKER}),
        "episodes_censored",
        "the newest 30 aborted episodes took 130 steps and earned 0.385 a step in the mean, "
        "the newest 100 finished ones 100 and 1",
        "",
    ),
    "good episodes are aborted": (
        told(gauges={**ABORTED, "aborted_return_mean": 80.0}, workers={0: FAILED_ONCE, 1: WORKER}),
        "episodes_censored",
        "the newest 30 aborted episodes took 50 steps and earned 1.6 a step in the mean",
        "",
    ),
    "episodes of lost clients are aborted": (
        told(healthy(recent=BEFORE), {**ABORTED, "aborted_len_mean": 130.0}, totals=LOST_CLIENT),
        "episodes_censored",
        "the newest 30 aborted episodes took 130 steps",
        "",
    ),
    "an env that is not built again": (
        told(workers={0: {**FAILS, "env_failure_age_s": 30.0, "envs_lost": 1, "num_envs": 8}, 1: WORKER}),
        "envs_down",
        r"1 of 8 envs of worker-0 are down; the newest failure, 30 s ago: boom\\n",
        "tail /runs/a/logs/worker-0.log",
    ),
    "some env hosts gone": (
        told(healthy(config=REMOTE, endpoints=AT | {"envs-0": "tcp://a:5800"}), workers={0: ONE_HOST, 1: WORKER}),
        "env_hosts_missing",
        "worker-0 has 1 of 2 env hosts; 4 of 8 envs wait for one",
        "headrace env-host --connect tcp://a:5800 --env CartPole-v1",
    ),
    "a batch refused again and again": (
        told(healthy(recent=BEFORE), {"messages_refused": 9.0}),
        "batches_refused",
        "has refused 7 messages of peers in the last minute",
        "grep refused /runs/a/logs/broker.log",
    ),
    "a broker that no peer can join": (
        told(healthy(), joins_blocked="this process can open no more files"),
        "joins_blocked",
        "no peer can join the broker: this process can open no more files",
        "tail /runs/a/logs/broker.log",
    ),
    "batches that are too large": (
        told(healthy(recent=BEFORE), totals={'dropped_agent_steps_total{reason="oversize"}': 1024}),
        "batches_oversize",
        "workers have dropped 1,024 steps as oversize in the last minute",
        "grep -r 'steps dropped' /runs/a/logs",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_each_bad_state_gives_one_finding_with_its_sentence_and_command(case: str) -> None:
    facts, kind, sentence, command = WRONG[case]
    (found,) = find(facts)
    assert (found.kind, found.severity) == (kind, KIND[kind].severity)
    assert re.search(sentence, found.sentence), found.sentence
    assert found.command.startswith(command)
    assert bool(found.command) == bool(command), found.command
    assert found.since_unix_s is None or found.since_unix_s <= NOW - KIND[kind].after_s
    assert "\n" not in found.sentence
    assert f"  try:   {found.command or KIND[kind].remedy}\n" in _as_text(facts, "", [found], None)


@pytest.mark.parametrize("case", WRONG)
def test_commands_quote_a_run_directory_with_a_space(case: str) -> None:
    facts, *_ = WRONG[case]
    for found in find(replace(facts, run_dir=Path("/my runs/a") if facts.run_dir is not None else None)):
        words = shlex.split(found.command)
        assert ("/my runs/a" in found.command) == any("/my runs/a" in word for word in words), found.command


def test_each_kind_of_finding_has_a_case_and_names_an_existing_setting() -> None:
    assert {kind for _, kind, _, _ in WRONG.values()} == set(KIND)
    assert len(KIND) == len(KINDS)
    assert {kind.limit for kind in KINDS} - {""} <= set(known_keys())


@pytest.mark.parametrize("case", WRONG)
def test_redis_alone_gives_the_same_finding_with_the_same_limit(case: str) -> None:
    facts, _, _, _ = WRONG[case]
    (here,) = find(facts)
    (elsewhere,) = find(by_redis_alone(facts))
    assert (elsewhere.kind, elsewhere.whom, elsewhere.since_unix_s) == (here.kind, here.whom, here.since_unix_s)
    assert elsewhere.limit in (here.limit, here.limit.partition(" = ")[0])
    assert ("=" in elsewhere.limit) == (here.limit.partition(" = ")[0] in TOLD_SETTINGS and "=" in here.limit)


def test_a_group_that_loses_batches_names_a_bound_on_batches_where_there_is_one() -> None:
    facts, _, _, _ = WRONG["a group that loses batches"]
    for bound, limit in ((None, "broker.max_held_bytes = 1073741824"), (20, "broker.max_held_batches = 20")):
        (found,) = find(replace(facts, config=FleetConfig(broker=BrokerSection(max_held_batches=bound))))
        assert found.limit == limit


def test_a_run_directory_tells_since_when_redis_is_away() -> None:
    away = healthy(snapshot=EMPTY, redis_error="refused", redis_away_unix_s=NOW - 70.0)
    assert [one.since_unix_s for one in find(away) if one.kind == "redis_away"] == [NOW - 70.0]


def test_a_start_that_waits_for_the_lease_of_another_fleet_says_so() -> None:
    starting = replace(having("supervisor", state="starting"), snapshot=EMPTY, redis_error="the fleet has started none")
    waits = replace(starting, waits_for="another `headrace up` to give up its lease")
    assert find(waits) == []
    assert verdict(waits, []) == "Starting: waiting for another `headrace up` to give up its lease."


def test_a_run_that_an_error_ended_says_so_and_names_a_disk_that_is_still_full() -> None:
    ended = replace(having("supervisor", state="stopped"), failure="the disk of /runs/a is full.", disk_free_bytes=9)
    assert verdict(ended, find(ended)).startswith("Ended with an error: the disk of /runs/a is full. 9,000 env steps.")
    assert [(one.kind, one.since_unix_s) for one in find(ended)] == [("disk_full", None)]


@pytest.mark.parametrize("kind", ["payload_too_large", "implausible batch"])
def test_refused_messages_are_named_by_peer_and_reason_and_the_limit_only_for_size(kind: str) -> None:
    most = [("worker 3 (pid 7 on 'a\x1bb')", kind, 1500), ("the learner", "implausible figures", 2)]
    (found,) = find(told(healthy(recent=BEFORE), {"messages_refused": 9.0}, refused=most))
    named = (
        rf"most since its start: 1,500 of worker 3 (pid 7 on 'a\x1bb') ({kind}), 2 of the learner (implausible figures)"
    )
    assert found.sentence.endswith(named)
    assert found.limit == (f"broker.max_batch_bytes = {1 << 27}" if kind == "payload_too_large" else "")


@pytest.mark.parametrize("kind", [UserCall.CONSTRUCTION, UserCall.RESET, UserCall.STEP])
def test_the_limit_of_a_call_in_a_process_of_envs_is_that_of_its_setting(kind: UserCall) -> None:
    call = CallInProgress(kind, 3, 60.0).in_words(8.0)
    (found,) = find(told(workers={0: {**WORKER, "env_silence_s": 8.0, "env_call": call}, 1: WORKER}))
    setting = "env_step_timeout_s" if kind is UserCall.STEP else "env_reset_timeout_s"
    assert (found.kind, found.limit) == ("envs_silent", f"sampling.{setting} = 60")


def test_a_fleet_that_tells_no_settings_is_judged_as_before() -> None:
    silent = {
        case: {one.kind for one in find(told(by_redis_alone(WRONG[case][0]), settings={}))}
        for case in ("no env host ever", "all env hosts gone", "a worker without credit")
    }
    assert list(silent.values()) == [{"worker_building"}, {"envs_silent"}, {"window_full"}]


def test_a_setting_of_another_type_in_redis_is_shown_safely_and_never_compared() -> None:
    facts = by_redis_alone(WRONG["a worker without credit"][0])
    wild = dict.fromkeys(TOLD_SETTINGS, "\x1b[2J\x9b") | {"worker.window_batches": "a\n\x9b"}
    (found,) = find(told(facts, workers=blocked(slots=(1,)), settings=wild))
    assert (found.kind, found.limit) == ("window_full", r'worker.window_batches = "a\n\u009b"')


def test_the_broker_tells_each_limit_but_addresses_and_paths_of_secrets() -> None:
    limits = {kind.limit for kind in KINDS} - {""}
    assert limits - set(TOLD_SETTINGS) == {"redis.url"}
    assert set(TOLD_SETTINGS) <= set(known_keys())


AFRESH = {"started_unix_s": NOW - 5}
EMPTY = Snapshot(fleet_id="demo")
CHECKS = process("supervisor", "supervisor", state="starting")
FINE = {
    "nothing has reported yet": (
        by_redis_alone(healthy(processes={}, snapshot=Snapshot(fleet_id="demo"))),
        "Starting: processes start",
    ),
    "learns": (healthy(), "Learning. Nothing lost."),
    "waits a little": (stalled(4.0), "Waiting for the learner to commit what it holds; .* for 4 s. Nothing lost."),
    "waits for a learner that has just connected": (
        stalled(75.0, {"since_unix_s": NOW - 4, "committed_unix_s": NOW - 4}),
        r"Waiting for the learner to commit what it holds; .* for 4 s. Nothing lost.",
    ),
    "checks": (replace(healthy(), snapshot=EMPTY, processes={"supervisor": CHECKS}), "Starting: processes start"),
    "loads": (
        replace(having("worker-0", having("worker-1", **AFRESH), doing="loading", **AFRESH), snapshot=EMPTY),
        r"Starting: waiting for worker-0 to load \(5 s so far\)",
    ),
    "has no weights yet": (
        told(having("learner", **AFRESH), {**STILL, "weights_seq": 0.0}, workers=NO_WEIGHTS, lease={"connected": 0.0}),
        r"Starting: waiting for first weights from the learner \(5 s so far\)",
    ),
    "has a new broker, which workers join again": (
        told(workers={0: WORKER}, started_unix_s=NOW - 5),
        "Learning. Nothing lost.",
    ),
    "has a new learner that has logged nothing, after one whose loss was NaN": (
        told(
            healthy(learner_row=LearnerRowView(1, 5, NOW - 900, 9000, 7, {"not_finite/loss": 1.0})),
            lease={**LEASE, "epoch": 2},
        ),
        "Learning. Nothing lost.",
    ),
    "aborts episodes like any": (
        told(gauges=ABORTED, workers={0: FAILED_ONCE, 1: WORKER}),
        "Learning. Nothing lost.",
    ),
    "aborted others when workers left": (
        told(
            healthy(recent=((NOW - 50.0, LOST_CLIENT),)),
            {**ABORTED, "aborted_len_mean": 130.0},
            totals={**LOST_CLIENT, 'discarded_agent_steps_total{reason="shutdown"}': 70},
        ),
        "Learning. Nothing lost.",
    ),
    "aborted others long ago": (
        told(
            gauges={**ABORTED, "aborted_len_mean": 130.0},
            workers={0: {**FAILED_ONCE, "env_failure_age_s": 99.0}, 1: WORKER},
        ),
        "Learning. Nothing lost.",
    ),
    "has a worker that has just left, and its supervisor has not told yet": (
        told(workers={0: WORKER}, rows={(1, LEFT.incarnation): LEFT}),
        "Learning. Nothing lost.",
    ),
    "has a Redis that has just come back, and its broker has not reported since": (
        replace(
            told(),
            snapshot=replace(told().snapshot, gauges={}, workers={}, reported_unix_s=NOW - 40),
            redis_back_s=3.0,
        ),
        "Waiting for the broker, which has reported nothing to Redis for 40 s. Nothing lost.",
    ),
    "drains": (
        having("supervisor", having("worker-0", state="draining", silent_s=9.0), state="draining"),
        "Draining. ",
    ),
    "has ended": (having("supervisor", state="stopped"), "Ended. 9,000 env steps. Nothing lost."),
    "has ended with steps under way": (
        told(having("supervisor", state="stopped"), fleet=FleetLedger(queued=1200)),
        r"Ended. 9,000 env steps. 1,200 agent steps still queued.$",
    ),
    "has ended in order with steps under way": (
        told(having("supervisor", state="stopped"), fleet=FleetLedger(queued=1200), ended_unix_s=NOW),
        r"Ended. .* still queued, dropped when the run goes on unless the learner saved them.$",
    ),
    "has ended, and its Redis with it": (
        replace(having("supervisor", state="stopped"), snapshot=EMPTY, redis_error="refused"),
        "Ended. Its books are not known",
    ),
    "has ended, by its broker": (
        replace(told(ended_unix_s=NOW - 900), processes={}, config=None),
        "Ended. 9,000 env steps. Nothing lost.",
    ),
}


def test_steps_that_the_learner_was_not_meant_to_get_are_not_lost() -> None:
    books = FleetLedger(stepped=100, discarded={"frozen": 30, "training_disabled": 5, "env_hang": 2})
    shown = ledger(books, [])
    assert (shown["undelivered"], shown["lost"]) == (37, 2)
    assert losses_in_words(books) == "2 steps lost by envs that hung."


@pytest.mark.parametrize("case", FINE)
def test_a_fleet_that_starts_learns_drains_or_has_ended_has_no_finding(case: str) -> None:
    facts, line = FINE[case]
    assert find(facts) == []
    assert re.match(line, verdict(facts, [])), verdict(facts, [])


def test_a_fleet_whose_supervisor_is_gone_is_not_said_to_learn() -> None:
    facts = told(having("supervisor", state="gone"), fleet=FleetLedger(queued=7))
    assert verdict(facts, find(facts)).startswith("The supervisor (pid 70) and its processes are gone and noted no end")
    assert verdict(facts, find(facts)).endswith(". 7 agent steps still queued.")


def test_a_stalled_fleet_names_the_process_that_it_waits_for() -> None:
    assert awaited(stalled(4.0)).startswith("the learner to commit what it holds")
    assert awaited(healthy()) == ""
    full = replace(stalled(4.0), disk_free_bytes=0)
    assert awaited(full).startswith("room on the disk of /runs/a, which is full: 0.0 MiB are left (df -h /runs/a); ")
    assert awaited(having("worker-1", is_stopped=True)) == "worker-1 (pid 70), which is stopped (kill -CONT 70)"


def test_the_verdict_counts_workers_and_names_losses() -> None:
    books = FleetLedger(
        stepped=9000, dropped={"worker_killed": (1000, 9)}, discarded={"worker_killed": 204, "shutdown": 9}
    )
    facts = having("worker-1", replace(told(fleet=books)), is_stopped=True)
    assert (
        verdict(facts, find(facts)) == "Learning. 1 of 2 workers late (worker-1). 1,204 steps lost by killed workers."
    )
    failing, _, _, _ = WRONG["an env quarantined"]
    assert verdict(failing, find(failing)) == "Learning. Envs fail (worker-0). Nothing lost."
    still = told(gauges=STILL, workers={0: raised(0, "E"), 1: raised(1, "E", env_failure_age_s=0.5)})
    assert verdict(still, find(still)) == "Envs fail (env 1 of worker-1). Nothing lost."
    still = having("broker", told(gauges=STILL), is_stopped=True)
    assert verdict(still, find(still)) == "Waiting for broker (pid 70), which is stopped. Nothing lost."


def test_many_findings_of_a_kind_are_merged_into_five_and_all_are_counted() -> None:
    many = {f"worker-{slot}": process(f"worker-{slot}", "worker", is_stopped=True) for slot in range(63)}
    facts = replace(healthy(), processes={**healthy().processes, **many, "worker-63": process("worker-63", "worker")})
    facts = told(facts, workers={**dict.fromkeys(range(64), WORKER)})
    found = find(facts)
    assert [one.whom for one in found] == ["worker-0", "worker-1", "worker-2", "worker-3", "worker-4 and 58 more"]
    assert verdict(facts, found) == "Learning. 63 of 64 workers late (worker-0). Nothing lost."


@pytest.mark.parametrize(
    ("late", "others", "said"),
    [
        ({}, {}, "the network to box is slow or down, its process is stopped, or a call holds Python's lock"),
        (
            {},
            {7: HEARD},
            "its process is stopped, or a call holds Python's lock; it is not the network, as 1 more of box",
        ),
        ({}, {7: LATE}, "so are all others of box: the network to box is slow or down, or that machine is stopped"),
        ({}, {7: {**LATE, "host": "b"}, 8: {**HEARD, "host": "b"}}, "the network to box is slow or down, its process"),
        (
            {"sent_bytes": 40 << 20, "accepted": 4},
            {7: HEARD},
            "the network to box is slow or down (its heartbeats wait behind batches of 10.0 MiB), its process",
        ),
        ({"sent_bytes": 40 << 10, "accepted": 4}, {}, "the network to box is slow or down, its process"),
    ],
)
def test_a_late_worker_names_the_network_unless_its_neighbours_answer(
    late: dict[str, Any], others: dict[int, dict[str, Any]], said: str
) -> None:
    found = find(told(workers={0: WORKER, 1: WORKER, 6: {**LATE, **late}, **others}))
    (sentence,) = (one.sentence for one in found if one.whom == "worker-6")
    assert f"silent for 8 s: {said}" in sentence


def raised(slot: int, message: str, **changes: Any) -> dict[str, Any]:
    failure = f"env_exception in env {slot} at step {40 + slot}: {message}"
    return {**FAILS, "env_failure": failure, "env_failure_age_s": 1.0 + slot, "num_envs": 8, **changes}


def test_one_cause_in_many_workers_is_one_finding_with_its_rate() -> None:
    workers = {slot: raised(slot, f"ValueError: bad at {slot}.5") for slot in range(4)}
    workers[3]["env_failure"] = "env_exception in env 3 at reset: ValueError: bad at 7"
    facts = told(
        healthy(recent=((NOW - 60.0, {"env_failures_total": 24}),)),
        workers=workers,
        totals={"env_steps_total": 9000, "env_failures_total": 36},
    )
    (found,) = find(facts)
    assert found.sentence == (
        "envs of 4 of 4 workers fail again and again at 12/min: 36 in all, the newest 1 s ago (worker-0): "
        "env_exception in env 0 at step 40: ValueError: bad at 0.5"
    )
    assert (found.whom, found.slots) == ("worker-0, worker-1, worker-2, worker-3", (0, 1, 2, 3))
    assert found.command == "tail /runs/a/logs/worker-0.log"
    assert verdict(facts, [found]) == "Learning. Envs fail (env 0 of worker-0). Nothing lost."
    for slot, state in workers.items():
        state["env_failure"] += f'; its task was {{"map":"{"abcd"[slot]}"}}'
    (found,) = find(facts)
    assert found.sentence.endswith('ValueError: bad at 0.5; its task was {"map":"a"}'), "tasks are not causes"


def test_envs_have_failed_since_their_workers_life_began_at_most_and_a_day_later_why_tells_the_date() -> None:
    usual = {"kind": "env_exception", "env": "e", "exception": "RuntimeError", "message": "boom", "where": "a.py:1"}
    errors = {
        name * 16: EnvErrorRow(**usual, count=9, first_unix_s=NOW - s, last_unix_s=NOW, traceback="", slots=[0])
        for name, s in (("a", 50), ("b", 200_000))
    }
    for joined_s, since_s, says in ((60, 60, r"\[since \d\d:"), (250_000, 200_000, r"\[since \d{4}-\d\d-\d\d \d\d:")):
        fails = {**FAILS, "env_failures": 20_000, "joined_unix_s": NOW - joined_s}
        facts = told(workers={0: fails, 1: WORKER}, errors=errors)
        (found,) = find(facts)
        assert found.since_unix_s == NOW - since_s
        assert re.search(says, _as_text(facts, "", [found], None))


def test_what_infos_go_without_is_told_with_its_count_and_is_no_finding_and_no_failure() -> None:
    known = {"first_unix_s": 1.0, "last_unix_s": NOW, "traceback": "", "slots": [0]}
    message = "infos go without info['scene'] (Type is not JSON\x1b serializable: Scene)"
    left_out = EnvErrorRow(kind=INFO_LEFT_OUT, where="info['scene']", message=message, count=1234, **known)
    facts = told(errors={"a" * 16: left_out})
    assert find(facts) == []
    assert verdict(facts, []) == "Learning. Nothing lost."
    said = "info: infos go without info['scene'] (Type is not JSON\\x1b serializable: Scene), 1,234 so far"
    assert _as_text(facts, "Learning.", [], None).splitlines() == ["Learning.", "", said, "  kind:  info_left_out"]
    (info,) = orjson.loads(_as_json(facts, "Learning.", [], None))["info"]
    assert (info["kind"], info["whom"], info["sentence"]) == ("info_left_out", "info['scene']", said[len("info: ") :])
    fails = {**FAILS, "env_failures": 20_000}
    failing = told(workers={0: fails, 1: WORKER}, errors={"a" * 16: left_out})
    (found,) = find(failing)
    assert found.since_unix_s is None, "the group of infos is no failure"
    assert "the first" not in env_failures(failing.snapshot)


def test_each_cause_is_a_finding_and_has_its_share_of_the_rate() -> None:
    workers = {0: raised(0, "ValueError: a"), 1: raised(1, "KeyError: b"), 2: raised(2, "ValueError: a"), 3: WORKER}
    facts = told(
        healthy(recent=((NOW - 60.0, {"env_failures_total": 0}),)),
        workers=workers,
        totals={"env_steps_total": 9000, "env_failures_total": 27},
    )
    told_of = {one.slots: one.sentence for one in find(facts)}
    assert "envs of 2 of 4 workers fail again and again at 18/min: 18 in all" in told_of[0, 2]
    assert "envs of worker-1 fail again and again at 9/min: 9 in all" in told_of[1,]


def test_envs_that_are_down_for_one_cause_are_one_finding() -> None:
    down = {"env_failure_age_s": 30.0, "envs_lost": 2}
    (found,) = find(told(workers={slot: raised(slot, "ValueError: a", **down) for slot in range(2)}))
    assert (found.kind, found.slots) == ("envs_down", (0, 1))
    assert found.sentence.startswith(
        "4 of 16 envs of 2 of 2 workers are down; the newest failure, 30 s ago (worker-0): env_exc"
    )


def test_each_cause_for_which_tasks_are_refused_is_a_finding_and_no_worker_counts_as_late() -> None:
    workers = {0: REFUSES, 1: {**WORKER, "tasks_refused": "1 of 2 tasks left out"}, 2: REFUSES, 3: WORKER}
    facts = told(workers=workers)
    found = find(facts)
    assert [one.slots for one in found] == [(0, 2), (1,)]
    line = "Learning. Envs of worker-0, worker-2 refuse tasks: SyncVectorEnv resets its envs"
    assert verdict(facts, found).startswith(line)


def ended(words: str, **changes: Any) -> dict[str, Any]:
    return {"state": "restarting", "pid": 0, "started_unix_s": 0, "last_words": words, **changes}


def of_workers(*states: dict[str, Any]) -> Facts:
    workers = {f"worker-{i}": process(f"worker-{i}", "worker", **state) for i, state in enumerate(states)}
    return replace(healthy(), processes={**healthy().processes, **workers})


def test_workers_that_end_again_and_again_for_one_cause_are_one_finding_with_its_rate() -> None:
    lives = [ended(f"exit code 3 (ENV): ValueError: bad at {slot}.5", recent_deaths=4) for slot in range(4)]
    facts = of_workers(*lives, {})
    facts = told(facts, workers={**facts.snapshot.workers, 4: WORKER})
    (found,) = find(facts)
    assert found.kind == "crash_loop"
    assert found.sentence == (
        "4 of 5 workers have ended 16 times within 60 s of running; the last time worker-0 ended with "
        "exit code 3 (ENV): ValueError: bad at 0.5"
    )
    assert (found.whom, found.slots) == ("worker-0, worker-1, worker-2, worker-3", (0, 1, 2, 3))
    assert verdict(facts, [found]) == "Learning. 4 of 5 workers late (worker-0). Nothing lost."


def test_workers_that_start_again_are_one_finding_for_each_cause_and_role() -> None:
    facts = of_workers(ended("exit code 1"), ended("signal SIGKILL"), ended("exit code 9"), ended("signal SIGKILL"))
    facts = having("learner", facts, **ended("signal SIGKILL"))
    assert {one.whom: one.sentence for one in find(facts) if one.kind == "process_restarting"} == {
        "worker-0": "waiting for worker-0 to start again (it ended with exit code 1)",
        "worker-1, worker-3": "waiting for 2 of 4 workers to start again (worker-1 ended with signal SIGKILL)",
        "worker-2": "waiting for worker-2 to start again (it ended with exit code 9)",
        "learner": "waiting for learner to start again (it ended with signal SIGKILL)",
    }


def test_restarts_of_the_last_minutes_are_told_of_a_healthy_fleet_and_are_no_finding() -> None:
    again = {"restarts": 1, "last_words": "signal SIGKILL", "started_unix_s": NOW - 40}
    facts = of_workers(again, {**again, "started_unix_s": NOW - 50}, {**again, "started_unix_s": NOW - 301}, {})
    facts = having("broker", facts, **{**again, "last_words": "exit code 1: it broke"})
    facts = replace(facts, snapshot=replace(facts.snapshot, workers=dict.fromkeys(range(4), WORKER)))
    assert (find(facts), verdict(facts, [])) == ([], "Learning. Nothing lost.")
    assert [(one.whom, one.sentence, one.since_unix_s, one.command) for one in notes(facts, [])] == [
        (
            "broker",
            "broker has started again (it ended with exit code 1: it broke)",
            NOW - 40,
            "tail /runs/a/logs/broker.log",
        ),
        (
            "worker-0, worker-1",
            "2 of 4 workers have started again (worker-0 ended with signal SIGKILL)",
            NOW - 50,
            "tail /runs/a/logs/worker-0.log",
        ),
    ]
    assert "\ninfo: broker has started again" in _as_text(facts, "", [], None)
    assert [len(row) for row in orjson.loads(_as_json(facts, "", [], None)).values() if isinstance(row, list)] == [0, 2]
    ends_often = having("worker-0", **{**again, "recent_deaths": 3})
    assert ([one.kind for one in find(ends_often)], notes(ends_often, [])) == (["crash_loop"], [])


def test_a_failure_that_can_be_repeated_is_told_unless_a_finding_has_its_command(tmp_path: Path) -> None:
    (tmp_path / "failures").mkdir()
    (tmp_path / "failures" / "0-1-3.failure").touch()
    rerun, fine = f"headrace rerun {tmp_path} --failure 0-1-3", healthy(run_dir=tmp_path)
    ended = having("supervisor", fine, state="stopped")
    assert [[one.command for one in notes(facts, find(facts))] for facts in (fine, ended)] == [[rerun], [rerun]]
    failing = replace(told(workers={0: FAILS, 1: WORKER}), run_dir=tmp_path)
    (found,) = find(failing)
    assert (found.command, notes(failing, [found])) == (rerun, [])


def test_a_learner_that_has_ended_is_told_at_once_while_workers_still_fill_their_windows() -> None:
    lease = {**LEASE, **SCRIPT, "connected": 0.0, "committed_unix_s": NOW - 2, "heard_unix_s": NOW - 2}
    facts = of_own_learner(told(lease=lease))
    assert find(facts) == [], "it may come back"
    assert verdict(facts, []) == (
        r"Sampling. Waiting for the learner /home/me/ppo.py (pid 71 on box\x1b) to come back; it has ended or cannot "
        "be reached; last heard of 2 s ago. Nothing lost."
    )
    facts = having("learner", told(lease={**LEASE, "connected": 0.0}), **ended("signal SIGKILL"))
    assert verdict(facts, find(facts)) == (
        "Sampling. Waiting for learner to start again (it ended with signal SIGKILL). Nothing lost."
    )


def test_a_fleet_that_stands_still_tells_what_it_waits_for_before_what_only_slows_it() -> None:
    facts = of_own_learner(stalled(4.0, {**SCRIPT, "host": "here", "torch_threads": 8.0, "cores": 4.0}))
    assert [one.kind for one in find(facts)] == ["learner_threads"]
    assert verdict(facts, find(facts)).startswith("Waiting for the learner /home/me/ppo.py (pid 71 on here) to commit")


def test_a_stopped_broker_is_the_only_finding_of_the_stall_it_causes() -> None:
    facts = having("broker", stalled(75.0), is_stopped=True)
    assert [one.kind for one in find(facts)] == ["process_stopped"]


def test_without_a_run_directory_the_limits_have_no_values() -> None:
    (found,) = find(replace(stalled(15.0), config=None, run_dir=None, endpoints={}, disk_free_bytes=None))
    assert (found.kind, found.limit) == ("learner_slow", "worker.window_batches")
    (found,) = find(stalled(15.0))
    assert found.limit == f"worker.window_batches = {FleetConfig().window_batches()}"


def test_a_fleet_whose_learner_logs_nan_is_not_said_to_learn() -> None:
    facts, _, _, _ = WRONG["a loss that is NaN"]
    assert verdict(facts, find(facts)).startswith("Sampling. The learner does not learn: its newest loss is NaN")


@pytest.mark.parametrize(
    ("program", "command"),
    [
        ("/venv/bin/headrace", "headrace learner --run-dir /runs/a"),
        ("python -m headrace.deploy", "headrace learner --run-dir /runs/a"),
        ("/my code/ppo.py", ""),
        ("python -m mine.ppo", ""),
        ("python -m ipykernel_launcher", ""),
        ("python", ""),
    ],
)
def test_a_learner_of_ones_own_that_is_gone_is_named_without_a_command(program: str, command: str) -> None:
    facts = of_own_learner(stalled(12.0, {**SCRIPT, "connected": 0.0, "program": program}))
    (found,) = find(facts)
    assert (found.kind, found.command) == ("no_learner", command)
    assert f"the learner {program} (pid 71 on " in found.sentence


def test_threads_of_the_fleets_own_learner_have_a_setting_and_those_elsewhere_take_no_cores() -> None:
    (found,) = find(told(lease={**LEASE, **GREEDY}))
    assert (found.kind, found.limit) == ("learner_threads", "learner.torch_threads = 1")
    fine = {
        "a host of its own": {"host": "there"},
        "enough cores": {"cores": 10.0},
        "one thread": {"torch_threads": 1.0},
    }
    fine |= {"gone": {"connected": 0.0}, "an earlier version": {"host": ""}}
    assert {name: find(told(lease={**LEASE, **GREEDY, **one})) for name, one in fine.items() if name != "gone"} == {
        name: [] for name in fine if name != "gone"
    }


def test_workers_that_wait_for_the_learner_do_not_accuse_a_group() -> None:
    behind = HOLDS.model_copy(update={"lag_steps": 100})
    for facts in (in_groups(blocked(), record=HOLDS), in_groups(blocked("group"), record=behind)):
        assert {found.kind for found in find(facts)} <= {"learner_slow", "no_commits"}
    assert find(in_groups({0: WORKER, 1: WORKER}, 150.0, watch=LOSES, record=HOLDS)) == []
