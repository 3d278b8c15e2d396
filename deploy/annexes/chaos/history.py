"""The judgement of the record: each step once, in order, without a gap, and every episode with its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from headrace.deploy.process.recorders import Life
from headrace.schemas.chunks.chunk import ChunkEnd

_SHOWN = 20


class Line(NamedTuple):
    """One batch of the record, as `recorder.line_of` writes it."""

    seconds: float
    slot: int
    incarnation: int
    seq: int
    steps: int
    chunks: list[tuple[str, int, int, int, int]]
    """(episode and agent, index, t_start, length, end)."""

    @property
    def life(self) -> Life:
        """Return the life of the worker that sent the batch."""
        return self.slot, self.incarnation


@dataclass
class History:
    """The record so far. `problems` has a sentence for each broken promise; only the first 20 are kept."""

    problems: list[str] = field(default_factory=list)
    broken: int = 0
    steps: Counter[Life] = field(default_factory=Counter)
    batches: int = 0
    episodes: int = 0
    """Episodes that have ended."""
    aborted: int = 0
    open: dict[str, tuple[int, int, Life]] = field(default_factory=dict)
    """Episode -> (index and t_start of its next chunk, life)."""
    _newest: dict[Life, int] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)

    def read(self, lines: Iterable[Line]) -> History:
        """Judge these lines too."""
        for line in lines:
            self._take(line)
        return self

    def without_end(self) -> Counter[Life]:
        """Return the episodes that are open, by life; after a drain there are none."""
        return Counter(life for _, _, life in self.open.values())

    def _take(self, line: Line) -> None:
        if line.seq:
            newest = self._newest.get(line.life, 0)
            if line.seq <= newest:
                self._break(
                    f"batch {line.seq} of {_named(line.life)} came after batch {newest}: twice, or out of order"
                )
            self._newest[line.life] = max(line.seq, newest)
        self.batches += 1
        self.steps[line.life] += line.steps
        for chunk in line.chunks:
            self._take_chunk(line.life, *chunk)

    def _take_chunk(self, life: Life, episode: str, index: int, t_start: int, length: int, end: int) -> None:
        chunk = f"chunk {index} of episode {episode} of {_named(life)}"
        known = hash(episode) in self._ended
        if known:
            self._break(f"{chunk} came after the end of its episode")
        next_index, next_t, _ = self.open.pop(episode, (0, 0, life))
        if length and not known and (index, t_start) != (next_index, next_t):
            self._break(f"{chunk} begins at step {t_start}; due was chunk {next_index} at step {next_t}")
        if end == ChunkEnd.ONGOING:
            self.open[episode] = (index + 1, t_start + length, life)
        elif not known:
            self._ended.add(hash(episode))
            self.episodes += 1
            self.aborted += end == ChunkEnd.ABORTED

    def _break(self, sentence: str) -> None:
        self.broken += 1
        if len(self.problems) < _SHOWN:
            self.problems.append(sentence)


def read_record(path: Path) -> Iterable[Line]:
    """Yield the lines of the record."""
    with path.open("rb") as file:
        for text in file:
            found: Any = orjson.loads(text)
            yield Line(*found)


def _named(life: Life) -> str:
    return f"slot {life[0]} incarnation {life[1]}"
