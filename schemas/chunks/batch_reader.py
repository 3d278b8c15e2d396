"""Reader of BATCH messages. It checks all parts of a message against each other and the spaces before it uses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    read_batch_header,
)
from headrace.schemas.chunks.chunk import CHUNK_TABLE, ChunkEnd
from headrace.schemas.chunks.lookback import LOOKBACK
from headrace.schemas.chunks.spaces import Space, column_dtype, leaf_shape, leaves
from headrace.schemas.errors import DecodeError
from headrace.schemas.frames.wire import DEFAULT_LIMITS, Buffer, MessageKind, WireLimits, decode_arrays, decode_header

_INDICES = ("agent", "module", "reason")
_INDEX_LAYOUT: Any = {
    "names": ["indices"],
    "formats": [("<u2", (len(_INDICES),))],
    "offsets": [CHUNK_TABLE.fields["agent"][1]],  # type: ignore[index]
    "itemsize": CHUNK_TABLE.itemsize,
}
_INDEX_TABLE: np.dtype[Any] = np.dtype(_INDEX_LAYOUT)
"""The three neighbouring uint16 fields of the chunk table as one array: numpy costs time by call, not by row."""

_Rows = tuple[np.dtype[Any], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class UnreadBatch:
    """A BATCH message with its header read and checked, and its arrays unread."""

    header: BatchHeader
    raw_header: dict[str, Any]
    frames: Sequence[Buffer]


class BatchReader:
    """Reads batches whose chunks have one pair of spaces."""

    def __init__(self, observation_space: Space, action_space: Space, limits: WireLimits = DEFAULT_LIMITS) -> None:
        self._observation_space = observation_space
        self._action_space = action_space
        self._limits = limits
        both = (*leaves(observation_space, "obs"), *leaves(action_space, "actions"))
        self._required: dict[str, _Rows] = {name: (column_dtype(leaf), leaf_shape(leaf)) for name, leaf in both}
        self._required |= {"rewards": (np.dtype("<f8"), ()), "weights_seq": (np.dtype("<i8"), ())}
        self._known = self._required | {"env_t": (np.dtype("<i8"), ())}

    def read(self, unread: UnreadBatch, newest: Version = (0, 0)) -> ChunkBatch:
        """Read the whole batch; its columns are views of the frames. `newest` is the version from which lag counts.

        Raises `DecodeError` when parts of the message contradict each other. The spaces fix names, dtypes and shapes,
        which are checked. Values are not checked: a NaN passes.
        """
        header = unread.header
        arrays = decode_arrays(unread.raw_header, unread.frames, self._limits)
        table, columns = _split(arrays)
        _check_table(table, header)
        batch = ChunkBatch(
            table=table,
            columns=columns,
            observation_space=self._observation_space,
            action_space=self._action_space,
            agents=header.agents,
            modules=header.modules,
            reasons=header.reasons,
            infos=_load_infos(arrays.get("_infos"), table, self._limits),
            slot=header.slot,
            incarnation=header.incarnation,
            seq=header.seq,
            learner_epoch=header.learner_epoch,
            weights_digest=header.weights_digest,
            connector_update={
                name.removeprefix(CONNECTOR_UPDATE): a
                for name, a in arrays.items()
                if name.startswith(CONNECTOR_UPDATE)
            },
            newest=newest,
        )
        if (batch.steps, len(batch)) != (header.steps, header.chunks):
            counts, told = (batch.steps, len(batch)), (header.steps, header.chunks)
            raise DecodeError("bad_table", f"{counts} steps and chunks; header says {told}")
        self._check_columns(batch)
        _check_lookback(batch)
        return batch

    def _check_columns(self, batch: ChunkBatch) -> None:
        if missing := self._required.keys() - batch.columns.keys():
            raise DecodeError("missing_column", f"column {min(missing)!r:.80} is missing")
        ends: dict[int, int] = {}  # by offsets: there are few kinds of columns, so each is computed once
        for name, column in batch.columns.items():
            offsets = batch.offsets_of(name)
            rows = ends.get(id(offsets))
            if rows is None:
                rows = ends[id(offsets)] = int(offsets[-1])
            shape = column.shape
            if not shape or shape[0] != rows:
                raise DecodeError("bad_column", f"column {name!r:.80} has shape {shape}, not {rows} rows")
            known = self._known.get(name)
            if known is None:
                if belongs_to_space(name):
                    raise DecodeError("bad_column", f"column {name!r:.80} is no leaf of its space")
            elif column.dtype != known[0] or shape[1:] != known[1]:
                seen = f"{column.dtype} rows of shape {shape[1:]}"
                raise DecodeError("bad_column", f"column {name!r:.80} has {seen}, not {known[0]} of {known[1]}")


def decode_batch(
    frames: Sequence[Buffer], observation_space: Space, action_space: Space, limits: WireLimits = DEFAULT_LIMITS
) -> tuple[BatchHeader, ChunkBatch]:
    """Read one batch, as `BatchReader.read` does."""
    kind, raw_header = decode_header(frames, limits)
    if kind is not MessageKind.BATCH:
        raise DecodeError("unexpected_kind", f"{kind.name} where BATCH was expected")
    unread = UnreadBatch(read_batch_header(raw_header), raw_header, frames)
    return unread.header, BatchReader(observation_space, action_space, limits).read(unread)


def _split(arrays: dict[str, NDArray[Any]]) -> tuple[NDArray[np.void], dict[str, NDArray[Any]]]:
    raw = arrays.get("_table")
    if raw is None or raw.dtype != np.uint8 or raw.ndim != 1 or raw.size % CHUNK_TABLE.itemsize:
        raise DecodeError("bad_table", f"no chunk table of {CHUNK_TABLE.itemsize}-byte rows")
    columns = {name: array for name, array in arrays.items() if not name.startswith("_")}
    return raw.view(CHUNK_TABLE), columns


def _check_table(table: NDArray[np.void], header: BatchHeader) -> None:
    if not len(table):
        return
    highest = table.view(_INDEX_TABLE)["indices"].max(0).tolist()
    for name, index, names in zip(_INDICES, highest, (header.agents, header.modules, header.reasons), strict=True):
        if index >= len(names):
            raise DecodeError("bad_table", f"{name} {index} of {len(names)}")
    end, length = table["end"], table["length"]
    if int(end.max()) > ChunkEnd.ABORTED:
        raise DecodeError("bad_table", f"chunk end {int(end.max())} is unknown")
    if not length.all() and bool((end[length == 0] != ChunkEnd.ABORTED).any()):
        raise DecodeError("bad_table", "a chunk of no steps that is no end marker")
    for name in ("t_start", "episode_length"):
        if int(table[name].view("<u8").max()) >= 1 << 62:  # read as unsigned, a negative number is huge
            raise DecodeError("bad_table", f"a chunk's {name} is out of range")


def _check_lookback(batch: ChunkBatch) -> None:
    """Raise `DecodeError` unless all step and observation columns look back or none does.

    Raise it also for a chunk that looks back beyond the first step of its episode.
    """
    back = {name.removeprefix(LOOKBACK): c for name, c in batch.columns.items() if name.startswith(LOOKBACK)}
    table = batch.table
    if not back and not table["lookback"].any():
        return
    if bool((table["lookback"] > np.where(table["length"], table["episode_length"] - table["length"], 0)).any()):
        raise DecodeError("bad_table", "a chunk looks back on more steps than lie before it")
    own = {name: c for name, c in batch.columns.items() if not name.startswith((LOOKBACK, STATE_IN))}
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
        infos = {int(i): {int(t): info for t, info in row.items()} for i, row in rows.items()}
    except (ValueError, AttributeError) as error:
        raise DecodeError("bad_infos", f"infos are not what the codec writes: {error!s:.200}") from error
    lengths = table["length"]
    for i, row in infos.items():
        if not 0 <= i < len(table) or not all(0 <= t <= lengths[i] and isinstance(row[t], dict) for t in row):
            raise DecodeError("bad_infos", f"infos of chunk {i} of {len(table)} are not dicts of its observations")
    return infos
