"""The episodes of one worker's life that are open: some of their chunks were cut, and their end was not.

When a worker dies, its supervisor sends them with the obituary, and the broker passes them on to the learner. So each
of them gets its end marker, also from a learner that began after their chunks had come.
"""

from __future__ import annotations

import base64
import binascii
import math
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, Strict

from headrace.schemas.basics.bounds import ListOf
from headrace.schemas.chunks.chunk import CHUNK_TABLE, ChunkEnd
from headrace.schemas.errors import DecodeError

OPEN_EPISODE = np.dtype([("chunk", CHUNK_TABLE), ("since", "<u8"), ("until", "<u8")])
"""The newest chunk of an open episode, from batch `since` on and before batch `until` (0: there was no later chunk).

The chunk's `t_start` is the env step after its last one, not its first.
"""

MOST_OPEN = 6000
"""Most rows in one message: with their names they stay below the limit of a header."""

_MOST_TEXT = 4 * (MOST_OPEN * OPEN_EPISODE.itemsize // 3 + 1)

ColumnForm = Annotated[tuple[str, ListOf[Annotated[int, Field(ge=0, lt=1 << 32)]]], Strict(False)]
"""(dtype, shape of one row)."""


class OpenEpisodes(BaseModel):
    """Open episodes, and the columns of the chunks of each module, so that markers have the same ones."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")
    agents: ListOf[str]
    modules: ListOf[str]
    columns: dict[str, dict[str, ColumnForm]]
    """By module and name."""
    rows: Annotated[str, Field(max_length=_MOST_TEXT)]
    """`OPEN_EPISODE` rows in base64. Agents and modules of their chunks are indices into the lists here."""

    def after(self, seq: int) -> NDArray[np.void]:
        """Return the rows of the episodes that were open after batch `seq`. Raises `DecodeError`."""
        try:
            table = np.frombuffer(base64.b64decode(self.rows, validate=True), OPEN_EPISODE)
        except (ValueError, binascii.Error) as error:
            raise DecodeError("bad_message", f"rows of open episodes: {error}") from error
        chunks = table["chunk"]
        if (chunks["agent"] >= len(self.agents)).any() or (chunks["module"] >= len(self.modules)).any():
            raise DecodeError("bad_message", "an open episode is of an agent or a module without a name")
        open_then: NDArray[np.bool_] = (table["since"] <= seq) & ((table["until"] == 0) | (table["until"] > seq))
        return table[open_then]

    def unfinished(self, seq: int) -> list[tuple[float, int]]:
        """Return (return, env steps) of each episode that was open after batch `seq`, as far as it was cut.

        Agents that were done before do not count in the return. Raises `DecodeError`.
        """
        found: dict[tuple[int, int], tuple[float, int]] = {}
        chunks = self.after(seq)["chunk"]
        columns = (chunks[name].tolist() for name in ("id_high", "id_low", "episode_return", "t_start"))
        for high, low, earned, steps in zip(*columns, strict=True):
            before, longest = found.get((high, low), (0.0, 0))
            found[high, low] = before + earned, max(longest, steps)
        return [(earned, steps) for earned, steps in found.values() if math.isfinite(earned) and steps > 0]


def open_episodes(
    rows: NDArray[np.void], agents: list[str], modules: list[str], columns: dict[str, Any]
) -> OpenEpisodes:
    """Return these rows of `OPEN_EPISODE` as a message carries them.

    If there are too many, leave out ended ones first.
    """
    kept = rows[np.argsort(rows["until"] > 0, kind="stable")][:MOST_OPEN]
    written = base64.b64encode(kept.tobytes()).decode()
    return OpenEpisodes(agents=agents, modules=modules, columns=columns, rows=written)


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
