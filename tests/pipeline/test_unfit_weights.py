"""Weights that no worker can load: the learner gets an error with the reason, and workers keep the old weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headrace.broker.batches.limits import BrokerLimits
from headrace.broker.sessions.core import BrokerCore
from headrace.learner_stub import EpisodeStream, WeightPublisher, save_policy
from headrace.schemas.basics.run_files import read_object
from headrace.schemas.chunks.spaces import Box, Discrete, Spaces
from headrace.schemas.errors import (
    EncodeError,
    ModuleError,
    NotFiniteError,
    RefusedWeightsError,
    WeightsMismatchError,
)
from headrace.schemas.messages import (
    LearnerHello,
    LearnerWelcome,
    Status,
    WorkerHello,
    tellable_shapes,
    tellable_weights,
)
from headrace.schemas.messages.weights import fit_published
from support.pipeline.delivery import BrokerThread
from support.pipeline.worker_threads import SAMPLING, WorkerThread, constant_value
from support.waiting import TIMEOUT_S, wait_until

SECTIONS: dict[str, Any] = {"sampling": SAMPLING}
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
    with pytest.raises(WeightsMismatchError, match="give worker and learner the same module") as caught:
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
    monkeypatch.setattr(publisher._brokers[0].link, "received", lambda: iter(()))
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


def test_weights_that_are_not_finite_are_refused_or_warned_of_once(
    stream: EpisodeStream,
    publisher: WeightPublisher,
    start_worker: StartWorker,
    caplog: pytest.LogCaptureFixture,
    subtests: pytest.Subtests,
) -> None:
    worker = start_worker()
    fit = constant_value(stream.spaces(timeout_s=TIMEOUT_S), 1.0)
    publisher.publish(fit)
    name = sorted(fit)[0]
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for value in (math.nan, math.inf, -math.inf):
            with subtests.test(dtype=dtype, value=value):
                bad = torch.as_tensor(fit[name]).to(dtype).clone()
                bad.view(-1)[-1] = value
                with pytest.raises(NotFiniteError, match=f"1 of {bad.numel():,} values of '{name}'") as caught:
                    publisher.publish({**fit, name: bad})
                assert (caught.value.name, caught.value.bad, caught.value.size) == (name, 1, bad.numel())
    with pytest.raises(NotFiniteError, match="connectors/"):
        publisher.publish({**fit, "connectors/env_to_module/0.Mine/low": np.array([-np.inf])})
    unused = {**fit, name: np.full_like(fit[name], np.nan)}
    assert [publisher.publish(unused, allow_non_finite=True) for _ in range(2)] == [2, 3]
    assert caplog.text.count(f"values of '{name}' are not finite") == 1
    wait_until(
        lambda: stream.next(0.01) is None and not worker.is_alive, "the worker ends by name, for these weights give NaN"
    )
    with pytest.raises(NotFiniteError, match=r"^with weights version [23] of learner epoch 1, the policy ActorCritic"):
        worker.check()


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_weights_under_the_names_of_a_wrapper_are_the_modules(
    prefix: str, stream: EpisodeStream, publisher: WeightPublisher, start_worker: StartWorker
) -> None:
    """No shapes are known for the first version. The second is of a module that is compiled in parts."""
    fit = constant_value(CART_POLE, 1.0)
    publisher.publish({prefix + name: tensor for name, tensor in fit.items()})
    worker = start_worker()
    assert _seq(stream) == 1
    publisher.publish({name.replace(".", f".{prefix}", 1): tensor for name, tensor in fit.items()})
    wait_until(lambda: _seq(stream) == 2, "a batch of the next weights")
    with pytest.raises(WeightsMismatchError, match=r"unknown \['w'\]"):
        publisher.publish({"_orig_mod.w": np.zeros(3, np.float32)})
    worker.check()


def test_numbers_of_another_kind_are_refused(
    stream: EpisodeStream, publisher: WeightPublisher, start_worker: StartWorker, subtests: pytest.Subtests
) -> None:
    """At once where a worker has told the kinds of its module; else by the worker."""
    fit = {name: torch.as_tensor(tensor) for name, tensor in constant_value(CART_POLE, 1.0).items()}
    publisher.publish({name: tensor.to(torch.int8) for name, tensor in fit.items()})
    worker = start_worker()
    with pytest.raises(RefusedWeightsError, match=r"is int8, the module's float32, and a cast would change"):
        wait_until(lambda: _pump(publisher), "never")
    publisher.publish({name: tensor.double() for name, tensor in fit.items()})
    wait_until(lambda: _seq(stream) == 2, "a batch of the next weights")
    for dtype in (torch.int8, torch.bool, torch.int64):
        with subtests.test(dtype=dtype), pytest.raises(WeightsMismatchError, match="the module's float, and a cast"):
            publisher.publish({name: tensor.to(dtype) for name, tensor in fit.items()})
    assert publisher.publish({name: tensor.bfloat16() for name, tensor in fit.items()}) == 3
    worker.check()


def test_the_first_version_in_another_kind_of_number_is_refused_at_once(
    stream: EpisodeStream, publisher: WeightPublisher, start_worker: StartWorker, subtests: pytest.Subtests
) -> None:
    worker = start_worker()
    fit = {
        name: torch.as_tensor(tensor)
        for name, tensor in constant_value(stream.spaces(timeout_s=TIMEOUT_S), 1.0).items()
    }
    for dtype in (torch.int8, torch.bool, torch.int64, torch.uint8):
        with subtests.test(dtype=dtype), pytest.raises(WeightsMismatchError, match="the module's float, and a cast"):
            publisher.publish({name: tensor.to(dtype) for name, tensor in fit.items()})
    with pytest.raises(WeightsMismatchError, match=r"'head\.bias' is int64, the module's float") as caught:
        publisher.publish(
            {f"module.{name}": tensor for name, tensor in {**fit, "head.bias": fit["head.bias"].long()}.items()}
        )
    assert caught.value.dtypes == {"head.bias": ("int64", "float")}
    assert publisher.seq == 0
    for seq, dtype in enumerate((torch.float16, torch.bfloat16, torch.float64, torch.float32), 1):
        assert publisher.publish({name: tensor.to(dtype) for name, tensor in fit.items()}) == seq
    wait_until(lambda: _seq(stream) == 4, "a batch of the last weights")
    worker.check()


def test_what_is_no_state_dict_is_refused_by_name(publisher: WeightPublisher, subtests: pytest.Subtests) -> None:
    module = torch.nn.Linear(2, 1)
    eye = torch.eye(2)
    refused: dict[str, tuple[Any, str]] = {
        "a module": (module, r"^Linear is no state dict; give module.state_dict\(\)"),
        "modules by id": ({"one": module}, r"give its state_dict\(\)"),
        "an optimizer": (torch.optim.Adam(module.parameters()).state_dict(), "of an optimizer"),
        "a list": ([eye], "^list is no state dict"),
        "sparse": ({"w": eye.to_sparse()}, "tensor 'w'"),
        "meta": ({"w": eye.to("meta")}, "tensor 'w' .* on the device \"meta\" and has no numbers"),
        "one name twice": (
            {"_orig_mod.w": eye, "w": eye},
            "'_orig_mod.w' and 'w' are both 'w' without wrappers' names",
        ),
        "masked": ({"w": np.ma.array([1.0, 2.0], mask=[True, False])}, "'w' is of type MaskedArray; only tensors"),
        "complex": ({"w": eye.to(torch.complex64)}, "'w' has dtype complex64"),
    }
    for kind, (given, says) in refused.items():
        with subtests.test(kind), pytest.raises(EncodeError, match=says):
            publisher.publish(given)
    tied = torch.ones(3, 2, requires_grad=True)
    assert publisher.publish({"a": tied, "b": tied, "c": tied.T, "d": torch.tensor(1.0), "e": torch.ones(0)}) == 1


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
    fit_published({"modules/one/w": np.zeros((2, 3))}, SHAPES)
    fit_published({"modules/one/connectors/x": np.zeros(9)}, SHAPES)
    fit_published(_arrays(w=(2, 3)), {"one": SHAPES["one"]})
    with pytest.raises(WeightsMismatchError, match="module 'two'"):
        fit_published({"modules/two/v": np.zeros(5)}, SHAPES)
    with pytest.raises(ModuleError, match="this fleet's modules are"):
        fit_published({"modules/three/v": np.zeros(5)}, SHAPES)
    with pytest.raises(ModuleError, match="this fleet's modules are"):
        fit_published(_arrays(w=(2, 3)), SHAPES)


KINDS = {"one": {"w": "float32", "n": "int64", "on": "bool"}}


@pytest.mark.parametrize(
    ("dtypes", "refused"),
    [
        ({}, {}),
        ({"w": "float16", "n": "uint8"}, {}),
        ({"w": "float64", "n": "int32"}, {}),
        ({"w": "int64"}, {"w": ("int64", "float")}),
        ({"n": "float32"}, {"n": ("float32", "int")}),
        ({"n": "bool", "on": "uint8"}, {"n": ("bool", "int"), "on": ("uint8", "bool")}),
    ],
)
def test_kinds_of_number_are_checked_by_what_workers_tell(dtypes: Any, refused: Any) -> None:
    """Averaged weights have floats for a counter, for example."""
    told = tellable_weights({"one": {name: np.zeros(2, dtype) for name, dtype in KINDS["one"].items()}})
    assert told == {"weight_shapes": {"one": {"w": [2], "n": [2], "on": [2]}}, "weight_kinds": {"one": "fib"}}
    given = {name: np.zeros(2, dtype) for name, dtype in {**KINDS["one"], **dtypes}.items()}
    seen = {}
    try:
        fit_published(given, *told.values())
    except WeightsMismatchError as error:
        seen = error.dtypes
    assert seen == refused
    for unknown in ({}, {"one": ""}, {"one": "???"}, {"two": "fib"}):
        fit_published(given, told["weight_shapes"], unknown)


def test_a_save_is_checked_against_what_workers_told_also_once_they_are_gone(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, SECTIONS):
        wait_until(lambda: read_object(tmp_path / "broker.json")["weight_shapes"], "the broker to note the weights")
    wait_until(lambda: not broker.ask(lambda its: its.core.weights_told), "the worker to be gone")
    fit = constant_value(CART_POLE, 1.0)
    with pytest.raises(WeightsMismatchError, match=r"nothing is saved to .*missing \[\], unknown \['extra'\]"):
        save_policy(tmp_path, {**fit, "extra": np.zeros(1)})
    assert save_policy(tmp_path, fit).exists()


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


def test_a_learner_hears_the_kinds_of_number_of_weights_with_their_shapes() -> None:
    """No more letters than tensors: a worker may claim a million."""
    told, shapes = _Told(), {"one": {"w": [2], "n": []}, "two": {"v": [1]}}
    hello = WorkerHello(fleet_id="f", token="0", slot=0, incarnation=1, weight_shapes=shapes)
    told.core.receive(b"w", hello.model_copy(update={"weight_kinds": {"one": "fi" + "f" * 999, "x": "f"}}), told.now)
    told.learner(b"p", "publisher")
    status = told.heartbeat()[b"p"]
    assert (status.weight_shapes, status.weight_kinds) == (shapes, {"one": "fi", "two": ""})
    assert told.heartbeat()[b"p"].weight_kinds == {}
    told.core.receive(b"w", hello, told.now)
    assert told.heartbeat()[b"p"].weight_kinds == {"one": "", "two": ""}, "a worker before 1.1 does not tell"


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
