"""The files of a recording, which a kill leaves whole and without a row twice.

Each flush writes one number N into the folder `unmerged`: `steps-N-MODULE.parquet` and `chunks-N-MODULE.parquet` of
each module, then `batches-N.parquet`. Its metadata has the position after its batches, and how many batches are before
them. A number without it is not complete, and the next process removes its files: their batches are not committed, so
they come again. `compaction` merges the numbers of `unmerged` into one number beside `unmerged`.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.deploy.annexes.recording.row_tables import batch_table, file_tables, files_of
from headrace.schemas.basics.run_files import replace_private, sync_folder
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.errors import RunDirError, absolute, is_there

SCHEMA = 2
"""Version of folders, and of names, types and meanings of columns and metadata. Any change of these raises it."""
METADATA = b"headrace"
"""Key of a file's metadata, which is JSON."""
NEW = "unmerged"
"""Folder of the numbers that are not merged yet. The newest merged number holds all up to its own."""

_KINDS = ("batches", "chunks", "steps")
_DIGITS = "[0-9]" * 6
_OF_FLOATS = ("FLOAT", "DOUBLE")
_OF_IMAGES = "FIXED_LEN_BYTE_ARRAY"
_Made = TypeVar("_Made")


class RecordingFolder:
    """The folder `path`, for one process that writes to it. Use it within `with`.

    - number: the newest complete number; 0 for a new recording.
    - position: that of a stream after its batches; None for a new recording.
    - batches: how many were recorded up to it.

    Raises:
        RunDirError: another process records to it, it is a run directory, or its newest file cannot be read.
        OSError: it cannot be made or read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path = absolute(path)
        if (path / "broker.json").exists():
            raise self._refusal("it is a run directory")
        (path / NEW).mkdir(parents=True, exist_ok=True)
        self._lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._take_lock()
            complete = numbered(path, "batches")
            self.number, self.batches, self.position = 0, 0, None
            if complete:
                self.number, newest = complete.popitem()
                self.position, self.batches = read_metadata(newest)["position"], batches_before(newest)[1]
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
        """Remove what no complete number has. A number that only its merge left incomplete is merged again."""
        complete = numbered(self.path, "batches")
        for folder, kind in product((self.path, self.path / NEW), _KINDS):
            for path in folder.glob(f".{kind}-{_DIGITS}*.parquet.*"):
                path.unlink()
            for path in folder.glob(f"{kind}-{_DIGITS}*.parquet"):
                newest = complete.get(file_number(path))
                if newest is None or (newest.parent != folder and folder != self.path):
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
        place = {"position": position, "before": self.batches}
        nbytes += self._write(f"batches-{number:06}", batch_table(batches, files), place)
        self.number, self.batches = number, self.batches + len(batches)
        return nbytes

    def _write(self, name: str, table: pa.Table, told: dict[str, Any]) -> int:
        """Write a file aside, wait until it is on the disk, and give it its name."""
        content = parquet_of(with_metadata(table, told))
        path = self.path / NEW / f"{name}.parquet"
        path.unlink(missing_ok=True)  # of a write that failed later; `replace_private` syncs a new file alone
        replace_private(path, content)
        sync_folder(path.parent)
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
    """Return the files of a kind by number, in order, without those whose rows a merged number holds."""
    new = _by_number(folder / NEW, kind)  # first: a merge removes them after it has named its own file
    merged = _by_number(folder, kind)
    newest = max(merged, default=0)
    return merged | {number: path for number, path in new.items() if number > newest}


def _by_number(folder: Path, kind: str) -> dict[int, Path]:
    return dict(sorted((file_number(path), path) for path in folder.glob(f"{kind}-*.parquet")))


def read_complete(folder: Path, read: Callable[[Mapping[int, Path]], _Made]) -> _Made:
    """Return what `read` makes of the files `batches-N` by number. It reads again if a merge takes one away."""
    while True:
        files = numbered(folder, "batches")
        try:
            return read(files)
        except (FileNotFoundError, RunDirError):
            if all(is_there(path) for path in files.values()):
                raise


def beside(files: Mapping[int, Path], kind: str) -> list[Path]:
    """Return the files of a kind beside these files `batches-N`, in the order of their numbers."""
    found = [path for folder in {path.parent for path in files.values()} for path in folder.glob(f"{kind}-*.parquet")]
    own = (path for path in found if (its := files.get(file_number(path))) and its.parent == path.parent)
    return sorted(own, key=lambda path: path.name)


def file_number(path: Path) -> int:
    """Return the number in the name of a file."""
    return int(path.name.split("-")[1].partition(".")[0])


def read_metadata(path: Path) -> dict[str, Any]:
    """Return what a file of a recording says of itself. Raises `RunDirError`."""
    try:
        schema = pq.read_schema(path)
    except (OSError, ValueError) as error:  # pyarrow's errors are of these kinds
        raise _unreadable(path, error) from error
    return metadata_in(schema, path)


def _unreadable(path: Path, error: Exception) -> RunDirError:
    return RunDirError("", "", sentence=f"recording {path} cannot be read: {error!s:.200}; choose another --dir")


def metadata_in(schema: pa.Schema, path: Path) -> dict[str, Any]:
    """Return what the schema of a file of a recording says of the file. Raises `RunDirError`."""
    try:
        told: dict[str, Any] = orjson.loads((schema.metadata or {}).get(METADATA, b"{}"))
    except ValueError as error:
        raise _unreadable(path, error) from error
    if told.get("schema") != SCHEMA:
        seen = f"schema {told['schema']!r:.20}" if "schema" in told else "no schema"
        known = f"it has {seen}, and this Headrace reads schema {SCHEMA}; use the version that wrote it"
        raise RunDirError("", "", sentence=f"recording {path} cannot be read: {known}")
    return told


def batches_before(path: Path) -> tuple[int, int]:
    """Return how many batches were recorded before those of a file `batches-N`, and with them. Raises `RunDirError`."""
    before = int(read_metadata(path)["before"])
    return before, before + pq.read_metadata(path).num_rows


def with_metadata(table: pa.Table, told: Mapping[str, Any]) -> pa.Table:
    """Return a table whose file says this of itself."""
    metadata = {METADATA: orjson.dumps({"schema": SCHEMA, **told})}
    return table.replace_schema_metadata({**(table.schema.metadata or {}), **metadata})


def parquet_of(table: pa.Table) -> bytes:
    """Return a table as a Parquet file, in a form that costs little: a merge writes its rows again."""
    sink = pa.BufferOutputStream()
    write_parquet(sink, table.schema, [table], compression="lz4")
    content: bytes = sink.getvalue().to_pybytes()
    return content


def write_parquet(sink: Any, schema: pa.Schema, tables: Iterable[pa.Table], compression: str = "zstd") -> None:
    """Write tables of a schema as a Parquet file. Each is a row group. Floats and images have no bounds there."""
    leaves = [*_leaves(schema)]
    words = [path for path, kind in leaves if kind not in (*_OF_FLOATS, _OF_IMAGES)]
    options = {
        "compression": compression,
        "compression_level": 1 if compression == "zstd" else None,
        "use_dictionary": words,
        "use_byte_stream_split": [path for path, kind in leaves if kind in _OF_FLOATS],
        "write_statistics": words,
    }
    with pq.ParquetWriter(sink, schema, **options) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=max(table.num_rows, 1))


def _leaves(schema: pa.Schema) -> Iterator[tuple[str, str]]:
    """Yield the path and the physical type of each column of the file that a schema becomes."""
    sink = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), sink)
    written = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    for index in range(len(written.names)):
        column = written.column(index)
        yield column.path, column.physical_type
