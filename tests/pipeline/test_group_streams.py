"""Streams of consumer groups: each reads all batches, beside the learner, and none takes another's place."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.deploy.annexes.recording import groups_command
from headrace.deploy.command.cli import app
from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.learner_stub.streaming import stall_detector
from headrace.schemas.errors import ConfigError, ExitCode, FencedError, HeadraceError, RunDirError, UnreachableError
from headrace.schemas.messages import GroupHello
from headrace.workers.fleet.session import SessionState
from support.pipeline.delivery import (
    BrokerThread,
    Envs,
    StartBroker,
    StartFeeder,
    Witness,
    ask_until_it_raises,
    batches_of,
)
from support.waiting import TIMEOUT_S, wait_until


@pytest.fixture
def broker(start_broker: StartBroker) -> BrokerThread:
    """A broker whose workers wait for the group "record"."""
    return start_broker(consumer_groups={"record": "wait"})


def _open(stack: ExitStack, broker: BrokerThread, group: str = "train", **settings: Any) -> EpisodeStream:
    stream = EpisodeStream(broker.endpoints.learner, group=group, connect_timeout_s=TIMEOUT_S, **settings)
    return stack.enter_context(stream)


def test_a_recorder_and_the_learner_of_one_process_read_the_same_batches(
    broker: BrokerThread, stack: ExitStack, start_feeder: StartFeeder
) -> None:
    train, publisher = _open(stack, broker), stack.enter_context(WeightPublisher(broker.endpoints.learner))
    record = _open(stack, broker, "record")
    assert (train.token, train.group) == (publisher.token, "train")
    assert record.token != train.token
    feeder = start_feeder(broker.endpoints.worker, Envs(7).fragments(20))
    by_learner, by_recorder = Witness(), Witness()
    for batch in batches_of(train, feeder.all_shipped):
        by_learner.see(batch)
        seen = record.next(TIMEOUT_S)
        assert seen is not None
        by_recorder.see(seen)
        assert seen.arrays["obs"].tobytes() == batch.arrays["obs"].tobytes()
    assert by_recorder.by_source == by_learner.by_source
    assert feeder.session.window(), "the last batch is not committed"
    train.commit()
    assert not feeder.all_settled()
    record.commit()
    wait_until(feeder.all_settled, "the settlement of both")


def test_a_worker_leaves_with_batches_that_only_a_group_lacks(
    broker: BrokerThread, stack: ExitStack, start_feeder: StartFeeder
) -> None:
    """The broker has them: it takes the worker's last words, and the group reads on."""
    feeder = start_feeder(broker.endpoints.worker, Envs(6).fragments(8))
    train = _open(stack, broker)
    for _ in batches_of(train, lambda: train.delivered == 8):
        pass
    train.commit()
    wait_until(lambda: feeder.session.settled.seq == 8, "the learner's settlement")
    assert len(feeder.session.window()) == 8
    feeder.leave()
    wait_until(lambda: feeder.session.state is SessionState.LEFT, "the broker's word that it took the BYE")
    record = _open(stack, broker, "record")
    steps = sum(batch.steps for batch in batches_of(record, lambda: record.exhausted))
    assert (steps, dict(record.dropped)) == (sum(feeder.steps.values()), {})


def test_a_later_stream_replaces_the_earlier_one_of_its_own_group_alone(broker: BrokerThread, stack: ExitStack) -> None:
    train, older = _open(stack, broker), _open(stack, broker, "record")
    later = _open(stack, broker, "record")
    with pytest.raises(FencedError, match="of this process has taken over from this one of group 'record'; use"):
        ask_until_it_raises(older)
    session = older._brokers[0].session
    wait_until(lambda: older._brokers[0].pump() or session.refusal, "the broker's word")
    assert session.refusal is not None
    assert "a newer reader of group 'record' (epoch 2) has taken over" in session.refusal[1]
    for stream in (train, later):
        assert stream.next(0.3) is None


def test_a_groups_position_leads_on_in_its_own_group_alone(
    broker: BrokerThread, stack: ExitStack, start_feeder: StartFeeder
) -> None:
    feeder, witness = start_feeder(broker.endpoints.worker, Envs(8).fragments(12)), Witness()
    with EpisodeStream(broker.endpoints.learner, group="record", auto_commit=False) as first:
        for _ in range(5):
            batch = first.next(TIMEOUT_S)
            assert batch is not None
            witness.see(batch)
        position = first.position()
    assert {place["group"] for place in position} == {"record"}
    with pytest.raises(ConfigError, match="position: it is of consumer group 'record', not of 'train'"):
        _open(stack, broker, position=position)
    train = _open(stack, broker)
    for _ in batches_of(train, lambda: train.delivered == 12):
        pass
    assert not any("group" in place for place in train.position())
    with pytest.raises(ConfigError, match="it is of consumer group 'train', not of 'record'"):
        _open(stack, broker, "record", position=train.position())
    train.commit()
    for batch in batches_of(_open(stack, broker, "record", position=position), feeder.all_settled):
        witness.see(batch)
    assert witness.by_source[(0, 1)] == sum(feeder.steps.values())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"group": "My Group"}, "group: 'My Group' is no name of a consumer group; give up to 32 lower-case"),
        ({"group": ""}, "group: '' is no name of a consumer group"),
        ({"group": 3}, "group: 3 is no name of a consumer group"),
        ({"group": "eval", "steps_per_update": 64}, "group 'eval' publishes no weights, so it takes neither"),
        ({"group": "eval", "synchronous": True}, "group 'eval' publishes no weights, so it takes neither"),
    ],
)
def test_a_group_that_cannot_be_is_refused_in_a_sentence(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EpisodeStream("tcp://127.0.0.1:1", **options)


def test_only_a_groups_hello_names_one_and_wants_no_window(broker: BrokerThread, stack: ExitStack) -> None:
    said = {}
    for group in ("train", "eval"):
        stream = _open(stack, broker, group)
        stream._updates.widen()
        stream._end_update()
        session = stream._brokers[0].session
        session._say_hello(0.0)
        (hello,) = session.take_outbox()
        said[group] = hello
    assert isinstance(said["eval"], GroupHello)
    assert (said["eval"].group, said["eval"].window_steps) == ("eval", None)
    assert not isinstance(said["train"], GroupHello)
    assert said["train"].window_steps


def test_only_the_learner_is_told_of_late_batches(broker: BrokerThread, stack: ExitStack) -> None:
    late = replace(Envs().fragment(), learner_epoch=1, newest=(1, 100))
    for group, count in (("train", 1), ("record", 0)):
        stream = _open(stack, broker, group)
        stream._brokers[0].lag.observe(late, 1)
        assert stream.late_batches == count


def test_a_learner_without_data_does_not_stall_while_a_group_holds_the_workers_up(
    broker: BrokerThread, stack: ExitStack, start_feeder: StartFeeder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stall_detector, "STALLED_S", 1.0)
    feeder = start_feeder(broker.endpoints.worker, Envs(9).fragments(20), window=4, window_bytes=4_500)
    train, record = _open(stack, broker, auto_commit=False), _open(stack, broker, "record")
    got = 0
    while train.next(1.0) is not None:
        got += 1
        if got < 4:
            train.commit()
    assert 0 < got < 20
    assert not feeder.all_shipped()
    for _ in range(3):
        assert train.next(0.5) is None, "not a WindowStalledError: a commit brings nothing"
    for _ in batches_of(record, feeder.all_shipped):
        while train.next(0.05) is not None:
            train.commit()


def _remove(*arguments: str) -> str:
    """What `headrace groups remove` says. Raises its error."""
    result = CliRunner().invoke(app, ["groups", "remove", *arguments])
    if isinstance(result.exception, HeadraceError):
        raise result.exception
    return result.output


def test_a_group_that_a_reader_made_is_removed_and_its_reader_ends(
    broker: BrokerThread, stack: ExitStack, tmp_path: Path
) -> None:
    stream, train = _open(stack, broker, "eval"), _open(stack, broker)
    assert _remove("eval", "--run-dir", str(tmp_path)) == "removed consumer group eval\n"
    with pytest.raises(FencedError, match="consumer group 'eval' was removed"):
        ask_until_it_raises(stream)
    assert train.next(0.3) is None
    assert broker.ask(lambda b: list(b.core.groups.by_name)) == ["record"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("eval", "there is no consumer group 'eval'; the groups are: record"),
        ("record", "broker.consumer_groups names 'record'; take it out of the config"),
        ("train", "NAME: 'train' cannot be removed; the learner's group stays"),
        ("My Group", "NAME: 'My Group' cannot be removed; give up to 32 lower-case letters"),
    ],
)
def test_a_group_that_cannot_be_removed_is_named_with_the_reason(broker: BrokerThread, name: str, said: str) -> None:
    with pytest.raises(HeadraceError, match=re.escape(said)) as raised:
        _remove(name, "--endpoint", broker.endpoints.learner)
    assert raised.value.exit_code is ExitCode.CONFIG


def test_removing_a_group_without_a_broker_ends_in_time(
    tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups_command, "_TIMEOUT_S", 0.3)
    with pytest.raises(RunDirError):
        _remove("eval", "--run-dir", str(tmp_path))
    with pytest.raises(UnreachableError, match="after 0"):
        _remove("eval", "--endpoint", f"tcp://127.0.0.1:{free_port}")
