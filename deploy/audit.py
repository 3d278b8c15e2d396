"""The audit: it checks that the books in Redis add up.

Every number of a ledger row takes part in an equation, so a wrong one is found and its row named:

    row        stepped = open + discarded + dropped + shipped;  shipped = accepted + lost;  accepted = held + settled
    sources    the lifetime counters merged for an incarnation are those its row stands for (`redis_keys.row_counters`)
    totals     each lifetime counter of the fleet is the sum over all incarnations
    fleet      stepped = committed + queued + sum dropped[reason] + sum discarded[reason]

Balanced books do not prove progress: `warnings` names what stands still.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headrace.deploy.fleet_file import read_fleet_file
from headrace.deploy.redis_view import Snapshot
from headrace.schemas.errors import RunDirError
from headrace.schemas.ledger import Count, FleetLedger, LedgerRow
from headrace.schemas.redis_keys import row_counters

OLDEST_UNSETTLED_S = 60.0


def audit(snapshot: Snapshot) -> list[str]:
    """Return one sentence for each thing that does not add up; empty when the books balance."""
    if snapshot.reported_unix_s is None:
        return [
            f"Redis has no report of fleet {snapshot.fleet_id!r}, so there is nothing to audit",
            *snapshot.garbage,
        ]
    problems = [f"Redis holds what no broker writes: {sentence}" for sentence in snapshot.garbage]
    for row in snapshot.rows.values():
        problems += row.problems()
    problems += _sources_against_rows(snapshot)
    problems += _totals_against_sources(snapshot)
    if balance := snapshot.fleet.balance():
        problems.append(
            f"fleet: stepped is {abs(balance)} steps {'more' if balance > 0 else 'less'} than what became of them"
        )
    return problems


def warnings(snapshot: Snapshot, oldest_unsettled_s: float = OLDEST_UNSETTLED_S) -> list[str]:
    """Return one sentence for each sign that the fleet stands still although its books balance."""
    age_s = snapshot.gauges.get("oldest_unsettled_age_s", 0.0)
    if age_s <= oldest_unsettled_s:
        return []
    return [
        f"the oldest batch has been held for {age_s:.0f} s without being committed or dropped "
        f"(bound: {oldest_unsettled_s:g} s); check that a learner is connected and commits"
    ]


def _sources_against_rows(snapshot: Snapshot) -> Iterator[str]:
    for source in sorted(snapshot.rows.keys() | snapshot.sources.keys()):
        name = f"slot {source[0]} incarnation {source[1]}"
        row, merged = snapshot.rows.get(source), snapshot.sources.get(source, {})
        if row is None:
            yield f"{name}: {merged.get('env_steps_total', 0)} steps were counted, but its ledger row is missing"
            continue
        if row.settled.seq > row.totals.seq:
            yield f"{name}: {row.settled.seq} batches settled, but only {row.totals.seq} cut"
        lost = _lost_twice(row)
        for counter, expected in sorted(row_counters(row).items()):
            counted = merged.get(counter, 0)
            if not expected <= counted <= expected + lost.get(counter, 0):
                yield f"{name}: {counter} was counted as {counted}, but its row says {expected}"


def _lost_twice(row: LedgerRow) -> dict[str, int]:
    """Return by how much a counter may exceed its row: a dead worker's batches that a broker accepted and died with.

    The counter never goes back, while the row says in the end that these batches are lost.
    """
    lost = row.lost.values() if row.closed else ()
    lost_steps, lost_chunks = sum(steps for steps, _ in lost), sum(chunks for _, chunks in lost)
    by_module = {f"module_steps_{module_id}_total": lost_steps for module_id in row.totals.module_steps}
    return {"env_steps_total": lost_steps, "chunks_total": lost_chunks, **by_module}


def _totals_against_sources(snapshot: Snapshot) -> Iterator[str]:
    sums: dict[str, int] = {}
    for counters in snapshot.sources.values():
        for counter, value in counters.items():
            sums[counter] = sums.get(counter, 0) + value
    for counter in sorted(sums.keys() | snapshot.totals.keys()):
        total, added_up = snapshot.totals.get(counter, 0), sums.get(counter, 0)
        if total != added_up:
            yield f"fleet: {counter} is {total}, but its incarnations add up to {added_up}"


def find_books(run_dir: Path) -> tuple[str, str]:
    """Return (Redis URL, fleet id) of the fleet in this run directory, from its fleet.json. Raises `RunDirError`."""
    fleet = read_fleet_file(run_dir / "fleet.json")
    if not fleet.redis_url or not fleet.fleet_id:
        raise RunDirError(str(run_dir), "its fleet ended before it had a Redis, so it has no books")
    return fleet.redis_url, fleet.fleet_id


def render(snapshot: Snapshot, problems: list[str], warned: list[str]) -> RenderableType:
    """Render for a rich console: a line for each incarnation, the fleet's equation in words, and what is wrong."""
    wrong = [Text(f"✗ {problem}", style="red") for problem in problems]
    doubtful = [Text(f"! {warning}", style="yellow") for warning in warned]
    fine = [] if wrong else [Text("✓ the books balance", style="green")]
    return Group(_rows_table(snapshot), Text(equation(snapshot.fleet)), *wrong, *doubtful, *fine)


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
    for (slot, incarnation), row in sorted(snapshot.rows.items()):
        state = "closed" if row.closed else "live"
        table.add_row(str(slot), str(incarnation), *(f"{steps:,}" for steps in _columns(row)), state)
    return table


def _columns(row: LedgerRow) -> tuple[int, ...]:
    totals = row.totals
    dropped = sum(_steps(counts) for counts in (totals.dropped, row.lost, row.settled.dropped))
    discarded = sum(totals.discarded.values())
    return totals.stepped, totals.open, discarded, row.accepted[0], row.settled.committed[0], row.held[0], dropped


def _steps(counts: dict[str, Count]) -> int:
    return sum(steps for steps, _ in counts.values())
