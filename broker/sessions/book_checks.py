"""Check of the counts that workers and supervisors tell: they must add up, or the ledger could not.

The types of fields (`schemas/basics/bounds.py`) bound each number. What fails here comes of a bug, of another version,
or of a damaged recorder.
"""

from __future__ import annotations

from headrace.schemas.accounts.ledger import WorkerTotals, total_of
from headrace.schemas.basics.bounds import MOST_EPOCH, MOST_LIVES
from headrace.schemas.errors import DecodeError
from headrace.schemas.messages import Heartbeat, LastWords, LearnerHello, Message, Skip, Tasks, WorkerHello


def check_books(message: Message) -> None:
    """Raise `DecodeError` for a message whose counts do not add up, or leave no room for the next life or learner."""
    match message:
        case WorkerHello():
            _check_room("incarnation", message.incarnation, MOST_LIVES)
            _check_room("learner epoch", message.weights[0], MOST_EPOCH)
            _check_totals(message.totals)
        case LearnerHello():
            _check_room("learner epoch", message.epoch, MOST_EPOCH)
        case Heartbeat():
            _check_room("learner epoch", message.weights[0], MOST_EPOCH)
            _check_room("epoch of tasks", (message.tasks or (0, 0))[0], MOST_EPOCH)
            _check_totals(message.totals)
        case Tasks():
            _check_room("epoch of tasks", message.version[0], MOST_EPOCH)
        case Skip():
            check_books_of_batch(message.batch.seq, message.totals)
        case LastWords():
            _check_room("incarnation", message.incarnation, MOST_LIVES)
            _check_totals(message.totals)


def check_books_of_batch(seq: int, totals: WorkerTotals) -> None:
    """Raise `DecodeError` unless `totals` add up and are those right after batch `seq`."""
    if totals.seq != seq:
        raise _implausible(f"batch {seq} with the totals of batch {totals.seq}")
    _check_totals(totals)


def _check_room(name: str, number: int, most: int) -> None:
    """Check that later numbers have room: the broker's file keeps the largest, also once its peer's key is revoked."""
    if number > most // 2:
        raise _implausible(f"{name} {number}; no honest peer comes near {most}, and later ones need room")


def _check_totals(totals: WorkerTotals) -> None:
    """Check that totals add up, as the ledger's equation says."""
    dropped = total_of(totals.dropped.values())[0] if totals.dropped else 0
    parts = totals.open + sum(totals.discarded.values()) + dropped + totals.shipped
    if totals.stepped != parts:
        raise _implausible(f"{totals.stepped} steps, of which {parts} are open, discarded, dropped or shipped")
    if totals.module_steps and sum(totals.module_steps.values()) != totals.shipped:
        raise _implausible(f"{sum(totals.module_steps.values())} steps of modules, {totals.shipped} shipped")


def _implausible(detail: str) -> DecodeError:
    return DecodeError("implausible", detail)
