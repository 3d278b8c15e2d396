"""The evidence in a run directory, with which the audit compares the ledger.

Workers write recorders. The learner writes its position in the stream into its checkpoint. The broker keeps a sum of
ended lives in lifetime.json, apart from the books: it shows whether Redis and books.json were lost together.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from headrace.broker.files.books_file import BooksFile
from headrace.broker.files.lifetime_file import Lifetime, LifetimeFile
from headrace.deploy.process.recorders import Life, covers, is_written_to, recorders_in
from headrace.deploy.run.checkpoint_facts import NEWEST_FILE
from headrace.deploy.run.redis_view import Snapshot
from headrace.deploy.run.resume import read_told
from headrace.deploy.run.several_brokers import learner_dir
from headrace.learner_stub.checkpoints.checkpoint import decode_checkpoint
from headrace.schemas.accounts.folded_lives import FoldedLives
from headrace.schemas.accounts.ledger import Settled
from headrace.schemas.accounts.recorder import Reading, is_unborn, read_recorder
from headrace.schemas.basics.printable import to_paste
from headrace.schemas.basics.run_files import read_regular
from headrace.schemas.errors import CheckpointError, RunDirError, is_there
from headrace.schemas.messages import SourcePosition

_POSITION = TypeAdapter(list[SourcePosition])
_STOPPED_BEFORE = (
    "; the broker had stopped before the learner committed them: the next `headrace up` in this run directory counts "
    "them as committed when that learner connects with its checkpoint's position"
)


@dataclass(frozen=True, slots=True)
class Evidence:
    """The files of a run directory, as read at one moment. A ledger that is read later may be ahead of them."""

    recorders: Mapping[Life, Reading] = field(default_factory=dict)
    living: frozenset[Life] = frozenset()
    """Lives whose recorder is still being written to on this machine."""
    unreadable: tuple[Path, ...] = ()
    """Recorders that cannot be read."""
    position: Mapping[Life, Settled] = field(default_factory=dict)
    """Position of the learner's newest checkpoint in the batches of each life."""
    ended: Mapping[int, FoldedLives] = field(default_factory=dict)
    """By slot, the lives whose ends the broker has had in its books, as lifetime.json says."""
    damage: tuple[str, ...] = ()
    """Sentences on a lifetime.json that is damaged, or was when a broker read it, and on a damaged checkpoint."""


def read_evidence(run_dir: Path, fleet_id: str) -> Evidence:
    """Read the files that exist. A checkpoint of another kind, or of another fleet, has no position."""
    readings, living, unreadable = {}, set(), []
    for life, path in recorders_in(run_dir / "recorders") if is_there(run_dir / "recorders") else ():
        reading = read_recorder(path)
        if reading is not None:
            if is_written_to(path, reading.pid):
                living.add(life)
            readings[life] = read_recorder(path) or reading  # read again: the last commit of a writer that has ended
        elif not is_unborn(path):
            unreadable.append(path)
    told = read_told(learner_dir(run_dir) / NEWEST_FILE) or {}
    position = settled_by_life(told.get("position", []), fleet_id)
    needs_witness = False
    with suppress(RunDirError):  # the deep audit names a damaged books.json
        needs_witness = BooksFile(run_dir, fleet_id).needs_witness()  # before the witness, which is written later
    witness = LifetimeFile(run_dir, fleet_id)
    lifetime = witness.read()
    damage = (*_damage(witness, lifetime, run_dir, needs_witness=needs_witness), *checkpoint_damage(run_dir))
    return Evidence(readings, frozenset(living), tuple(unreadable), position, lifetime.ended, damage)


def checkpoint_damage(run_dir: Path) -> Iterator[str]:
    """Yield a sentence if the learner's newest checkpoint is there and is not whole. Read all of the file."""
    path = learner_dir(run_dir) / NEWEST_FILE
    try:
        decode_checkpoint(read_regular(path), str(path))
    except FileNotFoundError:
        return
    except (CheckpointError, OSError) as error:
        reason = error.reason if isinstance(error, CheckpointError) else error.strerror
        yield (
            f"{path} cannot be read ({reason}), so it cannot show what the learner was trained on; the next learner "
            "goes on from the checkpoint before it, or from the copy in Redis, and saves another"
        )


def _damage(witness: LifetimeFile, lifetime: Lifetime, run_dir: Path, *, needs_witness: bool) -> Iterator[str]:
    check = f"check with `headrace audit --deep {to_paste(run_dir)}` that books.json and Redis agree"
    if needs_witness and not lifetime.ended and not lifetime.damage:
        yield (
            f"lifetime.json is missing, or has no sum of ended lives, although books.json has such lives, so it cannot "
            f"show which ended lives the ledger lacks; {check}; the next broker begins another from books.json"
        )
    if lifetime.damage:
        yield (
            f"lifetime.json is damaged ({lifetime.damage:.300}), so it cannot show which ended lives the ledger lacks; "
            f"{check}, then delete it while the fleet is stopped: the next broker begins another from books.json"
        )
    if is_there(witness.set_aside):
        yield (
            f"a broker found lifetime.json damaged and kept it as {witness.set_aside}; nothing else shows which lives "
            f"that had ended before the ledger lacks; {check}, then delete that file"
        )


def contradictions(evidence: Evidence, snapshot: Snapshot) -> Iterator[str]:
    """Yield one sentence for each thing that the ledger in Redis lacks, although the evidence proves it."""
    for path in evidence.unreadable:
        yield f"{path} is no recorder that this version can read, so its steps are in no books"
    for life in sorted(evidence.recorders.keys() - evidence.living):
        worker = snapshot.workers.get(life[0], {})
        if worker.get("incarnation") == life[1] and worker.get("host") != platform.node():
            continue  # it lives on another machine that has the same folder
        yield from _unread_recorder(life, evidence.recorders[life], snapshot)
    yield from evidence.damage
    yield from _lost_ends(evidence, snapshot)
    if evidence.position and not snapshot.rows and not snapshot.folded:
        steps = sum(settled.committed[0] for settled in evidence.position.values())
        yield f"the ledger is empty, although the learner has trained on {steps:,} steps ({NEWEST_FILE} says so)"
        return
    why = "" if snapshot.ended_unix_s is None else _STOPPED_BEFORE
    for life, settled in sorted(evidence.position.items()):
        if snapshot.is_folded(life):
            continue  # all its batches are settled
        row = snapshot.rows.get(life)
        known = row.settled.seq if row is not None else 0
        if known < settled.seq:
            yield (
                f"slot {life[0]} incarnation {life[1]}: the learner has settled batches up to {settled.seq} "
                f"({NEWEST_FILE} says so), but the ledger knows {known}{why}"
            )


def _unread_recorder(life: Life, reading: Reading, snapshot: Snapshot) -> Iterator[str]:
    row = snapshot.rows.get(life)
    if snapshot.is_folded(life):
        row = snapshot.folded[life[0]].row
    if row is not None and covers(row, reading):
        return
    if row is None and not reading.totals.stepped:
        return
    known = f"knows {row.totals.stepped:,}" if row is not None else "does not know this life"
    if row is not None and row.totals.stepped == reading.totals.stepped:
        known = "does not know that it has ended"
    yield (
        f"slot {life[0]} incarnation {life[1]}: its worker has ended after {reading.totals.stepped:,} steps, as its "
        f"recorder says, but the ledger {known}; the next `headrace up` in this run directory reads the recorder"
    )


def _lost_ends(evidence: Evidence, snapshot: Snapshot) -> Iterator[str]:
    """Yield a sentence for each slot of which the ledger has fewer ended lives than it had, or fewer of their steps."""
    known = {slot: (folded.lives, folded.row.totals.stepped) for slot, folded in snapshot.folded.items()}
    for row in snapshot.rows.values():
        if row.closed:
            lives, steps = known.get(row.slot, (0, 0))
            known[row.slot] = lives + 1, steps + row.totals.stepped
    for slot, ended in sorted(evidence.ended.items()):
        lives, steps = known.get(slot, (0, 0))
        if lives < ended.lives or steps < ended.row.totals.stepped:
            yield (
                f"slot {slot}: {ended.lives} of its lives had ended after {ended.row.totals.stepped:,} steps together, "
                f"as lifetime.json says, but the ledger knows {lives} ended lives with {steps:,} steps; the next "
                "`headrace up` in this run directory reports them again, unless books.json has lost them too"
            )


def position_by_life(position: Any, fleet_id: str) -> dict[Life, SourcePosition]:
    """Return a checkpoint's position in the batches of each life; {} if it is damaged or of another fleet."""
    try:
        ours = [place for place in position if place.get("fleet_id", fleet_id) in ("", fleet_id)]
        return {(place.slot, place.incarnation): place for place in _POSITION.validate_python(ours)}
    except (ValidationError, AttributeError, TypeError):
        return {}


def settled_by_life(position: Any, fleet_id: str) -> dict[Life, Settled]:
    """Return the settled batches by life, from a checkpoint's position."""
    return {life: place.settled for life, place in position_by_life(position, fleet_id).items()}
