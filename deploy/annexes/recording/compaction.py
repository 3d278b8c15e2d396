"""Compaction of a recording: the numbers in `unmerged` become one number, in files that never change again.

A merge writes its files aside, gives them their names, `batches-N` last, and then removes those that it has read. N is
the newest of their numbers. A merge that was killed before its `batches-N` is made again, up to the same N.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.deploy.annexes.recording.recording_folder import (
    METADATA,
    NEW,
    file_number,
    numbered,
    read_metadata,
    with_metadata,
    write_parquet,
)
from headrace.schemas.basics.run_files import open_own, sync_folder

MERGE_BYTES = 128 << 20
MERGE_AGE_S = 600.0
_GROUP_BYTES = 64 << 20
"""Bytes of rows in memory that become a row group."""

_Schemas = Mapping[str, pa.Schema]


def compact(folder: Path, *, all_now: bool = False) -> None:
    """Merge the numbers in `unmerged` once they have `MERGE_BYTES`, or the oldest is `MERGE_AGE_S` old, or now.

    Raises `OSError` and `RunDirError`. The numbers are complete then as before.
    """
    while run := _next_run(folder, all_now=all_now):
        _merge(folder, run)


def remove_oldest(folder: Path, max_bytes: float, max_age_s: float) -> None:
    """Remove the oldest merged numbers while the recording has more bytes, and those that are older. The newest stays.

    Raises `OSError`.
    """
    sizes = {number: _size(folder, number) for number in map(file_number, sorted(folder.glob("batches-*.parquet")))}
    nbytes = sum(sizes.values()) + sum(path.stat().st_size for path in (folder / NEW).glob("*.parquet"))
    for number in [*sizes][:-1]:
        written_at = (folder / f"batches-{number:06}.parquet").stat().st_mtime
        if nbytes <= max_bytes and written_at > time.time() - max_age_s:
            return
        remove_number(folder, number)
        nbytes -= sizes[number]


def _next_run(folder: Path, *, all_now: bool) -> dict[int, _Schemas]:
    """Return the numbers to merge, and the schemas of their files: the oldest, as far as their columns agree."""
    new = {number: path for number, path in numbered(folder, "batches").items() if path.parent != folder}
    begun = max((number for number in map(file_number, folder.glob("steps-*.parquet")) if number in new), default=0)
    run: dict[int, _Schemas] = {}
    joined: dict[str, pa.Schema] = {}
    nbytes, is_whole = 0, False
    for number in new:
        files = [file for file in _files_of(folder / NEW, number) if not file.name.startswith("batches")]
        own = {_file_of(file): pq.read_schema(file) for file in files}
        agrees = all(_agree(joined.get(file, schema), schema) for file, schema in own.items())
        is_whole = number > begun if begun else nbytes >= MERGE_BYTES or not agrees
        if is_whole:
            break
        joined |= {file: _union(joined.get(file, schema), schema) for file, schema in own.items()}
        run[number] = own
        nbytes += _size(folder / NEW, number)
    is_due = bool(begun) or all_now or is_whole or nbytes >= MERGE_BYTES
    return run if is_due or (run and new[min(run)].stat().st_mtime <= time.time() - MERGE_AGE_S) else {}


def _file_of(path: Path) -> str:
    """Return the kind and the module of a file of steps or chunks."""
    kind, _, module = path.name.split("-", 2)
    return f"{kind}-{module}"


def _size(folder: Path, number: int) -> int:
    return sum(path.stat().st_size for path in _files_of(folder, number))


def _files_of(folder: Path, number: int) -> list[Path]:
    """Return the files of a number. A module's id may end in the number of another."""
    return sorted(path for path in folder.glob(f"*-{number:06}[-.]*") if file_number(path) == number)


def _agree(one: pa.Schema, other: pa.Schema) -> bool:
    """Return whether columns that both have are of one form, and the files of one module and its spaces."""
    both = set(one.names) & set(other.names)
    same = all(one.field(name).equals(other.field(name), check_metadata=True) for name in both)
    return same and one.metadata[METADATA] == other.metadata[METADATA]


def _union(one: pa.Schema, other: pa.Schema) -> pa.Schema:
    return pa.schema([*one, *(field for field in other if field.name not in one.names)], metadata=one.metadata)


def _merge(folder: Path, run: Mapping[int, _Schemas]) -> None:
    new, stop = folder / NEW, max(run)
    written: dict[Path, Path] = {}
    """The name of each file, and the name that it has until it is whole."""
    try:
        for file in sorted({file for own in run.values() for file in own}):
            kind, module = file.split("-", 1)
            schemas = [own[file] for own in run.values() if file in own]
            schema = schemas[0]
            for later in schemas[1:]:
                schema = _union(schema, later)
            paths = [new / f"{kind}-{number:06}-{module}" for number, own in run.items() if file in own]
            name = folder / f"{kind}-{stop:06}-{module}"
            written[name] = _write_aside(name, schema, _groups(paths, schema))
        batches, name = _joined_batches(new, run), folder / f"batches-{stop:06}.parquet"
        last = _write_aside(name, batches.schema, [batches])
    except BaseException:
        for aside in folder.glob(f".*.parquet.{os.getpid()}"):
            aside.unlink()
        raise
    for path, aside in written.items():
        aside.replace(path)
    sync_folder(folder)
    last.replace(name)
    sync_folder(folder)
    for number in run:
        remove_number(new, number)


def remove_number(folder: Path, number: int) -> None:
    """Remove the files of a number, `batches-N` first: without it the number is not complete."""
    for path in _files_of(folder, number):
        path.unlink()


def _write_aside(path: Path, schema: pa.Schema, tables: Iterable[pa.Table]) -> Path:
    """Write a file under another name, wait until it is on the disk, and return the name."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.unlink(missing_ok=True)
    with os.fdopen(open_own(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        write_parquet(file, schema, tables)
        file.flush()
        os.fsync(file.fileno())
    return aside


def _groups(paths: Sequence[Path], schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield the rows of files in order, as tables of about `_GROUP_BYTES`. Absent columns are null."""
    held = [schema.empty_table()]
    for path in paths:
        with pq.ParquetFile(path) as file:
            held.append(file.read())
        if sum(table.nbytes for table in held) >= _GROUP_BYTES or path == paths[-1]:
            yield pa.concat_tables(held, promote_options="default").unify_dictionaries()
            held = [schema.empty_table()]


def _joined_batches(new: Path, run: Mapping[int, _Schemas]) -> pa.Table:
    """Return the rows of the tables of batches, where each tells its rows in the merged files."""
    paths = [new / f"batches-{number:06}.parquet" for number in run]
    before: dict[tuple[str, str], int] = {}
    tables = []
    for path in paths:
        with pq.ParquetFile(path) as file:
            table = file.read()
        files = table["file"].to_pylist()
        for name, count in (("first_step", "steps"), ("first_chunk", "chunks")):
            rows = [before.get((name, file), 0) for file in files]
            moved = pa.array(table[name].to_numpy() + np.array(rows, np.int64))
            for file, its in zip(files, table[count].to_pylist(), strict=True):
                before[name, file] = before.get((name, file), 0) + its
            table = table.set_column(table.column_names.index(name), name, moved)
        tables.append(table)
    told = {**read_metadata(paths[-1]), "before": read_metadata(paths[0])["before"]}
    return with_metadata(pa.concat_tables(tables), told)
