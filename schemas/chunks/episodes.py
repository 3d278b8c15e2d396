"""The steps of one or several batches, how each chunk ends, and which chunk goes on where another is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.chunk import LOOKBACK, ChunkEnd, arrays_in_words
from headrace.schemas.chunks.spaces import nest
from headrace.schemas.errors import ChunkError

if TYPE_CHECKING:
    from headrace.schemas.chunks.batch import ChunkBatch

_STATE_IN = "state_in/"


@dataclass(frozen=True, slots=True, eq=False)
class Episodes:
    """N steps in C chunks, one chunk after another. End markers have no steps and leave no trace here.

    - obs: (N + C, ...), in the nesting of the space: each chunk's T steps and the observation after them.
    - actions: (N, ...), in the nesting of the space. rewards: float64 (N,).
    - columns: all further columns (N, ...), such as `logp`, `values`, `weights_seq`.
    - offsets: int64 (C + 1,), where each chunk's steps begin.
    - step_rows: int64 (N,), the row of `obs` from which each step was taken.
    - last_rows: int64 (C,), the row of `obs` after each chunk's last step. Its value stands for all later rewards.
    - terminated, truncated: bool (C,), whether the episode ended so with the chunk. Where both are False the chunk is
      cut, or its episode was aborted: it would have gone on.
    - next_chunk: int64 (C,), the chunk here that goes on where this one is cut; -1 where there is none.
    - state_in: (C, ...) by name, a recurrent module's memory before the first step of each chunk.

    The arrays of one batch are the batch's own, without a copy, and read-only in a batch of a stream. Those of several
    batches are copies.
    """

    obs: Any
    actions: Any
    rewards: NDArray[np.float64]
    columns: dict[str, NDArray[Any]]
    offsets: NDArray[np.int64]
    step_rows: NDArray[np.int64]
    last_rows: NDArray[np.int64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    next_chunk: NDArray[np.int64]
    state_in: dict[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(self.rewards)

    def __repr__(self) -> str:
        return arrays_in_words(self)


def episodes_of(batches: Sequence[ChunkBatch]) -> Episodes:
    """Return the steps of `batches` of one module, in the order given, and which chunk goes on where another is cut.

    Columns that only some of the batches have are left out, as `logp` where others had random actions. Raises
    `ChunkError` without a batch, and for batches of several modules or spaces.
    """
    if not batches:
        raise ChunkError("no batch was given to make episodes of")
    batches = [batch for batch in batches if batch.steps] or batches[:1]
    first = batches[0]
    for batch in batches:
        of, spaces = batch.modules[:1], (batch.observation_space, batch.action_space)
        if (of, spaces) != (first.modules[:1], (first.observation_space, first.action_space)):
            raise ChunkError(
                f"batches of the modules {first.modules[0]!r} and {batch.modules[0]!r}, of slots {first.slot} and "
                f"{batch.slot}, cannot be joined; give batches of one module, with the same spaces"
            )
    shared = [name for name in first.arrays if all(name in batch.arrays for batch in batches)]
    columns = {name: _joined([batch.arrays[name] for batch in batches]) for name in shared}
    chunks = _joined([_with_steps(batch) for batch in batches])
    lengths = chunks["length"].astype(np.int64)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    number = np.arange(len(chunks))
    steps = {
        name: column
        for name, column in columns.items()
        if name not in ("rewards", "obs") and not name.startswith(("obs/", _STATE_IN, LOOKBACK))
    }
    return Episodes(
        obs=nest(first.observation_space, columns, "obs"),
        actions=nest(first.action_space, columns, "actions"),
        rewards=columns["rewards"].astype(np.float64, copy=False),
        columns={n: c for n, c in steps.items() if n != "actions" and not n.startswith("actions/")},
        offsets=offsets,
        step_rows=np.arange(int(offsets[-1])) + np.repeat(number, lengths),
        last_rows=offsets[1:] + number,
        terminated=chunks["end"] == ChunkEnd.TERMINATED,
        truncated=chunks["end"] == ChunkEnd.TRUNCATED,
        next_chunk=_next_chunks(chunks, _agents(batches)),
        state_in={n.removeprefix(_STATE_IN): c for n, c in columns.items() if n.startswith(_STATE_IN)},
    )


def ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [s, s + 1, ... s + n - 1] for each (s, n), one after another."""
    return np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(int(lengths.sum()))


def _joined(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _with_steps(batch: ChunkBatch) -> NDArray[np.void]:
    """Return the table without end markers; the batch's own where it has none, since copies of records are slow."""
    has_steps = batch.table["length"] > 0
    return batch.table if has_steps.all() else batch.table[has_steps]


def _agents(batches: Sequence[ChunkBatch]) -> NDArray[np.int64]:
    """Return a number for the agent of each chunk with steps: batches number their agents in different ways."""
    names: dict[str, int] = {}
    parts = []
    for batch in batches:
        numbers = np.array([names.setdefault(name, len(names)) for name in batch.agents], np.int64)
        parts.append(numbers[_with_steps(batch)["agent"]])
    return _joined(parts)


def _next_chunks(chunks: NDArray[np.void], agents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return `Episodes.next_chunk`. Steps of the agent are counted, as env steps have gaps where an agent pauses."""
    found = np.full(len(chunks), -1, np.int64)
    stops = chunks["episode_length"]
    starts = stops - chunks["length"].astype(np.int64)
    order = np.lexsort((starts, agents, chunks["id_low"], chunks["id_high"]))
    before, after = order[:-1], order[1:]
    goes_on = (chunks["end"][before] == ChunkEnd.ONGOING) & (starts[after] == stops[before])
    for same in (chunks["id_high"], chunks["id_low"], agents):
        goes_on &= same[before] == same[after]
    found[before[goes_on]] = after[goes_on]
    return found
