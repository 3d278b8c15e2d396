"""The deep audit: the numbers of each source for every life of a worker, and their differences.

recorder    the worker's own counts, in the run directory until Redis has the final ones
log         the supervisor's line on what it read after a worker's end
learner     the position in its newest checkpoint
books.json  the ended lives, which the broker writes there before Redis gets them
broker      the highest incarnation of each slot, in broker.json
ledger      the rows in Redis

It finds what the plain audit finds, and more. Recorders and books.json are read before and after Redis: the ledger lies
between the two. A running broker may need a moment to count what was read before.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import orjson
from rich.table import Table

from headrace.broker.files.books_file import BooksFile, EndedLives
from headrace.deploy.process.recorders import Life, recorders_in
from headrace.deploy.report.audit import NO_EVIDENCE, audit, find_books, once_caught_up
from headrace.deploy.report.evidence import Evidence, position_by_life, read_evidence
from headrace.deploy.run.checkpoint_facts import NEWEST_FILE
from headrace.deploy.run.redis_server import serving
from headrace.deploy.run.redis_view import FleetView, Snapshot
from headrace.deploy.run.resume import read_told
from headrace.deploy.run.several_brokers import learner_dir
from headrace.deploy.terminal.console import PrintableConsole
from headrace.deploy.terminal.log_rotation import rotated_path
from headrace.deploy.terminal.std_streams import say
from headrace.schemas.accounts.folded_lives import FoldedLives
from headrace.schemas.accounts.ledger import LedgerRow
from headrace.schemas.accounts.recorder import Reading, read_recorder
from headrace.schemas.basics.run_files import read_regular
from headrace.schemas.errors import HeadraceError, RunDirError
from headrace.schemas.messages import SourcePosition

_END = re.compile(r"worker (\d{1,9}) incarnation (\d{1,9}) took ([\d,]{1,30}) steps")
_LOST = re.compile(r"the recorder of worker (\d{1,9}) incarnation (\d{1,9}) is lost")
_SUMMED = ("ended lives", "steps", "committed steps", "batches", "settled batches", "episodes")


@dataclass(frozen=True, slots=True)
class Sources:
    """The numbers of each source, by life."""

    evidence: Evidence = NO_EVIDENCE
    position: Mapping[Life, SourcePosition] = field(default_factory=dict)
    log: Mapping[Life, int] = field(default_factory=dict)
    unrecorded: frozenset[Life] = frozenset()
    """Lives whose recorders were lost, as the supervisor's log says."""
    books: EndedLives | None = None
    """books.json; None without that file, or for a damaged one."""
    damage: tuple[str, ...] = ()
    """Sentences on a damaged books.json."""
    ledger: Snapshot = field(default_factory=Snapshot)
    recorders_after: Mapping[Life, Reading] = field(default_factory=dict)
    books_after: EndedLives | None = None
    highest: Mapping[int, int] = field(default_factory=dict)
    """By slot, the highest incarnation in broker.json; empty without that file."""

    @property
    def lives(self) -> list[Life]:
        """Return every life that some source knows."""
        known = (self.evidence.recorders, self.recorders_after, self.ledger.rows, self.log, self.position)
        return sorted({life for source in (*known, _rows_of(self.books)) for life in source})


def read_files(run_dir: Path, fleet_id: str) -> Sources:
    """Read the files that must not be ahead of the ledger."""
    told = read_told(learner_dir(run_dir) / NEWEST_FILE) or {}
    evidence, position = read_evidence(run_dir, fleet_id), position_by_life(told.get("position", []), fleet_id)
    log, lost = read_log(run_dir / "logs" / "supervisor.log")
    sources = Sources(evidence, position, log, frozenset(lost))
    try:
        return replace(sources, books=_books(run_dir, fleet_id))
    except RunDirError as error:
        return replace(sources, damage=(str(error),))


def with_ledger(sources: Sources, run_dir: Path, ledger: Snapshot) -> Sources:
    """Return the sources with the present ledger. Read sources that must not be behind the ledger after it."""
    recorders = recorders_in(run_dir / "recorders") if (run_dir / "recorders").is_dir() else ()
    readings = {life: reading for life, path in recorders if (reading := read_recorder(path)) is not None}
    books = _books(run_dir, ledger.fleet_id) if sources.books is not None else None
    return replace(
        sources, ledger=ledger, recorders_after=readings, books_after=books, highest=_highest(run_dir / "broker.json")
    )


def _books(run_dir: Path, fleet_id: str) -> EndedLives | None:
    return BooksFile(run_dir, fleet_id).read() if (run_dir / "books.json").exists() else None


def _rows_of(books: EndedLives | None) -> dict[Life, LedgerRow]:
    return {} if books is None else {(row.slot, row.incarnation): row for row in books.rows}


def read_log(path: Path) -> tuple[dict[Life, int], set[Life]]:
    """Return the steps of each life whose end the supervisor has logged, and the lives whose recorders were lost.

    The most steps, where it logged two ends of a life. A later line has fewer steps where the books were lost in
    between, and only the learner knew of the life.
    """
    ends, lost = dict[Life, int](), set[Life]()
    for part in (rotated_path(path), path):
        with suppress(FileNotFoundError), part.open(errors="replace") as lines:
            for line in lines:
                if match := _END.search(line):
                    life = int(match[1]), int(match[2])
                    ends[life] = max(ends.get(life, 0), int(match[3].replace(",", "")))
                elif match := _LOST.search(line):
                    lost.add((int(match[1]), int(match[2])))
    return ends, lost


def _highest(path: Path) -> dict[int, int]:
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        return {int(slot): int(highest) for slot, highest in orjson.loads(read_regular(path))["incarnations"].items()}
    return {}


# -- differences ------------------------------------------------------------------------------------------------------


def disagreements(sources: Sources) -> list[str]:
    """Return one sentence for each difference that no order of events explains."""
    found = [*audit(sources.ledger, sources.evidence), *sources.damage]
    for life in sources.lives:
        if not sources.ledger.is_folded(life):
            name = f"slot {life[0]} incarnation {life[1]}"
            found += [f"{name}: {difference}" for difference in _of_life(sources, life)]
    for slot, lives in sorted(sources.ledger.folded.items()):
        name = f"slot {slot}, its {lives.lives} folded lives"
        found += [f"{name}: {difference}" for difference in _of_folded(sources, slot, lives)]
    return [*found, *_of_sums(sources)]


def _of_life(sources: Sources, life: Life) -> Iterator[str]:
    row, ended = sources.ledger.rows.get(life), sources.evidence.recorders.get(life)
    if ended is not None and life not in sources.evidence.living:
        known = row.totals.episodes if row is not None else 0
        if known < ended.totals.episodes:
            yield f"it finished {ended.totals.episodes:,} episodes, as its recorder says, but the ledger has {known:,}"
    if life in sources.log:
        yield from _against_log(row, sources.log[life])
    if row is None:
        return
    if life in sources.position:
        yield from _against_position(row, sources.position[life])
    if (now := sources.recorders_after.get(life)) is not None:
        for what, known, recorded in (
            ("steps", row.totals.stepped, now.totals.stepped),
            ("batches", row.totals.seq, now.totals.seq),
            ("episodes", row.totals.episodes, now.totals.episodes),
        ):
            if known > recorded:
                yield f"the ledger has {known:,} {what}, but its recorder has only {recorded:,}"
    if sources.highest and life[1] > sources.highest.get(life[0], 0):
        yield f"broker.json knows only incarnations up to {sources.highest.get(life[0], 0)} of this slot"


def _against_log(row: LedgerRow | None, stepped: int) -> Iterator[str]:
    said = "as the supervisor's log says, but the ledger"
    if row is None and stepped:
        yield f"it ended after {stepped:,} steps, {said} does not know it"
    elif row is not None and row.totals.stepped != stepped:
        yield f"it ended after {stepped:,} steps, {said} has {row.totals.stepped:,}"
    elif row is not None and not row.closed:
        yield f"it has ended, {said} has it as live"


def _against_position(row: LedgerRow, place: SourcePosition) -> Iterator[str]:
    """Compare what the learner was trained on. The plain audit has compared the settled batches."""
    known, told, is_equal = row.settled.committed[0], place.settled.committed[0], row.settled.seq == place.settled.seq
    if known < told or (is_equal and known != told):
        yield (
            f"the learner was trained on {told:,} steps of its first {place.settled.seq} batches, but the ledger has "
            f"{known:,} of {row.settled.seq} as committed"
        )
    elif row.closed and is_equal and row.end_taken != place.ended:
        has, lacks = ("learner", "ledger") if place.ended else ("ledger", "learner")
        yield f"the {has} has the end of its open episodes as taken, but the {lacks} does not"


def _of_folded(sources: Sources, slot: int, lives: FoldedLives) -> Iterator[str]:
    """Yield the differences between the sum of a slot's older lives and the other sources."""
    books = lives.row
    ended = [steps for life, steps in sources.log.items() if life[0] == slot and life[1] in lives]
    steps = sum(ended)
    if steps > books.totals.stepped or (len(ended) == lives.lives and steps != books.totals.stepped):
        yield (
            f"{len(ended)} of them took {steps:,} steps, as the supervisor's log says, but the ledger has "
            f"{books.totals.stepped:,}"
        )
    places = [place.settled for life, place in sources.position.items() if life[0] == slot and life[1] in lives]
    settled, committed = sum(place.seq for place in places), sum(place.committed[0] for place in places)
    if settled > books.settled.seq or committed > books.settled.committed[0]:
        yield (
            f"the learner was trained on {committed:,} steps of {settled} batches, but the ledger has "
            f"{books.settled.committed[0]:,} of {books.settled.seq} as committed"
        )
    if sources.highest and lives.highest > sources.highest.get(slot, 0):
        yield f"broker.json knows only incarnations up to {sources.highest.get(slot, 0)} of this slot"


def _of_sums(sources: Sources) -> Iterator[str]:
    """Yield a sentence for each slot whose ended lives have other sums in Redis than in books.json."""
    if sources.books is None or sources.books_after is None:
        return
    yield from _sums_differ(sources.books, sources.books_after, sources.ledger.folded, sources.ledger.rows)
    for name, own in sources.ledger.groups.items():
        before, after = (books.groups.get(name, EndedLives()) for books in (sources.books, sources.books_after))
        found = _sums_differ(before, after, own.folded, own.rows)
        yield from (f"group {name}: {difference}" for difference in found)


def _sums_differ(
    books: EndedLives, books_after: EndedLives, folded: Mapping[int, FoldedLives], rows: Mapping[Life, LedgerRow]
) -> Iterator[str]:
    before, after = (_ended(file.folded, _rows_of(file)) for file in (books, books_after))
    ledger = _ended(folded, rows)
    for slot in sorted(before.keys() | ledger.keys()):
        known = ledger[slot]
        if not before[slot] <= known <= after[slot]:
            told = after[slot] if before[slot] <= known else before[slot]
            in_file, in_ledger = (", ".join(f"{sums[name]:,} {name}" for name in _SUMMED) for sums in (told, known))
            yield f"slot {slot}: books.json has {in_file}, but the ledger has {in_ledger}"


def _ended(folded: Mapping[int, FoldedLives], rows: Mapping[Life, LedgerRow]) -> defaultdict[int, Counter[str]]:
    """Return, by slot, the sums over the lives that have ended."""
    found: defaultdict[int, Counter[str]] = defaultdict(Counter)
    ended = [(lives.lives, lives.row) for lives in folded.values()]
    for count, row in (*ended, *((1, row) for row in rows.values() if row.closed)):
        totals, settled = row.totals, row.settled
        numbers = (count, totals.stepped, settled.committed[0], totals.seq, settled.seq, totals.episodes)
        found[row.slot].update(dict(zip(_SUMMED, numbers, strict=True)))
    return found


# -- what is shown ----------------------------------------------------------------------------------------------------


def known_losses(sources: Sources) -> Iterator[str]:
    """Yield one sentence for each life whose books have only what it had told of, as its recorder was lost."""
    for life in sorted(sources.unrecorded):
        row = sources.ledger.rows.get(life)
        if row is None and not sources.ledger.is_folded(life):
            continue
        has = f"the {row.totals.stepped:,} steps" if row is not None else "only the steps"
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
    for says in as_facts(sources):
        state = {None: "-", True: "closed", False: "live"}[says.pop("closed")]
        slot, incarnation, *figures = says.values()
        shown.add_row(str(slot), str(incarnation), *("-" if n is None else f"{n:,}" for n in figures), state)
    return shown


def as_facts(sources: Sources) -> Iterator[dict[str, Any]]:
    """Yield the numbers of each source for every life, for JSON; None if a source does not know the life."""
    rows_of_file = _rows_of(sources.books)
    for life in sources.lives:
        recorder = sources.recorders_after.get(life) or sources.evidence.recorders.get(life)
        row, place, ended = sources.ledger.rows.get(life), sources.position.get(life), rows_of_file.get(life)
        yield {
            "slot": life[0],
            "incarnation": life[1],
            "recorder_steps": recorder.totals.stepped if recorder is not None else None,
            "log_steps": sources.log.get(life),
            "books_steps": ended.totals.stepped if ended is not None else None,
            "ledger_steps": row.totals.stepped if row is not None else None,
            "learner_settled": place.settled.seq if place is not None else None,
            "ledger_settled": row.settled.seq if row is not None else None,
            "closed": row.closed if row is not None else None,
        }


def audit_deeply(run_dir: Path, *, as_json: bool, stream: TextIO) -> None:
    """Print the numbers of each source for every life, and the differences.

    Raises `HeadraceError` naming the differences, `RunDirError` without a fleet, and `RedisUnavailableError`.
    """
    url, fleet_id = find_books(run_dir)
    with serving(run_dir, url), FleetView(url, fleet_id, run_dir) as view:

        def compare(files: Sources) -> tuple[Sources, list[str], Snapshot]:
            now = with_ledger(files, run_dir, view.read())
            return now, disagreements(now), now.ledger

        sources, found = once_caught_up(lambda: read_files(run_dir, fleet_id), compare)
    losses = [*known_losses(sources)]
    if as_json:
        lives = list(as_facts(sources))
        told = {"fleet_id": fleet_id, "lives": lives, "known_losses": losses, "disagreements": found}
        say(orjson.dumps(told).decode(), stream)
    else:
        console = PrintableConsole(stream)
        known = [f"! {sentence}" for sentence in losses]
        verdict = [f"✗ {sentence}" for sentence in found] or ["✓ the sources agree"]
        console.print(table(sources), *known, *verdict, sep="\n")
    if found:
        raise HeadraceError("the sources differ: " + "; ".join(found))
