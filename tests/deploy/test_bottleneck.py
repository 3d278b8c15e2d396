"""What limits the pace is a sentence with the shares that say so; without enough data there is none."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from io import StringIO
from typing import Any

import orjson
import pytest

from headrace.deploy.annexes.watch.state.fleet_state import fleet_state
from headrace.deploy.annexes.watch.top.top import plain
from headrace.deploy.monitoring.bottleneck import find_bottleneck
from headrace.deploy.monitoring.facts import Facts
from headrace.deploy.monitoring.findings import Finding, find
from headrace.deploy.monitoring.why import why
from headrace.deploy.report.progress import ProgressView
from headrace.deploy.report.summary import Summary, print_summary
from headrace.deploy.run.goal import Goal, RunNumbers
from headrace.schemas.accounts.consumer_groups import GroupBooks, GroupRow
from headrace.schemas.accounts.redis_keys import LEARNER_TIME, labelled
from headrace.schemas.settings.config import BrokerSection, FleetConfig, LearnerSection, ServingSection, WorkerSection
from headrace.schemas.settings.config import SamplingSection as Sampling
from support.fleets.known_facts import GAUGES, LEASE, NOW, WORKER, blocked, by_redis_alone, having, healthy, told

TRAINS = {"wait": 0.02, "decode": 0.03, "train": 0.94, "publish": 0.01}
SHORT = LearnerSection(steps_per_update=512)
IDLE = {"wait": 0.9, "decode": 0.04, "train": 0.05, "publish": 0.01}
BLOCKED = {"env": 0.1, "inference": 0.05, "connectors": 0.0, "serialise": 0.01, "wait": 0.83, "other": 0.01}
STEPS = {"env": 0.85, "inference": 0.05, "connectors": 0.02, "serialise": 0.02, "wait": 0.04, "other": 0.02}


def mostly(part: str) -> dict[str, float]:
    """Shares of workers that spend their time on this part."""
    return {**dict.fromkeys(STEPS, 0.04), part: 0.8}


def shared(
    learner: dict[str, float],
    workers: dict[str, float],
    config: FleetConfig | None = None,
    gauges: dict[str, float] | None = None,
    joined_s: tuple[float, ...] = (60.0, 60.0),
    **changes: Any,
) -> Facts:
    """A fleet that moves, whose learner and workers spend their time so."""
    rows = {
        slot: {**WORKER, "time_share": workers, "joined_unix_s": NOW - age_s} for slot, age_s in enumerate(joined_s)
    }
    parts = {labelled(LEARNER_TIME, "part", part): share for part, share in learner.items()}
    facts = healthy(config=config or FleetConfig(), recent=((NOW - 100, {"env_steps_total": 10.0, **GAUGES}),))
    return told(facts, gauges={**parts, **(gauges or {})}, workers=rows, **changes)


def said(facts: Facts) -> str:
    limit = find_bottleneck(facts, find(facts))
    return limit.in_words() if limit is not None else ""


CASES = {
    "learner": (
        shared(TRAINS, BLOCKED),
        "The learner is the limit: it trains 94 % of its time, waits for data 2 %, and the workers wait 83 % of theirs."
        " A shorter update or a faster device helps, and more workers do not.",
    ),
    "learner reads": (
        shared({"wait": 0.0, "decode": 0.6, "train": 0.4, "publish": 0.0}, BLOCKED),
        "The learner is the limit: it reads batches for 60 % of its time, waits for data 0 %, and the workers wait "
        "83 % of theirs. Larger batches help: raise sampling.rollout_fragment_length.",
    ),
    "learner, with workers that drop": (
        shared(TRAINS, STEPS, totals={"env_steps_total": 9000, 'dropped_agent_steps_total{reason="overflow"}': 8}),
        "The learner is the limit: it trains 94 % of its time, waits for data 2 %, and steps are dropped. ",
    ),
    "learner that has not committed for a minute": (
        shared(TRAINS, BLOCKED, gauges={"env_steps_per_s": 0.0}),
        "The learner is the limit: ",
    ),
    "envs": (
        shared(IDLE, STEPS),
        "The envs are the limit: the workers spend 85 % of their time in envs, and the learner waits for data 90 % of "
        'its time. More workers or sampling.env_placement = "process" may use idle cores.',
    ),
    "envs in processes": (
        shared(IDLE, STEPS, FleetConfig(sampling=Sampling(env_placement="process"))),
        "The envs are the limit: .*time. More workers may use idle cores.",
    ),
    "envs, with every core busy": (
        shared(IDLE, STEPS),
        r"The envs are the limit: .* All \d+ cores of this machine are busy, so more workers need another machine.",
    ),
    "policy": (
        shared(IDLE, mostly("inference")),
        "The policy in the workers is the limit: the workers spend 80 % of their time on choosing actions, and the "
        "learner waits for data 90 % of its time. A smaller module helps",
    ),
    "connectors": (shared(IDLE, mostly("connectors")), "The connectors in the workers are the limit: "),
    "shipping": (shared(IDLE, mostly("serialise")), "The shipping of chunks is the limit: "),
    "callbacks": (shared(IDLE, mostly("other")), "The workers are the limit: .* on callbacks, weights and bookkeeping"),
    "broker that holds few batches": (
        shared(IDLE, BLOCKED, FleetConfig(learner=SHORT, broker=BrokerSection(max_held_batches=2))),
        "The broker is the limit: the learner waits 90 % of its time, and the workers wait 83 % of theirs; it has room "
        "for 1 of the batches of each worker. Raise broker.max_held_batches = 2.",
    ),
    "broker that holds few bytes": (
        shared(
            IDLE,
            BLOCKED,
            FleetConfig(broker=BrokerSection(max_held_bytes=1 << 20, max_batch_bytes=1 << 20)),
            {"window_batches": 2.0, "window_bytes": 2.0 * (1 << 18)},
        ),
        "The broker is the limit: .* for 2 of the batches of each worker. Raise broker.max_held_bytes = 1048576.",
    ),
    "broker without a core": (
        shared(IDLE, BLOCKED, gauges={labelled("process_cpu_share", "role", "broker"): 0.97}),
        "The broker is the limit: .* its process uses 97 % of a core. Larger batches help",
    ),
    "a window of one batch": (
        shared(IDLE, BLOCKED, FleetConfig(worker=WorkerSection(window_batches=2))),
        r"The way between learner and workers is the limit: .* A larger window helps \(worker.window_batches = 2\), or",
    ),
    "a window that follows the learner": (
        shared(IDLE, BLOCKED),
        "The way between .* A larger window helps .worker.window_batches, else it follows the learner's updates., or a",
    ),
    "processes that wait for a core": (
        shared(IDLE, BLOCKED),
        r"The cores are the limit: .* of theirs; all \d+ cores of this machine are busy. Fewer workers help",
    ),
    "workers with many tasks": (
        shared(IDLE, {**STEPS, "env": 0.4, "inference": 0.35, "other": 0.15}),
        "The workers are the limit: the workers spend 40 % of their time in envs, and",
    ),
    "a broker for which the learner waits less than the workers": (
        shared({"wait": 0.4, "decode": 0.1, "train": 0.4, "publish": 0.1}, BLOCKED),
        "The way between learner and workers is the limit: the learner waits 40 % of its time",
    ),
    "turns": (
        shared(IDLE, BLOCKED, FleetConfig(sampling=Sampling(synchronous=True))),
        "Learner and workers take turns: .* Sampling.synchronous = false lets them work at the same time.",
    ),
    "clients": (
        shared(IDLE, BLOCKED, FleetConfig(serving=ServingSection(enabled=True))),
        "The clients are the limit: ",
    ),
}


@pytest.fixture(autouse=True)
def load(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has nothing else to do, but where the case is about a busy one."""
    busy = getattr(request.node, "callspec", None) and request.node.callspec.params["case"] in BUSY
    monkeypatch.setattr(os, "getloadavg", lambda: (999.0 if busy else 0.1, 0.0, 0.0))


BUSY = ("envs, with every core busy", "processes that wait for a core")


@pytest.mark.parametrize("case", CASES)
def test_the_side_that_waits_least_is_the_limit_and_the_sentence_says_what_helps(case: str) -> None:
    facts, sentence = CASES[case]
    assert re.match(sentence, said(facts)), said(facts)


BALANCED = {"wait": 0.15, "decode": 0.05, "train": 0.8, "publish": 0.0}
SILENT = {
    "nobody waits much": shared(BALANCED, {**STEPS, "wait": 0.1}),
    "both wait a little": shared({**BALANCED, "wait": 0.15}, {**STEPS, "wait": 0.25}),
    "no shares of the learner": shared({}, BLOCKED),
    "a part of them": shared({"wait": 0.0}, BLOCKED),
    "no shares of workers": shared(TRAINS, {}),
    "shares that are no numbers": shared(TRAINS, {"wait": "\x1b"}),  # type: ignore[dict-item]
    "a learner that has just connected": shared(TRAINS, BLOCKED, lease={**LEASE, "since_unix_s": NOW - 5}),
    "a learner that is gone": shared(TRAINS, BLOCKED, lease={**LEASE, "connected": 0.0}),
    "workers that have just joined": shared(TRAINS, BLOCKED, joined_s=(3.0, 3.0, 60.0)),
    "no step for two minutes": shared(TRAINS, BLOCKED, totals={"env_steps_total": 10}),
    "a fleet that drains": having("supervisor", shared(TRAINS, BLOCKED), state="draining"),
    "Redis away": replace(shared(TRAINS, BLOCKED), redis_error="refused"),
    "a stopped worker": having("worker-1", shared(IDLE, STEPS), is_stopped=True),
}


@pytest.mark.parametrize("case", SILENT)
def test_without_enough_data_or_a_clear_limit_nothing_is_said(case: str) -> None:
    assert said(SILENT[case]) == ""


def test_while_a_learner_pauses_the_cores_are_not_blamed() -> None:
    facts = shared(IDLE, BLOCKED)
    assert find_bottleneck(facts, []) is not None
    assert find_bottleneck(facts, [Finding("learner_slow", "warning", "learner", "waiting for the learner")]) is None


def test_half_of_the_workers_are_enough_and_redis_alone_gives_the_same_sentence() -> None:
    facts = shared(TRAINS, BLOCKED, joined_s=(3.0, 60.0))
    assert said(facts) == said(by_redis_alone(facts)) == CASES["learner"][1]


class _Reader:
    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    def read(self) -> Facts:
        return self._facts


def test_why_top_the_page_and_up_show_the_sentence() -> None:
    facts, sentence = CASES["learner"]
    shown: dict[str, str] = {}
    for as_json in (False, True):
        stream = StringIO()
        assert why(_Reader(facts), as_json=as_json, stream=stream) == []  # type: ignore[arg-type]
        shown[f"why {as_json}"] = stream.getvalue()
    assert shown["why False"] == f"Learning. Nothing lost.\n{sentence}\n"
    assert orjson.loads(shown["why True"])["bottleneck"] == sentence
    document = fleet_state(facts, [])
    assert (document["bottleneck"], document["severity"]) == (sentence, "ok")
    assert sentence in [line.plain for line in plain(document, {}, 300)]
    limit = find_bottleneck(facts, [])
    assert limit is not None
    line = replace(ProgressView(1.0, RunNumbers(), Goal()), bottleneck=limit.sentence).in_one_line()
    assert line.endswith(
        "pace the learner is the limit: it trains 94 % of its time, waits for data 2 %, and the workers "
        "wait 83 % of theirs"
    )


def test_the_end_of_a_run_names_what_limited_it() -> None:
    limit = find_bottleneck(CASES["learner"][0], [])
    assert limit is not None
    numbers = RunNumbers()
    summary = Summary(
        fleet_id="f",
        run_dir="/r",
        seconds=1.0,
        start=numbers,
        end=numbers,
        at_goal=None,
        restarts={},
        weights_seq=0,
        ledger=None,
        failure=None,
        bottleneck=limit.in_words(),
    )
    assert orjson.loads(summary.as_json())["bottleneck"] == CASES["learner"][1]
    stream = StringIO()
    print_summary(summary, stream)
    assert "The learner is the limit" in stream.getvalue()


def test_a_group_that_workers_wait_for_is_the_limit() -> None:
    """The learner waits for data, and the workers for room, as where the way between them is the limit."""
    facts = shared({"wait": 0.9, "decode": 0.0, "train": 0.1, "publish": 0.0}, BLOCKED)
    state = GroupRow(on_slow="wait", connected=True, lag_steps=9000)
    waits = {slot: {**row, **blocked("group")[slot]} for slot, row in facts.snapshot.workers.items()}
    snapshot = replace(facts.snapshot, workers=waits, groups={"record": GroupBooks(state)})
    assert said(replace(facts, snapshot=snapshot)) == (
        "The reader of group record is the limit: the workers wait 83 % of their time. A quicker reader helps."
    )
