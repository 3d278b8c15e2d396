"""Checks of the counts that workers and supervisors tell: they must add up, or the ledger could not.

The types of fields (`schemas/basics/bounds.py`) bound each number. What fails here comes of a bug, of another version,
or of a damaged recorder.
"""

from __future__ import annotations

from headrace.schemas.accounts.ledger import Count, Settled, WorkerTotals, plus, total_of
from headrace.schemas.basics.bounds import MOST_EPOCH, MOST_LIVES, WINDOW
from headrace.schemas.errors import DecodeError
from headrace.schemas.messages import Heartbeat, LastWords, LearnerHello, Message, Skip, Tasks, WorkerHello


def check_books(message: Message) -> None:
    """Raise `DecodeError` for a message whose counts do not add up, or leave no room for the next life or learner."""
    match message:
        case WorkerHello():
            _check_room("incarnation", message.incarnation, MOST_LIVES)
            _check_room("learner epoch", message.weights[0], MOST_EPOCH)
            _check_totals(message.totals)
            for settled in (message.settled, *message.groups.values()):
                _check_settled(settled, message.totals)
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
            _check_last_words(message)


def check_books_of_batch(seq: int, totals: WorkerTotals) -> None:
    """Raise `DecodeError` unless `totals` add up and are those right after batch `seq`."""
    if totals.seq != seq:
        raise _implausible(f"batch {seq} with the totals of batch {totals.seq}")
    _check_totals(totals)


def _check_room(name: str, number: int, most: int) -> None:
    if number > most // 2:
        raise _implausible(f"{name} {number}; no honest peer comes near {most}, and later ones need room")


def _check_last_words(words: LastWords) -> None:
    totals, settled = words.totals, words.settled
    _check_totals(totals)
    _check_settled(settled, totals)
    for by_group in words.groups.values():
        _check_settled(by_group, totals)
    numbers, by_all = [batch.seq for batch in words.window], min(one.seq for one in (settled, *words.groups.values()))
    if numbers != sorted(set(numbers)) or not set(numbers) <= set(range(by_all + 1, totals.seq + 1)):
        told = f"where {totals.seq} are cut and {by_all} settled"
        raise _implausible(f"batches {numbers[:3]}... in the window, {told}")
    left = [batch for batch in words.window if batch.seq > settled.seq]
    kept, shipped = plus(settled.total(), total_of(batch.count for batch in left)), _shipped(totals)
    is_whole = len(left) == totals.seq - settled.seq
    if kept[0] > shipped[0] or kept[1] > shipped[1] or (is_whole and kept != shipped):
        raise _implausible(f"{kept} settled or in the window; {shipped} are shipped")


def _check_totals(totals: WorkerTotals) -> None:
    """Check that totals add up, as the ledger's equation says."""
    dropped = total_of(totals.dropped.values())[0] if totals.dropped else 0
    parts = totals.open + sum(totals.discarded.values()) + dropped + totals.shipped
    if totals.stepped != parts:
        raise _implausible(f"{totals.stepped} steps, of which {parts} are open, discarded, dropped or shipped")
    if totals.module_steps and sum(totals.module_steps.values()) != totals.shipped:
        raise _implausible(f"{sum(totals.module_steps.values())} steps of modules, {totals.shipped} shipped")
    if not totals.seq and (totals.shipped or totals.shipped_chunks):
        raise _implausible(f"{_shipped(totals)} shipped in no batch")


def _check_settled(settled: Settled, totals: WorkerTotals) -> None:
    """Check what a worker or its recorder says of its own batches: no more are settled than were cut."""
    if settled.seq > totals.seq or totals.seq - settled.seq > WINDOW:
        raise _implausible(f"{settled.seq} batches settled of {totals.seq}; at most {WINDOW} may be under way")
    total, shipped = settled.total(), _shipped(totals)
    if total[0] > shipped[0] or total[1] > shipped[1] or (settled.seq == totals.seq and total != shipped):
        raise _implausible(f"{total} settled in {settled.seq} batches; {shipped} are shipped in {totals.seq}")


def _implausible(detail: str) -> DecodeError:
    return DecodeError("implausible", detail)


def _shipped(totals: WorkerTotals) -> Count:
    return (totals.shipped, totals.shipped_chunks)
