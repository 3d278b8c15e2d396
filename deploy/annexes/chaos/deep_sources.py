"""The sources of the deep audit. Each is read by code of its own, not by that of its writer or of the plain audit.

recorder    the worker's own counts, in the run directory until Redis has the final ones
log         the supervisor's line on what it read after a worker's end
learner     the position in its newest checkpoint
books.json  the ended lives, which the broker writes there before Redis gets them
broker      the highest incarnation of each slot, in broker.json
ledger      the rows in Redis
"""

from __future__ import annotations

import contextlib
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from headrace.broker.redis.client import connect, naming_failures
from headrace.deploy.process.recorders import Life, is_written_to
from headrace.deploy.run.several_brokers import learner_dir
from headrace.deploy.terminal.log_rotation import rotated_path
from headrace.schemas.basics.run_files import read_regular, regular

READ_TIMEOUT_S = 2.0
_END = re.compile(r"worker (\d{1,9}) incarnation (\d{1,9}) took ([\d,]{1,30}) steps")
_LOST = re.compile(r"the recorder of worker (\d{1,9}) incarnation (\d{1,9}) is lost")
_RECORDER = re.compile(r"worker-(\d{1,9})-([1-9]\d{0,8})\.rec")
_WORDS = struct.Struct("<264q")
"""The head of a recorder and its two areas; `recorder.py` draws them."""
_MAGIC, _LAYOUTS = 0x4452_4F43_4552_5248, (1, 2)
_MOST_HEADER = 64 << 20
_WRONG = (ValueError, KeyError, TypeError, IndexError, AttributeError)
"""The errors that a value of another form raises."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers that only grow: of one life, or of several together."""

    stepped: int = 0
    cut: int = 0
    settled: int = 0
    committed: int = 0
    episodes: int = 0

    def plus(self, other: Counts) -> Counts:
        """Return the sums."""
        return Counts(*(mine + theirs for mine, theirs in zip(self._values(), other._values(), strict=True)))

    def is_behind(self, other: Counts) -> bool:
        """Return whether some number is lower than the other's."""
        return any(mine < theirs for mine, theirs in zip(self._values(), other._values(), strict=True))

    def __str__(self) -> str:
        return (
            f"{self.stepped:,} steps ({self.committed:,} committed), {self.cut:,} batches ({self.settled:,} settled) "
            f"and {self.episodes:,} episodes"
        )

    def _values(self) -> tuple[int, ...]:
        return self.stepped, self.cut, self.settled, self.committed, self.episodes


@dataclass(frozen=True, slots=True)
class RecorderLine:
    """The numbers in a recorder, and whether its writer lives."""

    stepped: int
    cut: int
    episodes: int
    lives: bool


@dataclass(frozen=True, slots=True)
class LearnerPlace:
    """A learner's position in one life: its last batch, and the steps that it was trained on."""

    seq: int
    committed: int
    ended: bool


@dataclass(frozen=True, slots=True)
class LifeLine:
    """The numbers of one life in the ledger or in books.json."""

    counts: Counts
    closed: bool
    end_taken: bool


@dataclass(frozen=True, slots=True)
class FoldedLine:
    """The sum over the older lives of a slot, and the incarnations of these lives."""

    highest: int
    missing: tuple[tuple[int, int], ...]
    counts: Counts

    def has(self, incarnation: int) -> bool:
        """Return whether this life is in the sum."""
        return incarnation <= self.highest and not any(first <= incarnation <= last for first, last in self.missing)

    @property
    def lives(self) -> int:
        """Return the number of lives in the sum."""
        return self.highest - sum(last - first + 1 for first, last in self.missing)


@dataclass(frozen=True, slots=True)
class Books:
    """The rows and the folded lives of the ledger, or of books.json."""

    rows: Mapping[Life, LifeLine] = field(default_factory=dict)
    folded: Mapping[int, FoldedLine] = field(default_factory=dict)

    def is_folded(self, life: Life) -> bool:
        """Return whether this life is in the sum of its slot's older lives."""
        return life[0] in self.folded and self.folded[life[0]].has(life[1])

    def ended(self) -> dict[int, tuple[int, Counts]]:
        """Return, by slot, how many lives have ended and their counts together."""
        found = {slot: (line.lives, line.counts) for slot, line in self.folded.items()}
        for (slot, _), row in self.rows.items():
            if row.closed:
                lives, counts = found.get(slot, (0, Counts()))
                found[slot] = lives + 1, counts.plus(row.counts)
        return found


def read_recorders(folder: Path) -> tuple[dict[Life, RecorderLine], list[Path]]:
    """Return the recorders in the folder, and those that cannot be read."""
    found, unreadable = dict[Life, RecorderLine](), list[Path]()
    for path in sorted(folder.glob("*.rec")):
        match = _RECORDER.fullmatch(path.name)
        words = _words(path) if match is not None and path.is_file() else ()
        if match is None or not words:
            continue
        if words[0] != _MAGIC or words[1] not in _LAYOUTS:
            unreadable.append(path)
            continue
        lives = is_written_to(path, words[4])
        area = 8 + 128 * (words[5] % 2)
        line = RecorderLine(words[area + 2], words[area + 1], words[area + 6], lives)
        found[int(match[1]), int(match[2])] = line
    return found, unreadable


def _words(path: Path) -> tuple[int, ...]:
    """Return the words as of one commit; () while the writer has recorded nothing, (0, 0) for any other file."""
    content, again, attempts = _head(path), b"", 0
    while content != again and attempts < 100:  # a writer that never pauses is read as it is
        content, again, attempts = again or content, _head(path), attempts + 1
    if not any(content[:8]):
        return ()
    return _WORDS.unpack(content) if len(content) == _WORDS.size else (0, 0)


def _head(path: Path) -> bytes:
    """Return the head and the areas; b"" where the file was deleted."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        return file.read(_WORDS.size)
    return b""


def read_position(run_dir: Path, fleet_id: str) -> dict[Life, LearnerPlace]:
    """Return the position in the learner's newest checkpoint; {} if it has none of this fleet."""
    with contextlib.suppress(OSError, *_WRONG):
        with open(learner_dir(run_dir) / "learner.checkpoint", "rb", opener=regular) as file:
            length = min(int.from_bytes(file.read(8), "little"), _MOST_HEADER)
            told = orjson.loads(orjson.loads(file.read(length))["__metadata__"]["headrace"])
        return {
            _life(place): LearnerPlace(
                _whole(place["settled"]["seq"]), _whole(place["settled"]["committed"][0]), bool(place.get("ended"))
            )
            for place in told["position"]
            if place.get("fleet_id", fleet_id) in ("", fleet_id)
        }
    return {}


def read_books(path: Path) -> Books | None:
    """Return the content of books.json; None if there is no such file. Raises `ValueError` for a damaged one."""
    try:
        told = orjson.loads(read_regular(path))
        rows = {_life(row): _line(row) for row in told["rows"]}
        return Books(rows, {int(slot): _folded(lives) for slot, lives in told["folded"].items()})
    except FileNotFoundError:
        return None
    except (OSError, *_WRONG) as error:
        raise ValueError(f"{path} cannot be read ({type(error).__name__})") from error


def read_ledger(url: str, fleet_id: str) -> tuple[Books, float]:
    """Return the rows in Redis, and when the broker reported last. Leave out what the plain audit names as garbage.

    Raises `RedisUnavailableError`.
    """
    prefix = f"headrace:{{{fleet_id}}}:"
    with contextlib.closing(connect(url, READ_TIMEOUT_S)) as client, naming_failures(url, READ_TIMEOUT_S):
        with client.pipeline(transaction=True) as pipe:
            pipe.hgetall(prefix + "ledger")
            pipe.hgetall(prefix + "folded")
            raw, sums = pipe.execute()
        reported: Any = client.hget(prefix + "fleet", "reported_unix_s")
    rows, folded = dict[Life, LifeLine](), dict[int, FoldedLine]()
    for name, text in raw.items():
        with contextlib.suppress(*_WRONG):
            slot, incarnation = map(int, name.split(b"/"))
            rows[slot, incarnation] = _line(orjson.loads(text))
    for name, text in sums.items():
        with contextlib.suppress(*_WRONG):
            folded[int(name)] = _folded(orjson.loads(text))
    reported_unix_s = 0.0
    with contextlib.suppress(ValueError):
        reported_unix_s = float(reported or 0.0)
    return Books(rows, folded), reported_unix_s if math.isfinite(reported_unix_s) else 0.0


def read_log(path: Path) -> tuple[dict[Life, int], set[Life]]:
    """Return the steps of each life whose end the supervisor has logged, and the lives whose recorders were lost.

    The most steps, where it logged two ends of a life. A later line has fewer steps where the books were lost in
    between, and only the learner knew of the life.
    """
    ends, lost = dict[Life, int](), set[Life]()
    for part in (rotated_path(path), path):
        with contextlib.suppress(FileNotFoundError), part.open(errors="replace") as lines:
            for line in lines:
                if match := _END.search(line):
                    life = int(match[1]), int(match[2])
                    ends[life] = max(ends.get(life, 0), int(match[3].replace(",", "")))
                elif match := _LOST.search(line):
                    lost.add((int(match[1]), int(match[2])))
    return ends, lost


def read_highest(path: Path) -> dict[int, int]:
    """Return the highest incarnation of each slot in broker.json; {} without that file."""
    with contextlib.suppress(OSError, *_WRONG):
        return {int(slot): int(highest) for slot, highest in orjson.loads(read_regular(path))["incarnations"].items()}
    return {}


def _life(told: Any) -> Life:
    return _whole(told["slot"]), _whole(told["incarnation"])


def _line(row: Any) -> LifeLine:
    return LifeLine(_counts(row), bool(row["closed"]), bool(row.get("end_taken")))


def _folded(told: Any) -> FoldedLine:
    missing = tuple((int(first), int(last)) for first, last in told["missing"])
    return FoldedLine(_whole(told["highest"]), missing, _counts(told["row"]))


def _counts(row: Any) -> Counts:
    totals, settled = row["totals"], row["settled"]
    return Counts(
        stepped=_whole(totals["stepped"]),
        cut=_whole(totals["seq"]),
        settled=_whole(settled["seq"]),
        committed=_whole(settled["committed"][0]),
        episodes=_whole(totals.get("episodes", 0)),
    )


def _whole(count: Any) -> int:
    """Return the count. Raises `TypeError` if it is no integer."""
    if type(count) is not int:
        raise TypeError(f"a count is {count!r:.100}")
    return count
