"""A fleet of two modules over real sockets: batches and weights by module, and crashes of worker and broker."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.broker.files.state_file import read_broker_file
from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.schemas.accounts.ledger import add_up
from headrace.schemas.accounts.recorder import read_recorder
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.module_spaces import module_spaces_to_json
from headrace.schemas.errors import EncodeError, ModuleError
from headrace.schemas.frames.wire import Buffer, MessageKind, decode, encode
from headrace.schemas.messages import WorkerHello
from headrace.workers.policy.policies import PolicyMappingError
from support.pipeline import worker_callbacks
from support.pipeline.delivery import (
    FLEET,
    SPACES,
    BrokerThread,
    Envs,
    RawPeer,
    StartFeeder,
    broker_process,
    worker_process,
)
from support.pipeline.several_agents import CARTS_AT_RANDOM, TWO_CARTS, AgentWitness
from support.pipeline.worker_threads import WorkerThread, accepted, closed_row, constant_value, drain, report_death
from support.waiting import TIMEOUT_S, wait_until


def see_until_both(
    stream: EpisodeStream, witness: AgentWitness, see: Callable[[ChunkBatch], None] | None = None
) -> None:
    """Take batches until each module's came."""

    def both() -> bool:
        batch = stream.next(0.1)
        if batch is not None:
            (see or witness.see)(batch)
        return all(witness.steps[module_id] > 100 for module_id in ("short", "long"))

    wait_until(both, "batches of both modules")


def test_each_modules_chunks_arrive_with_its_own_spaces_and_in_the_books(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    witness, lengths = AgentWitness(), dict[str, list[int]]()

    def see(batch: ChunkBatch) -> None:
        witness.see(batch)
        for chunk in batch:
            if chunk.end in (ChunkEnd.TERMINATED, ChunkEnd.TRUNCATED):
                lengths.setdefault(chunk.module_id, []).append(chunk.episode_length)

    with EpisodeStream(broker.endpoints.learner) as stream:
        with WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, CARTS_AT_RANDOM) as worker:
            by_module = stream.module_spaces(timeout_s=TIMEOUT_S)
            assert list(by_module) == ["short", "long"]
            assert stream.spaces("long") == by_module["long"]
            words = r"no module was named; this fleet's modules are \['long', 'short'\]"
            with pytest.raises(ModuleError, match=words):
                stream.spaces()
            with pytest.raises(ModuleError, match="there is no module 'tall'"):
                stream.spaces("tall")
            see_until_both(stream, witness, see)
        assert worker.error is None
        row = closed_row(broker, take=lambda: (drain(stream, see), stream.commit()))
    assert not witness.open_episodes()
    told = broker.report().policies
    newest = {module_id: all_of_it[-100:] for module_id, all_of_it in lengths.items()}
    assert {name: (own["len_mean"], own["len_min"], own["len_max"], own["agents"]) for name, own in told.items()} == {
        name: (sum(own) / len(own), min(own), max(own), len(own)) for name, own in newest.items()
    }
    assert dict(witness.steps) == row.totals.module_steps
    assert row.settled.committed[0] == row.accepted[0] == sum(witness.steps.values())
    assert row.totals.env_steps is not None
    assert max(witness.steps.values()) <= row.totals.env_steps < row.totals.stepped
    assert add_up(broker.rows()).balance() == 0


def test_steps_of_a_module_that_an_own_learner_does_not_train_stay_with_the_worker(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    witness = AgentWitness()
    worker_callbacks.sent.clear()
    sampling = {**TWO_CARTS, "callbacks": ["support.pipeline.worker_callbacks:Sent"]}
    learner = {"enabled": False, "policies_to_train": ["long"]}
    sections = {**CARTS_AT_RANDOM, "sampling": sampling, "learner": learner}
    with EpisodeStream(broker.endpoints.learner) as stream:
        with WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, sections):
            assert list(stream.module_spaces(timeout_s=TIMEOUT_S)) == ["short", "long"]

            def seen() -> bool:
                for batch in filter(None, [stream.next(0.1)]):
                    witness.see(batch)
                return witness.steps["long"] > 1000

            wait_until(seen, "batches of the trained module")
        row = closed_row(broker, take=lambda: (drain(stream, witness.see), stream.commit()))
    assert not witness.open_episodes()
    assert witness.steps.keys() == row.totals.module_steps.keys() == {"long"}
    assert sum(steps for _, _, steps in worker_callbacks.sent) == witness.steps["long"]
    assert row.totals.discarded["frozen"] > 0
    assert row.totals.env_steps is not None
    assert row.totals.stepped > row.totals.env_steps >= row.accepted[0] == row.settled.committed[0]
    assert set(broker.report().policies) == {"short", "long"}, "returns of frozen modules are told too"
    assert add_up(broker.rows()).balance() == 0


def test_a_fleet_stops_at_its_bound_of_steps_where_no_trained_module_plays(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its steps are in no batch. The ledger balances while the worker samples."""
    most = 4000
    broker.ask(lambda b: setattr(b.core.store, "max_env_steps", most))
    plays = {"short": "short", "long": "long"}
    policies = {"policies": {**TWO_CARTS["policies"], "other": {}}, "policy_mapping_fn": plays}
    learner = {"enabled": False, "policies_to_train": ["other"]}
    sections = {**CARTS_AT_RANDOM, "sampling": {**TWO_CARTS, **policies}, "learner": learner}
    with WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, sections):

        def counted() -> int:
            rows = broker.rows().values()
            assert not [problem for row in rows for problem in row.problems()]
            return sum(row.totals.steps_of_envs for row in rows)

        wait_until(lambda: counted() >= most, "the bound")
    row = closed_row(broker)
    cut = 2 * 16
    assert most <= row.totals.steps_of_envs <= most + 2 * cut, "an Ack may cross a heartbeat"
    assert row.totals.discarded == {"frozen": row.totals.stepped}
    assert add_up(broker.rows()).balance() == 0


def test_synchronous_sampling_stops_at_its_bound_of_steps_where_no_trained_module_plays(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No round ends, so the worker itself must stop."""
    broker.ask(lambda b: setattr(b.core.store, "max_env_steps", 1000))
    plays = {"short": "short", "long": "long"}
    sampling = {**TWO_CARTS, "policies": {**TWO_CARTS["policies"], "other": {}}, "policy_mapping_fn": plays}
    sections = {"sampling": sampling, "learner": {"enabled": False, "policies_to_train": ["other"]}}
    with (
        EpisodeStream(broker.endpoints.learner, synchronous=True, steps_per_update=64) as stream,
        WeightPublisher(broker.endpoints.learner) as weights,
        WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, sections) as worker,
    ):
        spaces = stream.module_spaces(timeout_s=TIMEOUT_S)
        weights.publish({module_id: constant_value(own, 1.0) for module_id, own in spaces.items()})

        def steps() -> int:
            assert stream.next(0.05) is None
            return sum(row.totals.steps_of_envs for row in broker.rows().values())

        wait_until(lambda: steps() >= 1000, "the bound")
        wait_until(lambda: steps() == steps(), "a worker that waits")
        assert worker.error is None
    row = closed_row(broker)
    assert row.totals.discarded == {"frozen": row.totals.stepped}


def test_weights_are_applied_by_module_and_an_unpublished_module_stays_frozen(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A module's value is a constant of its own under each version."""
    with (
        EpisodeStream(broker.endpoints.learner) as stream,
        WeightPublisher(broker.endpoints.learner) as weights,
        WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, {"sampling": TWO_CARTS}) as worker,
    ):
        spaces = stream.module_spaces(timeout_s=TIMEOUT_S)
        both = {module_id: constant_value(own, 1.0 + i) for i, (module_id, own) in enumerate(spaces.items())}
        weights.publish(both)
        values: dict[tuple[str, int], set[float]] = {}

        def see(seq: int) -> None:
            def seen() -> bool:
                batch = stream.next(0.1)
                for chunk in batch or ():
                    for version, value in zip(chunk.weights_seq.tolist(), chunk.columns["values"], strict=True):
                        values.setdefault((chunk.module_id, version), set()).add(float(value))
                return {("short", seq), ("long", seq)} <= values.keys()

            wait_until(seen, f"steps of both modules under version {seq}")

        see(1)
        weights.publish({"long": constant_value(spaces["long"], 7.0)})
        see(2)
        assert worker.error is None
    assert values["short", 1] == values["short", 2] == {1.0}
    assert (values["long", 1], values["long", 2]) == ({2.0}, {7.0})


def test_weights_of_an_unknown_module_raise_an_error_that_names_it(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (
        WeightPublisher(broker.endpoints.learner) as weights,
        WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, {"sampling": TWO_CARTS}) as worker,
    ):
        with pytest.raises(EncodeError, match="no name for a policy"):
            weights.publish({"a/b": {"w": np.zeros(1)}})
        with pytest.raises(EncodeError, match=r"\['w'\] stand beside state dicts of modules"):
            weights.publish({"a": {"w": np.zeros(1)}, "w": np.zeros(1)})  # type: ignore[dict-item]
        with pytest.raises(
            ModuleError, match=r"there is no module 'tall'; this fleet's modules are \['long', 'short'\]"
        ):
            wait_until(lambda: weights.publish({"tall": {"w": np.zeros(1)}}) < 0, "never")
        worker.check()


def test_an_agent_without_a_module_ends_the_worker_with_its_books_closed(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sections = {**CARTS_AT_RANDOM, "sampling": {**TWO_CARTS, "policy_mapping_fn": {"short": "short"}}}
    with WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, sections) as worker:
        wait_until(lambda: worker.error, "the worker's error")
    assert isinstance(worker.error, PolicyMappingError)
    assert "agent 'long' is not in the mapping" in str(worker.error)
    closed_row(broker)


def test_a_returning_learner_gets_the_uncommitted_batches_again(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second = AgentWitness(), AgentWitness()
    sections: dict[str, Any] = {**CARTS_AT_RANDOM, "learner": {"steps_per_update": 64}}
    with WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, sections):
        with EpisodeStream(broker.endpoints.learner, auto_commit=False) as stream:
            for _ in range(6):
                batch = stream.next(TIMEOUT_S)
                assert batch is not None
                first.see(batch)
        with EpisodeStream(broker.endpoints.learner) as stream:
            see_until_both(stream, second)
            for module_id in ("short", "long"):
                assert second.steps[module_id] >= first.steps[module_id]
        with EpisodeStream(broker.endpoints.learner) as stream:
            assert list(stream.module_spaces()) == ["short", "long"]
            assert stream.next(TIMEOUT_S) is not None


@pytest.mark.chaos
def test_after_sigkill_the_books_balance_and_each_agents_episode_is_ended(broker: BrokerThread, tmp_path: Path) -> None:
    witness = AgentWitness()
    with (
        EpisodeStream(broker.endpoints.learner) as stream,
        worker_process(tmp_path, broker.endpoints.worker, 0, 1, CARTS_AT_RANDOM) as worker,
    ):
        see_until_both(stream, witness)
        wait_until(lambda: accepted(broker, 1) > 6, "some batches")
        worker.signal(signal.SIGKILL)
        assert worker.wait() == -signal.SIGKILL
        report_death(broker, tmp_path, 1, "worker_killed")
        row = closed_row(broker, take=lambda: (drain(stream, witness.see), stream.commit()))
    assert not witness.open_episodes()
    assert set(witness.markers) == {"worker_killed"}
    reading = read_recorder(tmp_path / "worker-0-1.rec")
    assert reading is not None
    assert (row.totals.stepped, row.totals.env_steps) == (reading.totals.stepped, reading.totals.env_steps)
    assert sum(row.totals.module_steps.values()) == row.accepted[0]
    assert add_up(broker.rows()).balance() == 0


@pytest.mark.thorough
@pytest.mark.chaos
def test_a_broker_killed_between_batches_of_a_cut_costs_nothing(stack: ExitStack, tmp_path: Path) -> None:
    witness = AgentWitness()
    broker = stack.enter_context(broker_process(tmp_path))
    page = read_broker_file(tmp_path)
    assert page is not None
    stream = stack.enter_context(EpisodeStream(page.endpoints.learner))
    worker = stack.enter_context(worker_process(tmp_path, page.endpoints.worker, 0, 1, CARTS_AT_RANDOM))
    for _ in range(3):
        witness.steps.clear()
        see_until_both(stream, witness)
        broker.signal(signal.SIGKILL)
        broker.wait()
        broker = stack.enter_context(broker_process(tmp_path))
    see_until_both(stream, witness)
    worker.signal(signal.SIGTERM)
    wait_until(lambda: drain(stream, witness.see) or worker.popen.poll() is not None, "the worker's end")
    drain(stream, witness.see)
    assert worker.wait() == 0, worker.log.read_text()
    assert not witness.open_episodes()
    assert set(witness.markers) <= {"shutdown"}
    assert not stream.dropped


def test_workers_of_this_and_the_previous_minor_version_sample_for_one_fleet(
    broker: BrokerThread, start_feeder: StartFeeder
) -> None:
    old = start_feeder(broker.endpoints.worker, slot=0)  # tells its pair of spaces alone
    wait_until(lambda: old.session.welcome, "the old worker's welcome")
    told = module_spaces_to_json({"default_policy": SPACES})
    with RawPeer(broker.endpoints.worker) as new, EpisodeStream(broker.endpoints.learner) as stream:
        new.send(WorkerHello(fleet_id=FLEET, token="n", slot=1, spaces=told).frames())
        assert new.receive().kind is MessageKind.WELCOME
        assert stream.module_spaces() == {"default_policy": SPACES}
        assert stream.spaces() == SPACES


def of_a_stranger(seq: int, frames: list[Buffer]) -> list[Buffer]:
    """The same batch as one of another module."""
    message = decode(frames)
    header = {name: value for name, value in message.header.items() if name != "payload"}
    return encode(MessageKind.BATCH, header | {"modules": ["stranger"]}, message.arrays)


def test_batches_of_an_unknown_module_are_dropped_as_poison(broker: BrokerThread, start_feeder: StartFeeder) -> None:
    plan = Envs().fragments(2)
    feeder = start_feeder(broker.endpoints.worker, plan, alter=of_a_stranger)
    with EpisodeStream(broker.endpoints.learner) as stream:
        wait_until(lambda: stream.next(0.05) or feeder.all_settled(), "settled batches")
    assert stream.dropped["poison"] == sum(batch.steps for batch in plan)
