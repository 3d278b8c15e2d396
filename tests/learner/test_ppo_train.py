"""The training loop: no batch is committed before the checkpoint has it, and a kill at any moment changes nothing."""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from headrace.learner_stub.checkpoints.checkpoint import Checkpoint, load_checkpoint
from headrace.learner_stub.reference import training
from headrace.learner_stub.reference.policies import DEFAULT_MODULE, FrozenPolicy, LearnerPolicies
from headrace.learner_stub.reference.ppo import PPO
from headrace.learner_stub.reference.training import _position_in, gather, run_learner, train
from headrace.learner_stub.rollouts.connector_merger import ConnectorMerger
from headrace.learner_stub.rollouts.interruption import AbandonedUpdateError
from headrace.learner_stub.rollouts.module import TrainableModule
from headrace.learner_stub.streaming import stream
from headrace.schemas.basics.stop_event import stop_event
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.errors import CheckpointError, ModuleError, UnreachableError
from headrace.schemas.settings.config import FleetConfig, LearnerSection, WorkerSection
from support.ports import free_port

pytestmark = pytest.mark.long

MakeBatch = Callable[..., ChunkBatch]
NewModule = Callable[[], TrainableModule]

SETTINGS = LearnerSection(steps_per_update=64, epochs=2, minibatch_size=32)
UPDATES = 4


class Killed(BaseException):
    """A `kill -9` in a test: passes through everything."""


class Broker:
    """Keeps every batch until it is committed, and counts calls so that the learner can be killed at the n-th."""

    def __init__(self, batches: list[ChunkBatch]) -> None:
        self.batches = batches
        self.committed = 0
        self.calls: list[str] = []
        self.kill_at = -1

    def called(self, name: str) -> None:
        self.calls.append(name)
        if len(self.calls) == self.kill_at:
            raise Killed


class Link:
    """Stream and publisher of one learner's life. Sets `stopping` when every batch was handed out and trained on."""

    def __init__(self, broker: Broker, epoch: int, position: list[dict[str, Any]], stopping: threading.Event) -> None:
        self.broker, self.epoch, self.stopping = broker, epoch, stopping
        self.taken = max(broker.committed, position[0]["seq"] if position else 0)
        self.published: list[Mapping[str, Any]] = []
        self.logged: list[Mapping[str, float]] = []
        self.exhausted = True
        self.waits_s: list[float] = []

    def next(self, timeout_s: float) -> ChunkBatch | None:
        if self.taken == len(self.broker.batches):
            self.stopping.set()
            self.waits_s.append(timeout_s)
            return None
        self.broker.called("next")
        self.taken += 1
        return self.broker.batches[self.taken - 1]

    def position(self) -> list[dict[str, Any]]:
        self.broker.called("position")
        return [{"seq": self.taken}]

    def commit(self) -> None:
        self.broker.called("commit")
        self.broker.committed = self.taken
        self.broker.called("committed")

    def publish(self, state_dict: Mapping[str, Any], *, allow_non_finite: bool = False) -> int:
        self.broker.called("publish")
        self.published.append(state_dict)
        return len(self.published)

    def log(self, metrics: Mapping[str, float]) -> None:
        self.logged.append(metrics)


def _live(broker: Broker, epoch: int, policies: LearnerPolicies, path: Path) -> tuple[LearnerPolicies, Link]:
    """One life of a learner, from its checkpoint on, as `run_learner` does it."""
    stopping = threading.Event()
    saved = load_checkpoint(path)
    if saved:
        policies.set_state(saved.state, saved.arrays)
    link = Link(broker, epoch, saved.position if saved else [], stopping)
    train(policies, SETTINGS.steps_per_update, link, link, path, stopping)
    return policies, link


def _batches(make_batch: MakeBatch, modules: Sequence[str] = (DEFAULT_MODULE,)) -> list[ChunkBatch]:
    """Return batches of each module in turn. Each says that its connector has seen one row."""
    plain = [make_batch([20, 12], [ChunkEnd.TERMINATED, ChunkEnd.ONGOING], seed=seed) for seed in range(2 * UPDATES)]
    seen = {"count": np.array(1.0), "m2": np.array(0.0)}
    return [
        replace(
            batch,
            modules=(modules[i % len(modules)],),
            connector_update={
                f"env_to_module/0.MeanStd/obs/{name}": array for name, array in {**seen, "mean": np.array(i)}.items()
            },
        )
        for i, batch in enumerate(plain)
    ]


def _policies(new_module: NewModule, modules: Sequence[str] = (DEFAULT_MODULE,)) -> LearnerPolicies:
    """All trained, except a last one of several."""
    *trained, last = (PPO(new_module(), SETTINGS) for _ in modules)
    by_id: list[Any] = [*trained, FrozenPolicy(new_module()) if trained else last]  # type: ignore[arg-type]
    mergers = {module_id: ConnectorMerger(["headrace.workers.connectors:MeanStd"]) for module_id in modules}
    return LearnerPolicies(dict(zip(modules, by_id, strict=True)), mergers)


def test_each_update_is_checkpointed_then_committed_then_published(
    make_batch: MakeBatch, new_module: NewModule, tmp_path: Path
) -> None:
    broker = Broker(_batches(make_batch))
    learner, link = _live(broker, 1, _policies(new_module), tmp_path / "c")
    update = ["next", "next", "position", "commit", "committed", "publish"]
    assert broker.calls == ["position", "publish", *update * UPDATES]
    assert learner.updates == UPDATES
    assert len(link.published) == UPDATES + 1


@pytest.mark.one_in(3)
@pytest.mark.parametrize("modules", [(DEFAULT_MODULE,), ("one", "two"), ("one", "two", "frozen")])
def test_a_kill_at_any_call_ends_in_the_same_state_as_no_kill(
    modules: Sequence[str], make_batch: MakeBatch, new_module: NewModule, tmp_path: Path
) -> None:
    whole = Broker(_batches(make_batch, modules))
    expected, _ = _live(whole, 1, _policies(new_module, modules), tmp_path / "whole")
    state, arrays = expected.get_state()
    counts = [float(array) for name, array in arrays.items() if name.endswith("MeanStd/obs/count")]
    assert (len(counts), sum(counts)) == (len(modules), len(whole.batches))
    for kill_at in range(1, len(whole.calls) + 1):
        broker = Broker(_batches(make_batch, modules))
        broker.kill_at = kill_at
        path = tmp_path / f"killed-{kill_at}"
        with pytest.raises(Killed):
            _live(broker, 1, _policies(new_module, modules), path)
        learner, _ = _live(broker, 2, _policies(new_module, modules), path)
        own_state, own_arrays = learner.get_state()
        assert own_state == state, kill_at
        assert own_arrays.keys() == arrays.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(own_arrays[name], array, err_msg=f"{kill_at}: {name}")


class _Stops:
    """Has the learner's next life stop at the n-th forward pass of its module, with no time left."""

    def __init__(self, module: TrainableModule, n: int, finish_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stopping: threading.Event | None = None
        self.left, self._forward = n, module.forward_train
        monkeypatch.setattr(training, "_SHORT_S", 0.0)
        monkeypatch.setattr(training, "_FINISH_S", finish_s)
        monkeypatch.setattr(module, "forward_train", self)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        self.left -= 1
        if self.left == 0 and self.stopping is not None:
            self.stopping.set()
        return self._forward(batch)


def _stopped_life(
    broker: Broker, path: Path, module: TrainableModule, stops: _Stops, *, synchronous: bool
) -> LearnerPolicies:
    stops.stopping = threading.Event()
    link = Link(broker, 1, [], stops.stopping)
    policies = _policies(lambda: module)
    train(policies, SETTINGS.steps_per_update, link, link, path, stops.stopping, synchronous=synchronous)
    return policies


def test_a_stop_ends_the_running_update_early_and_shortens_later_updates(
    make_batch: MakeBatch, new_module: NewModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update is one pass without gradients and four minibatches; the second one stops after its second minibatch."""
    broker, module = Broker(_batches(make_batch)), new_module()
    stops = _Stops(module, 5 + 3, 100.0, monkeypatch)
    learner = _stopped_life(broker, tmp_path / "c", module, stops, synchronous=False)
    assert 5 + 3 - stops.left == 5 + 3 + 2 + 2
    assert (learner.updates, learner.steps) == (UPDATES, sum(batch.steps for batch in broker.batches))
    saved = load_checkpoint(tmp_path / "c")
    assert saved is not None
    assert saved.position == [{"seq": broker.committed}] == [{"seq": len(broker.batches)}]


@pytest.mark.parametrize(("forward", "synchronous"), [(1, False), (1, True), (3, True)])
def test_a_stop_abandons_a_synchronous_update_or_one_without_a_training_step(
    forward: int,
    synchronous: bool,
    make_batch: MakeBatch,
    new_module: NewModule,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next life repeats the abandoned update and ends in the same state as without a stop."""
    whole, _ = _live(Broker(_batches(make_batch)), 1, _policies(new_module), tmp_path / "whole")
    broker, module = Broker(_batches(make_batch)), new_module()
    stops = _Stops(module, 5 + forward, 0.0, monkeypatch)
    with pytest.raises(AbandonedUpdateError):
        _stopped_life(broker, tmp_path / "c", module, stops, synchronous=synchronous)
    assert broker.committed == 2
    monkeypatch.undo()
    after, _ = _live(broker, 2, _policies(new_module), tmp_path / "c")
    (state, arrays), (expected_state, expected) = after.get_state(), whole.get_state()
    assert state == expected_state
    for name, array in expected.items():
        np.testing.assert_array_equal(arrays[name], array, err_msg=name)


def test_a_stop_while_gathering_returns_the_batches_gathered_so_far(make_batch: MakeBatch) -> None:
    stopping = threading.Event()
    link = Link(Broker([make_batch([20], [ChunkEnd.ONGOING])]), 1, [], stopping)
    assert [batch.steps for batch in gather(link, 64, stopping)] == [20]
    assert gather(link, 64, stopping) == []
    assert link.broker.committed == 0


@pytest.mark.parametrize(("exhausted", "looks"), [(True, 1), (False, 10)])
def test_a_stopped_learner_waits_for_a_last_batch_only_while_one_may_come(exhausted: bool, looks: int) -> None:
    link = Link(Broker([]), 1, [], threading.Event())
    link.exhausted = exhausted
    assert gather(link, 64, link.stopping) == []
    assert len(link.waits_s) >= looks


def test_gather_takes_whole_batches_until_there_are_enough_steps(make_batch: MakeBatch) -> None:
    batches = [make_batch([30], [ChunkEnd.ONGOING]) for _ in range(5)]
    gathered = gather(Link(Broker(batches), 1, [], threading.Event()), 64, threading.Event())
    assert gathered == batches[:3]


def test_the_checkpoint_of_another_module_is_refused_by_name(
    make_batch: MakeBatch, new_module: NewModule, tmp_path: Path
) -> None:
    path = tmp_path / "c"
    _live(Broker(_batches(make_batch)), 1, _policies(new_module), path)
    saved = load_checkpoint(path)
    assert saved is not None
    other = LearnerPolicies({DEFAULT_MODULE: PPO(torch.nn.Linear(2, 2), SETTINGS)})  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="does not fit the modules"):
        training._resume(other, saved, path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_second_stop_signal_goes_to_the_previous_handler(number: signal.Signals) -> None:
    heard: list[int] = []
    before = signal.signal(number, lambda n, _: heard.append(n))
    try:
        with stop_event() as stopping:
            assert not stopping.is_set()
            signal.raise_signal(number)
            assert stopping.is_set()
            assert heard == []
            signal.raise_signal(number)
            assert heard == [number]
    finally:
        signal.signal(number, before)


def test_the_learner_waits_for_its_first_broker_as_long_as_the_setting_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "SAY_WAITING_S", 0.2)
    caplog.set_level(logging.INFO)
    endpoint, config = f"tcp://127.0.0.1:{free_port()}", FleetConfig(worker=WorkerSection(connect_timeout_s=1.0))
    with pytest.raises(UnreachableError, match=f"no broker answers at {endpoint} after 1 s"):
        run_learner(config, endpoint=endpoint, run_dir=tmp_path)
    said = rf"no broker answers at {re.escape(endpoint)} after [01] s; check that it runs .* \(waits for at most 1 s\)"
    assert re.search(said, caplog.text)


def test_the_position_in_a_checkpoint_of_another_fleet_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """In another fleet the same numbers mean other batches."""
    place = {"slot": 0, "incarnation": 1, "settled": {"seq": 3}, "fleet_id": "ours"}
    saved = Checkpoint(1, [place], {}, {})
    for fleet_ids in ({"ours"}, {""}):
        assert _position_in(fleet_ids, saved) == [place]
    assert not caplog.records
    assert _position_in({"theirs"}, saved) == []
    assert "the checkpoint was written in another fleet" in caplog.text


def test_an_update_that_makes_weights_nan_ends_the_learner_and_the_last_finite_checkpoint_stays(
    make_batch: MakeBatch, new_module: NewModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer that is infinite from the start is meant."""
    module = new_module()
    cast(torch.nn.Module, module).register_buffer("mask", torch.tensor([0.0, -np.inf]))
    merger = ConnectorMerger(["headrace.workers.connectors:MeanStd"])
    policies = LearnerPolicies({DEFAULT_MODULE: PPO(module, SETTINGS)}, {DEFAULT_MODULE: merger})
    update = policies.update

    def third_is_nan(*args: Any) -> Any:
        metrics = update(*args)
        if policies.updates == 3:
            with torch.no_grad():
                list(module.parameters())[-1].view(-1)[0] = np.nan
        return metrics

    monkeypatch.setattr(policies, "update", third_is_nan)
    broker, path = Broker(_batches(make_batch)), tmp_path / "checkpoint"
    says = r"update 3 has made weights that are not finite \(.*loss = .*the checkpoint stays that of the update before"
    with pytest.raises(ModuleError, match=says):
        _live(broker, 1, policies, path)
    saved = load_checkpoint(path)
    assert saved is not None
    assert saved.state["updates"] == 2
    assert not any(np.isnan(array).any() for array in saved.arrays.values())
    assert broker.committed == 4, "the batches of two updates"
