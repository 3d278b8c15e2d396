"""A learner that trains nothing and records each batch, for an independent judgement of what a learner gets.

    FOLDER/record.jsonl     a line for each batch, see `line_of`
    FOLDER/position.json    how long the record is, and the position in the stream there; replaced in one step
    FOLDER/slow             seconds that it waits after each batch, while the file exists

It commits only batches that are in both files. After a kill, it cuts off lines that `position.json` does not cover: the
fleet sends these batches again. If the record then lacks or repeats a batch, the fleet broke its promise.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import orjson

from headrace.learner_stub import EpisodeStream
from headrace.schemas.basics.run_files import replace_private
from headrace.schemas.basics.stop_event import stop_event
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import format_episode_id
from headrace.schemas.credentials.keys import client_keys
from headrace.schemas.errors import HeadraceError

RECORD, POSITION, SLOW = "record.jsonl", "position.json", "slow"
_COMMIT_S = 0.1
_SILENCE_S = 3600.0


class RecordFiles:
    """The files of the record, opened where the last commit left them."""

    def __init__(self, folder: Path) -> None:
        self._position = folder / POSITION
        known = orjson.loads(self._position.read_bytes()) if self._position.exists() else {}
        self.position: list[dict[str, Any]] = known.get("position", [])
        self._length: int = known.get("length", 0)
        self._file = os.open(folder / RECORD, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, self._length)
        os.lseek(self._file, self._length, os.SEEK_SET)
        self._lines: list[bytes] = []

    def add(self, batch: ChunkBatch) -> None:
        """Add a batch. `save` writes it to the files."""
        self._lines.append(line_of(batch, time.monotonic()))

    def save(self, position: list[dict[str, Any]]) -> bool:
        """Write the added batches, with the position after them. Return whether there were any."""
        if not self._lines:
            return False
        text = b"".join(self._lines)
        self._lines.clear()
        while text:
            written = os.write(self._file, text)
            self._length += written
            text = text[written:]
        replace_private(self._position, orjson.dumps({"length": self._length, "position": position}))
        return True


def line_of(batch: ChunkBatch, now_s: float) -> bytes:
    """Return [seconds, slot, incarnation, seq, steps, [[episode and agent, index, t_start, length, end], ...]]."""
    chunks = [
        (
            f"{format_episode_id(int(row['id_high']), int(row['id_low']))}/{row['agent']}",
            *(int(row[name]) for name in ("chunk_index", "t_start", "length", "end")),
        )
        for row in batch.table
    ]
    return orjson.dumps([now_s, batch.slot, batch.incarnation, batch.seq, batch.steps, chunks]) + b"\n"


def record(endpoint: str, folder: Path, run_dir: Path) -> None:
    """Record the stream of the fleet in `run_dir`, from `endpoint`, until a stop signal.

    Raises the errors of `EpisodeStream`.
    """
    files, slow = RecordFiles(folder), folder / SLOW
    keys = client_keys(None, "learner")
    settings: dict[str, Any] = {"auto_commit": False, "silence_timeout_s": _SILENCE_S, "keys": keys}
    with stop_event() as stopping, EpisodeStream(endpoint, position=files.position, **settings) as stream:
        saved_at = time.monotonic()
        while not stopping.is_set():
            batch = stream.next(timeout_s=_COMMIT_S / 2)
            if batch is not None:
                files.add(batch)
                if slow.exists():
                    stopping.wait(float(slow.read_text() or 0))
            if batch is None or time.monotonic() - saved_at > _COMMIT_S:
                if files.save(stream.position()):
                    stream.commit()
                saved_at = time.monotonic()
        if files.save(stream.position()):
            stream.commit()


if __name__ == "__main__":
    try:
        record(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    except HeadraceError as error:
        sys.exit(f"{type(error).__name__}: {error}")
