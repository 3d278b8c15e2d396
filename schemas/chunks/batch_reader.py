"""Reader of BATCH messages. It checks all parts of a message against each other and the spaces before it uses them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from headrace.schemas.basics.bounds import Version
from headrace.schemas.chunks.batch import (
    CONNECTOR_UPDATE,
    STATE_IN,
    BatchHeader,
    ChunkBatch,
    Infos,
    belongs_to_space,
    is_obs_column,
    without_prefix,
)
from headrace.schemas.chunks.chunk import CHUNK_TABLE, LOOKBACK, ChunkEnd
from headrace.schemas.chunks.info_json import read_info
from headrace.schemas.chunks.spaces import Space, column_dtype, leaf_shape, leaves
from headrace.schemas.chunks.task import Task
from headrace.schemas.errors import DecodeError
from headrace.schemas.frames.wire import DEFAULT_LIMITS, Buffer, WireLimits, decode_arrays

_INDICES = ("agent", "module", "reason")
_SIGN_BITS = 0xC0
"""The two highest bits of the last byte of an int64: both are 0 from 0 to 2^62 - 1."""


def _bytes_of(name: str) -> slice:
    """Return where a field's bytes lie in a row of the chunk table."""
    dtype, start = CHUNK_TABLE.fields[name][:2]  # type: ignore[index]
    return slice(start, start + dtype.itemsize)


_AT = {name: _bytes_of(name) for name in (*_INDICES, "t_start", "episode_length", "end", "lookback")}

_Rows = tuple[np.dtype[Any], tuple[int, ...], bool]
"""Dtype and shape of a column's rows, and whether it is of observations."""


class BatchReader:
    """Reads batches whose chunks have one pair of spaces."""

    def __init__(self, observation_space: Space, action_space: Space, limits: WireLimits = DEFAULT_LIMITS) -> None:
        self._observation_space = observation_space
        self._action_space = action_space
        self._limits = limits
        both = (*leaves(observation_space, "obs"), *leaves(action_space, "actions"))
        self._required: dict[str, _Rows] = {
            name: (column_dtype(leaf), leaf_shape(leaf), is_obs_column(name)) for name, leaf in both
        }
        self._required |= {"rewards": (np.dtype("<f8"), (), False), "weights_seq": (np.dtype("<i8"), (), False)}
        self._known = self._required | {"env_t": (np.dtype("<i8"), (), False)}

    def read(
        self, header: BatchHeader, raw_header: dict[str, Any], frames: Sequence[Buffer], newest: Version = (0, 0)
    ) -> ChunkBatch:
        """Read the whole batch; its columns are views of the frames. `newest` is the version from which lag counts.

        `raw_header` is what `decode_header` returned, and `header` what `read_batch_header` made of it.

        Raises `DecodeError` when parts of the message contradict each other. The spaces fix names, dtypes and shapes,
        which are checked. Values are not checked: a NaN passes.
        """
        arrays = decode_arrays(raw_header, frames, self._limits)
        raw = arrays.pop("_table", None)
        if raw is None or raw.dtype != np.uint8 or raw.ndim != 1 or raw.size % CHUNK_TABLE.itemsize:
            raise DecodeError("bad_table", f"no chunk table of {CHUNK_TABLE.itemsize}-byte rows")
        further = {name: arrays.pop(name) for name in [name for name in arrays if name.startswith("_")]}
        looks_back = _check_table(raw, header)
        table, task_of = raw.view(CHUNK_TABLE), header.task_of
        if task_of and (len(task_of) != len(table) or max(task_of) > len(header.tasks)):
            what = f"{len(task_of)} numbers up to {max(task_of)} of {len(header.tasks)} tasks"
            raise DecodeError("bad_tasks", f"{what}, for {len(table)} chunks")
        batch = ChunkBatch(
            table=table,
            arrays=arrays,
            observation_space=self._observation_space,
            action_space=self._action_space,
            agents=header.agents,
            modules=header.modules,
            reasons=header.reasons,
            infos=_load_infos(further.get("_infos"), table, self._limits),
            slot=header.slot,
            incarnation=header.incarnation,
            seq=header.seq,
            learner_epoch=header.learner_epoch,
            weights_digest=header.weights_digest,
            connector_update=without_prefix(CONNECTOR_UPDATE, further) if further else {},
            newest=newest,
            tasks=[Task(*told) for told in header.tasks],
            task_of=np.array(header.task_of, np.int32) if header.task_of else None,
            episode_ends=header.ends,
        )
        if (batch.steps, len(batch)) != (header.steps, header.chunks):
            counts, told = (batch.steps, len(batch)), (header.steps, header.chunks)
            raise DecodeError("bad_table", f"{counts} steps and chunks; header says {told}")
        obs_rows = batch.steps + int(np.count_nonzero(table["length"]))
        if obs_rows < batch.steps + len(table) and bool((table["end"][table["length"] == 0] != ChunkEnd.ABORTED).any()):
            raise DecodeError("bad_table", "a chunk of no steps that is no end marker")
        if self._check_columns(batch, obs_rows) or looks_back:
            _check_lookback(batch)
        return batch

    def _check_columns(self, batch: ChunkBatch, obs_rows: int) -> bool:
        """Raise `DecodeError` for a column that is missing, or not as it must be. Return whether one looks back."""
        columns, steps, looks_back = batch.arrays, batch.steps, False
        if missing := self._required.keys() - columns.keys():
            raise DecodeError("missing_column", f"column {min(missing)!r:.80} is missing")
        for name, column in columns.items():
            known, rows = self._known.get(name), steps
            if known is not None:
                rows = obs_rows if known[2] else steps
            elif belongs_to_space(name):
                raise DecodeError("bad_column", f"column {name!r:.80} is no leaf of its space")
            elif name.startswith((LOOKBACK, STATE_IN)):
                rows = int(batch.offsets_of(name)[-1])
                looks_back |= name.startswith(LOOKBACK)
            shape = column.shape
            if not shape or shape[0] != rows:
                raise DecodeError("bad_column", f"column {name!r:.80} has shape {shape}, not {rows} rows")
            if known is not None and (column.dtype != known[0] or shape[1:] != known[1]):
                seen = f"{column.dtype} rows of shape {shape[1:]}"
                raise DecodeError("bad_column", f"column {name!r:.80} has {seen}, not {known[0]} of {known[1]}")
        return looks_back


def _check_table(raw: NDArray[np.uint8], header: BatchHeader) -> bool:
    """Raise `DecodeError` for a value that no worker writes. Return whether any chunk looks back.

    numpy costs time by call, not by row. So the largest of all rows is taken once, byte by byte, for all fields.
    """
    if not len(raw):
        return False
    largest = np.maximum.reduce(raw.reshape(-1, CHUNK_TABLE.itemsize)).tobytes()
    for name, names in zip(_INDICES, (header.agents, header.modules, header.reasons), strict=True):
        if int.from_bytes(largest[_AT[name]], "little") >= len(names):  # the bytes may be of two rows
            index = int(raw.view(CHUNK_TABLE)[name].max())
            if index >= len(names):
                raise DecodeError("bad_table", f"{name} {index} of {len(names)}")
    if (end := largest[_AT["end"]][0]) > ChunkEnd.ABORTED:
        raise DecodeError("bad_table", f"chunk end {end} is unknown")
    for name in ("t_start", "episode_length"):
        if largest[_AT[name]][-1] & _SIGN_BITS:
            raise DecodeError("bad_table", f"a chunk's {name} is out of range")
    return any(largest[_AT["lookback"]])


def _check_lookback(batch: ChunkBatch) -> None:
    """Raise `DecodeError` unless all step and observation columns look back or none does.

    Raise it also for a chunk that looks back beyond the first step of its episode.
    """
    table, back = batch.table, batch.lookback
    if bool((table["lookback"] > np.where(table["length"], table["episode_length"] - table["length"], 0)).any()):
        raise DecodeError("bad_table", "a chunk looks back on more steps than lie before it")
    own = {name: c for name, c in batch.arrays.items() if not name.startswith((LOOKBACK, STATE_IN))}
    if different := back.keys() ^ own.keys():
        raise DecodeError("bad_column", f"{min(different)!r:.80} has a column or lookback, but not both")
    for name, column in back.items():
        if (column.dtype, column.shape[1:]) != (own[name].dtype, own[name].shape[1:]):
            raise DecodeError("bad_column", f"lookback of column {name!r:.80} has other rows than the column")


def _load_infos(raw: NDArray[Any] | None, table: NDArray[np.void], limits: WireLimits) -> Infos:
    if raw is None:
        return {}
    if raw.dtype != np.uint8 or raw.ndim != 1 or raw.nbytes > limits.infos_bytes:
        raise DecodeError("bad_infos", f"infos are not at most {limits.infos_bytes} bytes of JSON")
    try:
        rows = orjson.loads(raw.data)
        infos = {int(i): {int(t): read_info(info) for t, info in row.items()} for i, row in rows.items()}
    except (ValueError, AttributeError, RecursionError) as error:
        raise DecodeError("bad_infos", f"infos are not what the codec writes: {error!s:.200}") from error
    lengths = table["length"]
    for i, row in infos.items():
        if not 0 <= i < len(table) or not all(0 <= t <= lengths[i] and isinstance(row[t], dict) for t in row):
            raise DecodeError("bad_infos", f"infos of chunk {i} of {len(table)} are not dicts of its observations")
    return infos
