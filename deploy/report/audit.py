"""The audit, and `headrace audit`: it checks that the books in Redis add up.

Every number of a ledger row takes part in an equation, so a wrong one is found and its row named:

    row        stepped = open + discarded + dropped + shipped;  shipped = accepted + lost;  accepted = held + settled
    sources    the lifetime counters merged for an incarnation are those its row stands for
    totals     each lifetime counter of the fleet is the sum over all incarnations
    fleet      stepped = committed + queued + sum dropped[reason] + sum discarded[reason]
    groups     the first and the last for each consumer group, with the lives, totals and accepted steps of the ledger

A ledger that lacks a life, or the end of a life, may balance too. So the audit also compares it with evidence that the
broker did not write (`evidence.py`). It also checks that no life is live beside a newer life of its slot.

Balanced books do not prove progress: `warnings` reports a fleet that stands still.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TextIO, TypeVar

import orjson
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headrace.deploy.report.evidence import Evidence, contradictions, read_evidence
from headrace.deploy.report.group_audit import group_problems, off_balance
from headrace.deploy.run.fleet_file import read_fleet_file
from headrace.deploy.run.redis_server import serving
from headrace.deploy.run.redis_view import FleetView, Snapshot
from headrace.deploy.terminal.console import PrintableConsole
from headrace.deploy.terminal.std_streams import say
from headrace.schemas.accounts.folded_lives import FoldedLives
from headrace.schemas.accounts.ledger import Count, FleetLedger, LedgerRow
from headrace.schemas.accounts.lifetime_counters import row_counters
from headrace.schemas.accounts.redis_keys import labelled
from headrace.schemas.errors import RunDirError

F = TypeVar("F")
T = TypeVar("T")

CATCH_UP_S = 5.0
PAUSE_S = 0.25
OLDEST_UNSETTLED_S = 60.0
NO_EVIDENCE = Evidence()

MOST_SHOWN = 100
"""Most rows in the table for people. It takes half a millisecond for each, and who reads thousands?"""


def audit(snapshot: Snapshot, evidence: Evidence = NO_EVIDENCE) -> list[str]:
    """Return one sentence for each thing that does not add up; empty when the books balance."""
    if snapshot.reported_unix_s is None:
        return [
            f"Redis has no report of fleet {snapshot.fleet_id!r}, so there is nothing to audit",
            *snapshot.garbage,
            *contradictions(evidence, snapshot),
        ]
    problems = [f"Redis holds what no broker writes: {sentence}" for sentence in snapshot.garbage]
    for row in snapshot.rows.values():
        problems += row.problems()
    problems += _folded_problems(snapshot)
    problems += _sources_against_rows(snapshot)
    problems += _totals_against_sources(snapshot)
    problems += _live_beside_newer(snapshot)
    problems += contradictions(evidence, snapshot)
    problems += off_balance("fleet", snapshot.fleet)
    problems += group_problems(snapshot)
    return problems


def warnings(snapshot: Snapshot) -> list[str]:
    """Return one sentence for each sign that the fleet stands still although its books balance."""
    ages = {"a learner": snapshot.gauges.get("oldest_unsettled_age_s", 0.0)}
    holding = ((name, books.state) for name, books in snapshot.groups.items() if books.state.on_slow == "wait")
    ages |= {f"a reader of group {name}": state.oldest_s for name, state in holding}
    return [
        f"the oldest batch has been held for {age_s:.0f} s without being committed or dropped "
        f"(bound: {OLDEST_UNSETTLED_S:g} s); check that {whose} is connected and commits"
        for whose, age_s in ages.items()
        if age_s > OLDEST_UNSETTLED_S
    ]


def _folded_problems(snapshot: Snapshot) -> Iterator[str]:
    for slot, lives in sorted(snapshot.folded.items()):
        yield from lives.problems()
        given = snapshot.incarnations.get(slot, lives.highest)
        if lives.highest > given:
            yield f"slot {slot}: incarnation {lives.highest} is folded, but the highest ever given out is {given}"
    for slot, incarnation in sorted(snapshot.rows):
        if snapshot.is_folded((slot, incarnation)):
            yield f"slot {slot} incarnation {incarnation} has a row, although it is folded: its steps count twice"


def _sources_against_rows(snapshot: Snapshot) -> Iterator[str]:
    rows = {**snapshot.rows, **{(slot, 0): lives.row for slot, lives in snapshot.folded.items()}}
    for source in sorted(rows.keys() | snapshot.sources.keys()):
        name = f"slot {source[0]} incarnation {source[1]}" if source[1] else f"slot {source[0]}, its folded lives"
        row, merged = rows.get(source), snapshot.sources.get(source, {})
        if row is None:
            steps = merged.get("accepted_agent_steps_total", 0)
            yield f"{name}: {steps} steps were counted, but its ledger row is missing"
            continue
        if row.settled.seq > row.totals.seq:
            yield f"{name}: {row.settled.seq} batches settled, but only {row.totals.seq} cut"
        lost = _lost_twice(row)
        for counter, expected in sorted(row_counters(row).items()):
            counted = merged.get(counter, 0)
            if not expected <= counted <= expected + lost.get(counter, 0):
                yield f"{name}: {counter} was counted as {counted}, but its row says {expected}"


def _lost_twice(row: LedgerRow) -> dict[str, int]:
    """Return by how much each counter may exceed its row: a dead worker's batches that an earlier broker had accepted.

    These batches died with that broker. The row counts them as lost in the end, while the counter never decreases.
    Module steps of folded lives may also have been counted earlier and be missing in their last rows.
    """
    lost = row.lost.values() if row.closed else ()
    lost_steps, lost_chunks = sum(steps for steps, _ in lost), sum(chunks for _, chunks in lost)
    unnamed = row.accepted[0] - sum(row.totals.module_steps.values())
    by_module = {
        labelled("accepted_module_agent_steps_total", "module", module_id): lost_steps + unnamed
        for module_id in row.totals.module_steps
    }
    return {"accepted_agent_steps_total": lost_steps, "accepted_chunks_total": lost_chunks, **by_module}


def _totals_against_sources(snapshot: Snapshot) -> Iterator[str]:
    sums: dict[str, int] = {}
    for counters in snapshot.sources.values():
        for counter, value in counters.items():
            sums[counter] = sums.get(counter, 0) + value
    for counter in sorted(sums.keys() | snapshot.totals.keys()):
        total, added_up = snapshot.totals.get(counter, 0), sums.get(counter, 0)
        if total != added_up:
            yield f"fleet: {counter} is {total}, but its incarnations add up to {added_up}"


def _live_beside_newer(snapshot: Snapshot) -> Iterator[str]:
    newest = dict(snapshot.incarnations)
    for slot, incarnation in snapshot.rows:
        newest[slot] = max(newest.get(slot, 0), incarnation)
    for (slot, incarnation), row in sorted(snapshot.rows.items()):
        if not row.closed and incarnation < newest[slot] and row.totals.stepped:
            yield (
                f"slot {slot} incarnation {incarnation} claims to be live, although incarnation {newest[slot]} has its "
                "slot: its end was not counted, so steps of it may be missing; if its end stays unknown, a running "
                "broker closes its books about a minute after its last word, with the steps that it had told of"
            )


def find_books(run_dir: Path, named: tuple[str, str] | None = None) -> tuple[str, str]:
    """Return (Redis URL, fleet id) of the fleet in this run directory, from its fleet.json.

    A fleet that `headrace up` did not start has no fleet.json: then return `named`, from the settings. Raises
    `RunDirError` without either.
    """
    if named is not None and not (run_dir / "fleet.json").exists():
        return named
    fleet = read_fleet_file(run_dir / "fleet.json")
    if not fleet.redis_url or not fleet.fleet_id:
        raise RunDirError(str(run_dir), "its fleet ended before it had a Redis, so it has no books")
    return fleet.redis_url, fleet.fleet_id


def render(snapshot: Snapshot, problems: list[str], warned: list[str]) -> RenderableType:
    """Render for a rich console: a line for each incarnation, the fleet's equation in words, and the problems."""
    wrong = [Text(f"✗ {problem}", style="red") for problem in problems]
    doubtful = [Text(f"! {warning}", style="yellow") for warning in warned]
    fine = [] if wrong else [Text("✓ the books balance", style="green")]
    groups = [Text(f"group {name}: {equation(books.fleet())}") for name, books in snapshot.groups.items()]
    return Group(_rows_table(snapshot), Text(equation(snapshot.fleet)), *groups, *wrong, *doubtful, *fine)


def equation(fleet: FleetLedger) -> str:
    """Return stepped = committed + queued + each drop + each discard, with this fleet's numbers, in agent steps."""
    parts = [f"committed {fleet.committed[0]:,}", f"queued {fleet.queued:,}"]
    parts += [f"dropped[{reason}] {count[0]:,}" for reason, count in sorted(fleet.dropped.items())]
    parts += [f"discarded[{reason}] {steps:,}" for reason, steps in sorted(fleet.discarded.items())]
    sign = "≠" if fleet.balance() else "="
    return f"stepped {fleet.stepped:,} {sign} {' + '.join(parts)}  (agent steps)"


def _rows_table(snapshot: Snapshot) -> Table:
    table = Table("slot", "inc.", title=f"fleet {snapshot.fleet_id}, agent steps", title_justify="left")
    for column in ("stepped", "open", "discarded", "accepted", "committed", "held", "dropped"):
        table.add_column(column, justify="right")
    table.add_column("state")
    folded = {(slot, 0): lives.row for slot, lives in snapshot.folded.items()}
    shown = sorted({**folded, **snapshot.rows}.items())
    for (slot, incarnation), row in shown[:MOST_SHOWN]:
        lives = snapshot.folded[slot].lives if not incarnation else 0
        name, state = str(incarnation) if incarnation else "older", "closed" if row.closed else "live"
        state = f"{lives} folded" if lives else state
        table.add_row(str(slot), name, *(f"{steps:,}" for steps in _columns(row)), state)
    if len(shown) > MOST_SHOWN:
        table.caption, table.caption_justify = f"{len(shown) - MOST_SHOWN:,} more rows: --json has all", "left"
    return table


def _columns(row: LedgerRow) -> tuple[int, ...]:
    totals = row.totals
    dropped = sum(_steps(counts) for counts in (totals.dropped, row.lost, row.settled.dropped))
    discarded = sum(totals.discarded.values())
    return totals.stepped, totals.open, discarded, row.accepted[0], row.settled.committed[0], row.held[0], dropped


def _steps(counts: dict[str, Count]) -> int:
    return sum(steps for steps, _ in counts.values())


def audit_run(run_dir: Path, *, as_json: bool, stream: TextIO, named: tuple[str, str] | None = None) -> list[str]:
    """Print the rows and the problems. Return the problems. `named` is as in `find_books`.

    Raises `RunDirError` without a fleet, and `RedisUnavailableError` when its Redis cannot be read.
    """
    snapshot, problems = read_and_audit(run_dir, named)
    warned = warnings(snapshot)
    if as_json:
        say(orjson.dumps(_as_json(snapshot, problems, warned)).decode(), stream)
    else:
        PrintableConsole(stream).print(render(snapshot, problems, warned))
    return problems


def read_and_audit(run_dir: Path, named: tuple[str, str] | None = None) -> tuple[Snapshot, list[str]]:
    """Return the books of a fleet, running or stopped, and their problems. `named` is as in `find_books`.

    Raises `RunDirError` without a fleet, and `RedisUnavailableError` when its Redis cannot be read.
    """
    url, fleet_id = find_books(run_dir, named)
    with serving(run_dir, url), FleetView(url, fleet_id, run_dir) as view:

        def compare(evidence: Evidence) -> tuple[Snapshot, list[str], Snapshot]:
            now = view.read()
            return now, audit(now, evidence), now

        return once_caught_up(lambda: read_evidence(run_dir, fleet_id), compare)


def once_caught_up(read: Callable[[], F], compare: Callable[[F], tuple[T, list[str], Snapshot]]) -> tuple[T, list[str]]:
    """Return what `compare` finds for the files that `read` returns. `compare` also returns the ledger that it read.

    While a broker reports, compare the same files with newer ledgers until its next report and some seconds more:
    reports lag behind the files, and newer files would always be ahead. Then read the files once more: they may have
    been read between two writes.
    """
    for _ in range(2):
        files, began = read(), time.monotonic()
        while True:
            seen, problems, ledger = compare(files)
            if not problems or not ledger.is_live:
                return seen, problems
            if time.monotonic() - began > CATCH_UP_S + ledger.report_interval_s:
                break
            time.sleep(PAUSE_S)
    return seen, problems


def _as_json(snapshot: Snapshot, problems: list[str], warned: list[str]) -> dict[str, object]:
    groups = {
        name: {"state": books.state.model_dump(), **_books_as_json(books.fleet(), books.rows, books.folded)}
        for name, books in snapshot.groups.items()
    }
    return {
        "fleet_id": snapshot.fleet_id,
        "balanced": not problems,
        "problems": problems,
        "warnings": warned,
        **_books_as_json(snapshot.fleet, snapshot.rows, snapshot.folded),
        "totals": dict(snapshot.totals),
        **({"groups": groups} if groups else {}),
    }


def _books_as_json(
    fleet: FleetLedger, rows: Mapping[tuple[int, int], LedgerRow], folded: Mapping[int, FoldedLives]
) -> dict[str, object]:
    return {
        "ledger": fleet.model_dump(),
        "rows": [row.model_dump() for _, row in sorted(rows.items())],
        "folded": [{"lives": lives.lives, **lives.model_dump()} for _, lives in sorted(folded.items())],
    }
