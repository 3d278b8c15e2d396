"""The deep audit: the numbers of each source for every life of a worker, and their differences.

`deep_sources.py` lists the sources and reads them. Recorders and books.json are read before and after Redis: the ledger
lies between the two. A running broker may need a moment to count what was read before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import orjson
from rich.console import Console
from rich.table import Table

from headrace.deploy.annexes.chaos.deep_sources import (
    Books,
    Counts,
    LearnerPlace,
    LifeLine,
    RecorderLine,
    read_books,
    read_highest,
    read_ledger,
    read_log,
    read_position,
    read_recorders,
)
from headrace.deploy.process.recorders import Life
from headrace.deploy.report.audit import find_books
from headrace.deploy.report.audit_command import FILE_WIDTH, once_caught_up
from headrace.deploy.report.evidence import checkpoint_damage
from headrace.deploy.run.redis_server import serving
from headrace.schemas.errors import HeadraceError


@dataclass(frozen=True, slots=True)
class Sources:
    """The numbers of each source, by life."""

    recorders: Mapping[Life, RecorderLine] = field(default_factory=dict)
    unreadable: tuple[str, ...] = ()
    """Sentences on files that cannot be read."""
    position: Mapping[Life, LearnerPlace] = field(default_factory=dict)
    log: Mapping[Life, int] = field(default_factory=dict)
    unrecorded: frozenset[Life] = frozenset()
    """Lives whose recorders were lost, as the supervisor's log says."""
    books: Books | None = None
    """books.json; None without that file."""
    ledger: Books = field(default_factory=Books)
    recorders_after: Mapping[Life, RecorderLine] = field(default_factory=dict)
    books_after: Books | None = None
    highest: Mapping[int, int] = field(default_factory=dict)
    """By slot, the highest incarnation in broker.json; empty without that file."""
    reported_unix_s: float = 0.0

    @property
    def lives(self) -> list[Life]:
        """Return every life that some source knows."""
        rows = self.books.rows if self.books is not None else {}
        known = (self.recorders, self.recorders_after, self.ledger.rows, self.log, self.position, rows)
        return sorted({life for source in known for life in source})


def read_files(run_dir: Path, fleet_id: str) -> Sources:
    """Read the files that must not be ahead of the ledger."""
    recorders, unreadable = read_recorders(run_dir / "recorders")
    words, books = [f"{path} cannot be read as a recorder" for path in unreadable], None
    words += checkpoint_damage(run_dir)
    try:
        books = read_books(run_dir / "books.json")
    except ValueError as error:
        words.append(str(error))
    position, (log, lost) = read_position(run_dir, fleet_id), read_log(run_dir / "logs" / "supervisor.log")
    return Sources(recorders, tuple(words), position, log, frozenset(lost), books)


def with_ledger(sources: Sources, run_dir: Path, url: str, fleet_id: str) -> Sources:
    """Return the sources with the present ledger. Read sources that must not be behind the ledger after it.

    Raises `RedisUnavailableError`.
    """
    ledger, reported_unix_s = read_ledger(url, fleet_id)
    return replace(
        sources,
        ledger=ledger,
        recorders_after=read_recorders(run_dir / "recorders")[0],
        books_after=read_books(run_dir / "books.json") if sources.books is not None else None,
        highest=read_highest(run_dir / "broker.json"),
        reported_unix_s=reported_unix_s,
    )


def disagreements(sources: Sources) -> list[str]:
    """Return one sentence for each difference that no order of events explains."""
    found = list(sources.unreadable)
    for life in sources.lives:
        name = f"slot {life[0]} incarnation {life[1]}"
        found += [f"{name}: {difference}" for difference in _of_life(sources, life)]
    for slot, line in sorted(sources.ledger.folded.items()):
        found += [
            f"slot {slot}, its {line.lives} folded lives: {difference}" for difference in _of_folded(sources, slot)
        ]
    return [*found, *_of_sums(sources)]


def known_losses(sources: Sources) -> Iterator[str]:
    """Yield one sentence for each life whose books have only what it had told of, as its recorder was lost."""
    for life in sorted(sources.unrecorded):
        row = sources.ledger.rows.get(life)
        if row is None and not sources.ledger.is_folded(life):
            continue
        has = f"the {row.counts.stepped:,} steps" if row is not None else "only the steps"
        yield (
            f"slot {life[0]} incarnation {life[1]}: its recorder was lost, so the ledger has {has} that it had told "
            "of; how many more it took is not known"
        )


def table(sources: Sources) -> Table:
    """Return a line for each life, with the numbers of each source; "-" if a source does not know the life."""
    shown = Table("slot", "inc.", title="what each source says", title_justify="left")
    for column in (
        *("recorder steps", "log steps", "books.json steps", "ledger steps"),
        *("learner settled", "ledger settled", "ledger"),
    ):
        shown.add_column(column, justify="right")
    for life in sources.lives:
        says = as_facts(sources, life)
        state = {None: "-", True: "closed", False: "live"}[says.pop("closed")]
        figures = ("-" if figure is None else f"{figure:,}" for figure in list(says.values())[2:])
        shown.add_row(str(life[0]), str(life[1]), *figures, state)
    return shown


def as_facts(sources: Sources, life: Life) -> dict[str, Any]:
    """Return the numbers of each source for a life, for JSON; None if a source does not know the life."""
    recorder = sources.recorders_after.get(life) or sources.recorders.get(life)
    row, place = sources.ledger.rows.get(life), sources.position.get(life)
    ended = sources.books.rows.get(life) if sources.books is not None else None
    return {
        "slot": life[0],
        "incarnation": life[1],
        "recorder_steps": recorder.stepped if recorder is not None else None,
        "log_steps": sources.log.get(life),
        "books_steps": ended.counts.stepped if ended is not None else None,
        "ledger_steps": row.counts.stepped if row is not None else None,
        "learner_settled": place.seq if place is not None else None,
        "ledger_settled": row.counts.settled if row is not None else None,
        "closed": row.closed if row is not None else None,
    }


def _of_sums(sources: Sources) -> Iterator[str]:
    """Yield a sentence for each slot whose ended lives have other sums in Redis than in books.json."""
    if sources.books is None or sources.books_after is None:
        return
    nothing = (0, Counts())
    before, ledger, after = (books.ended() for books in (sources.books, sources.ledger, sources.books_after))
    for slot in sorted(before.keys() | ledger.keys()):
        lives, counts = ledger.get(slot, nothing)
        for (known, told), is_behind in ((before.get(slot, nothing), True), (after.get(slot, nothing), False)):
            differ = counts.is_behind(told) if is_behind else told.is_behind(counts)
            if differ or (lives < known if is_behind else lives > known):
                yield (
                    f"slot {slot}: its {known} ended lives have {told} in books.json, but its {lives} in the ledger "
                    f"have {counts}"
                )
                break


def _of_folded(sources: Sources, slot: int) -> Iterator[str]:
    """Yield the differences between the sum of a slot's older lives and the other sources."""
    line = sources.ledger.folded[slot]
    ended = {life: steps for life, steps in sources.log.items() if life[0] == slot and line.has(life[1])}
    steps = sum(ended.values())
    if steps > line.counts.stepped or (len(ended) == line.lives and steps != line.counts.stepped):
        yield (
            f"{len(ended)} of them took {steps:,} steps, as the supervisor's log says, but the ledger has "
            f"{line.counts.stepped:,}"
        )
    places = [place for life, place in sources.position.items() if life[0] == slot and line.has(life[1])]
    settled, committed = sum(place.seq for place in places), sum(place.committed for place in places)
    if settled > line.counts.settled or committed > line.counts.committed:
        yield (
            f"the learner was trained on {committed:,} steps of {settled} batches, but the ledger has "
            f"{line.counts.committed:,} of {line.counts.settled} as committed"
        )
    if sources.highest and line.highest > sources.highest.get(slot, 0):
        yield f"broker.json knows only incarnations up to {sources.highest.get(slot, 0)} of this slot"


def _of_life(sources: Sources, life: Life) -> Iterator[str]:
    if sources.ledger.is_folded(life):
        if life in sources.ledger.rows:
            yield "the ledger has a row of it, although it is folded"
        reading = sources.recorders.get(life)
        if reading is not None and reading.stepped > sources.ledger.folded[life[0]].counts.stepped:
            yield f"it ended after {reading.stepped:,} steps, which its slot's folded lives do not have together"
        return
    row, ended = sources.ledger.rows.get(life), sources.recorders.get(life)
    if ended is not None and not ended.lives:
        yield from _against_end(row, ended.stepped, "its recorder")
        known = row.counts.episodes if row is not None else 0
        if known < ended.episodes:
            yield f"it finished {ended.episodes:,} episodes, as its recorder says, but the ledger has {known:,}"
    if life in sources.log:
        yield from _against_end(row, sources.log[life], "the supervisor's log")
    if (position := sources.position.get(life)) is not None:
        yield from _against_position(row, position)
    if row is None:
        return
    if (now := sources.recorders_after.get(life)) is not None:
        for what, known, recorded in (
            ("steps", row.counts.stepped, now.stepped),
            ("batches", row.counts.cut, now.cut),
            ("episodes", row.counts.episodes, now.episodes),
        ):
            if known > recorded:
                yield f"the ledger has {known:,} {what}, but its recorder has only {recorded:,}"
    newest = max(incarnation for slot, incarnation in sources.ledger.rows if slot == life[0])
    if not row.closed and row.counts.stepped and life[1] < newest:  # a life without a step has no books to close
        yield f"the ledger has it as live, beside incarnation {newest}"
    if sources.highest and life[1] > sources.highest.get(life[0], 0):
        yield f"broker.json knows only incarnations up to {sources.highest.get(life[0], 0)} of this slot"


def _against_end(row: LifeLine | None, stepped: int, witness: str) -> Iterator[str]:
    if row is None and stepped:
        yield f"it ended after {stepped:,} steps, as {witness} says, but the ledger does not know it"
    elif row is not None and row.counts.stepped != stepped:
        yield f"it ended after {stepped:,} steps, as {witness} says, but the ledger has {row.counts.stepped:,}"
    elif row is not None and not row.closed:
        yield f"it has ended, as {witness} says, but the ledger has it as live"


def _against_position(row: LifeLine | None, place: LearnerPlace) -> Iterator[str]:
    counts = row.counts if row is not None else Counts()
    if counts.settled < place.seq:
        yield f"the learner has settled batches up to {place.seq}, but the ledger knows {counts.settled}"
    elif counts.committed < place.committed or (counts.settled == place.seq and counts.committed != place.committed):
        yield (
            f"the learner was trained on {place.committed:,} steps of its first {place.seq} batches, but the "
            f"ledger has {counts.committed:,} of {counts.settled} as committed"
        )
    elif row is not None and row.closed and counts.settled == place.seq and row.end_taken != place.ended:
        has, lacks = ("learner", "ledger") if place.ended else ("ledger", "learner")
        yield f"the {has} has the end of its open episodes as taken, but the {lacks} does not"


def audit_deeply(run_dir: Path, *, as_json: bool, stream: TextIO) -> None:
    """Print the numbers of each source for every life, and the differences.

    Raises `HeadraceError` naming the differences, `RunDirError` without a fleet, and `RedisUnavailableError`.
    """
    url, fleet_id = find_books(run_dir)
    files = read_files(run_dir, fleet_id)
    with serving(run_dir, url):

        def look() -> tuple[Sources, list[str], float]:
            now = with_ledger(files, run_dir, url, fleet_id)
            return now, disagreements(now), now.reported_unix_s

        sources, found = once_caught_up(look)
    losses = [*known_losses(sources)]
    if as_json:
        lives = [as_facts(sources, life) for life in sources.lives]
        told = {"fleet_id": fleet_id, "lives": lives, "known_losses": losses, "disagreements": found}
        print(orjson.dumps(told).decode(), file=stream)
    else:
        console = Console(file=stream, width=None if stream.isatty() else FILE_WIDTH)
        known = [f"! {sentence}" for sentence in losses]
        verdict = [f"✗ {sentence}" for sentence in found] or ["✓ the sources agree"]
        console.print(table(sources), *known, *verdict, sep="\n")
    if found:
        raise HeadraceError("the sources differ: " + "; ".join(found))
