"""A part of the weights: only its tensors change and travel, and each worker has the whole."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headrace.broker.files.state_file import read_broker_file
from headrace.broker.ports import weights_relay
from headrace.learner_stub import WeightPublisher
from headrace.learner_stub.publishing.broker_weights import BrokerWeights
from headrace.schemas.basics.bounds import Version
from headrace.schemas.errors import EncodeError, NotFiniteError, WeightsMismatchError
from headrace.schemas.frames.wire import decode
from headrace.schemas.messages.shared_weights import SharedWeights
from headrace.schemas.messages.weights import weights_digest
from headrace.workers.fleet.weights import WeightsReceiver
from support.pipeline import delivery
from support.pipeline.delivery import BrokerThread, Feeder, StartBroker, StartFeeder, blocked, broker_process
from support.waiting import wait_until

SMALL, LARGE = 1_000, 1_000_000
"""Floats of the base; a part has a hundredth."""


def whole(size: int, value: float = 0.0) -> dict[str, torch.Tensor]:
    base = torch.arange(size).float()
    return {
        "base": base,
        "tied": base,
        "lora.a": torch.full((size // 100,), float(value)),
        "lora.b": torch.full((1,), float(value)),
    }


def part(size: int, value: float) -> dict[str, torch.Tensor]:
    return {f"module.{name}": tensor for name, tensor in whole(size, value).items() if "lora" in name}


class Follower:
    """The whole versions that a worker has collected, and the bytes of messages that it took for them."""

    def __init__(self, feeder: Feeder) -> None:
        self._feeder = feeder
        self.version: Version = (0, 0)
        self.arrays: dict[str, NDArray[Any]] = {}

    def wait(self, version: Version, value: float, size: int) -> None:
        """Wait for a version, and check each of its bits and its digest."""

        def taken() -> bool:
            found = self._feeder.weights.take()
            if found is not None:
                assert weights_digest(found.arrays) == found.digest
                self.version, self.arrays = found.version, dict(found.arrays)
            return self.version >= version

        wait_until(taken, f"weights {version}")
        assert self.version == version
        wanted = whole(size, value)
        assert self.arrays.keys() == wanted.keys()
        assert all(np.array_equal(self.arrays[name], tensor.numpy()) for name, tensor in wanted.items())


def acknowledge(publisher: WeightPublisher) -> None:

    wait_until(
        lambda: publisher.pump(0.01) or publisher.acknowledged == (publisher.epoch, publisher.seq), "the broker's word"
    )


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each WEIGHTS message that a publisher sends."""
    sizes, message = list[int](), BrokerWeights._message

    def counted(self: BrokerWeights, *args: Any) -> list[Any]:
        frames = message(self, *args)
        sizes.append(sum(map(len, frames)))
        return frames

    monkeypatch.setattr(BrokerWeights, "_message", counted)
    return sizes


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of arrays of each message of weights that a worker takes."""
    sizes, receive = list[int](), WeightsReceiver.receive

    def counted(self: WeightsReceiver, message: Any, now: float) -> None:
        sizes.append(sum(array.nbytes for array in message.arrays.values()))
        receive(self, message, now)

    monkeypatch.setattr(WeightsReceiver, "receive", counted)
    return sizes


class _Shared(SharedWeights):
    def claim(self) -> bool:
        return True

    def _put(self, *_: Any) -> None:
        return None


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publisher and workers are on other machines than the broker: what they share with it is not there."""
    monkeypatch.setattr("headrace.learner_stub.publishing.broker_weights.is_own_address", lambda endpoint: False)
    monkeypatch.setattr("headrace.workers.fleet.link.is_own_address", lambda endpoint: False)
    monkeypatch.setattr(SharedWeights, "read", lambda self, version, digest: None)
    monkeypatch.setattr(delivery, "WeightsReceiver", lambda fleet_id: WeightsReceiver(fleet_id, _Shared(fleet_id)))


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.usefixtures("elsewhere")
def test_a_part_alone_travels_and_each_worker_has_the_whole(
    size: int,
    broker: BrokerThread,
    publisher: WeightPublisher,
    start_feeder: StartFeeder,
    sent: list[int],
    taken: list[int],
) -> None:
    """One worker was there before, and one comes later. A whole version may follow, and a part of that."""
    early = Follower(start_feeder(broker.endpoints.worker))
    assert publisher.publish(whole(size)) == 1
    early.wait((1, 1), 0.0, size)
    acknowledge(publisher)
    whole_sent, whole_taken = sent[-1], sum(taken)
    for seq in (2, 3):
        taken.clear()
        assert publisher.publish(part(size, seq), partial=True) == seq
        early.wait((1, seq), seq, size)
        acknowledge(publisher)
        if size == LARGE:
            assert sent[-1] < 0.011 * whole_sent, "no more than the part, and a header"
            assert sum(taken) < 0.011 * whole_taken
    assert len(sent) == 3
    late = Follower(start_feeder(broker.endpoints.worker, slot=1))
    late.wait((1, 3), 3, size)
    publisher.publish(whole(size, 4.0))
    publisher.publish(part(size, 5.0), partial=True)
    for follower in (early, late):
        follower.wait((1, 5), 5.0, size)
    held = broker.ask(lambda b: b.relay.frames)
    assert sum(map(len, held)) < 1.05 * whole_sent, "tied tensors stay one"


@pytest.mark.usefixtures("elsewhere")
def test_a_worker_that_missed_the_base_pulls_the_whole(
    broker: BrokerThread, publisher: WeightPublisher, start_feeder: StartFeeder
) -> None:
    feeder = start_feeder(broker.endpoints.worker)
    follower = Follower(feeder)
    publisher.publish(whole(LARGE))
    follower.wait((1, 1), 0.0, LARGE)
    feeder.weights._whole = None
    publisher.publish(part(LARGE, 2.0), partial=True)
    follower.wait((1, 2), 2.0, LARGE)


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.usefixtures("elsewhere")
def test_a_part_may_have_connector_state_that_the_whole_lacked(
    size: int, broker: BrokerThread, publisher: WeightPublisher, start_feeder: StartFeeder
) -> None:
    """`ConnectorMerger.get_state` has none before the first batch. Broker and workers then get the whole."""
    feeders = [start_feeder(broker.endpoints.worker)]
    publisher.publish({"one": whole(size)})
    acknowledge(publisher)
    name = "connectors/env_to_module/0.Mine/seen"
    for seq in (2, 3):
        learnt = {name: np.full(seq, float(seq))}
        publisher.publish({"one": {**part(size, seq), **learnt}}, partial=True)
        acknowledge(publisher)
        for feeder in [*feeders, start_feeder(broker.endpoints.worker, slot=seq)]:
            found = wait_until(
                lambda feeder=feeder, seq=seq: (v := feeder.weights.take()) and v.version == (1, seq) and v, "weights"
            )
            assert weights_digest(found.arrays) == found.digest
            assert found.arrays.keys() == {f"modules/one/{n}" for n in (*whole(size), name)}
            assert found.arrays[f"modules/one/{name}"].tolist() == learnt[name].tolist()
            assert found.arrays["modules/one/lora.b"] == seq


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_module_that_is_left_out_keeps_its_newest_weights_in_workers_that_start_later(
    size: int, broker: BrokerThread, publisher: WeightPublisher, start_feeder: StartFeeder
) -> None:
    """As in self-play, where both modules are one at first."""
    start_feeder(broker.endpoints.worker)
    first = {"w": torch.ones(size)}
    publisher.publish({"learns": first, "earlier": first})
    acknowledge(publisher)
    for seq in (2, 3):
        first["w"].fill_(seq)
        assert publisher.publish({"learns": first}) == seq
    late = start_feeder(broker.endpoints.worker, slot=1)
    found = wait_until(lambda: (v := late.weights.take()) and v.version == (1, 3) and v, "weights")
    assert weights_digest(found.arrays) == found.digest
    assert {name: set(array.tolist()) for name, array in found.arrays.items()} == {
        "modules/learns/w": {3.0},
        "modules/earlier/w": {1.0},
    }
    publisher.publish({"earlier": first})
    found = wait_until(lambda: (v := late.weights.take()) and v.version == (1, 4) and v, "weights")
    assert {name: set(array.tolist()) for name, array in found.arrays.items()} == {
        "modules/learns/w": {3.0},
        "modules/earlier/w": {3.0},
    }


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_part_on_one_machine_makes_a_whole_in_its_memory(
    size: int, broker: BrokerThread, publisher: WeightPublisher, start_feeder: StartFeeder, sent: list[int]
) -> None:
    follower = Follower(start_feeder(broker.endpoints.worker))
    publisher.publish(whole(size))
    for seq in (2, 3):
        publisher.publish(part(size, seq), partial=True)
        follower.wait((1, seq), seq, size)
    assert max(sent) < 10_000 or size == SMALL


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.usefixtures("elsewhere")
def test_a_broker_that_lost_the_base_gets_the_whole(
    size: int, start_broker: StartBroker, start_feeder: StartFeeder
) -> None:
    """After a restart without Redis. The part is the first that it hears, or comes before it has answered."""
    broker = start_broker()
    with WeightPublisher(broker.endpoints.learner) as publisher:
        publisher.publish(whole(size))
        acknowledge(publisher)
        broker.stop()
        publisher.publish(part(size, 2.0), partial=True)
        broker = start_broker()
        publisher.publish(part(size, 3.0), partial=True)
        acknowledge(publisher)
        Follower(start_feeder(broker.endpoints.worker)).wait((publisher.epoch, 3), 3.0, size)
        broker.ask(lambda b: b.relay.__init__())  # it forgets, and its session goes on
        publisher.publish(part(size, 4.0), partial=True)
        acknowledge(publisher)
        assert decode(broker.ask(lambda b: b.relay.frames)).arrays["lora.b"] == 4.0


@pytest.mark.usefixtures("elsewhere")
def test_newer_versions_wait_until_a_large_one_has_arrived_and_only_the_newest_is_sent(
    broker: BrokerThread, start_feeder: StartFeeder, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a learner that publishes faster than its link sends would fill its memory with versions that wait."""
    monkeypatch.setattr("headrace.learner_stub.publishing.broker_weights._PACED_BYTES", LARGE)
    follower = Follower(start_feeder(broker.endpoints.worker))
    with WeightPublisher(broker.endpoints.learner) as publisher:
        with blocked(broker):
            publisher.publish(whole(LARGE))
            for seq in (2, 3):
                publisher.publish(part(LARGE, seq), partial=True)
            assert len(sent) == 1
        acknowledge(publisher)
        assert sent == [pytest.approx(sent[0], abs=50)] * 2, "the broker has no base of the part"
        follower.wait((1, 3), 3.0, LARGE)
        with blocked(broker):
            publisher.publish(whole(LARGE, 4.0))
            publisher.publish(whole(LARGE, 5.0))
            assert len(sent) == 3
            publisher.close()
    follower.wait((1, 5), 5.0, LARGE)


@pytest.mark.usefixtures("elsewhere")
def test_a_broker_that_merges_other_bytes_than_were_published_gets_the_whole(
    broker: BrokerThread, start_feeder: StartFeeder, publisher: WeightPublisher, sent: list[int]
) -> None:
    """The digest of the whole tells it, although base and part are what they claim to be."""
    merge, bad = weights_relay.merge_received, list[bool]()

    def damaged(*args: Any) -> Any:
        arrays = merge(*args)
        bad.append(bool(arrays))
        return {**arrays, "tied": arrays["base"] + 1}

    with mock.patch.object(weights_relay, "merge_received", damaged):
        publisher.publish(whole(LARGE))
        acknowledge(publisher)
        publisher.publish(part(LARGE, 2.0), partial=True)
        acknowledge(publisher)
    assert bad == [True]
    assert sent[2] == pytest.approx(sent[0], abs=50)
    Follower(start_feeder(broker.endpoints.worker)).wait((1, 2), 2.0, LARGE)


_KILLED_BROKER = """
import os, signal
from headrace.broker.process import Broker
from headrace.broker.ports.weights_relay import WeightsRelay
own, name = {"merge": WeightsRelay, "offer": WeightsRelay, "_broadcast": Broker}["%s"], "%s"
done = getattr(own, name)
def die(self, *args, **options):
    found = done(self, *args, **options)
    if getattr(self, "relay", self).version[1] == 2 or name == "merge":
        os.kill(os.getpid(), signal.SIGKILL)
    return found
setattr(own, name, die)
"""
"""A broker that is killed once it has merged, kept or broadcast version 2."""


@pytest.mark.parametrize("step", ["merge", "offer", "_broadcast"])
@pytest.mark.usefixtures("elsewhere")
def test_a_broker_killed_amid_a_part_leaves_no_mixture(step: str, tmp_path: Path, start_feeder: StartFeeder) -> None:
    """The workers' versions are whole, and their digests those of what was published, before and after."""
    with broker_process(tmp_path, first=_KILLED_BROKER % (step, step)) as broker:
        endpoints = read_broker_file(tmp_path)
        assert endpoints is not None
        early = Follower(start_feeder(endpoints.endpoints.worker))
        with WeightPublisher(endpoints.endpoints.learner) as publisher:
            publisher.publish(whole(LARGE))
            early.wait((1, 1), 0.0, LARGE)
            publisher.publish(part(LARGE, 2.0), partial=True)
            assert broker.wait() == -signal.SIGKILL
            with broker_process(tmp_path):
                acknowledge(publisher)
                for follower in (early, Follower(start_feeder(endpoints.endpoints.worker, slot=1))):
                    follower.wait((publisher.epoch, 2), 2.0, LARGE)
                publisher.publish(part(LARGE, 3.0), partial=True)
                early.wait((publisher.epoch, 3), 3.0, LARGE)


def test_a_part_of_nothing_and_what_is_no_part_are_refused(publisher: WeightPublisher) -> None:
    with pytest.raises(EncodeError, match="no version of which this can be a part; publish all weights"):
        publisher.publish(part(SMALL, 1.0), partial=True)
    publisher.publish(whole(SMALL))
    with pytest.raises(WeightsMismatchError, match=r"unknown \['new'\]"):
        publisher.publish({"new": torch.ones(1)}, partial=True)
    with pytest.raises(WeightsMismatchError, match=r"'lora.b' has shape \(2,\), the module's \(1,\)"):
        publisher.publish({"lora.b": torch.ones(2)}, partial=True)
    with pytest.raises(WeightsMismatchError, match=r"'lora\.b' is int64, the module's float"):
        publisher.publish({"lora.b": torch.ones(1, dtype=torch.int64)}, partial=True)
    with pytest.raises(NotFiniteError):
        publisher.publish({"lora.b": torch.tensor([torch.nan])}, partial=True)
    assert publisher.publish(part(SMALL, 1.0), partial=True) == 2
