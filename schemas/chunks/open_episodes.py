"""The episodes of one source that are open at a learner: some of their chunks have come, and their end has not.

A learner's checkpoint has them, as a part of its position. So each of them gets its end marker, also from the learner
that goes on from the checkpoint.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, Strict

from headrace.schemas.basics.bounds import ListOf
from headrace.schemas.chunks.chunk import CHUNK_TABLE, ChunkEnd
from headrace.schemas.chunks.task import Task, TaskJson
from headrace.schemas.errors import DecodeError

OPEN_EPISODE = np.dtype([("chunk", CHUNK_TABLE), ("since", "<u8"), ("until", "<u8")])
"""The newest chunk of an open episode. Its `t_start` is the env step after its last one, not its first.

The other fields are 0. They have a meaning in messages of earlier versions only.
"""

ColumnForm = Annotated[tuple[str, ListOf[Annotated[int, Field(ge=0, lt=1 << 32)]]], Strict(False)]
"""(dtype, shape of one row)."""


class OpenEpisodes(BaseModel):
    """Open episodes, and the columns of the chunks of each module, so that markers have the same ones."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")
    agents: ListOf[str]
    modules: ListOf[str]
    columns: dict[str, dict[str, ColumnForm]]
    """By module and name."""
    rows: str
    """`OPEN_EPISODE` rows in base64. Agents and modules of their chunks are indices into the lists here."""
    tasks: ListOf[TaskJson | None] = []
    """The task of each row; empty if none has one."""

    def chunks(self) -> NDArray[np.void]:
        """Return the newest chunk of each episode, as a copy. Raises `DecodeError`."""
        try:
            table = np.frombuffer(base64.b64decode(self.rows, validate=True), OPEN_EPISODE)
        except (ValueError, binascii.Error) as error:
            raise DecodeError("bad_message", f"rows of open episodes: {error}") from error
        chunks: NDArray[np.void] = table["chunk"].copy()
        if (chunks["agent"] >= len(self.agents)).any() or (chunks["module"] >= len(self.modules)).any():
            raise DecodeError("bad_message", "an open episode is of an agent or a module without a name")
        return chunks

    def tasks_by_episode(self) -> dict[tuple[int, int], Task]:
        """Return the tasks of the episodes that have one, by the two words of their ids. Raises as `chunks` does."""
        rows = zip(self.chunks(), self.tasks, strict=False)  # a list that is too short leaves the others without
        return {(int(row["id_high"]), int(row["id_low"])): Task(*told) for row, told in rows if told is not None}


def open_episodes(
    chunks: NDArray[np.void],
    agents: list[str],
    modules: list[str],
    columns: dict[str, Any],
    tasks: Sequence[Task | None] = (),
) -> OpenEpisodes:
    """Return the episodes with these newest chunks and their tasks, as a checkpoint carries them."""
    rows = np.zeros(len(chunks), OPEN_EPISODE)
    rows["chunk"] = chunks
    written = base64.b64encode(rows.tobytes()).decode()
    told: Any = [task and task.as_json() for task in tasks if any(tasks)]
    return OpenEpisodes(agents=agents, modules=modules, columns=columns, rows=written, tasks=told)


def stops(table: NDArray[np.void], env_t: NDArray[Any] | None) -> NDArray[np.int64]:
    """Return the env step after each chunk's last one. An agent that pauses has fewer steps than its env."""
    after: NDArray[np.int64] = table["t_start"] + table["length"]
    if env_t is not None and len(env_t):
        has_steps = table["length"] > 0
        after[has_steps] = env_t[np.cumsum(table["length"])[has_steps] - 1] + 1
    return after


def in_order(table: NDArray[np.void]) -> NDArray[np.intp]:
    """Return rows in the order of events in each env.

    A worker writes end markers last, but they end episodes of earlier batches, and other episodes have begun in their
    place since.
    """
    return np.argsort(table["length"] > 0, kind="stable")


def is_open(row: np.void) -> bool:
    """Return whether an episode goes on after this chunk."""
    return bool(row["length"] and row["end"] == ChunkEnd.ONGOING)


def index_of(name: str, names: list[str]) -> int:
    """Return the index of `name` in `names`, to which it is added if it is new."""
    if name not in names:
        names.append(name)
    return names.index(name)
