"""Recordings of episodes that a test makes up: cut in chunks, which lie among those of other workers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.deploy.annexes.recording.recording_folder import RecordingFolder
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import CHUNK_TABLE, EXPLORE, UNSEEDED, ChunkEnd, format_episode_id
from headrace.schemas.chunks.gymnasium_spaces import to_gym
from headrace.schemas.chunks.spaces import Space, column_dtype, leaf_values, leaves
from headrace.schemas.chunks.task import Task


@dataclass
class Played:
    """An episode, whose steps are drawn from the spaces. `skip`: a chunk that the recording lacks."""

    steps: int
    end: ChunkEnd = ChunkEnd.TERMINATED
    seed: int | None = 1
    task: dict[str, Any] | None = None
    agent: str = "default_agent"
    skip: int | None = None

    def draw(self, number: int, observation: Space, action: Space) -> None:
        """Draw its arrays."""
        self.id = format_episode_id(7, number)
        self.number = number
        self.columns: dict[str, Any] = {"rewards": np.random.default_rng(number).normal(size=self.steps)}
        for root, space, rows in (("obs", observation, self.steps + 1), ("actions", action, self.steps)):
            gym_space = to_gym(space)
            gym_space.seed(number)
            drawn = [leaf_values(space, gym_space.sample()) for _ in range(rows)]
            for (name, leaf), values in zip(leaves(space, root), zip(*drawn, strict=True), strict=True):
                self.columns[name] = np.stack([np.asarray(value, column_dtype(leaf)) for value in values])


def make_recording(path: Path, spaces: tuple[Space, Space], *episodes: Played, module: str = "default_policy") -> Path:
    """Record the episodes, each in chunks of 3 steps at most, one chunk of each in turn, in a file for each turn."""
    observation, action = spaces
    for number, episode in enumerate(episodes):
        episode.draw(number, observation, action)
    with RecordingFolder(path) as folder:
        for turn in range(max((episode.steps + 2) // 3 for episode in episodes) + 1):
            own = [episode for episode in episodes if turn <= (episode.steps - 1) // 3 or _ends_now(episode, turn)]
            own = [episode for episode in own if episode.skip != turn]
            for slot in (0, 1):
                if mine := [episode for episode in own if episode.number % 2 == slot]:
                    folder.write([_batch(mine, turn, slot, spaces, module)], [])
    return path


def _ends_now(episode: Played, turn: int) -> bool:
    return episode.end is ChunkEnd.ABORTED and turn == (episode.steps + 2) // 3


def _batch(episodes: list[Played], turn: int, slot: int, spaces: tuple[Space, Space], module: str) -> ChunkBatch:
    table = np.zeros(len(episodes), CHUNK_TABLE)
    parts: dict[str, list[Any]] = {}
    agents = sorted({episode.agent for episode in episodes})
    for row, episode in zip(table, episodes, strict=True):
        start, stop = min(3 * turn, episode.steps), min(3 * turn + 3, episode.steps)
        row["id_high"], row["id_low"], row["env_index"] = 7, episode.number, episode.number
        row["seed"] = UNSEEDED if episode.seed is None else episode.seed
        row["t_start"], row["length"], row["chunk_index"] = start, stop - start, turn
        row["episode_return"], row["episode_length"] = episode.columns["rewards"][:stop].sum(), stop
        row["agent"], row["flags"] = agents.index(episode.agent), EXPLORE
        is_last = start == stop if episode.end is ChunkEnd.ABORTED else stop == episode.steps
        row["end"] = episode.end if is_last else ChunkEnd.ONGOING
        row["reason"] = int(row["end"] == ChunkEnd.ABORTED)
        for name, column in episode.columns.items():
            parts.setdefault(name, []).append(column[start : stop + (name.startswith("obs") and stop > start)])
    tasks = [Task((1, 1), episode.task) for episode in episodes if episode.task is not None]
    task_of = np.cumsum([episode.task is not None for episode in episodes]) * [e.task is not None for e in episodes]
    columns = {name: np.concatenate(own) for name, own in parts.items()}
    columns["weights_seq"] = np.full(len(columns["rewards"]), turn)
    return ChunkBatch(
        table,
        columns,
        *spaces,
        agents=agents,
        modules=(module,),
        reasons=("", "env_exception"),
        slot=slot,
        incarnation=1,
        seq=turn,
        tasks=tasks,
        task_of=task_of.astype(np.int32) if tasks else None,
    )
