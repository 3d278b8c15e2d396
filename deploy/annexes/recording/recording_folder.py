"""The files of a recording, which a kill leaves whole and without a row twice.

Each flush writes one number N: `steps-N-MODULE.parquet` and `chunks-N-MODULE.parquet` of each module, then
`batches-N.parquet`. Its metadata has the position after its batches. A number without it is not complete, and the next
process removes its files: their batches are not committed, so they come again.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.deploy.annexes.recording.row_tables import batch_table, file_tables, files_of
from headrace.schemas.basics.run_files import replace_private, sync_folder
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.errors import RunDirError

SCHEMA = 1
"""Version of names, types and meanings of columns and metadata."""
METADATA = b"headrace"
"""Key of a file's metadata, which is JSON."""

_OF_FLOATS = ("FLOAT", "DOUBLE")


class RecordingFolder:
    """The folder `path`, for one process that writes to it. Use it within `with`.

    - number: the newest complete number; 0 for a new recording.
    - position: that of a stream after its batches; None for a new recording.

    Raises:
        RunDirError: another process records to it, it is a run directory, or its newest file cannot be read.
        OSError: it cannot be made or read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if (path / "broker.json").exists():
            raise self._refusal("it is a run directory")
        path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._take_lock()
            complete = numbered(path, "batches")
            self.number = max(complete, default=0)
            self.position = read_metadata(complete[self.number])["position"] if complete else None
            self._remove_incomplete()
        except BaseException:
            self.close()
            raise

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._refusal("another process records to it") from None

    def _refusal(self, reason: str) -> RunDirError:
        return RunDirError("", reason, sentence=f"recording {self.path}: {reason}; choose another --dir")

    def _remove_incomplete(self) -> None:
        for path in self.path.glob(".*.parquet.*"):
            path.unlink()
        for kind in ("steps", "chunks"):
            for path in self.path.glob(f"{kind}-*.parquet"):
                if file_number(path) > self.number:
                    path.unlink()

    def write(self, batches: Sequence[ChunkBatch], position: Sequence[dict[str, Any]]) -> int:
        """Write batches and the position after them. Return the number of bytes. Raises `OSError`."""
        number, nbytes, files = self.number + 1, 0, files_of(batches)
        for file in dict.fromkeys(files):
            own = [batch for batch, its in zip(batches, files, strict=True) if its == file]
            spaces = own[0].observation_space.model_dump(mode="json"), own[0].action_space.model_dump(mode="json")
            told = {"module": own[0].modules[0], "observation_space": spaces[0], "action_space": spaces[1]}
            for kind, table in zip(("steps", "chunks"), file_tables(own), strict=True):
                nbytes += self._write(f"{kind}-{number:06}-{file}", table, told)
        nbytes += self._write(f"batches-{number:06}", batch_table(batches, files), {"position": position})
        self.number = number
        return nbytes

    def _write(self, name: str, table: pa.Table, told: dict[str, Any]) -> int:
        """Write a file aside, wait until it is on the disk, and give it its name."""
        metadata = {METADATA: orjson.dumps({"schema": SCHEMA, **told})}
        content = parquet_of(table.replace_schema_metadata({**(table.schema.metadata or {}), **metadata}))
        path = self.path / f"{name}.parquet"
        path.unlink(missing_ok=True)  # of a write that failed later; `replace_private` syncs a new file alone
        replace_private(path, content)
        sync_folder(self.path)
        return len(content)

    def close(self) -> None:
        """Let another process record to the folder."""
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def numbered(folder: Path, kind: str) -> dict[int, Path]:
    """Return the files of a kind by number, in order."""
    return dict(sorted((file_number(path), path) for path in folder.glob(f"{kind}-*.parquet")))


def file_number(path: Path) -> int:
    """Return the number in the name of a file."""
    return int(path.name.split("-")[1].partition(".")[0])


def read_metadata(path: Path) -> dict[str, Any]:
    """Return what a file of a recording says of itself. Raises `RunDirError`."""
    try:
        told: dict[str, Any] = orjson.loads((pq.read_schema(path).metadata or {})[METADATA])
    except (OSError, KeyError, ValueError) as error:  # pyarrow's errors are of these kinds
        raise RunDirError(
            "", "", sentence=f"recording {path} cannot be read: {error!s:.200}; choose another --dir"
        ) from error
    if told.get("schema") != SCHEMA:
        known = f"it has schema {told.get('schema')!r:.20}, and this Headrace knows {SCHEMA}"
        raise RunDirError("", "", sentence=f"recording {path} cannot be read: {known}; use the version that wrote it")
    return told


def parquet_of(table: pa.Table) -> bytes:
    """Return a table as a Parquet file."""
    leaves = [*_leaves(table.schema)]
    floats = [path for path, kind in leaves if kind in _OF_FLOATS]
    use_dictionary = [path for path, kind in leaves if kind not in _OF_FLOATS]
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        compression="zstd",
        compression_level=1,
        use_dictionary=use_dictionary,
        use_byte_stream_split=floats,
    )
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _leaves(schema: pa.Schema) -> Iterator[tuple[str, str]]:
    """Yield the path and the physical type of each column of the file that a schema becomes."""
    sink = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), sink)
    written = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    for index in range(len(written.names)):
        column = written.column(index)
        yield column.path, column.physical_type
