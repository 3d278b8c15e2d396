"""Tables of a recording: one row for each step, for each chunk, and for each batch.

A column of a batch has the same name here. Rows of several dimensions are flat: lists of one length, or bytes where
they are images. The field's metadata has their `shape` and `dtype`.

| table | its own columns |
|---|---|
| steps | what the batch has of each step: "obs" before the action, "actions", "rewards", "logp", ... |
| chunks | "final_obs" after the chunk's last step, "state_in/...", "lookback/...", `infos` as JSON |
| batches | where its steps and chunks stand, and what the tables above do not say of it |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, count, groupby
from typing import Any
from urllib.parse import quote

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from headrace.schemas.chunks.batch import STATE_IN, ChunkBatch, is_obs_column
from headrace.schemas.chunks.chunk import EXPLORE, LOOKBACK, RANDOM_ACTIONS, UNSEEDED, ChunkEnd, format_episode_id
from headrace.schemas.chunks.info_json import infos_json
from headrace.schemas.chunks.task import Task

FINAL = "final_"
"""Prefix of the columns of observations after a chunk's last step."""

_OF_CHUNK = ("episode_id", "agent", "module", "slot", "incarnation", "env_index", "learner_epoch", "task")
"""Columns of a chunk that each of its steps has too."""
_OF_STEP = (*_OF_CHUNK, "end", "reason", "t")
_ENDS = pa.array([end.name for end in ChunkEnd])
_COPIED_BYTES = 1 << 14
"""Bytes of a chunk's observations up to which they are copied into one array with those of other chunks."""


def column_of(name: str) -> str:
    """Return the name in the table of steps for a step column of a batch. No two columns get the same."""
    if name == "env_t":
        return "t"
    return f"{name}_" if name.rstrip("_") in _OF_STEP else name


def files_of(batches: Sequence[ChunkBatch]) -> list[str]:
    """Return for each batch the name of its file: its module, and a number where a column has changed its form."""
    forms: dict[str, dict[str, Any]] = {}
    names = []
    for batch in batches:
        own: dict[str, Any] = {name: (column.dtype, column.shape[1:]) for name, column in batch.arrays.items()}
        own[""] = batch.observation_space, batch.action_space
        module = quote(batch.modules[0], safe="")
        further = (f"{module}+{number}" for number in count(1))
        name = next(name for name in chain([module], further) if _agree(forms.setdefault(name, {}), own))
        forms[name] |= own
        names.append(name)
    return names


def _agree(known: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    return all(known.get(name, form) == form for name, form in own.items())


def file_tables(batches: Sequence[ChunkBatch]) -> tuple[pa.Table, pa.Table]:
    """Return the steps and the chunks of the batches of one file, in their order.

    A column that only some of the batches have is null for the others.
    """
    alike = [list(run) for _, run in groupby(batches, lambda batch: [*batch.arrays])]
    steps, chunks = zip(*(_tables(run) for run in alike), strict=True)
    return _joined(steps), _joined(chunks)


def batch_table(batches: Sequence[ChunkBatch], files: Sequence[str]) -> pa.Table:
    """Return a row for each batch, in order. `first_step` and `first_chunk` are rows in the tables of its file."""
    stops: dict[str, tuple[int, int]] = {}
    rows = []
    for batch, file in zip(batches, files, strict=True):
        first_step, first_chunk = stops.get(file, (0, 0))
        stops[file] = first_step + batch.steps, first_chunk + len(batch)
        rows.append(
            {
                "file": file,
                "module": batch.modules[0],
                "slot": batch.slot,
                "incarnation": batch.incarnation,
                "seq": batch.seq,
                "learner_epoch": batch.learner_epoch,
                "weights_digest": batch.weights_digest,
                "newest": [*batch.newest],
                "first_step": first_step,
                "steps": batch.steps,
                "first_chunk": first_chunk,
                "chunks": len(batch),
                "columns": [*batch.arrays],
                "agents": [*batch.agents],
                "reasons": [*batch.reasons],
                "tasks": [_task_json(task) for task in batch.tasks],
                "task_of": None if batch.task_of is None else batch.task_of.tolist(),
                "table": batch.table.tobytes(),
                "connector_update": [
                    {"name": name, "dtype": array.dtype.str, "shape": [*array.shape], "data": array.tobytes()}
                    for name, array in batch.connector_update.items()
                ],
            }
        )
    return pa.Table.from_pylist(rows, _BATCHES)


_WORDS = pa.list_(pa.string())
_ARRAY = pa.struct({"name": pa.string(), "dtype": pa.string(), "shape": pa.list_(pa.int64()), "data": pa.binary()})
_BATCHES = pa.schema(
    [
        *[pa.field(name, pa.string()) for name in ("file", "module", "weights_digest")],
        *[pa.field(name, pa.int64()) for name in ("slot", "incarnation", "seq", "learner_epoch")],
        *[pa.field(name, pa.int64()) for name in ("first_step", "steps", "first_chunk", "chunks")],
        *[pa.field(name, _WORDS) for name in ("columns", "agents", "reasons", "tasks")],
        *[pa.field(name, pa.list_(pa.int64())) for name in ("newest", "task_of")],
        *[pa.field("table", pa.binary()), pa.field("connector_update", pa.list_(_ARRAY))],
    ]
)


def _joined(tables: Sequence[pa.Table]) -> pa.Table:
    return pa.concat_tables(tables, promote_options="default").unify_dictionaries()


def _tables(batches: Sequence[ChunkBatch]) -> tuple[pa.Table, pa.Table]:
    """Return the steps and the chunks of batches with the same columns."""
    parts = {name: [batch.arrays[name] for batch in batches] for name in batches[0].arrays}
    table = _concatenated([batch.table for batch in batches])
    lengths = table["length"].astype(np.int64)
    chunk_of = np.repeat(np.arange(len(table)), lengths)
    chunks = _Columns(_chunk_columns(batches, table))
    steps = _Columns({name: chunks.arrays[name].take(pa.array(chunk_of)) for name in _OF_CHUNK})

    stop = np.cumsum(lengths)
    has_steps = lengths > 0
    last = np.zeros(len(chunk_of), np.bool_)
    last[stop[has_steps] - 1] = True
    at = np.where(has_steps, np.cumsum(has_steps) - 1, 0)
    """The place of each chunk among those with steps."""
    for name in ("end", "reason"):
        code = chunks.arrays[name].indices.fill_null(-1).to_numpy()[chunk_of]
        code = np.where(last, code, 0 if name == "end" else -1)
        steps.arrays[name] = _words(code, chunks.arrays[name].dictionary)
    t = np.arange(len(chunk_of)) + np.repeat(table["t_start"] - stop + lengths, lengths)
    steps.add(column_of("env_t"), *parts.pop("env_t", [t]))
    for name, columns in parts.items():
        if is_obs_column(name):
            rows, finals = _obs_rows(columns, batches)
            steps.add(name, *rows)
            chunks.add_some(FINAL + name, finals, at, ~has_steps)
        elif name.startswith(STATE_IN):
            chunks.add_some(name, _concatenated(columns), at, ~has_steps)
        elif name.startswith(LOOKBACK):
            chunks.add_lists(name, _concatenated(columns), table["lookback"])
        else:
            steps.add(column_of(name), *columns)
    return steps.table(), chunks.table()


def _obs_rows(
    columns: Sequence[NDArray[Any]], batches: Sequence[ChunkBatch]
) -> tuple[list[NDArray[Any]], NDArray[Any]]:
    """Return the observations before each step, in one array or in several, and those after each chunk's last step."""
    rows, finals = [], []
    for column, batch in zip(columns, batches, strict=True):
        lengths = batch.table["length"].astype(np.int64)
        lengths = lengths[lengths > 0]
        final = np.cumsum(lengths + 1) - 1
        rows += [column[stop - length : stop] for length, stop in zip(lengths.tolist(), final.tolist(), strict=True)]
        finals.append(column[final])
    is_small = sum(column.nbytes for column in columns) <= _COPIED_BYTES * len(rows)
    return ([np.concatenate(rows or [columns[0][:0]])] if is_small else rows), np.concatenate(finals)


def _chunk_columns(batches: Sequence[ChunkBatch], table: NDArray[np.void]) -> dict[str, pa.Array]:
    """Return what the tables of these batches say of each chunk."""
    counts = [len(batch) for batch in batches]
    ids = zip(table["id_high"].tolist(), table["id_low"].tolist(), strict=True)
    numbers: dict[tuple[int, int], int] = {}
    episodes = np.array([numbers.setdefault(episode, len(numbers)) for episode in ids], np.int32)
    columns = {
        "episode_id": _words(episodes, pa.array([format_episode_id(*episode) for episode in numbers])),
        "chunk_index": pa.array(table["chunk_index"]),
        "agent": _named(batches, lambda batch: (batch.agents, batch.table["agent"])),
        "module": _named(batches, lambda batch: (batch.modules, batch.table["module"])),
        "slot": pa.array(np.repeat([batch.slot for batch in batches], counts)),
        "incarnation": pa.array(np.repeat([batch.incarnation for batch in batches], counts)),
        "env_index": pa.array(table["env_index"]),
        "seed": pa.array(table["seed"], mask=table["seed"] == UNSEEDED),
        "t_start": pa.array(table["t_start"]),
        "length": pa.array(table["length"]),
        "end": _words(table["end"], _ENDS),
        "reason": _named(batches, lambda batch: (batch.reasons, batch.table["reason"])),
        "episode_return": pa.array(table["episode_return"]),
        "episode_length": pa.array(table["episode_length"]),
        "explore": pa.array(table["flags"] & EXPLORE > 0),
        "random_actions": pa.array(table["flags"] & RANDOM_ACTIONS > 0),
        "learner_epoch": pa.array(np.repeat([batch.learner_epoch for batch in batches], counts)),
        "task": _named(batches, lambda batch: (["", *map(_task_json, batch.tasks)], _task_numbers(batch))),
    }
    if any(batch.infos for batch in batches):
        columns["infos"] = pa.array([_infos(batch, i) for batch in batches for i in range(len(batch))], pa.string())
    return columns


class _Columns:
    """Arrow arrays by name, and the metadata of those that were made of numpy's."""

    def __init__(self, arrays: Mapping[str, pa.Array]) -> None:
        self.arrays = dict(arrays)
        self._forms: dict[str, dict[str, str]] = {}

    def add(self, name: str, *parts: NDArray[Any]) -> None:
        """Add a column, whose rows stand in these parts."""
        self.arrays[name] = pa.chunked_array([*map(_flat, parts)])
        self._note_form(name, parts[0])

    def add_some(self, name: str, column: NDArray[Any], at: NDArray[Any], absent: NDArray[Any]) -> None:
        """Add the rows `at` of a column, and null where `absent`."""
        rows = _flat(column)
        self.arrays[name] = rows.take(pa.array(at, mask=absent)) if absent.any() else rows
        self._note_form(name, column)

    def add_lists(self, name: str, column: NDArray[Any], counts: NDArray[Any]) -> None:
        """Add a column of lists. Each holds the next `counts` rows. pandas reads no lists of bytes of one length."""
        offsets = np.concatenate(([0], np.cumsum(counts, dtype=np.int32))).astype(np.int32)
        rows = _flat(column)
        rows = rows.cast(pa.binary()) if pa.types.is_fixed_size_binary(rows.type) else rows
        self.arrays[name] = pa.ListArray.from_arrays(pa.array(offsets), rows)
        self._note_form(name, column)

    def _note_form(self, name: str, column: NDArray[Any]) -> None:
        self._forms[name] = {"shape": orjson.dumps(column.shape[1:]).decode(), "dtype": column.dtype.str}

    def table(self) -> pa.Table:
        """Return the table."""
        fields = [pa.field(name, array.type, metadata=self._forms.get(name)) for name, array in self.arrays.items()]
        return pa.table([*self.arrays.values()], pa.schema(fields))


def _flat(column: NDArray[Any]) -> pa.Array:
    """Return an array of rows: numbers, lists of one length, or bytes for images.

    Parquet writes bytes thirty times faster than lists of small integers.
    """
    rows, size = len(column), int(np.prod(column.shape[1:], dtype=np.int64))
    if column.ndim == 1:
        return pa.array(column)
    if not size:
        return pa.nulls(rows)
    column = np.ascontiguousarray(column)
    if column.dtype == np.uint8 and column.ndim > 2:
        return pa.Array.from_buffers(pa.binary(size), rows, [None, pa.py_buffer(column)])
    return pa.FixedSizeListArray.from_arrays(pa.array(column.reshape(-1)), size)


def _words(codes: NDArray[Any], words: pa.Array) -> pa.DictionaryArray:
    """Return the word for each code, and null for -1."""
    codes = codes.astype(np.int32)
    return pa.DictionaryArray.from_arrays(pa.array(codes, mask=codes < 0), words)


def _named(
    batches: Iterable[ChunkBatch], numbered: Callable[[ChunkBatch], tuple[Sequence[str], NDArray[Any]]]
) -> pa.DictionaryArray:
    """Return a name for each chunk: `numbered` gives a batch's names, and of each chunk a name's index. "" is null."""
    known = {"": -1}
    parts = []
    for batch in batches:
        names, indices = numbered(batch)
        parts.append(np.array([known.setdefault(name, len(known) - 1) for name in names], np.int32)[indices])
    return _words(np.concatenate(parts), pa.array([*known][1:], pa.string()))


def _task_json(task: Task) -> str:
    version, values, group, member = task.as_json()
    return orjson.dumps({"version": version, "values": values, "group": group, "member": member}).decode()


def _task_numbers(batch: ChunkBatch) -> NDArray[np.int32]:
    return np.zeros(len(batch), np.int32) if batch.task_of is None else batch.task_of


def _infos(batch: ChunkBatch, chunk: int) -> str | None:
    infos = batch.infos.get(chunk)
    return infos_json(infos).decode() if infos else None


def _concatenated(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
