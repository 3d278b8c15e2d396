"""The deep audit: the numbers of each source for every life of a worker, and their differences.

Each source is read separately. Only the recorders are read by the code that wrote them:

    recorder  the worker's own counts, in the run directory until Redis has the final ones
    log       the supervisor's line on what it read after a worker's end
    learner   the position in its newest checkpoint
    broker    the highest incarnation of each slot, in broker.json
    ledger    the rows in Redis

The recorders are read before and after Redis: the ledger lies between the two. A running broker may need a moment to
count what was read before.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
from rich.table import Table

from headrace.broker.redis.client import connect, naming_failures
from headrace.deploy.process.recorders import Life
from headrace.deploy.report.evidence import Evidence, read_evidence
from headrace.deploy.terminal.log_rotation import rotated_path
from headrace.schemas.accounts.ledger import Settled
from headrace.schemas.accounts.recorder import Reading

READ_TIMEOUT_S = 2.0
_END = re.compile(r"worker (\d{1,9}) incarnation (\d{1,9}) took ([\d,]{1,30}) steps")


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """The ledger's numbers of one life."""

    stepped: int
    cut: int
    settled: int
    committed: int
    closed: bool


@dataclass(frozen=True, slots=True)
class FoldedLine:
    """The ledger's sum over the older lives of a slot, and the incarnations of these lives."""

    highest: int
    missing: tuple[tuple[int, int], ...]
    stepped: int
    settled: int
    committed: int

    def has(self, incarnation: int) -> bool:
        """Return whether this life is in the sum."""
        return incarnation <= self.highest and not any(first <= incarnation <= last for first, last in self.missing)

    @property
    def lives(self) -> int:
        """Return the number of lives in the sum."""
        return self.highest - sum(last - first + 1 for first, last in self.missing)


@dataclass(frozen=True, slots=True)
class Sources:
    """The numbers of each source, by life."""

    before: Evidence
    after: Mapping[Life, Reading] = field(default_factory=dict)
    ledger: Mapping[Life, LedgerLine] = field(default_factory=dict)
    folded: Mapping[int, FoldedLine] = field(default_factory=dict)
    log: Mapping[Life, int] = field(default_factory=dict)
    highest: Mapping[int, int] = field(default_factory=dict)
    """By slot, the highest incarnation in broker.json; empty without that file."""
    reported_unix_s: float = 0.0

    @property
    def lives(self) -> list[Life]:
        """Return every life that some source knows."""
        known = (self.before.recorders, self.after, self.ledger, self.log, self.before.position)
        return sorted({life for source in known for life in source})

    def is_folded(self, life: Life) -> bool:
        """Return whether the ledger has this life in the sum of its slot's older lives."""
        return life[0] in self.folded and self.folded[life[0]].has(life[1])


def read_files(run_dir: Path, fleet_id: str) -> Sources:
    """Read recorders, the learner's position and the log."""
    return Sources(read_evidence(run_dir, fleet_id), log=_read_log(run_dir / "logs" / "supervisor.log"))


def with_ledger(sources: Sources, run_dir: Path, url: str, fleet_id: str) -> Sources:
    """Return the sources with the present ledger. Read sources that must not be behind the ledger after it.

    Raises `RedisUnavailableError`.
    """
    ledger, folded, reported_unix_s = _read_ledger(url, fleet_id)
    after = read_evidence(run_dir, fleet_id).recorders
    highest = _read_highest(run_dir / "broker.json")
    return replace(sources, ledger=ledger, folded=folded, after=after, highest=highest, reported_unix_s=reported_unix_s)


def disagreements(sources: Sources) -> list[str]:
    """Return one sentence for each difference that no order of events explains."""
    found = [f"{path} cannot be read as a recorder" for path in sources.before.unreadable]
    for life in sources.lives:
        name = f"slot {life[0]} incarnation {life[1]}"
        found += [f"{name}: {difference}" for difference in _of_life(sources, life)]
    for slot, line in sorted(sources.folded.items()):
        found += [
            f"slot {slot}, its {line.lives} folded lives: {difference}" for difference in _of_folded(sources, slot)
        ]
    return found


def table(sources: Sources) -> Table:
    """Return a line for each life, with the numbers of each source; "-" if a source does not know the life."""
    shown = Table("slot", "inc.", title="what each source says", title_justify="left")
    for column in ("recorder steps", "log steps", "ledger steps", "learner settled", "ledger settled", "ledger"):
        shown.add_column(column, justify="right")
    for life in sources.lives:
        says = as_facts(sources, life)
        state = {None: "-", True: "closed", False: "live"}[says.pop("closed")]
        figures = ("-" if figure is None else f"{figure:,}" for figure in list(says.values())[2:])
        shown.add_row(str(life[0]), str(life[1]), *figures, state)
    return shown


def as_facts(sources: Sources, life: Life) -> dict[str, Any]:
    """Return the numbers of each source for a life, for JSON; None if a source does not know the life."""
    recorder = sources.after.get(life) or sources.before.recorders.get(life)
    row, position = sources.ledger.get(life), sources.before.position.get(life)
    return {
        "slot": life[0],
        "incarnation": life[1],
        "recorder_steps": recorder.totals.stepped if recorder is not None else None,
        "log_steps": sources.log.get(life),
        "ledger_steps": row.stepped if row is not None else None,
        "learner_settled": position.seq if position is not None else None,
        "ledger_settled": row.settled if row is not None else None,
        "closed": row.closed if row is not None else None,
    }


def _of_folded(sources: Sources, slot: int) -> Iterator[str]:
    """Yield the differences between the sum of a slot's older lives and the other sources."""
    line = sources.folded[slot]
    ended = {life: steps for life, steps in sources.log.items() if life[0] == slot and line.has(life[1])}
    steps = sum(ended.values())
    if steps > line.stepped or (len(ended) == line.lives and steps != line.stepped):
        yield (
            f"{len(ended)} of them took {steps:,} steps, as the supervisor's log says, but the ledger has "
            f"{line.stepped:,}"
        )
    places = [place for life, place in sources.before.position.items() if life[0] == slot and line.has(life[1])]
    settled, committed = sum(place.seq for place in places), sum(place.committed[0] for place in places)
    if settled > line.settled or committed > line.committed:
        yield (
            f"the learner was trained on {committed:,} steps of {settled} batches, but the ledger has "
            f"{line.committed:,} of {line.settled} as committed"
        )
    if sources.highest and line.highest > sources.highest.get(slot, 0):
        yield f"broker.json knows only incarnations up to {sources.highest.get(slot, 0)} of this slot"


def _of_life(sources: Sources, life: Life) -> Iterator[str]:
    if sources.is_folded(life):
        if life in sources.ledger:
            yield "the ledger has a row of it, although it is folded"
        reading = sources.before.recorders.get(life)
        if reading is not None and reading.totals.stepped > sources.folded[life[0]].stepped:
            yield f"it ended after {reading.totals.stepped:,} steps, which its slot's folded lives do not have together"
        return
    row, ended = sources.ledger.get(life), sources.before.recorders.get(life)
    if ended is not None and life not in sources.before.living:
        yield from _against_end(row, ended.totals.stepped, "its recorder")
    if life in sources.log:
        yield from _against_end(row, sources.log[life], "the supervisor's log")
    if (position := sources.before.position.get(life)) is not None:
        yield from _against_position(row, position)
    if row is None:
        return
    if (now := sources.after.get(life)) is not None:
        for what, known, recorded in (
            ("steps", row.stepped, now.totals.stepped),
            ("batches", row.cut, now.totals.seq),
        ):
            if known > recorded:
                yield f"the ledger has {known:,} {what}, but its recorder has only {recorded:,}"
    newest = max(incarnation for slot, incarnation in sources.ledger if slot == life[0])
    if not row.closed and row.stepped and life[1] < newest:  # a life without a step has no books to close
        yield f"the ledger has it as live, beside incarnation {newest}"
    if sources.highest and life[1] > sources.highest.get(life[0], 0):
        yield f"broker.json knows only incarnations up to {sources.highest.get(life[0], 0)} of this slot"


def _against_end(row: LedgerLine | None, stepped: int, witness: str) -> Iterator[str]:
    if row is None and stepped:
        yield f"it ended after {stepped:,} steps, as {witness} says, but the ledger does not know it"
    elif row is not None and row.stepped != stepped:
        yield f"it ended after {stepped:,} steps, as {witness} says, but the ledger has {row.stepped:,}"
    elif row is not None and not row.closed:
        yield f"it has ended, as {witness} says, but the ledger has it as live"


def _against_position(row: LedgerLine | None, position: Settled) -> Iterator[str]:
    if row is None or row.settled < position.seq:
        known = 0 if row is None else row.settled
        yield f"the learner has settled batches up to {position.seq}, but the ledger knows {known}"
    elif row.committed < position.committed[0] or (
        row.settled == position.seq and row.committed != position.committed[0]
    ):
        yield (
            f"the learner was trained on {position.committed[0]:,} steps of its first {position.seq} batches, but the "
            f"ledger has {row.committed:,} of {row.settled} as committed"
        )


def _read_ledger(url: str, fleet_id: str) -> tuple[dict[Life, LedgerLine], dict[int, FoldedLine], float]:
    prefix = f"headrace:{{{fleet_id}}}:"
    with contextlib.closing(connect(url, READ_TIMEOUT_S)) as client, naming_failures(url, READ_TIMEOUT_S):
        with client.pipeline(transaction=True) as pipe:
            pipe.hgetall(prefix + "ledger")
            pipe.hgetall(prefix + "folded")
            raw, sums = pipe.execute()
        reported: Any = client.hget(prefix + "fleet", "reported_unix_s")
    rows = {}
    for name, text in raw.items():
        with contextlib.suppress(ValueError, KeyError, TypeError, IndexError):  # the audit names such a row
            slot, incarnation = map(int, name.split(b"/"))
            row = orjson.loads(text)
            totals, settled = row["totals"], row["settled"]
            counts = _whole(totals["stepped"], totals["seq"], settled["seq"], settled["committed"][0])
            rows[slot, incarnation] = LedgerLine(*counts, bool(row["closed"]))
    folded = {}
    for name, text in sums.items():
        with contextlib.suppress(ValueError, KeyError, TypeError, IndexError):
            told = orjson.loads(text)
            missing = tuple((int(first), int(last)) for first, last in told["missing"])
            totals, settled = told["row"]["totals"], told["row"]["settled"]
            counts = _whole(told["highest"], totals["stepped"], settled["seq"], settled["committed"][0])
            folded[int(name)] = FoldedLine(counts[0], missing, *counts[1:])
    reported_unix_s = 0.0
    with contextlib.suppress(ValueError):
        reported_unix_s = float(reported or 0.0)
    return rows, folded, reported_unix_s if math.isfinite(reported_unix_s) else 0.0


def _whole(*counts: Any) -> tuple[int, int, int, int]:
    """Return the four counts. Raises `TypeError` if one is no integer."""
    if not all(type(count) is int for count in counts):
        raise TypeError(f"counts of a row are {counts!r:.100}")
    return counts


def _read_log(path: Path) -> dict[Life, int]:
    ends = {}
    for part in (rotated_path(path), path):
        with contextlib.suppress(FileNotFoundError), part.open(errors="replace") as lines:
            for line in lines:
                if (match := _END.search(line)) is not None:
                    ends[int(match[1]), int(match[2])] = int(match[3].replace(",", ""))
    return ends


def _read_highest(path: Path) -> dict[int, int]:
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
        return {int(slot): int(highest) for slot, highest in orjson.loads(path.read_bytes())["incarnations"].items()}
    return {}
