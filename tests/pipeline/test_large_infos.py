"""Infos or names too large for one message: the batch is split. Only a chunk that is too large alone is dropped."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from headrace.schemas.accounts.ledger import Drop, LedgerRow, Settled
from headrace.schemas.accounts.recorder import Recorder, read_recorder
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.messages import WorkerHello
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
        return np.array([self._t], np.float32), 1.0, self._t == 7, False, self._info if self._info["said"] else {}


class Shipped:
    """Batches that a runner of `Talkative`s ships, cut by cut, as a learner reads them; None for a dropped batch."""

    def __init__(self, path: Path, mib: list[float]) -> None:
        self.recorder = Recorder(path, 0, 1)
        self.session = WorkerSession(WorkerHello(fleet_id=FLEET, token="t", slot=0), SessionLimits())
        config: dict[str, Any] = {"num_envs": len(mib), "env_config": {"mib": mib}, "seed": 1}
        self.runner = SingleAgentEnvRunner(EnvRunnerConfig(env=Talkative, rollout_fragment_length=STEPS, **config))
        parts = FLEET, self.session, self.recorder, self.runner.totals, self.runner.take_finished_episodes
        self.shipper = Shipper(*parts)
        self.episodes: list[tuple[float, int]] = []

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


def test_a_chunk_with_too_large_infos_is_dropped_and_logged_and_others_arrive(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    shipped = Shipped(tmp_path / "a.rec", [0, 3, 0.5, 0])
    with shipped.runner:
        (*batches,) = shipped.cut()
        shipped.check_books()
    shipped.recorder.close()
    arrived = [chunk.env_index for batch in batches if batch is not None for chunk in batch]
    assert arrived == [0, 2, 3]
    assert batches.count(None) == 1
    assert shipped.session.window()[batches.index(None)].steps == STEPS
    (word,) = caplog.messages
    assert "env 1, in 4 steps in a row: a batch's infos have 12" in word
    assert "8388608 are allowed" in word
    assert "set infos = 'none': 4 steps dropped" in word


def test_the_episodes_that_ended_are_told_by_the_next_batch_that_arrives(tmp_path: Path) -> None:
    shipped = Shipped(tmp_path / "a.rec", [3, 0, 0])
    with shipped.runner:
        batches = [batch for _ in range(2) for batch in shipped.cut()]
        shipped.check_books()
    shipped.recorder.close()
    assert batches.count(None) == 2, "each cut's first chunk is dropped"
    assert shipped.episodes == 3 * [(7.0, 7)]


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
