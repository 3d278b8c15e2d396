"""Weights from publisher to worker: broadcast, pulled, after every kind of restart; never half, never backwards."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from fuzz.lying_broker import Frames, LyingBroker
from numpy.typing import NDArray

from headrace.broker.ports.weights_relay import PULLED_S, WeightsRelay
from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.schemas.basics.bounds import Version
from headrace.schemas.errors import EncodeError, FencedError
from headrace.schemas.frames.wire import MessageKind, WireMessage, decode, encode
from headrace.schemas.messages import (
    Ack,
    Reject,
    WeightsHeader,
    WeightsPart,
    WeightsPull,
    WorkerHello,
    WorkerWelcome,
    read,
)
from headrace.schemas.messages.shared_weights import SharedWeights
from headrace.schemas.messages.weights import encode_weights
from headrace.schemas.peers.sockets import OwnSockets
from headrace.workers.fleet.weights import BROADCAST_S, PIECES_IN_FLIGHT, PULL_RETRY_S, WeightsReceiver
from support.pipeline.delivery import (
    FLEET,
    BrokerThread,
    Envs,
    Feeder,
    RawPeer,
    StartBroker,
    StartFeeder,
    batches_of,
)
from support.waiting import wait_until

SMALL = 10
ONE = np.ones(1, np.float32)
LARGE = 700_000
"""Elements of float32: 2.8 MB, three pieces."""


def state(value: float, size: int = SMALL) -> dict[str, NDArray[Any]]:
    return {"w": np.full(size, value, np.float32), "b": np.array([value, size], np.float64)}


@dataclass
class Applied:
    """The weights that a feeder's receiver has ready."""

    feeder: Feeder

    def newest(self) -> Version:
        return self.feeder.weights.newest

    def wait(self, version: Version, value: float, size: int = SMALL) -> None:
        wait_until(lambda: self.newest() == version, f"weights {version}")
        # The feeder's thread notes the version before it offers the arrays.
        taken = wait_until(self.feeder.weights.take, f"the arrays of weights {version}")
        assert taken is not None
        assert taken.version == version
        assert {name: a.tolist() for name, a in taken.arrays.items()} == {
            name: a.tolist() for name, a in state(value, size).items()
        }


def acknowledge(publisher: WeightPublisher) -> None:
    def pumped() -> bool:
        publisher.pump()
        return publisher.acknowledged == (publisher.epoch, publisher.seq)

    wait_until(pumped, "the broker's acknowledgement")


def publish_until_it_raises(publisher: WeightPublisher) -> None:
    for value in range(200):
        publisher.publish(state(float(value)))
        publisher.pump(0.02)


def test_a_worker_tries_each_address_of_weights_once(
    start_feeder: StartFeeder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It pulls weights from the broker meanwhile. The broker tells the same bad address twice, and then a good one."""
    addresses = ["nonsense", "nonsense", "tcp://127.0.0.1:9"]
    opened, open_socket = list[int](), OwnSockets.open

    def noted(own: OwnSockets, kind: int, options: Any) -> Any:
        opened.append(kind)
        return open_socket(own, kind, options)

    def answer(kind: MessageKind, header: Any, frames: list[bytes]) -> Iterator[Frames]:
        if kind is MessageKind.HELLO:
            welcome = WorkerWelcome(fleet_id=FLEET, slot=0, incarnation=1, max_batch_bytes=1 << 20)
            yield welcome.model_copy(update={"weights_endpoint": addresses.pop(0)}).frames()
        for _ in range(3):
            yield Ack(slot=0, incarnation=1).frames()
        if addresses:
            yield Reject(code="x", detail="say HELLO again", fatal=False).frames()

    monkeypatch.setattr(OwnSockets, "open", noted)
    with LyingBroker(answer) as broker:
        feeder = start_feeder(broker.endpoint)
        wait_until(lambda: feeder.link._subscriber is not None, "a subscription")
        feeder.stop()
    assert opened == [zmq.DEALER, zmq.SUB, zmq.SUB]
    assert len([r for r in caplog.records if "an address of weights that is none" in r.getMessage()]) == 1


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_published_weights_arrive_whole(
    broker: BrokerThread, publisher: WeightPublisher, start_feeder: StartFeeder, size: int
) -> None:
    applied = Applied(start_feeder(broker.endpoints.worker))
    wait_until(lambda: applied.feeder.session.welcome, "a welcome")
    assert publisher.publish(state(1.0, size)) == 1
    applied.wait((1, 1), 1.0, size)
    assert publisher.publish(state(2.0, size)) == 2
    applied.wait((1, 2), 2.0, size)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_worker_that_joins_late_gets_the_last_version(
    broker: BrokerThread, publisher: WeightPublisher, start_feeder: StartFeeder, size: int
) -> None:
    for value in (1.0, 2.0, 3.0):
        publisher.publish(state(value, size))
    acknowledge(publisher)
    Applied(start_feeder(broker.endpoints.worker)).wait((1, 3), 3.0, size)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_worker_without_broadcasts_learns_of_new_weights_by_heartbeat(
    broker: BrokerThread,
    publisher: WeightPublisher,
    start_feeder: StartFeeder,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
) -> None:
    from headrace.workers.fleet.link import FleetLink

    monkeypatch.setattr(FleetLink, "_subscribe", lambda self, endpoint: None)
    applied = Applied(start_feeder(broker.endpoints.worker))
    wait_until(lambda: applied.feeder.session.welcome, "a welcome")
    publisher.publish(state(1.0, size))
    applied.wait((1, 1), 1.0, size)


@pytest.mark.long
def test_a_restarted_broker_gets_the_weights_again_from_the_publisher(
    start_broker: StartBroker, start_feeder: StartFeeder, stack: ExitStack
) -> None:
    first = start_broker()
    publisher = stack.enter_context(WeightPublisher(first.endpoints.learner))
    publisher.publish(state(1.0))
    acknowledge(publisher)
    first.stop()
    second = start_broker()
    applied = Applied(start_feeder(second.endpoints.worker))

    def arrived() -> bool:
        publisher.pump()
        return applied.newest() == (1, 1)

    wait_until(arrived, "the weights at the new broker")


@pytest.mark.long
def test_a_waiting_stream_pumps_the_publisher(
    start_broker: StartBroker, start_feeder: StartFeeder, stack: ExitStack
) -> None:
    first = start_broker()
    stream = stack.enter_context(EpisodeStream(first.endpoints.learner))
    publisher = stack.enter_context(WeightPublisher(first.endpoints.learner))
    assert publisher.epoch == stream.epoch
    publisher.publish(state(1.0))
    acknowledge(publisher)
    first.stop()
    second = start_broker()
    applied = Applied(start_feeder(second.endpoints.worker))

    def arrived() -> bool:
        assert stream.next(0.05) is None
        return applied.newest() == (1, 1)

    wait_until(arrived, "the weights at the new broker")


def test_the_next_learner_publishes_under_a_higher_epoch(
    broker: BrokerThread, start_feeder: StartFeeder, stack: ExitStack
) -> None:
    applied = Applied(start_feeder(broker.endpoints.worker))
    with EpisodeStream(broker.endpoints.learner), WeightPublisher(broker.endpoints.learner) as older:
        for value in range(5):
            older.publish(state(float(value)))
        wait_until(lambda: applied.newest() == (1, 5), "five versions")
    with EpisodeStream(broker.endpoints.learner), WeightPublisher(broker.endpoints.learner) as newer:
        assert newer.publish(state(9.0)) == 1
        wait_until(lambda: applied.newest() == (2, 1), "the first version of the next learner")


def test_an_older_publisher_is_fenced_and_changes_nothing(
    broker: BrokerThread, publisher: WeightPublisher, start_feeder: StartFeeder
) -> None:
    publisher.publish(state(1.0))
    acknowledge(publisher)
    applied = Applied(start_feeder(broker.endpoints.worker))
    with EpisodeStream(broker.endpoints.learner) as stream:
        stream.close()
    with EpisodeStream(broker.endpoints.learner), WeightPublisher(broker.endpoints.learner) as newer:
        newer.publish(state(2.0))
        wait_until(lambda: applied.newest() == (newer.epoch, 1), "the newer learner's weights")
        with pytest.raises(FencedError):
            publish_until_it_raises(publisher)
        assert applied.newest() == (newer.epoch, 1)


def test_a_reopened_publisher_continues_its_version_numbers(broker: BrokerThread, start_feeder: StartFeeder) -> None:
    """The lease is the process's, so versions that began again at 1 would be ignored as old."""
    applied = Applied(start_feeder(broker.endpoints.worker))
    for expected in (1, 2, 3):
        with WeightPublisher(broker.endpoints.learner) as publisher:
            assert publisher.publish(state(1.0)) == expected
            acknowledge(publisher)
        wait_until(lambda n=expected: applied.newest()[1] == n, "the next version")  # type: ignore[misc]


def test_weights_without_tensors_or_with_complex_numbers_are_refused(publisher: WeightPublisher) -> None:
    with pytest.raises(EncodeError, match="without tensors"):
        publisher.publish({})
    with pytest.raises(EncodeError, match="complex"):
        publisher.publish({"w": np.zeros(3, complex)})


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        ({"w": b"extra state"}, "'w' is of type bytes"),
        ({"w": [1.0]}, "'w' is of type list"),
        ({3: np.zeros(3)}, "3 cannot be the name"),
        ({"\udc80": np.zeros(3)}, "cannot be the name"),
        ({"w": np.array([None])}, "dtype object"),
        ({"w": np.array(["text"])}, "dtype <U4"),
        ({"w": torch.zeros(3, device="meta")}, "'w' of dtype torch.float32 cannot be published"),
        ({"w": np.zeros((1,) * 9)}, "9 axes"),
        ({f"w{n}": ONE for n in range(65_537)}, "0 MiB in 65,537 arrays"),
        ({f"{n}" + "n" * 400_000: np.zeros(1) for n in range(45)}, "header of WEIGHTS"),
        ({f"{n}" + "n" * 400_000: np.zeros(200) for n in range(45)}, "header of WEIGHTS"),
        ({"w": np.broadcast_to(ONE, ((1 << 30) + 1,))}, "weights of 4,096 MiB in 1 arrays"),
    ],
)
def test_weights_that_cannot_be_sent_are_refused_and_the_ones_before_stay(
    weights: Any, told: str, start_broker: StartBroker
) -> None:
    broker = start_broker()
    with WeightPublisher(broker.endpoints.learner) as publisher:
        publisher.publish(state(1.0))
        acknowledge(publisher)
        with pytest.raises(EncodeError, match=told):
            publisher.publish(weights)
        publisher.pump()
        publisher._brokers[0]._lacks((0, 0))  # as from a broker that has lost them
        wait_until(lambda: publisher.pump(0.01) or publisher.acknowledged == (1, 1), "the weights before to be sent")
        assert publisher.publish(state(2.0)) == 2
        acknowledge(publisher)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_big_endian_weights_arrive(size: int, start_broker: StartBroker, start_feeder: StartFeeder) -> None:
    broker = start_broker()
    with WeightPublisher(broker.endpoints.learner) as publisher:
        publisher.publish(
            {name: array.astype(array.dtype.newbyteorder(">")) for name, array in state(1.0, size).items()}
        )
        Applied(start_feeder(broker.endpoints.worker)).wait((1, 1), 1.0, size)


def test_weights_larger_than_the_largest_batch_are_taken_whole(
    start_broker: StartBroker, start_feeder: StartFeeder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a learner on another machine, or where memory has no room."""
    monkeypatch.setattr(SharedWeights, "_put", lambda *_: None)
    broker = start_broker(max_batch_bytes=1 << 20)
    with WeightPublisher(broker.endpoints.learner) as publisher:
        publisher.publish(state(1.0, LARGE))
        acknowledge(publisher)
        Applied(start_feeder(broker.endpoints.worker)).wait((1, 1), 1.0, LARGE)


def test_damaged_weights_are_refused_by_the_broker(
    broker: BrokerThread, publisher: WeightPublisher, start_feeder: StartFeeder
) -> None:
    publisher.publish(state(1.0))
    acknowledge(publisher)
    message = decode(encode_weights(FLEET, (1, 2), state(2.0)))
    wrong = {**message.header, "digest": "0" * 32}
    wrong.pop("payload")
    publisher._brokers[0].link.send(encode(MessageKind.WEIGHTS, wrong, message.arrays))
    assert broker.ask(lambda b: b.relay.version) == (1, 1)
    applied = Applied(start_feeder(broker.endpoints.worker))
    applied.wait((1, 1), 1.0)


def test_pieces_are_of_one_version_and_any_offset_is_answered(broker: BrokerThread, publisher: WeightPublisher) -> None:
    publisher.publish(state(1.0, LARGE))
    acknowledge(publisher)
    with RawPeer(broker.endpoints.worker) as peer:
        peer.send(WeightsPull(version=(1, 1), offset=0, length=1 << 20).frames())
        assert read(Reject, peer.receive_kind(MessageKind.REJECT).header).code == "unknown_peer"
        peer.send(WorkerHello(fleet_id=FLEET, token="w", slot=1, incarnation=1).frames())
        peer.receive_kind(MessageKind.WELCOME)
        for offset, at in ((0, 0), ((1 << 20) + 7, 1 << 20), (1 << 40, 1 << 40)):
            peer.send(WeightsPull(version=(1, 1), offset=offset, length=1 << 20).frames())
            part = peer.receive_kind(MessageKind.WEIGHTS_PART)
            assert read(WeightsPart, part.header).offset == at
        peer.send(WeightsPull(version=(1, 9), offset=77, length=1 << 20).frames())
        part = peer.receive_kind(MessageKind.WEIGHTS_PART)
        assert read(WeightsPart, part.header).offset == 0


# -- the receiver alone -----------------------------------------------------------------------------------------------


def message(version: Version, value: float, fleet_id: str = FLEET) -> WireMessage:
    return decode([bytes(frame) for frame in encode_weights(fleet_id, version, state(value))])


def test_equal_or_older_versions_are_ignored() -> None:
    receiver = WeightsReceiver(FLEET)
    receiver.receive(message((2, 3), 1.0), 0.0)
    assert receiver.take() is not None
    for version in ((2, 3), (2, 2), (1, 99)):
        receiver.receive(message(version, 5.0), 0.0)
    assert (receiver.take(), receiver.newest) == (None, (2, 3))
    receiver.receive(message((3, 1), 5.0), 0.0)
    assert receiver.newest == (3, 1)


def test_weights_of_another_fleet_are_not_taken() -> None:
    receiver = WeightsReceiver(FLEET)
    receiver.receive(message((9, 9), 1.0, "other"), 0.0)
    assert (receiver.take(), receiver.newest) == (None, (0, 0))


def test_weights_with_a_wrong_digest_are_refused_and_the_old_version_is_kept() -> None:
    receiver = WeightsReceiver(FLEET)
    receiver.receive(message((1, 1), 1.0), 0.0)
    wrong = message((1, 2), 2.0)
    wrong.header["digest"] = "0" * 32
    receiver.receive(wrong, 0.0)
    taken = receiver.take()
    assert taken is not None
    assert (taken.version, receiver.newest) == ((1, 1), (1, 1))


def test_a_broadcast_on_its_way_is_not_pulled_as_well() -> None:
    receiver = WeightsReceiver(FLEET)
    receiver.hear_of((1, 1), 10.0)
    assert receiver.requests(10.0) == []
    receiver.receive(message((1, 1), 1.0), 10.1)
    assert receiver.requests(10.0 + 2 * BROADCAST_S) == []
    receiver.hear_of((1, 2), 20.0)
    assert receiver.requests(20.0 + BROADCAST_S) == [WeightsPull(offset=0, length=1 << 20)]


def test_a_newer_version_during_a_pull_restarts_the_pull() -> None:
    receiver = WeightsReceiver(FLEET)
    receiver.hear_of((1, 2), 0.0)

    def blob(version: Version, value: float) -> tuple[bytes, list[int]]:
        frames = [bytes(frame) for frame in encode_weights(FLEET, version, state(value))]
        return b"".join(frames), [len(frame) for frame in frames]

    def part(version: Version, value: float, start: int, stop: int | None) -> WireMessage:
        data, sizes = blob(version, value)
        header = WeightsPart(version=version, offset=start, frame_sizes=sizes).model_dump()
        frames = encode(MessageKind.WEIGHTS_PART, header, {"part": np.frombuffer(data[start:stop], np.uint8)})
        return decode([bytes(frame) for frame in frames])

    receiver.receive(part((1, 1), 1.0, 0, 100), 1.0)
    assert receiver.pulling
    receiver.receive(part((1, 2), 2.0, 0, 100), 1.1)
    receiver.receive(part((1, 1), 1.0, 100, None), 1.2)
    receiver.receive(part((1, 2), 2.0, 0, 100), 1.3)
    receiver.receive(part((1, 2), 2.0, 100, None), 1.4)
    taken = receiver.take()
    assert taken is not None
    assert (taken.version, taken.arrays["w"][0]) == ((1, 2), 2.0)
    assert not receiver.pulling


def test_a_version_is_pulled_although_a_piece_of_another_came_unasked() -> None:
    receiver = WeightsReceiver(FLEET)
    header = WeightsPart(version=(1, 9), offset=50, frame_sizes=[100]).model_dump()
    receiver.receive(decode(encode(MessageKind.WEIGHTS_PART, header, {"part": np.zeros(50, np.uint8)})), 0.0)
    receiver.receive(message((1, 1), 1.0), 0.1)
    receiver.hear_of((2, 1), 1.0)
    assert receiver.requests(1.0 + BROADCAST_S) == [WeightsPull(offset=0, length=1 << 20, version=(1, 9))]


@pytest.mark.parametrize("sizes", [[], [0, 0], [1 << 40], [1] * 65])
def test_a_piece_with_sizes_that_no_version_has_does_not_stop_a_pull(sizes: list[int]) -> None:
    relay, receiver = pieces_of((1, 2), 2.0, LARGE)
    (pull,) = receiver.requests(1.0)
    receiver.receive(decode(relay.part(pull)), 1.0)
    header = WeightsPart(version=(1, 9), offset=0, frame_sizes=sizes).model_dump()
    receiver.receive(decode(encode(MessageKind.WEIGHTS_PART, header, {"part": np.zeros(0, np.uint8)})), 1.0)
    asked = receiver.requests(1.0)
    assert asked
    assert {pull.version for pull in asked} == {(1, 2)}


def pieces_of(version: Version, value: float, size: int) -> tuple[WeightsRelay, WeightsReceiver]:
    """A relay that holds a version, and a receiver that has heard of it."""
    relay, receiver = WeightsRelay(), WeightsReceiver(FLEET)
    frames = encode_weights(FLEET, version, state(value, size))
    relay.offer(read(WeightsHeader, decode(frames).header), frames)
    receiver.hear_of(version, 0.0)
    return relay, receiver


def test_a_pull_ends_although_newer_versions_come_before_its_end() -> None:
    """Each version is there for one piece of four. The relay keeps the one that is pulled, and no other."""
    now = [0.0]
    relay, receiver = WeightsRelay(clock=lambda: now[0]), WeightsReceiver(FLEET)
    taken, kept, asked = list[Version](), list[Version](), list[WeightsPull]()
    for seq in range(1, 31):
        now[0] += 1.0
        frames = encode_weights(FLEET, (1, seq), state(seq, 900_000))
        relay.offer(read(WeightsHeader, decode(frames).header), frames)
        receiver.hear_of((1, seq), now[0] - 1.0)
        asked += receiver.requests(now[0])
        if asked:
            receiver.receive(decode(relay.part(asked.pop(0))), now[0])
        if (found := receiver.take()) is not None:
            assert found.arrays["w"][0] == found.version[1]
            taken.append(found.version)
        kept.append(relay._pulled.version if relay._pulled is not None else (0, 0))
    assert len(taken) >= 5
    assert all(seq - older <= 5 for seq, (_, older) in enumerate(kept, 1) if older)
    now[0] += PULLED_S + 1
    relay.offer(read(WeightsHeader, message((1, 99), 1.0).header), encode_weights(FLEET, (1, 99), state(1.0)))
    assert relay._pulled is None, "nobody pulls any more"


def test_a_pull_keeps_several_pieces_in_flight() -> None:
    relay, receiver = pieces_of((1, 1), 1.0, 3_000_000)
    first = receiver.requests(1.0)
    assert [pull.offset for pull in first] == [0]
    assert receiver.requests(1.0) == []
    receiver.receive(decode(relay.part(first[0])), 1.0)
    asked = receiver.requests(1.0)
    assert [pull.offset >> 20 for pull in asked] == list(range(1, 1 + PIECES_IN_FLIGHT))
    receiver.receive(decode(relay.part(asked[0])), 1.0)
    assert [pull.offset >> 20 for pull in receiver.requests(1.0)] == [1 + PIECES_IN_FLIGHT]


def test_lost_pieces_are_requested_again_and_duplicates_do_no_harm() -> None:
    relay, receiver = pieces_of((1, 1), 1.0, 3_000_000)
    receiver.receive(decode(relay.part(receiver.requests(1.0)[0])), 1.0)
    lost = receiver.requests(1.0)
    for now in (1.0 + PULL_RETRY_S, 1.1 + PULL_RETRY_S):
        while asked := receiver.requests(now):
            for pull in asked + lost:
                receiver.receive(decode(relay.part(pull)), now)
    taken = receiver.take()
    assert taken is not None
    assert np.array_equal(taken.arrays["w"], state(1.0, 3_000_000)["w"])


def test_a_piece_is_encoded_once_for_all_workers() -> None:
    relay, receiver = pieces_of((1, 1), 1.0, LARGE)
    (pull,) = receiver.requests(1.0)
    assert relay.part(pull) is relay.part(pull)
    odd = WeightsPull(version=(1, 1), offset=7, length=4 << 20)
    assert relay.part(odd) is relay.part(pull)  # copies would be as many as a peer likes to ask for


def test_a_pulled_version_is_copied_once_at_either_end() -> None:
    relay, receiver = pieces_of((1, 1), 1.0, 3_000_000)
    nbytes = 12_000_000
    tracemalloc.start()
    try:
        while asked := receiver.requests(1.0):
            for pull in asked:
                receiver.receive(decode(relay.part(pull)), 1.0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert receiver.take() is not None
    assert peak < 2.2 * nbytes, "the relay's copy and the receiver's"


def test_the_receiver_allocates_nothing_for_an_impossibly_large_version() -> None:
    receiver = WeightsReceiver(FLEET)
    part = WeightsPart(version=(1, 1), offset=0, frame_sizes=[1 << 40])
    receiver.receive(decode(encode(MessageKind.WEIGHTS_PART, part.model_dump(), {"part": np.zeros(9, np.uint8)})), 1.0)
    assert not receiver.pulling


def test_a_version_for_which_there_is_no_memory_is_not_pulled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    relay, receiver = pieces_of((1, 2), 2.0, LARGE)
    monkeypatch.setattr("headrace.workers.fleet.weights.free_memory", lambda: 2_000_000.0)
    (pull,) = receiver.requests(1.0)
    receiver.receive(decode(relay.part(pull)), 1.0)
    assert not receiver.pulling
    assert re.search(r"weights \(1, 2\) of 280\d+ bytes; 2000000 of memory are left", caplog.text)
    monkeypatch.undo()
    for now in range(9):
        for pull in receiver.requests(now):
            receiver.receive(decode(relay.part(pull)), now)
    assert receiver.newest == (1, 2), "it is asked for again"


def test_weights_for_whose_copy_there_is_no_memory_are_refused(
    broker: BrokerThread, publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SharedWeights, "_put", lambda *_: None)
    monkeypatch.setattr("headrace.learner_stub.publishing.publisher.free_memory", lambda: 2_000_000.0)
    with pytest.raises(EncodeError, match="weights of 2 MiB cannot be copied; 2 MiB of memory are left"):
        publisher.publish(state(1.0, LARGE))
    assert publisher.publish(state(1.0)) == 1
    acknowledge(publisher)


def test_changed_frame_sizes_restart_the_pull() -> None:
    relay, receiver = pieces_of((1, 1), 1.0, LARGE)
    (pull,) = receiver.requests(1.0)
    wrong = WeightsPart(version=(1, 1), offset=0, frame_sizes=[9_999]).model_dump()
    receiver.receive(decode(encode(MessageKind.WEIGHTS_PART, wrong, {"part": np.zeros(9, np.uint8)})), 1.0)
    receiver.receive(decode(relay.part(pull)), 1.0)
    while asked := receiver.requests(1.0):
        for pull in asked:
            receiver.receive(decode(relay.part(pull)), 1.0)
    assert receiver.newest == (1, 1)


def test_a_batch_reaches_the_learner_with_its_weights_label(
    broker: BrokerThread, publisher: WeightPublisher, start_feeder: StartFeeder
) -> None:
    """The broker knows from headers alone what each batch was sampled with."""
    feeder = start_feeder(broker.endpoints.worker, Envs().fragments(2))
    wait_until(lambda: feeder.session.accepted == 2, "two batches")
    with EpisodeStream(broker.endpoints.learner) as stream:
        for batch in batches_of(stream, feeder.all_settled):
            assert batch.learner_epoch == 0
