"""Several brokers under one learner, over real sockets: one stream, one position, and the same weights at each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.broker.batches.limits import BrokerLimits
from headrace.broker.sessions.hello_rights import judge_hello
from headrace.deploy.run.options import Asked, resolve_each
from headrace.deploy.run.several_brokers import at_broker, index_for
from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.learner_stub.streaming.session import LearnerSession, LearnerSessionState, StreamLimits
from headrace.learner_stub.streaming.stall_detector import STARVED_S, StallDetector
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.errors import ConfigError, DecodeError, RefusedError, UnreachableError
from headrace.schemas.messages import Status, WorkerHello
from headrace.schemas.messages.weights import Arrays, weights_digest
from headrace.schemas.peers import fleet_place
from headrace.schemas.peers.fleet_place import FleetPlace
from headrace.schemas.peers.rendezvous import Published
from headrace.workers.fleet.link import FleetLink
from headrace.workers.fleet.session import SessionState, WorkerSession
from headrace.workers.fleet.weights import WeightsReceiver
from headrace.workers.fleet.window import SessionLimits
from support.pipeline.delivery import SPACES, BrokerThread, Envs, StartBroker, StartFeeder, Witness, batches_of
from support.waiting import TIMEOUT_S, wait_until

FLEETS = ("pair.0", "pair.1")


@pytest.fixture
def brokers(start_broker: StartBroker, tmp_path: Path) -> list[BrokerThread]:
    return [start_one(start_broker, tmp_path, index) for index in range(2)]


def start_one(start_broker: StartBroker, folder: Path, index: int, **settings: Any) -> BrokerThread:
    folder = folder / f"broker-{index}"
    folder.mkdir(exist_ok=True)
    return start_broker(folder, FLEETS[index], count=2, index=index, **settings)


def learners(brokers: Sequence[BrokerThread]) -> list[str]:
    return [broker.endpoints.learner for broker in brokers]


def test_batches_of_both_brokers_form_one_stream_with_one_position(
    brokers: list[BrokerThread], start_feeder: StartFeeder, stack: ExitStack
) -> None:
    """The first learner takes some batches, the second one takes exactly the rest."""
    given = [Envs(seed).fragments(20) for seed in range(2)]
    feeders = [
        start_feeder(broker.endpoints.worker, given[slot], slot=slot, fleet_id=FLEETS[slot])
        for slot, broker in enumerate(brokers)
    ]
    witness = Witness()
    with EpisodeStream(learners(brokers), auto_commit=False, fleet_id="pair") as stream:
        turns: list[int] = []
        while stream.delivered < 12 or set(turns) != {0, 1}:
            batch = stream.next(timeout_s=TIMEOUT_S)
            assert batch is not None
            witness.see(batch)
            turns.append(batch.slot)
        position = stream.position()
        stream.commit()
        assert stream.module_spaces() == {"default_policy": SPACES}
    assert {place["fleet_id"] for place in position} == set(FLEETS)
    again = stack.enter_context(EpisodeStream(learners(brokers), position=position))
    for batch in batches_of(again, lambda: all(feeder.all_settled() for feeder in feeders)):
        witness.see(batch)
    assert witness.steps == sum(batch.steps for batches in given for batch in batches)
    for slot, broker in enumerate(brokers):
        assert list(broker.rows()) == [(slot, 1)]
        assert not list(broker.rows()[(slot, 1)].problems())


class Entry:
    """The entry of one broker, as the test says."""

    problem, at_goal = "", False

    def __init__(self, broker: BrokerThread) -> None:
        self.names = broker

    def find(self, role: str) -> str:
        return str(getattr(self.names.endpoints, role))

    def stopped(self) -> None:
        return None


def test_an_entry_that_names_the_other_broker_ends_neither_worker_nor_learner(
    start_broker: StartBroker,
    stack: ExitStack,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(fleet_place, "_LOOK_S", 0.05)
    quick = {"lease_s": 1.0}
    brokers = [start_one(start_broker, tmp_path, index, **quick) for index in range(2)]
    entries = [Entry(broker) for broker in brokers]
    hello = WorkerHello(fleet_id=FLEETS[0], token="t", slot=0, spaces=SPACES.model_dump(mode="json"))
    session = WorkerSession(hello, SessionLimits(16))
    place = FleetPlace(brokers[0].endpoints.worker, "worker", entries[0])
    link = FleetLink(place, session, WeightsReceiver(FLEETS[0]))
    stack.callback(link.close)
    stream = stack.enter_context(EpisodeStream(learners(brokers), rendezvous=entries, fleet_id="pair"))
    weights = stack.enter_context(WeightPublisher(learners(brokers), rendezvous=entries, fleet_id="pair"))

    def all_joined() -> bool:
        link.pump()
        stream.pump(0.01)
        weights.pump()
        active = session.state is SessionState.ACTIVE, all(broker.is_active for broker in stream._brokers)
        return all(active) and all(broker.joined for broker in weights._brokers)

    wait_until(all_joined, "all to join")
    brokers[0].stop()
    entries[0].names = brokers[1]
    wait_until(lambda: not all_joined() and caplog.text.count(" is another one: ") >= 3, "all to be refused")
    assert "slot 0 belongs to broker 0 of 2" in caplog.text
    entries[0].names = start_one(start_broker, tmp_path, 0, **quick)
    wait_until(all_joined, "all to be back")


def test_a_publisher_opened_with_the_addresses_from_before_a_move_is_the_streams_own_learner(
    brokers: list[BrokerThread], stack: ExitStack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another learner's publisher would fence the stream."""
    monkeypatch.setattr(fleet_place, "_LOOK_S", 0.05)
    entries = [Entry(broker) for broker in brokers]
    before = [f"ipc://{tmp_path}/gone-{index}" for index in range(2)]
    stream = stack.enter_context(EpisodeStream(before, rendezvous=entries, fleet_id="pair"))
    weights = stack.enter_context(WeightPublisher(before, rendezvous=entries, fleet_id="pair"))
    wait_until(lambda: (weights.pump(), all(broker.joined for broker in weights._brokers))[1], "both to welcome it")
    stream.next(0.1)
    assert (stream.epoch, weights.epoch, weights.token) == (1, 1, stream.token)


def test_a_version_of_the_weights_has_one_number_at_all_brokers(brokers: list[BrokerThread], stack: ExitStack) -> None:
    """Broker 0 has met a learner before, so the epochs differ."""
    EpisodeStream(learners(brokers)[0], fleet_id=FLEETS[0]).close()
    stream = stack.enter_context(EpisodeStream(learners(brokers)))
    weights = stack.enter_context(WeightPublisher(learners(brokers)))
    for _ in range(3):
        weights.publish({"w": np.zeros(4, np.float32)})
    wait_until(lambda: (weights.pump(), all(broker.joined for broker in weights._brokers))[1], "both to welcome it")
    wait_until(lambda: (weights.pump(), weights.acknowledged[1] == 3)[1], "both to have it")
    held = [broker.ask(lambda b: b.relay.version) for broker in brokers]
    assert held == [(2, 3), (1, 3)]
    wait_until(lambda: (stream.next(0.01), stream.epoch == 2)[1], "the stream's epoch at the first broker")


def test_a_version_is_hashed_once_for_all_brokers(
    brokers: list[BrokerThread], stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = stack.enter_context(WeightPublisher(learners(brokers)))
    wait_until(lambda: (weights.pump(), all(broker.joined for broker in weights._brokers))[1], "both to welcome it")
    hashed = []

    def counted(arrays: Arrays) -> str:
        hashed.append(sorted(arrays))
        return weights_digest(arrays)

    for module in ("learner_stub.publishing.publisher", "schemas.messages.weights"):
        monkeypatch.setattr(f"headrace.{module}.weights_digest", counted)
    weights.publish({"w": np.zeros(4, np.float32)})
    wait_until(lambda: (weights.pump(), weights.acknowledged[1] == 1)[1], "both to have it")
    assert hashed == [["w"]] * 3, "once by the publisher, and once by each broker"


@pytest.mark.long
def test_a_broker_that_joins_late_or_stops_affects_only_its_share(
    start_broker: StartBroker, start_feeder: StartFeeder, stack: ExitStack, tmp_path: Path
) -> None:
    first = start_one(start_broker, tmp_path, 0)
    places = [tmp_path / f"meet-{index}.json" for index in range(2)]
    Published(fleet_id=FLEETS[0], endpoints=first.endpoints.model_dump()).write(places[0])
    stream = stack.enter_context(EpisodeStream.of(places, auto_commit=True))
    weights = stack.enter_context(WeightPublisher.of(places))
    weights.publish({"w": np.zeros(4, np.float32)})
    feeder = start_feeder(first.endpoints.worker, Envs(0).fragments(5), fleet_id=FLEETS[0])
    assert sum(batch.steps for batch in batches_of(stream, feeder.all_settled)) == sum(feeder.steps.values())

    second = start_one(start_broker, tmp_path, 1)
    Published(fleet_id=FLEETS[1], endpoints=second.endpoints.model_dump()).write(places[1])
    other = start_feeder(second.endpoints.worker, Envs(1).fragments(5), slot=1, fleet_id=FLEETS[1])
    assert sum(batch.steps for batch in batches_of(stream, other.all_settled)) == sum(other.steps.values())
    wait_until(lambda: (stream.pump(), second.ask(lambda b: b.relay.version)[1] == 1)[1], "the weights at the second")

    first.stop()
    more = start_feeder(second.endpoints.worker, Envs(2).fragments(5), slot=3, fleet_id=FLEETS[1])
    assert sum(batch.steps for batch in batches_of(stream, more.all_settled)) == sum(more.steps.values())
    assert stream.ended == ""


def test_workers_of_another_env_at_the_second_broker_are_refused(
    brokers: list[BrokerThread], start_feeder: StartFeeder, stack: ExitStack
) -> None:
    for slot, broker in enumerate(brokers):
        spaces = SPACES if slot == 0 else Spaces(observation=SPACES.action, action=SPACES.action)
        start_feeder(broker.endpoints.worker, slot=slot, fleet_id=FLEETS[slot], spaces=spaces)
    with pytest.raises(RefusedError, match="different spaces; give all the same env"):
        next(iter(stack.enter_context(EpisodeStream(learners(brokers)))))


def test_a_stream_of_other_brokers_than_its_position_is_refused(brokers: list[BrokerThread]) -> None:
    places = [
        {"fleet_id": fleet, "slot": slot, "incarnation": 1, "settled": {"seq": 1}} for slot, fleet in enumerate(FLEETS)
    ]
    with pytest.raises(ConfigError, match=r"fleets \['pair.0', 'pair.1'\], not of 1 brokers"):
        EpisodeStream(learners(brokers)[0], position=places)
    with pytest.raises(RefusedError):
        EpisodeStream(learners(brokers)[::-1], position=places)
    with pytest.raises(ConfigError, match="synchronous sampling has one broker"):
        EpisodeStream(learners(brokers), synchronous=True)
    with pytest.raises(ConfigError, match="an empty list names no broker"):
        WeightPublisher([])
    with pytest.raises(UnreachableError):
        EpisodeStream.of([Path("none-0.json"), Path("none-1.json")], connect_timeout_s=0.2)


def test_a_learner_is_starved_only_when_the_workers_of_all_brokers_wait() -> None:
    sessions = [LearnerSession("token", StreamLimits()) for _ in range(2)]
    stall = StallDetector(sessions)
    stall.add_wait(STARVED_S)
    assert not stall.starved
    for session, workers in zip(sessions, (2, 1), strict=True):
        session.state = LearnerSessionState.ACTIVE
        session.status = Status(epoch=1, workers=workers, workers_blocked=workers)
        session.uncommitted = lambda: 1  # type: ignore[method-assign]
    assert stall.starved
    sessions[1].status = Status(epoch=1, workers=2, workers_blocked=1)
    assert not stall.starved
    sessions[1].state = LearnerSessionState.JOINING
    assert stall.starved, "a broker that is gone has no say"


def test_a_wait_asks_for_a_larger_window_once_a_second_while_a_worker_waits_for_a_commit() -> None:
    session = LearnerSession("token", StreamLimits())
    stall = StallDetector([session])

    def hints(workers_blocked: int, uncommitted: int) -> list[bool]:
        session.status = Status(epoch=1, workers=2, workers_blocked=workers_blocked)
        session.uncommitted = lambda: uncommitted  # type: ignore[method-assign]
        found = []
        for _ in range(6):
            stall.add_wait(0.5)
            found.append(stall.take_hint())
        return found

    assert hints(workers_blocked=0, uncommitted=1) == [False] * 6
    assert hints(workers_blocked=1, uncommitted=1) == [True, False] * 3
    assert hints(workers_blocked=1, uncommitted=0) == [False] * 6


def test_a_wait_for_workers_without_weights_names_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    session = LearnerSession("token", StreamLimits())
    session.state, stall = LearnerSessionState.ACTIVE, StallDetector([session])
    told = {"default_policy": SPACES}
    for published, workers, spaces in (((1, 1), 2, told), ((0, 0), 0, {}), ((0, 0), 2, {}), ((0, 0), 2, told)):
        assert "publish" not in caplog.text
        session.status, session.spaces = Status(epoch=1, workers=workers, published=published), spaces
        stall.add_wait(10.0)
    assert "the envs of 2 workers are not ready" in caplog.text
    assert "2 workers wait for first weights; call weights.publish(...) before" in caplog.text


def test_a_broker_gives_out_and_takes_only_its_own_slots(
    brokers: list[BrokerThread], start_feeder: StartFeeder
) -> None:
    for index, broker in enumerate(brokers):
        feeders = [start_feeder(broker.endpoints.worker, slot=None, fleet_id=FLEETS[index]) for _ in range(2)]
        wait_until(lambda of=feeders: all(feeder.session.slot is not None for feeder in of), "their slots")
        assert sorted(feeder.session.slot for feeder in feeders) == [1000 + index, 1002 + index]
    second = BrokerLimits(brokers=2, index=1)
    judge_hello(WorkerHello(fleet_id="pair.1", token="t", slot=3, incarnation=1), None, second)
    with pytest.raises(DecodeError, match="slot 2 belongs to broker 0 of 2, and this is broker 1"):
        judge_hello(WorkerHello(fleet_id="pair.1", token="t", slot=2, incarnation=1), None, second)


def test_settings_of_several_brokers_are_resolved_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"fleet.fleet_id": "pair", "fleet.run_dir": str(tmp_path), "broker.count": 3}
    config = Asked(flags=named).settings
    assert [index_for(config, slot) for slot in (0, 4, 1001)] == [0, 1, 2]
    assert index_for(config, None) == index_for(config, None), "a machine keeps its broker"
    monkeypatch.setenv("HEADRACE_BROKER__INDEX", "2")
    assert index_for(Asked(flags=named).settings, None) == 2
    monkeypatch.delenv("HEADRACE_BROKER__INDEX")
    each = resolve_each(Asked(flags=named))
    assert [one.fleet.fleet_id for one in each] == ["pair.0", "pair.1", "pair.2"]
    assert [one.fleet.rendezvous for one in each] == [f"{tmp_path}/broker-{i}/rendezvous.json" for i in range(3)]
    published = Asked(flags={**named, "fleet.rendezvous": "http://head/{broker}.json"}).settings
    assert at_broker(published, 1).fleet.rendezvous == "http://head/1.json"
    for wrong, said in (
        ({"fleet.rendezvous": "one.json"}, r"should contain \{broker\}, since broker.count = 3"),
        ({"fleet.fleet_id": ""}, "should name the fleet"),
        ({"broker.index": 3}, "index = 3 is none of count = 3 brokers"),
        ({"sampling.synchronous": True}, "has one broker"),
    ):
        with pytest.raises(ConfigError, match=said):
            resolve_each(Asked(flags={**named, **wrong}))
