"""The log of a worker's open episodes: a small file beside its recorder, readable after any death.

One record for each batch, written before the batch is sent:

    seq u64 | bytes of the head u32 | chunks u32 | crc32 of what follows u32
    head: JSON with the batch's module, agents and columns (`EpisodeLogHead`)
    for each chunk: its CHUNK_TABLE row; then the env step after each, i64; then the batch of each, u64

A reader goes over the records in order, and so knows which episodes were open after each batch. It stops at the first
that it cannot read. A torn last record is of a batch that was never sent. The file is rewritten when it has grown: what
came before the settled batch is replaced by the episodes that were open then. The writer keeps its records in memory
for that, since reading them again takes longer than all else here.

Without this file only the newest chunk of each episode is unknown, never a step. So a disk without room does not stop
the worker. Records wait in memory until there is room; the log ends with a warning where too many wait.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
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
_SEQ = struct.Struct("<Q")
_CHUNK_BYTES = CHUNK_TABLE.itemsize + 16
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


@dataclass(slots=True)
class _Record:
    """The chunks of one batch, or the newest ones of several; each with its batch, and the env step after it."""

    seq: int
    module: str
    agents: list[str]
    columns: dict[str, Any]
    table: NDArray[np.void]
    after: NDArray[np.int64]
    since: NDArray[np.uint64]

    def by_place(self) -> dict[_Place, tuple[np.void, int, int]]:
        """Return (chunk, env step after it, batch) of the newest chunk in each place."""
        found = {}
        for i in in_order(self.table).tolist():
            row = self.table[i]
            place = int(row["env_index"]), self.agents[row["agent"]], self.module
            found[place] = row, int(self.after[i]), int(self.since[i])
        return found

    def encode(self) -> bytes:
        """Return the record as it stands in the file."""
        head = _head(self.module, self.agents, self.columns)
        return _encode(self.seq, head, self.table.tobytes(), self.after.tobytes(), self.since.tobytes())


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
        self._heads: dict[tuple[str, tuple[str, ...]], tuple[bytes, dict[str, Any]]] = {}

    def append(self, batch: ChunkBatch, seq: int, settled: int) -> None:
        """Write the chunks of batch `seq`, which is of one module. Batches up to `settled` need no record any more."""
        if self._descriptor is None:
            return
        (module,) = batch.modules
        key = (module, tuple(batch.agents))
        if key not in self._heads:
            columns = {name: (column.dtype.str, column.shape[1:]) for name, column in batch.columns.items()}
            self._heads[key] = _head(module, list(batch.agents), columns), columns
        head, columns = self._heads[key]
        after = stops(batch.table, batch.columns.get("env_t"))
        rows, numbers = batch.table.tobytes(), _SEQ.pack(seq) * len(batch)
        table, since = np.frombuffer(rows, CHUNK_TABLE), np.frombuffer(numbers, np.uint64)
        self._records.append(_Record(seq, module, list(batch.agents), columns, table, after, since))
        self._write(_encode(seq, head, rows, after.tobytes(), numbers))
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
        aside.unlink(missing_ok=True)
        descriptor = None
        try:
            descriptor = open_own(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            _write_all(descriptor, content, 0)
            aside.replace(self.path)
        except OSError:
            if descriptor is not None:
                os.close(descriptor)
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
    state: dict[_Place, tuple[np.void, int, int]] = {}
    found: list[tuple[_Place, tuple[np.void, int, int], int]] = []
    columns: dict[str, Any] = {}
    for record in _from(list(_records(path)), settled):
        columns[record.module] = record.columns
        for place, newest in record.by_place().items():
            before = state.get(place)
            if before is not None and is_open(before[0]) and record.seq > settled:
                found.append((place, before, record.seq))
            state[place] = newest
    found += [(place, newest, 0) for place, newest in state.items() if is_open(newest[0])]
    if not columns:
        return None
    agents: list[str] = []
    modules: list[str] = []
    rows = np.zeros(len(found), OPEN_EPISODE)
    for i, ((_, agent, module), (chunk, after, since), until) in enumerate(found):
        rows[i] = chunk, since, until
        kept = rows["chunk"][i]
        kept["t_start"], kept["agent"], kept["module"] = after, index_of(agent, agents), index_of(module, modules)
    return open_episodes(rows, agents, modules, columns)


def _from(records: list[_Record], settled: int) -> list[_Record]:
    """Return records of the episodes that were open after batch `settled`, then the records after that batch."""
    return [*_opening(records, settled), *(record for record in records if record.seq > settled)]


def _opening(records: list[_Record], settled: int) -> Iterator[_Record]:
    """Yield one record for each module with the episodes that were open after batch `settled`."""
    by_module: dict[str, list[_Record]] = {}
    for record in records:
        if record.seq <= settled:
            by_module.setdefault(record.module, []).append(record)
    for module, own in by_module.items():
        agents: list[str] = []
        tables = [_renamed(record, agents).tobytes() for record in own]
        table = np.frombuffer(b"".join(tables), CHUNK_TABLE)  # as bytes: numpy is slow to join structures
        of = np.repeat(np.arange(len(own)), [len(record.table) for record in own])
        order = np.lexsort((table["length"] > 0, of))  # that of `in_order` within each record
        rows = order[_newest(_places(table)[order])]
        rows = rows[(table["length"][rows] > 0) & (table["end"][rows] == ChunkEnd.ONGOING)]
        after, since = (np.concatenate(parts)[rows] for parts in zip(*((r.after, r.since) for r in own), strict=True))
        yield _Record(settled, module, agents, own[-1].columns, table[rows], after, since)


def _renamed(record: _Record, agents: list[str]) -> NDArray[np.void]:
    """Return the record's table with its agents as indices in `agents`, to which new ones are added."""
    places = [index_of(agent, agents) for agent in record.agents]
    if places == list(range(len(places))):
        return record.table
    table = record.table.copy()
    table["agent"] = np.array(places, np.uint16)[table["agent"]]
    return table


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
    at, known = 0, dict[bytes, EpisodeLogHead]()
    while len(content) - at >= _HEAD.size:
        seq, head_bytes, count, crc = _HEAD.unpack_from(content, at)
        body = content[at + _HEAD.size :][: head_bytes + count * _CHUNK_BYTES]
        if len(body) < head_bytes + count * _CHUNK_BYTES or zlib.crc32(body) != crc:
            return
        text, chunks = bytes(body[:head_bytes]), body[head_bytes:]
        try:
            head = known.get(text) or EpisodeLogHead.model_validate_json(text)
        except ValidationError as error:
            log.warning("%s: the record at byte %d has no head that a worker writes: %s", path, at, error.errors()[0])
            return
        known[text] = head
        steps = count * CHUNK_TABLE.itemsize
        table = np.frombuffer(chunks[:steps], CHUNK_TABLE)
        after = np.frombuffer(chunks[steps : steps + 8 * count], np.int64)
        since = np.frombuffer(chunks[steps + 8 * count :], np.uint64)
        if count and int(table["agent"].max()) >= len(head.agents):
            log.warning("%s: the record at byte %d has an agent without a name", path, at)
            return
        yield _Record(seq, head.module, head.agents, head.columns, table, after, since)
        at += _HEAD.size + len(body)


def _head(module: str, agents: list[str], columns: dict[str, Any]) -> bytes:
    return orjson.dumps({"module": module, "agents": agents, "columns": columns})


def _encode(seq: int, head: bytes, rows: bytes, after: bytes, since: bytes) -> bytes:
    body = b"".join((head, rows, after, since))
    return _HEAD.pack(seq, len(head), len(since) // _SEQ.size, zlib.crc32(body)) + body
