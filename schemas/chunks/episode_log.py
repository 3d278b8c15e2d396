"""The log of a worker's open episodes: a small file beside its recorder, readable after any death.

One record for each batch, written before the batch is sent:

    seq u64 | bytes of the head u32 | chunks u32 | crc32 of what follows u32
    head: JSON with the batch's module, agents and columns (`EpisodeLogHead`)
    for each chunk: its CHUNK_TABLE row, whose `t_start` is the env step after its last one

A reader goes over the records in order, and so knows which episodes were open after each batch. It stops at the first
that it cannot read. A torn last record is of a batch that was never sent. The file is rewritten when it has grown:
records up to the settled batch keep only the chunks of episodes that were open then. The writer keeps its records in
memory for that, since reading them again takes longer than all else here.

Without this file only the newest chunk of each episode is unknown, never a step. So a disk without room does not stop
the worker. Records wait in memory until there is room; the log ends with a warning where too many wait.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from headrace.schemas.basics.run_files import open_own, opener
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import CHUNK_TABLE, ChunkEnd
from headrace.schemas.chunks.open_episodes import (
    OPEN_EPISODE,
    ColumnForm,
    OpenEpisodes,
    in_order,
    index_of,
    is_open,
    open_episodes,
    stops,
)

log = logging.getLogger("headrace.worker")

_HEAD = struct.Struct("<QIII")
_REWRITE_BYTES = 1 << 20
_MOST_WAITING = 1 << 20
"""Bytes of records that wait for room on the disk: some hundred batches."""
_MOST_BYTES = 1 << 28
"""Most of a file that a reader looks at."""

_Place = tuple[int, str, str]
"""(env, agent, module)."""


class EpisodeLogHead(BaseModel):
    """The head of a record: the names that its rows count, and the form of the batch's columns."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")
    module: str
    agents: list[str]
    columns: dict[str, ColumnForm]


@dataclass(frozen=True, slots=True)
class _Head:
    """A head, as it stands in the file, and its crc32."""

    told: EpisodeLogHead
    text: bytes
    crc: int

    @classmethod
    def of(cls, batch: ChunkBatch, module: str) -> _Head:
        columns = {name: (column.dtype.str, list(column.shape[1:])) for name, column in batch.columns.items()}
        told = EpisodeLogHead(module=module, agents=list(batch.agents), columns=columns)
        text = orjson.dumps(told.model_dump())
        return cls(told, text, zlib.crc32(text))


@dataclass(slots=True)
class _Record:
    """The chunks of one batch, or those of its open episodes. Their `t_start` is the env step after the last one."""

    seq: int
    head: _Head
    rows: bytes | bytearray
    """The rows as bytes: numpy is slow to copy and to join rows with fields."""

    @property
    def table(self) -> NDArray[np.void]:
        """Return the rows as `CHUNK_TABLE`."""
        return np.frombuffer(self.rows, CHUNK_TABLE)

    def by_place(self) -> dict[_Place, np.void]:
        """Return the newest chunk in each place."""
        agents, module = self.head.told.agents, self.head.told.module
        table = self.table
        rows = (table[i] for i in in_order(table).tolist())
        return {(int(row["env_index"]), agents[row["agent"]], module): row for row in rows}

    def encode(self) -> bytes:
        """Return the record as it stands in the file."""
        rows, text = self.rows, self.head.text
        crc, count = zlib.crc32(rows, self.head.crc), len(rows) // CHUNK_TABLE.itemsize
        return b"".join((_HEAD.pack(self.seq, len(text), count, crc), text, rows))


class EpisodeLog:
    """The writing side; one process, one thread."""

    def __init__(self, path: Path) -> None:
        """Begin a new file at `path`. Raises `OSError`."""
        self.path = path
        self._descriptor: int | None = open_own(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._bytes = 0
        self._rewrite_at = _REWRITE_BYTES
        self._waiting = b""
        """Records that are not in the file yet."""
        self._records: list[_Record] = []
        """The records of a rewritten file: those of the present one and the waiting ones, without what is settled."""
        self._heads: dict[tuple[str, tuple[str, ...]], _Head] = {}

    def append(self, batch: ChunkBatch, seq: int, settled: int) -> None:
        """Write the chunks of batch `seq`, which is of one module. Batches up to `settled` need no record any more."""
        if self._descriptor is None:
            return
        (module,) = batch.modules
        key = (module, tuple(batch.agents))
        head = self._heads.get(key)
        if head is None:
            head = self._heads[key] = _Head.of(batch, module)
        record = _Record(seq, head, bytearray(batch.table.tobytes()))
        record.table["t_start"] = stops(batch.table, batch.columns.get("env_t"))
        self._records.append(record)
        self._write(record.encode())
        if self._descriptor is not None and self._bytes > self._rewrite_at:
            self._rewrite(settled)

    def close(self) -> None:
        """Close the file, which stays for its readers."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._records = []

    def _write(self, record: bytes) -> None:
        """Write the waiting records, then this one. The next write overwrites a record that was written in part."""
        assert self._descriptor is not None
        waited, self._waiting = len(self._waiting), self._waiting + record
        try:
            _write_all(self._descriptor, self._waiting, self._bytes)
            self._bytes += len(self._waiting)
        except OSError as error:
            if not waited:
                log.warning("%s: %s; the log of open episodes waits for room", self.path, error)
            if len(self._waiting) > _MOST_WAITING:
                log.warning("%s ends: episodes that a kill leaves open may lack their end marker", self.path)
                self.close()
                with suppress(OSError):
                    self.path.unlink(missing_ok=True)
        else:
            self._waiting = b""
            if waited:
                self._has_room_again()

    def _has_room_again(self) -> None:
        """Note that all waiting records are in the file."""
        self._waiting = b""
        log.info("%s: the log of open episodes has room again, and nothing is lost", self.path)

    def _rewrite(self, settled: int) -> None:
        """Replace the file by a shorter one. If the disk has no room for that, keep the old file and let it grow."""
        self._records = _from(self._records, settled)
        content = b"".join(record.encode() for record in self._records)
        aside = self.path.with_name(f".{self.path.name}")
        descriptor = None
        try:
            aside.unlink(missing_ok=True)
            descriptor = open_own(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            _write_all(descriptor, content, 0)
            aside.replace(self.path)
        except OSError:
            if descriptor is not None:
                os.close(descriptor)
            with suppress(OSError):
                aside.unlink(missing_ok=True)
            self._rewrite_at = 2 * self._bytes
            return
        assert self._descriptor is not None
        os.close(self._descriptor)
        self._descriptor, self._bytes = descriptor, len(content)
        if self._waiting:
            self._has_room_again()
        self._rewrite_at = max(_REWRITE_BYTES, 4 * self._bytes)


def _write_all(descriptor: int, content: bytes, at: int) -> None:
    if os.pwrite(descriptor, content, at) != len(content):
        raise OSError("no room is left")


def log_path(recorder: Path) -> Path:
    """Return the path of the log beside a recorder."""
    return recorder.with_suffix(".episodes")


def read_open_episodes(path: Path, settled: int) -> OpenEpisodes | None:
    """Return the episodes that were open after batch `settled` or a later one; None without a log, or an empty one.

    Batches up to `settled` are settled, as the worker has heard. Which of the later ones reach a learner is not known
    here: a broker that accepted them may be gone. Raises nothing but OSError for a file it may not read.
    """
    state: dict[_Place, tuple[np.void, int]] = {}
    found: list[tuple[_Place, tuple[np.void, int], int]] = []
    columns: dict[str, Any] = {}
    for record in _from(list(_records(path)), settled):
        columns[record.head.told.module] = record.head.told.columns
        for place, row in record.by_place().items():
            before = state.get(place)
            if before is not None and is_open(before[0]) and record.seq > settled:
                found.append((place, before, record.seq))
            state[place] = row, record.seq
    found += [(place, newest, 0) for place, newest in state.items() if is_open(newest[0])]
    if not columns:
        return None
    agents: list[str] = []
    modules: list[str] = []
    rows = np.zeros(len(found), OPEN_EPISODE)
    for i, ((_, agent, module), (chunk, since), until) in enumerate(found):
        rows[i] = chunk, since, until
        kept = rows["chunk"][i]
        kept["agent"], kept["module"] = index_of(agent, agents), index_of(module, modules)
    return open_episodes(rows, agents, modules, columns)


def _from(records: list[_Record], settled: int) -> list[_Record]:
    """Return the records, those up to batch `settled` with no chunks but of episodes that were open after it."""
    return [*_still_open(records, settled), *(record for record in records if record.seq > settled)]


def _still_open(records: list[_Record], settled: int) -> Iterator[_Record]:
    """Yield the records up to batch `settled`, with the chunks of episodes that were open after it, if they have any.

    The last one of each module comes also without any: it has the columns.
    """
    by_module: dict[str, list[_Record]] = {}
    for record in records:
        if record.seq <= settled:
            by_module.setdefault(record.head.told.module, []).append(record)
    for own in by_module.values():
        agents: list[str] = []
        table = np.frombuffer(b"".join(_renamed(record, agents) for record in own), CHUNK_TABLE)
        ends = np.cumsum([len(record.rows) for record in own]) // CHUNK_TABLE.itemsize
        of = np.repeat(np.arange(len(own)), np.diff(ends, prepend=0))
        order = np.lexsort((table["length"] > 0, of))  # that of `in_order` within each record
        rows = np.sort(order[_newest(_places(table)[order])])
        rows = rows[(table["length"][rows] > 0) & (table["end"][rows] == ChunkEnd.ONGOING)]
        for number in np.union1d(of[rows], len(own) - 1).tolist():
            first, last = np.searchsorted(of[rows], (number, number + 1))
            kept = rows[first:last] - ends[number]  # counted from the record's end
            yield replace(own[number], rows=own[number].table[kept].tobytes())


def _renamed(record: _Record, agents: list[str]) -> bytes | bytearray:
    """Return the record's rows with its agents as indices in `agents`, to which new ones are added."""
    places = [index_of(agent, agents) for agent in record.head.told.agents]
    if places == list(range(len(places))):
        return record.rows
    table = record.table.copy()
    table["agent"] = np.array(places, np.uint16)[table["agent"]]
    return table.tobytes()


def _places(table: NDArray[np.void]) -> NDArray[np.uint64]:
    """Return a number for the env and agent of each row."""
    places: NDArray[np.uint64] = (table["env_index"].astype(np.uint64) << np.uint64(16)) | table["agent"]
    return places


def _newest(places: NDArray[np.uint64]) -> NDArray[np.intp]:
    """Return the index of the last of each number."""
    _, from_end = np.unique(places[::-1], return_index=True)
    return len(places) - 1 - from_end


def _records(path: Path) -> Iterator[_Record]:
    """Yield the whole records of a file, up to the first that is not."""
    try:
        with open(path, "rb", opener=opener) as file:
            content = memoryview(file.read(_MOST_BYTES))
    except FileNotFoundError:
        return
    at, known = 0, dict[bytes, _Head]()
    while len(content) - at >= _HEAD.size:
        seq, head_bytes, count, crc = _HEAD.unpack_from(content, at)
        size = head_bytes + count * CHUNK_TABLE.itemsize
        body = content[at + _HEAD.size :][:size]
        if len(body) < size or zlib.crc32(body) != crc:
            return
        text = bytes(body[:head_bytes])
        try:
            head = known.get(text) or _Head(EpisodeLogHead.model_validate_json(text), text, zlib.crc32(text))
        except ValidationError as error:
            log.warning("%s: the record at byte %d has no head that a worker writes: %s", path, at, error.errors()[0])
            return
        known[text] = head
        record = _Record(seq, head, bytes(body[head_bytes:]))
        if count and int(record.table["agent"].max()) >= len(head.told.agents):
            log.warning("%s: the record at byte %d has an agent without a name", path, at)
            return
        yield record
        at += _HEAD.size + size
