"""A cut of several modules becomes several batches, and the books balance after each of them, wherever a kill falls."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.schemas.accounts.ledger import Discard, Drop, HeldBatch, LedgerRow, Settled, WorkerTotals
from headrace.schemas.accounts.recorder import Recorder, read_recorder
from headrace.schemas.basics.bounds import WINDOW
from headrace.schemas.chunks.batch import MOST_ENDED, BatchHeader, ChunkBatch, read_batch_header
from headrace.schemas.chunks.chunk import CHUNK_TABLE, ChunkEnd
from headrace.schemas.frames.wire import decode_header
from headrace.schemas.messages import WorkerHello
from headrace.workers.envs import restarts
from headrace.workers.fleet.session import WorkerSession
from headrace.workers.fleet.shipping import Shipper
from headrace.workers.fleet.window import SessionLimits, Shipment
from headrace.workers.metrics.totals import RunnerTotals
from headrace.workers.sampling.module_batches import ModuleBatches
from support.pipeline.delivery import FLEET, SPACES
from support.pipeline.several_agents import come_and_go


class Watched(WorkerSession):
    """A session that shows each batch at the moment it is handed over."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(WorkerHello(fleet_id=FLEET, token="t", slot=0), SessionLimits(window_batches=WINDOW))
        self.headers: list[BatchHeader] = []
        self._path = recorder.path

    def submit(self, shipment: Shipment) -> None:
        reading = read_recorder(self._path)
        assert reading is not None
        assert reading.window[-1] == shipment.batch, "recorded before it can be sent"
        assert_balanced(reading.totals)
        assert_balanced(shipment.totals)
        assert shipment.totals == reading.totals.model_copy(update={"module_steps": shipment.totals.module_steps})
        assert sum(shipment.totals.module_steps.values()) == shipment.totals.shipped
        assert shipment.frames is not None
        self.headers.append(read_batch_header(decode_header(shipment.frames)[1]))
        super().submit(shipment)


def assert_balanced(totals: WorkerTotals) -> None:
    row = LedgerRow(
        slot=0,
        incarnation=1,
        totals=totals,
        accepted=(totals.shipped, totals.shipped_chunks),
        held=(totals.shipped, totals.shipped_chunks),
        settled=Settled(),
    )
    assert not list(row.problems())


def test_the_books_balance_after_each_batch_of_a_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "BACKOFF_S", 0.0)  # all lanes act in each cut
    recorder = Recorder(tmp_path / "a.rec", 0, 1)
    session = Watched(recorder)
    with come_and_go(num_envs=3, length=20, seed=5) as runner:
        shipper = Shipper(FLEET, session, recorder, runner.totals, runner.take_finished_episodes)
        for _ in range(20):
            runner_cut = runner.sample_fragment(shipper.step, random_actions=True)
            shipper.ship(runner_cut)
        totals = session.totals
    recorder.close()
    assert (totals.stepped, totals.env_steps) == (runner.totals.stepped, runner.totals.env_steps)
    assert totals.env_steps != totals.stepped
    assert {tuple(header.modules) for header in session.headers} == {("one",), ("two",)}
    per_cut = zip(session.headers[::2], session.headers[1::2], strict=True)
    assert all((first.modules, second.modules) == (["one"], ["two"]) for first, second in per_cut)
    told = sum(len(header.episodes) for header in session.headers[::2])
    assert 0 < told == runner.totals.episodes, "the first batch of a cut tells of its episodes"
    assert not any(header.episodes for header in session.headers[1::2])


def test_batches_of_a_frozen_module_stay_and_their_steps_and_returns_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent's module changes from episode to episode; some episodes have frozen agents only."""
    monkeypatch.setattr(restarts, "BACKOFF_S", 0.0)
    lives = []
    for frozen in ((), ("two",)):
        recorder = Recorder(tmp_path / f"{len(frozen)}.rec", 0, 1)
        session = Watched(recorder)
        with come_and_go(num_envs=3, length=20, seed=5) as runner:
            totals, finished = runner.totals, runner.take_finished_episodes
            shipper = Shipper(FLEET, session, recorder, totals, finished, frozen=frozen)
            for _ in range(20):
                shipper.ship(runner.sample_fragment(shipper.step, random_actions=True))
            share = session.totals.discarded.get("frozen", 0) / session.totals.shipped
            assert shipper.steps_for(1000) == 1000 + int(1000 * share)
            shipper.drop(runner.discard_open(Discard.FENCED), Drop.FENCED)
            sampled = {name: count for name, count in runner.get_metrics().items() if name.startswith("num_")}
        recorder.close()
        reading = read_recorder(recorder.path)
        assert reading is not None
        assert_balanced(reading.totals)
        lives.append((session.headers, reading.totals, sampled))
    (every, all_of_it, sampled), (sent, kept, sampled_too) = lives
    assert {tuple(header.modules) for header in sent} == {("one",)}
    assert [header.steps for header in sent] == [header.steps for header in every if header.modules == ["one"]]
    assert kept.discarded.pop("frozen") == sum(header.steps for header in every if header.modules == ["two"]) > 0
    assert (kept.stepped, kept.env_steps, kept.episodes) == (all_of_it.stepped, all_of_it.env_steps, all_of_it.episodes)
    assert kept.discarded == all_of_it.discarded
    assert kept.dropped["fenced"][1] < all_of_it.dropped["fenced"][1], "markers of frozen agents are no loss"
    ended = [zip(h.agent_returns, h.agent_lengths, strict=True) for h in every if h.modules == ["two"]]
    told = [("two", *agent) for agents in ended for agent in agents]
    assert [agent for header in sent for agent in header.frozen_agents] == told
    assert sum(len(header.episodes) for header in sent) > 0
    assert not any(header.frozen_agents for header in every)
    assert (sampled["num_agent_steps_sampled"], sampled["num_episodes"]) == (
        sampled_too["num_agent_steps_sampled"],
        sampled_too["num_episodes"],
    )


def test_a_header_tells_the_newest_of_more_episodes_than_it_can_hold(tmp_path: Path) -> None:
    """Each agent's episode is of one step. The numbers are among the longest that JSON writes."""
    many, long_number = 60_000, (1 << 53) - 1
    returns = -np.arange(1, many + 1) * np.pi * 1e-300
    table = np.zeros(many, CHUNK_TABLE)
    table["length"], table["episode_length"], table["end"] = 1, long_number, ChunkEnd.TERMINATED
    table["episode_return"] = returns
    columns = {"obs": np.zeros((2 * many, 1), np.float32), "actions": np.zeros(many, np.int64)}
    columns |= {"rewards": np.zeros(many), "weights_seq": np.zeros(many, np.int64)}
    batch = ChunkBatch(table, columns, SPACES.observation, SPACES.action, agents=("red", "blue"))
    ended = [(earned, long_number) for earned in returns.tolist()]
    totals = RunnerTotals(stepped=2 * many, episodes=many)
    totals.aborted.extend(ended)
    recorder = Recorder(tmp_path / "a.rec", 0, 1)
    session = Watched(recorder)
    Shipper(FLEET, session, recorder, totals, lambda: ended, frozen=("long",)).ship(
        ModuleBatches({"long": replace(batch, modules=("long",)), "short": replace(batch, modules=("short",))})
    )
    recorder.close()
    (header,) = session.headers
    newest = ended[-MOST_ENDED:]
    assert header.episodes == header.aborted == newest
    assert list(zip(header.agent_returns, header.agent_lengths, strict=True)) == newest
    assert header.frozen_agents == [("long", *agent) for agent in newest]
    assert header.totals.episodes == many, "all of them are counted"


def test_the_recorder_balances_after_a_kill_between_two_batches_of_a_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    pid = os.fork()
    if not pid:
        try:
            _die_between_two_batches(path)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    reading = read_recorder(path)
    assert reading is not None
    assert_balanced(reading.totals)
    assert (reading.totals.seq, len(reading.window)) == (3, 3)
    assert reading.totals.open > 0, "the other module's batch was cut and had no number yet"


def _die_between_two_batches(path: Path) -> None:
    recorder = Recorder(path, 0, 1)
    session = WorkerSession(WorkerHello(fleet_id=FLEET, token="t", slot=0), SessionLimits())
    submit = session.submit

    def submit_thrice(shipment: Shipment) -> None:
        if shipment.batch.seq == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        submit(shipment)

    setattr(session, "submit", submit_thrice)  # noqa: B010
    with come_and_go(num_envs=3, length=20, seed=5) as runner:
        shipper = Shipper(FLEET, session, recorder, runner.totals, runner.take_finished_episodes)
        while True:
            shipper.ship(runner.sample_fragment(shipper.step, random_actions=True))


def test_a_window_has_room_for_all_batches_of_a_cut_or_for_none() -> None:
    hello = WorkerHello(fleet_id=FLEET, token="t", slot=0)

    def filled(batches: int, **limits: Any) -> WorkerSession:
        session = WorkerSession(hello, SessionLimits(**limits))
        for _ in range(batches):
            held = HeldBatch(seq=session.next_seq, steps=1, chunks=1)
            session.submit(Shipment(held, 1, [b"x"], WorkerTotals()))
        return session

    assert filled(0, window_batches=2).has_room(5), "an empty window takes any cut"
    assert filled(3, window_batches=8).has_room(5)
    assert not filled(4, window_batches=8).has_room(5)
    assert filled(WINDOW - 10, window_batches=WINDOW).has_room(5)
    assert not filled(WINDOW - 9, window_batches=WINDOW).has_room(5), "a drain's batches must fit the recorder besides"
