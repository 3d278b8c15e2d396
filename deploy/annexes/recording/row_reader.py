"""Batches out of the tables of a recording: what `row_tables` has put there, equal to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from headrace.deploy.annexes.recording.recording_folder import beside, metadata_in, read_complete, read_metadata
from headrace.deploy.annexes.recording.row_tables import FINAL, column_of
from headrace.schemas.chunks.batch import STATE_IN, ChunkBatch, is_obs_column
from headrace.schemas.chunks.chunk import CHUNK_TABLE, LOOKBACK
from headrace.schemas.chunks.info_json import read_info
from headrace.schemas.chunks.spaces import Spaces, spaces_from_json
from headrace.schemas.chunks.task import Task
from headrace.schemas.errors import RunDirError

_OF_EPISODE = ("episode_id", "agent", "module")
_EPISODE = {
    **dict.fromkeys(("slot", "incarnation", "env_index", "seed", "task"), "first"),
    **dict.fromkeys(("end", "reason", "episode_return", "episode_length", "learner_epoch"), "last"),
    "oldest_weights": "min",
    "newest_weights": "max",
}
"""Further columns of an episode, and how each is made of those of its chunks."""
_ROWS = 256
"""Rows of the table of batches that are Python objects at a time."""


def batches_in(path: Path, first: int = 0) -> Iterator[ChunkBatch]:
    """Return the batches of a file `batches-N.parquet`, in order, without the `first`. Their arrays are read-only.

    It opens the files at once, so that they can be removed, and reads a row group when its first batch is due.
    """
    rows, number = pq.read_table(path).slice(first), path.stem.removeprefix("batches-")
    files = {file: _File(path.parent, f"{number}-{file}") for file in rows["file"].unique().to_pylist()}
    parts = (rows.slice(start, _ROWS).to_pylist() for start in range(0, rows.num_rows, _ROWS))
    return (files[row["file"]].batch(row) for part in parts for row in part)


def spaces_in(path: Path) -> tuple[str, Spaces]:
    """Return the module of a file of steps or chunks, and its spaces. Raises `RunDirError`."""
    told = read_metadata(path)
    return told["module"], _spaces(told)


def _spaces(told: dict[str, Any]) -> Spaces:
    return spaces_from_json({"observation": told["observation_space"], "action": told["action_space"]})


def episode_table(folder: Path) -> pa.Table:
    """Return a row for each agent's episode, in the order in which they begin. Raises `RunDirError` without a batch.

    Each column but the weights is that of the same name in `chunks`; return, length, end and reason are those of the
    newest chunk. `oldest_weights` and `newest_weights` are versions (`weights_seq`) that chose its steps.
    """
    parts = read_complete(folder, lambda files: [_chunks_with_weights(path) for path in beside(files, "chunks")])
    if not parts:
        raise RunDirError("", "", sentence=f"recording {folder} has no batch yet")
    chunks = pa.concat_tables(parts).sort_by("chunk_index")
    told = chunks.group_by([*_OF_EPISODE], use_threads=False).aggregate([*_EPISODE.items()])
    made = [f"{name}_{how}" for name, how in _EPISODE.items()]
    return told.select([*_OF_EPISODE, *made]).rename_columns([*_OF_EPISODE, *_EPISODE])


def _chunks_with_weights(path: Path) -> pa.Table:
    names = [*_OF_EPISODE, *(name for name in _EPISODE if not name.endswith("_weights")), "chunk_index", "length"]
    chunks = pq.read_table(path, columns=names)
    steps = pq.read_table(path.with_name(path.name.replace("chunks-", "steps-", 1)), columns=["weights_seq"])
    seq, lengths = steps["weights_seq"].to_numpy(), chunks["length"].to_numpy()
    has_steps = lengths > 0
    starts = (np.cumsum(lengths, dtype=np.int64) - lengths)[has_steps]
    at = pa.array(np.cumsum(has_steps) - 1, mask=~has_steps)
    for name, of in (("oldest_weights", np.minimum), ("newest_weights", np.maximum)):
        bound = of.reduceat(seq, starts) if len(starts) else np.empty(0, np.int64)
        chunks = chunks.append_column(name, pa.array(bound).take(at))
    plain = [pa.string() if pa.types.is_dictionary(field.type) else field.type for field in chunks.schema]
    return chunks.cast(pa.schema([*zip(chunks.column_names, plain, strict=True)]))


class _File:
    """The steps and the chunks of one module in one number of a recording."""

    def __init__(self, folder: Path, name: str) -> None:
        self._steps = _Rows(folder / f"steps-{name}.parquet")
        self._chunks = _Rows(folder / f"chunks-{name}.parquet")
        self._spaces = _spaces(self._steps.told)

    def batch(self, row: dict[str, Any]) -> ChunkBatch:
        """Return the batch of a row of the table of batches."""
        table = np.frombuffer(row["table"], CHUNK_TABLE)
        steps = self._steps.slice(row["first_step"], row["steps"])
        chunks = self._chunks.slice(row["first_chunk"], row["chunks"])
        columns = {name: _column(name, steps, chunks, table) for name in row["columns"]}
        for column in columns.values():
            column.flags.writeable = False
        told = chunks["infos"].to_pylist() if "infos" in chunks.column_names else []
        infos = {i: orjson.loads(info) for i, info in enumerate(told) if info is not None}
        return ChunkBatch(
            table,
            columns,
            self._spaces.observation,
            self._spaces.action,
            agents=row["agents"],
            modules=[row["module"]],
            reasons=row["reasons"],
            infos={i: {int(t): read_info(info) for t, info in infos[i].items()} for i in infos},
            slot=row["slot"],
            incarnation=row["incarnation"],
            seq=row["seq"],
            learner_epoch=row["learner_epoch"],
            weights_digest=row["weights_digest"],
            connector_update={
                array["name"]: np.frombuffer(array["data"], array["dtype"]).reshape(array["shape"])
                for array in row["connector_update"]
            },
            newest=(row["newest"][0], row["newest"][1]),
            tasks=[_task(text) for text in row["tasks"]],
            task_of=None if row["task_of"] is None else np.array(row["task_of"], np.int32),
        )


class _Rows:
    """The rows of a file, without the columns that a batch has elsewhere. It holds the row groups asked for last."""

    def __init__(self, path: Path) -> None:
        self._file = pq.ParquetFile(path)
        schema = self._file.schema_arrow
        self.told = metadata_in(schema, path)
        self._columns = [field.name for field in schema if field.metadata or field.name == "infos"]
        groups = range(self._file.metadata.num_row_groups)
        self._stops = np.cumsum([self._file.metadata.row_group(group).num_rows for group in groups], dtype=np.int64)
        self._held = range(0)
        self._first = 0
        self._table = schema.empty_table().select(self._columns)

    def slice(self, first: int, count: int) -> pa.Table:
        """Return `count` rows."""
        if count:
            start, last = np.searchsorted(self._stops, [first, first + count - 1], "right").tolist()
            if self._held != range(start, last + 1):
                self._held = range(start, last + 1)
                self._table = self._file.read_row_groups([*self._held], self._columns).combine_chunks()
                self._first = int(self._stops[start - 1]) if start else 0
        return self._table.slice(first - self._first if count else 0, count)


def _task(text: str) -> Task:
    told = orjson.loads(text)
    return Task(tuple(told["version"]), told["values"], told["group"], told["member"])


def _column(name: str, steps: pa.Table, chunks: pa.Table, table: NDArray[np.void]) -> NDArray[Any]:
    """Return a column of a batch, whose steps and chunks these are."""
    lengths = table["length"]
    has_steps = lengths > 0
    states = int(has_steps.sum())
    if is_obs_column(name):
        rows, finals = _rows(steps, name, steps.num_rows), _rows(chunks, FINAL + name, states)
        column = np.empty((len(rows) + states, *rows.shape[1:]), rows.dtype)
        is_final = np.zeros(len(column), np.bool_)
        is_final[np.cumsum(lengths, dtype=np.int64)[has_steps] + np.arange(states)] = True
        column[is_final], column[~is_final] = finals, rows
        return column
    if name.startswith(STATE_IN):
        return _rows(chunks, name, states)
    if name.startswith(LOOKBACK):
        return _rows(chunks, name, int(table["lookback"].sum()))
    return _rows(steps, column_of(name), steps.num_rows)


def _rows(table: pa.Table, name: str, count: int) -> NDArray[Any]:
    """Return the `count` rows of a column as an array in the form that its field tells. Null stands for no row."""
    form = table.field(name).metadata
    dtype, shape = np.dtype(form[b"dtype"].decode()), orjson.loads(form[b"shape"])
    if 0 in (count, *shape):
        return np.zeros((count, *shape), dtype)
    array = table[name].chunk(0).drop_null()
    if pa.types.is_list(array.type):
        array = array.flatten()
    if pa.types.is_binary(array.type):
        array = array.cast(pa.binary(len(array[0].as_buffer())))
    if pa.types.is_fixed_size_binary(array.type):
        size = array.type.byte_width
        flat = np.frombuffer(array.buffers()[1], np.uint8)[array.offset * size :][: count * size]
    else:
        flat = (array.flatten() if shape else array).to_numpy(zero_copy_only=False)
    return flat.reshape(count, *shape)
