"""Weights that no worker can load: the learner gets an error with the reason, and workers keep the old weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.broker.core import BrokerCore
from headrace.broker.limits import BrokerLimits
from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.schemas.chunks.spaces import Box, Discrete, Spaces
from headrace.schemas.errors import RefusedWeightsError, WeightsMismatchError, WhichModuleError
from headrace.schemas.messages import LearnerHello, LearnerWelcome, Status, WorkerHello, tellable_shapes
from headrace.schemas.messages.weights import check_published
from support.pipeline.delivery import BrokerThread
from support.pipeline.worker_threads import SAMPLING, WorkerThread, constant_value
from support.waiting import TIMEOUT_S, wait_until

SECTIONS: dict[str, Any] = {"sampling": SAMPLING, "worker": {"drain_timeout_s": 1.0}}
CART_POLE = Spaces(observation=Box(shape=(4,), dtype="<f4"), action=Discrete(n=2))
STRANGE_CONNECTOR = {"connectors/env_to_module/0.MeanStd/obs/count": np.ones(1)}
StartWorker = Callable[[], WorkerThread]


@pytest.fixture
def stream(broker: BrokerThread, stack: ExitStack) -> EpisodeStream:
    return stack.enter_context(EpisodeStream(broker.endpoints.learner))


@pytest.fixture
def start_worker(
    broker: BrokerThread, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> StartWorker:
    return lambda: stack.enter_context(WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, SECTIONS))


def _seq(stream: EpisodeStream) -> int:
    batch = stream.next(TIMEOUT_S)
    assert batch is not None
    return int(batch.columns["weights_seq"][-1])


def _pump(publisher: WeightPublisher) -> bool:
    publisher.pump(0.05)
    return False


def test_unfit_weights_raise_at_once_and_workers_keep_the_old_weights(
    stream: EpisodeStream, publisher: WeightPublisher, start_worker: StartWorker
) -> None:
    worker = start_worker()
    fit = constant_value(stream.spaces(timeout_s=TIMEOUT_S), 1.0)
    assert publisher.publish(fit) == 1
    unfit = {**fit, "head.bias": np.zeros(7, np.float32), "extra": np.zeros(1)}
    name = next(name for name in fit if name.endswith("weight"))
    del unfit[name]
    with pytest.raises(WeightsMismatchError, match="worker and learner must build the same module") as caught:
        publisher.publish(unfit)
    assert (caught.value.missing, caught.value.unknown) == ([name], ["extra"])
    assert caught.value.shapes == {"head.bias": ((7,), fit["head.bias"].shape)}
    assert _seq(stream) == 1
    assert publisher.publish(fit) == 2, "nothing of it was published"
    wait_until(lambda: _seq(stream) == 2, "a batch of the next weights")
    assert worker.is_alive
    worker.check()


def test_a_publisher_knows_the_shapes_as_soon_as_the_stream_of_its_process_does(
    stream: EpisodeStream, publisher: WeightPublisher, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher._brokers[0].link, "receive", lambda: None)
    start_worker()
    stream.spaces(timeout_s=TIMEOUT_S)
    with pytest.raises(WeightsMismatchError):
        publisher.publish({"w": np.zeros(3)})


def test_a_workers_refusal_of_weights_reaches_the_learner(
    stream: EpisodeStream, publisher: WeightPublisher, start_worker: StartWorker
) -> None:
    """The weights have state of a connector that the worker lacks. The error comes once and blocks no newer weights."""
    worker = start_worker()
    fit = constant_value(stream.spaces(timeout_s=TIMEOUT_S), 1.0)
    publisher.publish(fit)
    assert _seq(stream) == 1

    def publish_and_listen() -> None:  # on a slow machine the worker's word is there before `publish` returns
        publisher.publish({**fit, **STRANGE_CONNECTOR})
        wait_until(lambda: _seq(stream) != 1, "never")

    with pytest.raises(RefusedWeightsError, match=r"worker 0 cannot load weights \(1, 2\)") as caught:
        publish_and_listen()
    assert (caught.value.version, caught.value.slot) == ((1, 2), 0)
    assert {_seq(stream) for _ in range(20)} == {1}
    publisher.publish(fit)
    wait_until(lambda: _seq(stream) == 3, "a batch of the next weights")
    worker.check()


def test_the_first_worker_refuses_unfit_weights_that_were_published_before_it(
    stream: EpisodeStream, publisher: WeightPublisher, start_worker: StartWorker
) -> None:
    fit = constant_value(CART_POLE, 1.0)
    publisher.publish({"w": np.zeros(3)})
    worker = start_worker()
    with pytest.raises(RefusedWeightsError, match="unknown"):
        wait_until(lambda: _pump(publisher), "never")
    publisher.publish(fit)
    wait_until(lambda: _seq(stream) == 2, "a batch of the next weights")
    worker.check()


SHAPES = {"one": {"w": (2, 3)}, "two": {"v": (4,)}}


def _arrays(**shapes: tuple[int, ...]) -> dict[str, NDArray[Any]]:
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def test_weights_of_several_modules_are_checked_by_module() -> None:
    check_published({"modules/one/w": np.zeros((2, 3))}, SHAPES)
    check_published({"modules/one/connectors/x": np.zeros(9)}, SHAPES)
    check_published(_arrays(w=(2, 3)), {"one": SHAPES["one"]})
    with pytest.raises(WeightsMismatchError, match="module 'two'"):
        check_published({"modules/two/v": np.zeros(5)}, SHAPES)
    with pytest.raises(WhichModuleError):
        check_published({"modules/three/v": np.zeros(5)}, SHAPES)
    with pytest.raises(WhichModuleError):
        check_published(_arrays(w=(2, 3)), SHAPES)


def test_weight_shapes_too_large_for_a_message_are_left_out() -> None:
    assert tellable_shapes(SHAPES) == {"one": {"w": [2, 3]}, "two": {"v": [4]}}
    assert tellable_shapes({"one": {str(n): (1,) for n in range(2000)}}) == {}
    assert tellable_shapes({"one": {"x" * 300: (1,)}}) == {}
    assert tellable_shapes({"one": {f"{n:0200}": (1,) for n in range(400)}}) == {}


# -- what the broker tells --------------------------------------------------------------------------------------------


class _Told:
    """A broker's core, and what it tells the connections of a learner about shapes."""

    def __init__(self) -> None:
        self.core = BrokerCore("f", BrokerLimits(heartbeat_interval_s=1.0))
        self.now = 0.0

    def worker(self, peer: bytes, slot: int, shapes: dict[str, dict[str, list[int]]]) -> None:
        hello = WorkerHello(fleet_id="f", token=f"{slot}", slot=slot, incarnation=1, weight_shapes=shapes)
        self.core.receive(peer, hello, self.now)

    def learner(self, peer: bytes, channel: Any) -> dict[str, dict[str, list[int]]]:
        """Say HELLO; return the shapes in the WELCOME."""
        self.core.receive(peer, LearnerHello(token="learner", channel=channel), self.now)
        sends = [send.content for send in self.core.take_outbox() if send.peer == peer]
        (welcome,) = [message for message in sends if isinstance(message, LearnerWelcome)]
        return welcome.weight_shapes

    def heartbeat(self) -> dict[bytes, Status]:
        """Advance to the next heartbeat; return it by connection."""
        self.now += 1.0
        self.core.tick(self.now)
        return {send.peer: send.content for send in self.core.take_outbox() if isinstance(send.content, Status)}


def test_heartbeats_carry_weight_shapes_only_when_they_are_new() -> None:
    """With a thousand names a heartbeat has 26,074 bytes, without them 177."""
    told, many = _Told(), {"one": {f"layer{n}.weight": [64, 64] for n in range(1000)}}
    assert told.learner(b"s", "stream") == {}
    assert told.learner(b"p", "publisher") == {}
    told.worker(b"w", 0, many)
    assert {peer: status.weight_shapes for peer, status in told.heartbeat().items()} == {b"s": many, b"p": many}
    later = told.heartbeat()
    assert {peer: status.weight_shapes for peer, status in later.items()} == {b"s": {}, b"p": {}}
    assert sum(map(len, later[b"p"].frames())) < 500

    told.worker(b"w", 0, {"one": {"w": [2]}})
    assert told.heartbeat()[b"p"].weight_shapes == {"one": {"w": [2]}}, "they have changed"
    assert told.learner(b"p2", "publisher") == {"one": {"w": [2]}}, "a new connection was not told"
    assert {peer: status.weight_shapes for peer, status in told.heartbeat().items()} == {b"s": {}, b"p2": {}}
    assert told.learner(b"p2", "publisher") == {"one": {"w": [2]}}, "one that says HELLO again may have lost them"
