"""The stream of a recording, which `EpisodeStream.of` returns for its folder."""

from __future__ import annotations

import inspect
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import orjson

from headrace.deploy.annexes.recording import check_pyarrow
from headrace.learner_stub import EpisodeStream
from headrace.learner_stub.link.ranks import chosen_rank
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import format_episode_id
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.errors import ConfigError, RunDirError, absolute, which_module_error

try:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from headrace.deploy.annexes.recording.recording_folder import batches_before, beside, read_complete, read_metadata
    from headrace.deploy.annexes.recording.row_reader import batches_in, episode_table, spaces_in
except ImportError:
    check_pyarrow()
    raise

_SOURCE = ("slot", "incarnation", "seq")


class RecordedStream:
    """The batches that were recorded, in order and equal to the bit, by the verbs of an `EpisodeStream`.

    It ends after the newest file. A later call goes on with the files that were written since.

    - position: the result of `position()` of an earlier stream of this recording, also with another `keep`.
    - keep: called with the row of each agent's episode in `episodes()`, with its `task` as a dict. Chunks of episodes
      for which it returns False are left out, and batches of these alone. It judges what is recorded at this moment.
    - of_a_fleet: further options of an `EpisodeStream`, which change nothing here.

    Raises:
        ConfigError: `position` is not of this recording, or pyarrow is not installed.
        ConfigError: it is to have several ranks.
        RunDirError: a file is damaged, or of another version; or the batches at `position` were removed.
    """

    group = "recording"
    token = ""
    rank, world_size = 0, 1
    epoch = workers = late_batches = redelivered = 0
    starved = False

    def __init__(
        self,
        path: str | Path,
        *,
        position: Sequence[dict[str, Any]] | None = None,
        keep: Callable[[Mapping[str, Any]], bool] | None = None,
        auto_commit: bool = True,
        **of_a_fleet: Any,
    ) -> None:
        if unknown := of_a_fleet.keys() - inspect.signature(EpisodeStream.__init__).parameters:
            raise TypeError(f"a recording has no option {min(unknown)!r}")
        if chosen_rank(of_a_fleet.get("rank", 0), of_a_fleet.get("world_size", 1)) != (0, 1):
            raise ConfigError("a recording has one reader, and no ranks", key="world_size")
        self.path = absolute(path)
        self.auto_commit = auto_commit
        self.delivered = 0
        self.lag = 0.0
        self.dropped: Counter[str] = Counter()
        self._number = 0
        self._read: int | None = None
        """Batches that were recorded before the next one to read."""
        self._rest: Iterator[ChunkBatch] = iter(())
        self._ahead: deque[tuple[ChunkBatch, dict[str, Any]]] = deque()
        """Batches that were read and not handed out, each with the position after it."""
        self._place: dict[str, Any] = {"group": self.group, "batches": 0}
        self._at_end = False
        read_complete(self.path, lambda files: files and read_metadata(files[max(files)]))  # it checks the schema
        self._chosen = self._choose(keep) if keep is not None else None
        if position:
            self._seek(position)

    def _choose(self, keep: Callable[[Mapping[str, Any]], bool]) -> set[tuple[str, str, str]]:
        """Return id, agent and module of the episodes to keep."""
        rows = self.episodes().to_pylist()
        for row in rows:
            row["task"] = row["task"] and orjson.loads(row["task"])["values"]
        return {(row["episode_id"], row["agent"], row["module"]) for row in rows if keep(row)}

    def _seek(self, position: Sequence[dict[str, Any]]) -> None:
        """Go on after the batch at `position`. Raises `ConfigError` and `RunDirError`."""
        place = dict(position[0])
        known = len(position) == 1 and place.get("group") == self.group and isinstance(place.get("batches"), int)
        number = read_complete(self.path, lambda files: self._number_of(files, place)) if known else None
        if number is None:
            raise ConfigError(f"position: it is not of the recording {self.path}", key="position")
        self._place, self._read, self._number = place, place["batches"], number - 1

    def _number_of(self, files: Mapping[int, Path], place: dict[str, Any]) -> int | None:
        """Return the number that has the batch at a place, or the next one; None if the batch there is another."""
        count = place["batches"]
        if not count:
            return 1 if place == self._place else None
        for number, path in files.items():
            before, stop = batches_before(path)
            if count < before:
                raise self._removed(count, before)
            if count == before:
                return number  # the batch itself was removed, and the next one was not
            if count <= stop:
                (its,) = pq.read_table(path, columns=[*_SOURCE]).slice(count - before - 1, 1).to_pylist()
                return number if place == {**self._place, "batches": count, **its} else None
        return None

    def _removed(self, read: int, before: int) -> RunDirError:
        its = f"batches {read + 1:,} to {before:,} were removed before they were read, for --max-bytes or --max-age-s"
        return RunDirError("", "", sentence=f"recording {self.path}: {its}; begin at the oldest: leave out position=")

    def __iter__(self) -> Iterator[ChunkBatch]:
        """Yield batches to the end of the recording."""
        while (batch := self.next()) is not None:
            yield batch

    def __next__(self) -> ChunkBatch:
        return next(iter(self))

    def __repr__(self) -> str:
        return f"<RecordedStream of {self.path}: {self.delivered:,} batches{', at its end' if self.ended else ''}>"

    def next(self, timeout_s: float = 0.0) -> ChunkBatch | None:
        """Return the next batch; None if there is none. It does not wait."""
        batches = self.round_of(1)
        return batches[0] if batches else None

    def round_of(self, count: int, timeout_s: float | None = None) -> list[ChunkBatch]:
        """Return the next `count` batches; none if there are fewer. It does not wait."""
        if count < 1:
            raise ValueError(f"count = {count}: a round has 1 batch or more")
        while len(self._ahead) < count and self._fetch():
            pass
        self._at_end = len(self._ahead) < count
        given = [self._ahead.popleft() for _ in range(0 if self._at_end else count)]
        if given:
            batch, self._place = given[-1]
            self.lag = float(batch.lag.mean()) if batch.steps else self.lag
        self.delivered += len(given)
        return [batch for batch, _ in given]

    def _fetch(self) -> bool:
        """Read the next batch to hand out. Return whether there was one."""
        while (batch := self._next_read()) is not None:
            kept = self._kept(batch)
            if len(kept):
                source = {name: getattr(batch, name) for name in _SOURCE}
                self._ahead.append((kept, {"group": self.group, "batches": self._read, **source}))
                return True
        return False

    def _next_read(self) -> ChunkBatch | None:
        while (batch := next(self._rest, None)) is None:
            if not read_complete(self.path, self._open_next):
                return None
        self._read = (self._read or 0) + 1
        return batch

    def _open_next(self, files: Mapping[int, Path]) -> bool:
        """Open the files of the next number, some of whose batches may have been read. Return whether there is one."""
        number = next((number for number in files if number > self._number), None)
        if number is None:
            return False
        before, _ = batches_before(files[number])
        first = before if self._read is None else self._read
        if before > first:
            raise self._removed(first, before)
        self._rest = batches_in(files[number], first - before)
        self._number, self._read = number, first
        return True

    def _kept(self, batch: ChunkBatch) -> ChunkBatch:
        if self._chosen is None:
            return batch
        rows, (module,) = batch.table, batch.modules
        ids = zip(rows["id_high"].tolist(), rows["id_low"].tolist(), rows["agent"].tolist(), strict=True)
        keep = [(format_episode_id(high, low), batch.agents[agent], module) in self._chosen for high, low, agent in ids]
        return batch if all(keep) else batch.select(np.array(keep, np.bool_))

    def episodes(self) -> pa.Table:
        """Return a row for each agent's episode: worker, env, seed, task, end, reason, return, length, weights."""
        return episode_table(self.path)

    def position(self) -> list[dict[str, Any]]:
        """Return how far this reader is, as plain values for its own checkpoint."""
        return [dict(self._place)]

    def commit(self) -> None:
        """Do nothing: a recording keeps its batches."""

    def pump(self, wait_s: float = 0.0) -> None:
        """Do nothing: nothing arrives."""

    def close(self) -> None:
        """Forget what was read ahead."""
        self._ahead.clear()
        self._rest = iter(())

    def spaces(self, module_id: str | None = None, *, timeout_s: float = 0.0) -> Spaces:
        """Return the observation and action space of a module, or of the only one there is.

        Raises `ModuleError`, and `RunDirError` without a batch.
        """
        known = self.module_spaces()
        if not known:
            raise RunDirError("", "", sentence=f"recording {self.path} has no batch yet")
        if module_id is None and len(known) == 1:
            return next(iter(known.values()))
        if module_id is None or module_id not in known:
            raise which_module_error(module_id, known)
        return known[module_id]

    def module_spaces(self, *, timeout_s: float = 0.0) -> dict[str, Spaces]:
        """Return module id -> the spaces of its chunks, of the modules that were recorded."""
        return read_complete(self.path, lambda files: dict(map(spaces_in, beside(files, "chunks"))))

    @property
    def endpoint(self) -> str:
        """Return the folder."""
        return str(self.path)

    @property
    def ended(self) -> str:
        """Return why no batch came to the last call; "" before the end."""
        return f"the recording {self.path} has no more batches" if self._at_end else ""

    @property
    def exhausted(self) -> bool:
        """Return whether no batch came to the last call."""
        return self._at_end

    @property
    def pending(self) -> int:
        """Return the number of batches read and not handed out."""
        return len(self._ahead)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
