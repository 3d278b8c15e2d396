"""The broker's log of accepted batches: append-only files in the run directory, from which the next broker goes on.

    accepted ──▶ append ──▶ (log thread) write, one fsync for all that waits ──▶ take_synced ──▶ Ack
    settled  ──▶ retire ──▶ (log thread) write what is settled, fsync, remove whole segments

One thread writes. So the broker's loop never waits for the disk, and one fsync covers all batches that came meanwhile.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from headrace.broker.files.log_records import BATCH, MAGIC, NOTE, Record, SegmentReader, encode_record
from headrace.schemas.accounts.ledger import Settled
from headrace.schemas.basics.counted_warnings import CountedWarnings
from headrace.schemas.basics.run_files import open_own, sync_folder
from headrace.schemas.errors import RunDirError, write_error, writing
from headrace.schemas.frames.wire import Buffer

log = logging.getLogger(__name__)

SourceId = tuple[int, int]
"""(slot, incarnation)."""

WhenFull = Literal["stop", "go_on"]

SEGMENT_BYTES = 64 << 20
LEAST_SEGMENTS = 8
"""Parts of the log's bound that one segment may take, at most."""

RETRY_S = 5.0
"""Time after which a log that found no room tries again."""

_MOST_PIECES = 512
_MOST_LATE_NOTES = 64
_CLOSE_S = 10.0


@dataclass(slots=True)
class _Segment:
    """A file of the log, with the newest batch of each source in it."""

    path: Path
    nbytes: int = 0
    newest: dict[SourceId, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Append:
    source: SourceId
    seq: int
    frames: list[Buffer]
    nbytes: int


class LogNote(BaseModel):
    """A note in the log, beside its batches. Later notes add to earlier ones."""

    model_config = ConfigDict(extra="ignore")
    settled: dict[str, Settled] = {}
    """The settled position of each source, by "slot/incarnation"."""
    spaces: dict[str, Any] = {}
    """Spaces of the workers' envs, without which no learner can read a batch."""

    def sources(self) -> dict[SourceId, Settled]:
        """Return what is settled by (slot, incarnation). Raises ValueError for a malformed name."""
        parts = ((name.partition("/"), told) for name, told in self.settled.items())
        return {(int(slot), int(life)): told for (slot, _, life), told in parts}


class BatchLog:
    """The log of one broker in `run_dir`.

    Call `recover` and `start` first. All methods are for the broker's thread. `wake` is called by the log's thread when
    `take_synced` has something.
    """

    def __init__(self, run_dir: Path, max_bytes: int, when_full: WhenFull, wake: Callable[[], None]) -> None:
        self.folder = log_folder(run_dir)
        self._max_bytes, self._when_full, self._wake = max_bytes, when_full, wake
        self._segment_bytes = min(SEGMENT_BYTES, max_bytes // LEAST_SEGMENTS)
        self._segments: dict[int, _Segment] = {}
        self._noted: dict[SourceId, int] = {}
        """The newest settled batch of each source that the log knows."""
        self._retiring: set[int] = set()
        self._changed = threading.Condition()
        # Both threads use the following fields, under `_changed`.
        self._appends: deque[_Append] = deque()
        self._notes: list[bytes] = []
        self._retired: list[int] = []
        self._synced: list[tuple[SourceId, int, int | None]] = []
        """(source, batch, segment); the segment is None for a batch that found no room."""
        self._closing = False
        self._error: OSError | None = None
        self.backlog_bytes = 0
        """Bytes that wait to be written."""
        # Only the log's thread uses the following fields.
        self._file = -1
        self._current = 0
        self._paused_until = 0.0
        self._late_notes: list[bytes] = []
        """Notes that found no room yet."""
        self._warnings = CountedWarnings(log)
        self._thread = threading.Thread(target=self._run, name="broker-log", daemon=True)
        self._make_folder()

    def _make_folder(self) -> None:
        with writing(self.folder, "the broker's log"):
            self.folder.mkdir(mode=0o700, exist_ok=True)
            if self.folder.is_symlink():
                raise RunDirError(str(self.folder), "the broker's log is a symbolic link", "remove the link")

    # -- start --------------------------------------------------------------------------------------------------------

    def recover(self) -> Iterator[list[Buffer] | LogNote]:
        """Return what earlier brokers logged, in order: frames of batches, and notes.

        Cut the unfinished record of a broker that was killed. Raises `RunDirError`.
        """
        paths = segment_paths(self.folder)
        for path in paths:
            index = int(path.stem)
            try:
                reader = SegmentReader(path)
            except OSError as error:
                raise RunDirError(str(path), f"the broker's log cannot be read ({error})") from error
            self._segments[index] = _Segment(path, reader.nbytes)
            self._current = index
            for record in reader.records():
                if record.kind == BATCH:
                    yield record.frames
                elif record.kind == NOTE:
                    yield _read_note(record)
            if reader.readable < reader.nbytes:
                self._cut(path, reader.readable, reader.nbytes, is_last=path is paths[-1])

    def _cut(self, path: Path, readable: int, nbytes: int, *, is_last: bool) -> None:
        lost = nbytes - readable
        if is_last:
            log.warning("broker log: cut %d bytes of an unfinished record at the end of %s", lost, path.name)
            with writing(path, "the broker's log"):
                os.truncate(path, readable)
        else:
            log.error("broker log: %s is damaged; %d bytes after byte %d are ignored", path.name, lost, readable)

    def know(self, source: SourceId, seq: int) -> None:
        """Note that the segment that `recover` reads now has this batch."""
        self._segments[self._current].newest[source] = seq

    def start(self) -> None:
        """Open a new segment and start the thread. Raises `RunDirError`."""
        with writing(self.folder, "the broker's log"):
            self._open_segment()
        self._thread.start()

    # -- the broker's side --------------------------------------------------------------------------------------------

    def has(self, source: SourceId) -> bool:
        """Return whether a segment has batches of this source."""
        return any(source in segment.newest for segment in list(self._segments.values()))

    def append(self, source: SourceId, seq: int, frames: list[Buffer], nbytes: int) -> None:
        """Log an accepted batch. `take_synced` returns it once it is on disk."""
        with self._changed:
            self._appends.append(_Append(source, seq, frames, nbytes))
            self.backlog_bytes += nbytes
            self._changed.notify()

    def take_synced(self) -> list[tuple[SourceId, int]]:
        """Return the batches that, since the last call, reached the disk or were left out for lack of room.

        Raises `RunDirError` if the log cannot be written and `when_full` is "stop".
        """
        with self._changed:
            synced, self._synced = self._synced, []
            error = self._error
        if error is not None:
            raise _log_error(self.folder, error)
        for source, seq, segment in synced:
            if segment is not None and segment in self._segments:
                self._segments[segment].newest[source] = seq
        return [(source, seq) for source, seq, _ in synced]

    def note(self, note: LogNote) -> None:
        """Log a note. It is on disk no later than the batches that are logged after it."""
        with self._changed:
            self._notes.append(note.model_dump_json(exclude_defaults=True).encode())
            self._changed.notify()

    def retire(
        self, settled: Mapping[SourceId, Settled], spaces: dict[str, Any], is_over: Callable[[SourceId, int], bool]
    ) -> None:
        """Log what is settled of each source, and remove the segments that no broker needs. Call it every second or so.

        `is_over` says whether a batch is settled, or can no longer be accepted.
        """
        with self._changed:
            current, segments = self._current, self._segments
        retired = [
            index
            for index, segment in segments.items()
            if index not in self._retiring and index != current and _is_over(segment, is_over)
        ]
        # A segment's notes are removed with it, so log a complete note before the removal.
        news = [source for source, told in settled.items() if retired or told.seq != self._noted.get(source, 0)]
        self._noted.update({source: settled[source].seq for source in news})
        self._retiring.update(retired)
        if news or retired:
            told = {f"{slot}/{life}": settled[slot, life] for slot, life in news}
            self.note(LogNote(settled=told, spaces=spaces if retired else {}))
        if retired:
            with self._changed:
                self._retired += retired
                self._changed.notify()

    def close(self, is_over: Callable[[SourceId, int], bool]) -> None:
        """Write all waiting records, and remove all segments if no batch in them is needed any more."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive() or self._error is not None:
            return
        self.take_synced()
        segments = list(self._segments.values())
        if all(_is_over(segment, is_over) for segment in segments):
            for segment in segments:
                with suppress(OSError):
                    segment.path.unlink(missing_ok=True)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._appends or self._notes or self._retired or self._closing):
                    self._changed.wait()
                appends = self._next_group()
                notes, self._notes = self._notes, []
                retired, self._retired = self._retired, []
                closing = self._closing
            self._write_group(appends, notes)
            for index in retired:
                self._remove(index)
            if closing and not appends:
                os.close(self._file)
                return

    def _next_group(self) -> list[_Append]:
        """Take the batches that wait, at most about a segment of them."""
        group, nbytes = [], 0
        while self._appends and nbytes < self._segment_bytes:
            group.append(self._appends.popleft())
            nbytes += group[-1].nbytes
        return group

    def _write_group(self, appends: list[_Append], notes: list[bytes]) -> None:
        """Write and sync one group.

        On an error the file has no part of the group, and `when_full` decides what to do.
        """
        segment: int | None = self._current
        try:
            if time.monotonic() >= self._paused_until:
                # Notes first: without the spaces no learner can read the batches.
                told = [Record(NOTE, [note]) for note in (*self._late_notes, *notes)]
                self._write([*told, *(Record(BATCH, append.frames) for append in appends)])
                self._late_notes = []
                segment = self._current
            else:
                segment = None
                self._late_notes = [*self._late_notes, *notes][:_MOST_LATE_NOTES]
        except OSError as error:
            if self._when_full == "stop":
                with self._changed:
                    self._error = error
                self._wake()
                return
            segment = None
            self._late_notes = [*self._late_notes, *notes][:_MOST_LATE_NOTES]
            self._paused_until = time.monotonic() + RETRY_S
            self._warnings.warn(b"", "full", f"{_log_error(self.folder, error)}; batches are acknowledged without it")
        if appends:
            with self._changed:
                self._synced += [(append.source, append.seq, segment) for append in appends]
                self.backlog_bytes -= sum(append.nbytes for append in appends)
            self._wake()

    def _write(self, records: list[Record]) -> None:
        if not records:
            return
        pieces = [piece for record in records for piece in encode_record(record)]
        nbytes = sum(memoryview(piece).nbytes for piece in pieces)
        if self._segments[self._current].nbytes > self._segment_bytes:
            self._open_segment()
        segment = self._segments[self._current]
        in_all = sum(each.nbytes for each in list(self._segments.values()))
        if in_all + nbytes > self._max_bytes:
            raise _FullError(self._max_bytes)
        try:
            _write_all(self._file, pieces)
            os.fsync(self._file)
        except OSError:
            whole, segment.nbytes = segment.nbytes, segment.nbytes + self._segment_bytes  # full, if it stays torn
            os.ftruncate(self._file, whole)
            os.lseek(self._file, 0, os.SEEK_END)
            segment.nbytes = whole
            raise
        segment.nbytes += nbytes

    def _open_segment(self) -> None:
        index = self._current + 1
        path = self.folder / f"{index:08d}.log"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        file = open_own(path, flags, 0o600)
        try:
            os.write(file, MAGIC)
            os.fsync(file)
            sync_folder(self.folder)
        except OSError:
            os.close(file)
            path.unlink(missing_ok=True)
            raise
        if self._file >= 0:
            os.close(self._file)
        segment = _Segment(path, len(MAGIC))
        with self._changed:
            self._file, self._current = file, index
            self._segments = {**self._segments, index: segment}

    def _remove(self, index: int) -> None:
        """Remove a segment that no broker needs. One that stays does no harm: its batches are known to be over."""
        with suppress(OSError):
            self._segments[index].path.unlink(missing_ok=True)
        with self._changed:
            self._segments = {other: each for other, each in self._segments.items() if other != index}


class _FullError(OSError):
    """The log has reached its bound."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        super().__init__(None, f"broker.log_max_bytes = {max_bytes} are reached")


def _is_over(segment: _Segment, is_over: Callable[[SourceId, int], bool]) -> bool:
    return all(is_over(source, seq) for source, seq in segment.newest.items())


def log_folder(run_dir: Path) -> Path:
    """Return the folder of the broker's log in a run directory."""
    return run_dir / "broker-log"


def segment_paths(folder: Path) -> list[Path]:
    """Return the segments of a log, oldest first."""
    return sorted(path for path in folder.glob("*.log") if path.stem.isdecimal())


def _log_error(folder: Path, error: OSError) -> RunDirError:
    if isinstance(error, _FullError):
        reason = f"the broker's log is full: {error.strerror}"
        advice = "raise it, let the learner commit, or set broker.log_when_full = 'go_on'"
        return RunDirError(str(folder), reason, advice)
    return write_error(str(folder), error, "the broker's log")


def _read_note(record: Record) -> LogNote:
    try:
        note = LogNote.model_validate_json(bytes(record.frames[0]))
        note.sources()
    except (IndexError, ValueError) as error:
        log.error("broker log: a note cannot be read: %s", error)
        return LogNote()
    return note


def _write_all(file: int, pieces: list[Buffer]) -> None:
    waiting = deque(memoryview(piece).cast("B") for piece in pieces if memoryview(piece).nbytes)
    while waiting:
        written = os.writev(file, [waiting[i] for i in range(min(len(waiting), _MOST_PIECES))])
        while waiting and written >= waiting[0].nbytes:
            written -= waiting.popleft().nbytes
        if written:
            waiting[0] = waiting[0][written:]
