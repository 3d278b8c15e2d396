"""What is too large for one message: a batch is split, and a chunk goes without the largest values of its infos."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from headrace.schemas.accounts.env_errors import INFO_LEFT_OUT
from headrace.schemas.accounts.ledger import Drop, LedgerRow, Settled
from headrace.schemas.accounts.recorder import Recorder, read_recorder
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.messages import WorkerHello, WorkerWelcome
from headrace.workers import EnvRunnerConfig, MultiAgentEnv, MultiAgentEnvRunner, SingleAgentEnvRunner
from headrace.workers.fleet.session import WorkerSession
from headrace.workers.fleet.shipping import Shipper
from headrace.workers.fleet.window import SessionLimits
from support.decode_batch import decode_batch
from support.pipeline.delivery import FLEET

STEPS = 4
MIB = 1 << 20


class Talkative(gym.Env[Any, Any]):
    """Says so many MiB in each step, by its place; its episodes have seven steps. Observation: the step."""

    def __init__(self, context: Any) -> None:
        self.observation_space = gym.spaces.Box(0, 100, (1,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self._info = {"said": "a" * int(context["mib"][context.vector_index] * MIB)}
        self._t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self._t += 1
        info = {**self._info, "t": self._t} if self._info["said"] else {}
        return np.array([self._t], np.float32), 1.0, self._t == 7, False, info


class Shipped:
    """Batches that a runner of `Talkative`s ships, cut by cut, as a learner reads them; None for a dropped batch."""

    def __init__(self, path: Path, mib: list[float], max_batch_bytes: int = 0) -> None:
        self.recorder = Recorder(path, 0, 1)
        self.session = WorkerSession(WorkerHello(fleet_id=FLEET, token="t", slot=0), SessionLimits())
        config: dict[str, Any] = {"num_envs": len(mib), "env_config": {"mib": mib}, "seed": 1}
        self.runner = SingleAgentEnvRunner(EnvRunnerConfig(env=Talkative, rollout_fragment_length=STEPS, **config))
        parts = FLEET, self.session, self.recorder, self.runner.totals, self.runner.take_finished_episodes
        self.shipper = Shipper(*parts)
        self.episodes: list[tuple[float, int]] = []
        if max_batch_bytes:
            self.limit(max_batch_bytes)

    def limit(self, max_batch_bytes: int) -> None:
        """Take over what the broker takes, from its WELCOME."""
        self.session.welcome = WorkerWelcome.model_construct(max_batch_bytes=max_batch_bytes)

    def cut(self) -> list[ChunkBatch | None]:
        first = self.session.next_seq
        self.shipper.ship(self.runner.sample_fragment(random_actions=True))
        return [self._read(seq) for seq in range(first, self.session.next_seq)]

    def _read(self, seq: int) -> ChunkBatch | None:
        shipment = self.session._window[seq]
        if shipment.frames is None:
            assert shipment.reason == Drop.OVERSIZE
            return None
        spaces = self.runner.spaces
        header, batch = decode_batch(shipment.frames, spaces.observation, spaces.action)
        assert (header.seq, header.steps, header.chunks) == (seq, batch.steps, len(batch))
        self.episodes += header.episodes
        return batch

    def check_books(self) -> None:
        reading = read_recorder(self.recorder.path)
        assert reading is not None
        totals = self.session.totals
        assert reading.totals == totals.model_copy(update={"module_steps": reading.totals.module_steps})
        assert reading.window == self.session.window()
        whole = (totals.shipped, totals.shipped_chunks)
        row = LedgerRow(slot=0, incarnation=1, totals=totals, accepted=whole, held=whole, settled=Settled())
        assert not list(row.problems())
        assert totals.stepped == totals.shipped == self.runner.totals.stepped


def test_a_batch_with_infos_too_large_for_one_message_is_sent_as_several_batches(tmp_path: Path) -> None:
    shipped = Shipped(tmp_path / "a.rec", [1, 0, 1, 1, 0])
    with shipped.runner:
        cuts = [shipped.cut() for _ in range(4)]
        shipped.check_books()
    shipped.recorder.close()
    seen: dict[str, list[float]] = {}
    for cut in cuts:
        assert 1 < len(cut) < 5
        for batch in cut:
            assert batch is not None, "none is dropped"
            for chunk in batch:
                seen.setdefault(chunk.episode_id, [0.0]).extend(chunk.obs[1:, 0].tolist())
                told = [len(info.get("said", "")) for info in chunk.infos]
                assert max(told, default=0) == (MIB if chunk.env_index in (0, 2, 3) else 0)
    lives = sorted(seen.values())
    assert lives == sorted(5 * [list(range(8)), list(range(8)), [0, 1, 2]])
    assert shipped.episodes == 10 * [(7.0, 7)]


def test_a_chunk_with_too_large_infos_arrives_without_their_largest_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shipped = Shipped(tmp_path / "a.rec", [0, 3, 0.5, 9])
    with shipped.runner:
        (*batches,) = shipped.cut()
        shipped.check_books()
        (group,) = shipped.runner.totals.failure_groups.all()
    shipped.recorder.close()
    chunks = [chunk for batch in batches if batch is not None for chunk in batch]
    assert [chunk.env_index for chunk in chunks] == [0, 1, 2, 3]
    told = [[len(info.get("said", "")) for info in chunk.infos] for chunk in chunks]
    assert told[0] == []
    assert sorted(told[1]) == [0, 0, 0, 3 * MIB, 3 * MIB], "two of four fit"
    assert told[2] == [0, *[MIB // 2] * STEPS]
    assert [info.get("t") for info in chunks[3].infos] == [None, 1, 2, 3, 4], "small values stay"
    assert told[3] == [0] * (STEPS + 1)
    assert (group.kind, group.where, group.count) == (INFO_LEFT_OUT, "info['said']", 2 + STEPS)
    assert group.message.startswith("infos go without info['said'] (9,437,195 bytes of JSON, in a chunk that is too")
    assert "infos go without info['said'] (3,145,739 bytes of JSON" in caplog.text


def test_infos_go_before_steps_where_the_broker_takes_less_and_larger_batches_go_in_parts(tmp_path: Path) -> None:
    shipped = Shipped(tmp_path / "a.rec", [0, 0.125, 0, 0.125], max_batch_bytes=1 << 16)
    with shipped.runner:
        batches = [batch for _ in range(4) for batch in shipped.cut()]
        shipped.check_books()
    shipped.recorder.close()
    assert all(batch is not None and not batch.infos.get(1) for batch in batches)
    assert sum(batch.steps for batch in batches if batch is not None) == 4 * 4 * STEPS


def test_a_chunk_that_is_too_large_without_infos_is_dropped_and_the_next_batch_tells_its_episodes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    shipped = Shipped(tmp_path / "a.rec", [0, 0], max_batch_bytes=1)
    with shipped.runner:
        batches = [batch for _ in range(2) for batch in shipped.cut()]
        shipped.limit(1 << 20)
        batches += shipped.cut()
        shipped.check_books()
    shipped.recorder.close()
    assert batches[:-1] == [None] * 6
    assert shipped.episodes == 2 * [(7.0, 7)]
    assert "exceeds broker.max_batch_bytes = 1; lower sampling.rollout_fragment_length" in caplog.text


class LongNames(MultiAgentEnv):
    """Fifty agents act in each step. Their names together are longer than a header may be."""

    def __init__(self, context: Any) -> None:
        self.possible_agents = [f"{i}-{'x' * 30_000}" for i in range(50)]
        box: Any = gym.spaces.Box(0, 1, (1,), np.float32)
        choice: Any = gym.spaces.Discrete(2)
        self.observation_spaces = dict.fromkeys(self.possible_agents, box)
        self.action_spaces = dict.fromkeys(self.possible_agents, choice)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._now(), {}

    def step(self, actions: dict[Any, Any]) -> Any:
        return self._now(), dict.fromkeys(actions, 1.0), {"__all__": False}, {"__all__": False}, {}

    def _now(self) -> Any:
        return {agent: np.zeros(1, np.float32) for agent in self.possible_agents}


def test_a_batch_with_too_many_names_of_agents_is_sent_as_several_batches(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a.rec", 0, 1)
    session = WorkerSession(WorkerHello(fleet_id=FLEET, token="t", slot=0), SessionLimits())
    config = EnvRunnerConfig(env=LongNames, rollout_fragment_length=STEPS, seed=1, policies={"shared": None})
    with MultiAgentEnvRunner(config) as runner:
        shipper = Shipper(FLEET, session, recorder, runner.totals, runner.take_finished_episodes)
        shipper.ship(runner.sample_fragment(random_actions=True))
        spaces = runner.module_spaces["shared"]
    recorder.close()
    seen: list[str] = []
    for held in session.window():
        frames = session._window[held.seq].frames
        assert frames is not None, "none is dropped"
        _, batch = decode_batch(frames, spaces.observation, spaces.action)
        assert len(batch.agents) == len(batch) < 50
        seen += [chunk.agent_id for chunk in batch]
    assert sorted(seen) == sorted(LongNames(None).possible_agents)
    assert session.totals.shipped == session.totals.stepped - session.totals.open > 0
