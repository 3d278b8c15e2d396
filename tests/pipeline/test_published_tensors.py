"""Tensors of any dtype and under any wrapper: a worker acts with exactly what the learner published."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.learner_stub.publishing.publisher import array_views
from headrace.schemas.basics.tensor_array import BIT_DTYPES, bits_of, tensor_of, widened
from headrace.schemas.chunks.spaces import Box, Discrete, Spaces
from headrace.schemas.errors import DecodeError, EncodeError, NotFiniteError
from headrace.schemas.frames.wire import MessageKind, decode, encode
from headrace.schemas.messages.shared_weights import SharedWeights
from headrace.schemas.messages.weights import encode_weights, unwrapped
from headrace.workers.modules import actor_critic, lstm_actor_critic
from support.pipeline.delivery import BrokerThread
from support.pipeline.worker_threads import SAMPLING, WorkerThread
from support.waiting import TIMEOUT_S, wait_until

CART_POLE = Spaces(observation=Box(shape=(4,), dtype="<f4"), action=Discrete(n=2))
WITH_BITS = [name for name in BIT_DTYPES if hasattr(torch, name)]
FLOATS = ["float64", "float32", "float16", *WITH_BITS]
BUILT: list[nn.Module] = []
"""The modules of this test's workers, which run in threads of this process."""


def build(
    spaces: Spaces, *, dtype: str = "float32", kind: str = "mlp", ballast: int = 0, tied: bool = False
) -> nn.Module:
    """The default policy in `dtype`, with weights beside it that take no part."""
    module: nn.Module = (lstm_actor_critic if kind == "lstm" else actor_critic)(spaces, seed=3)
    module = module.to(getattr(torch, dtype)) if dtype in ("float16", "bfloat16") else module
    module.register_buffer("extra", torch.zeros(6 + ballast).to(getattr(torch, dtype)))
    if tied:
        module.register_buffer("again", module.extra)  # type: ignore[arg-type]
    BUILT.append(module)
    return module


@pytest.fixture(autouse=True)
def _built() -> Iterator[None]:
    BUILT.clear()
    yield
    BUILT.clear()


@pytest.fixture
def stream(broker: BrokerThread, stack: ExitStack) -> EpisodeStream:
    return stack.enter_context(EpisodeStream(broker.endpoints.learner))


StartWorker = Callable[..., WorkerThread]


@pytest.fixture
def start_worker(
    broker: BrokerThread, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> StartWorker:
    def start(**config: Any) -> WorkerThread:
        sections = {"sampling": SAMPLING, "module": {"build": f"{__name__}:build", "config": config}}
        return stack.enter_context(WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, sections))

    return start


def all_bits(dtype: str) -> torch.Tensor:
    """A tensor with each bit pattern of a dtype of 8 or 16 bits that is a finite number."""
    bits = torch.arange(1 << 8 * getattr(torch, dtype).itemsize, dtype=torch.int32)
    bits = bits.to(torch.uint8 if len(bits) == 256 else torch.int16)
    return bits[bits.view(getattr(torch, dtype)).float().isfinite()].view(getattr(torch, dtype))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


def built_by_worker(learnt: nn.Module) -> nn.Module:
    (built,) = (module for module in BUILT if module is not learnt)
    return built


def next_of(stream: EpisodeStream, seq: int) -> Any:
    """The first batch whose last step is by weights `seq`."""

    def found() -> Any:
        batch = stream.next(TIMEOUT_S)
        return batch if batch is not None and batch.columns["weights_seq"][-1] == seq else None

    return wait_until(found, f"a batch of weights {seq}")


@pytest.mark.parametrize("way", ["small", "mapped", "pulled"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_worker_acts_with_the_bits_that_were_published(
    dtype: str, way: str, publisher: WeightPublisher, stream: EpisodeStream, start_worker: StartWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A module in the same dtype, by each way that weights travel. What leaves it is float32."""
    if way == "pulled":
        monkeypatch.setattr(SharedWeights, "_put", lambda *_: None)
    ballast = 0 if way == "small" else 400_000
    worker = start_worker(dtype=dtype, ballast=ballast)
    learnt = build(CART_POLE, dtype=dtype, ballast=ballast)
    with torch.no_grad():
        for parameter in learnt.parameters():
            parameter.add_(torch.randn(parameter.shape).to(parameter.dtype))
        learnt.extra.copy_(torch.arange(1, len(learnt.extra) + 1).remainder(7).exp2().to(learnt.extra.dtype))  # type: ignore[operator, arg-type, union-attr]
    given = learnt.state_dict()
    given["trunk.0.weight"] = given["trunk.0.weight"].T.contiguous().T
    assert not given["trunk.0.weight"].is_contiguous()
    publisher.publish(given)
    batch = next_of(stream, 1)
    assert {batch.columns[name].dtype for name in ("logp", "values")} == {np.dtype(np.float32)}
    assert batch.columns["actions"].dtype == np.int64
    own = built_by_worker(learnt).state_dict()
    assert {name for name in given if not same_bits(own[name], given[name])} == set()
    steps = int(batch.table["length"][0])
    with torch.no_grad():
        values = learnt.forward_train({"obs": torch.from_numpy(batch.arrays["obs"][:steps].copy())})["values"]  # type: ignore[operator]
    seen = batch.columns["values"][:steps]
    assert np.ptp(seen) > 0
    np.testing.assert_allclose(seen, values.float().numpy(), rtol=0.05, atol=0.05)
    worker.check()


@pytest.mark.parametrize(("own", "given"), [("float32", each) for each in FLOATS] + [("bfloat16", "float32")])
def test_a_worker_casts_to_the_dtype_of_its_module(
    own: str, given: str, publisher: WeightPublisher, stream: EpisodeStream, start_worker: StartWorker
) -> None:
    start_worker(dtype=own)
    learnt = build(CART_POLE, dtype=own)
    state = learnt.state_dict()
    state["extra"] = (torch.tensor([1.0, 0.5, 2.0, 4.0, 0.25, 1.0]) / 3).to(getattr(torch, given))
    publisher.publish(state)
    next_of(stream, 1)
    assert same_bits(built_by_worker(learnt).extra, state["extra"].to(getattr(torch, own)))  # type: ignore[arg-type]


def test_a_recurrent_policy_acts_in_bfloat16(
    publisher: WeightPublisher, stream: EpisodeStream, start_worker: StartWorker
) -> None:
    try:
        nn.LSTM(1, 1).to(torch.bfloat16)(torch.ones(1, 1, dtype=torch.bfloat16))
    except RuntimeError as error:
        pytest.skip(f"torch {torch.__version__} on this processor: {error}")
    start_worker(dtype="bfloat16", kind="lstm")
    publisher.publish(build(CART_POLE, dtype="bfloat16", kind="lstm").state_dict())
    columns = next_of(stream, 1).arrays
    assert {columns[name].dtype for name in ("logp", "values", "state_in/h")} == {np.dtype(np.float32)}


def test_a_convolution_acts_in_float16() -> None:
    module = actor_critic(Spaces(observation=Box(shape=(8, 8, 1), dtype="|u1", low=0, high=255), action=Discrete(n=2)))
    answer = module.half().forward_inference({"obs": torch.zeros(3, 8, 8, 1, dtype=torch.uint8)})
    assert {answer["logp"].dtype, answer["values"].dtype} == {torch.float32}


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_is_refused_in_any_dtype(dtype: str, publisher: WeightPublisher) -> None:
    weights = torch.tensor([1.0, 2.0, torch.nan]).to(getattr(torch, dtype))
    with pytest.raises(NotFiniteError, match=r"the weights are not finite: 1 of 3 values of 'w' are NaN or infinite"):
        publisher.publish({"w": weights})
    assert publisher.publish({"w": weights}, allow_non_finite=True) == 1


def test_weights_that_are_not_finite_name_the_last_version_that_was_and_the_likely_cause(
    publisher: WeightPublisher,
) -> None:
    with pytest.raises(
        NotFiniteError, match=r"of 'w' are NaN or infinite; .* by the std\(\) of a minibatch of one step"
    ):
        publisher.publish({"w": torch.full((3,), torch.nan)})
    publisher.publish({"w": torch.ones(3)})
    publisher.publish({"w": torch.ones(3)})
    with pytest.raises(NotFiniteError, match=r"infinite since version 2 was published; the cause may be too large a"):
        publisher.publish({"w": torch.tensor([1.0, torch.inf, 1.0])})
    publisher.publish({"w": torch.full((3,), torch.inf)}, allow_non_finite=True)
    with pytest.raises(NotFiniteError, match=r"of 'w' are NaN or infinite; the cause"):
        publisher.publish({"w": torch.full((3,), torch.inf)})


@pytest.mark.parametrize("dtype", WITH_BITS)
def test_each_number_of_a_dtype_that_numpy_lacks_comes_back(dtype: str) -> None:
    tensor = all_bits(dtype)
    (array,) = decode(encode_weights("f", (1, 1), {"w": bits_of(tensor)})).arrays.values()
    assert array.nbytes == tensor.nbytes
    assert same_bits(tensor_of(array.copy()), tensor)
    np.testing.assert_array_equal(widened(array.copy()), tensor.float().numpy())


def test_bits_of_weights_are_refused_in_other_messages() -> None:
    """As readers before 1.1 refuse them in weights too."""
    frames = encode(MessageKind.BATCH, {}, {"w": bits_of(torch.ones(2, dtype=torch.bfloat16))})
    with pytest.raises(DecodeError, match="array 'w' has dtype 'bfloat16', which is not allowed"):
        decode(frames)


@pytest.mark.parametrize("size", [3_000, 300_000])
def test_tied_parameters_are_sent_once(
    size: int, broker: BrokerThread, publisher: WeightPublisher, stream: EpisodeStream, start_worker: StartWorker
) -> None:
    """By a socket, and by memory. A copy, a transposed view and another shape of the memory are sent by themselves."""
    start_worker(ballast=size - 6, tied=True)
    learnt = build(CART_POLE, ballast=size - 6, tied=True)
    learnt.extra.copy_(torch.arange(size))  # type: ignore[operator, union-attr]
    state, bytes_of = learnt.state_dict(), []
    for given in (state, {**state, "again": state["extra"].clone()}):
        publisher.publish(given)
        wait_until(lambda: publisher.pump(0.01) or publisher.acknowledged == (1, publisher.seq), "the broker's word")
        bytes_of.append(broker.ask(lambda b: sum(map(len, b.relay.frames))))
        next_of(stream, publisher.seq)
        assert same_bits(built_by_worker(learnt).extra, state["extra"])  # type: ignore[arg-type]
    assert abs(bytes_of[1] - bytes_of[0] - 4 * size) < 100
    square = torch.rand(3, 3)
    views = array_views(
        {"a": square, "b": square, "t": square.T, "r": square.view(9), "h": square[:2], "c": square.clone()}
    )
    assert len({id(array) for array in views.values()}) == 5


@pytest.mark.parametrize("name", ["extra", "again"])
@pytest.mark.parametrize("size", [3_000, 300_000])
def test_a_part_with_one_name_of_a_tied_parameter_changes_it_at_the_worker(
    size: int, name: str, broker: BrokerThread, publisher: WeightPublisher, stream: EpisodeStream,
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """`named_parameters()` names a tied parameter once. The part travels over sockets, and with both names."""
    monkeypatch.setattr("headrace.learner_stub.publishing.broker_weights.is_own_address", lambda endpoint: False)
    start_worker(ballast=size - 6, tied=True)
    learnt = build(CART_POLE, ballast=size - 6, tied=True)
    for value in (1.0, 2.0, 3.0):
        learnt.extra.fill_(value)  # type: ignore[operator, union-attr]
        publisher.publish({name: learnt.extra} if value > 1 else learnt.state_dict(), partial=value > 1)
        next_of(stream, publisher.seq)
        assert same_bits(built_by_worker(learnt).extra, learnt.extra)  # type: ignore[arg-type]
    held = decode(broker.ask(lambda b: b.relay.frames)).arrays
    assert held["extra"].ctypes.data == held["again"].ctypes.data, "sent once"
    publisher.publish({"extra": torch.zeros(size), "again": torch.ones(size)}, partial=True)
    next_of(stream, publisher.seq)
    held = decode(broker.ask(lambda b: b.relay.frames)).arrays
    assert (held["extra"].max(), held["again"].min()) == (0, 1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("wrap", ["compile", "compiled parts", "ddp", "ddp of compile", "compile of ddp"])
def test_names_of_a_wrapped_module_are_those_of_the_module(wrap: str, tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 1)))
    names, wrapped = list(module.state_dict()), module
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        if wrap == "compiled parts":
            module[1] = torch.compile(module[1])
        for kind in reversed(wrap.split(" of ")) if wrap != "compiled parts" else ():
            made: Any = torch.compile(wrapped) if kind == "compile" else nn.parallel.DistributedDataParallel(wrapped)
            wrapped = made
        state = dict(wrapped.state_dict())
    finally:
        torch.distributed.destroy_process_group()
    assert list(state) != names
    learnt = {"connectors/env_to_module/0.Mine/module.x": torch.ones(1)}
    assert list(unwrapped({**state, **learnt})) == [*names, *learnt]
    by_module = {f"modules/{m}/{name}": tensor for m in ("a", "b") for name, tensor in state.items()}
    assert list(unwrapped(by_module)) == [f"modules/{m}/{name}" for m in ("a", "b") for name in names]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_shards_are_refused_and_a_whole_state_of_shards_is_published(tmp_path: Path) -> None:
    from torch.distributed import fsdp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("torch before 2.6 has no fully_shard")
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        module, mesh = nn.Linear(2, 2), torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        weight = module.weight.detach().clone()
        fsdp.fully_shard(module, mesh=mesh)
        with pytest.raises(EncodeError, match="it is a shard; give get_model_state_dict"):
            array_views(module.state_dict())
        whole = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
        assert np.array_equal(array_views(whole)["weight"], weight.numpy())
    finally:
        torch.distributed.destroy_process_group()


def test_names_that_become_one_without_wrappers_are_refused(publisher: WeightPublisher) -> None:
    one = torch.ones(1)
    with pytest.raises(EncodeError, match=r"'_orig_mod\.w' and 'w' are both 'w' without wrappers' names"):
        publisher.publish({"_orig_mod.w": one, "w": one})
    assert list(unwrapped({"module.w": one, "v": one})) == ["module.w", "v"]
