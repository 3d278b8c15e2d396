"""The state of a fleet as Redis should hold it, and the part that this Redis has not confirmed yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, Generic, TypeVar

from headrace.broker.files.books_file import EndedLives
from headrace.broker.redis.parser import SourceKey
from headrace.broker.reports.report import Part, Report
from headrace.schemas.accounts.consumer_groups import GroupBooks
from headrace.schemas.accounts.folded_lives import FoldedLives
from headrace.schemas.accounts.ledger import LedgerRow
from headrace.schemas.accounts.lifetime_counters import folded_counters, row_counters
from headrace.schemas.accounts.logged_metrics import SumsOfLife
from headrace.schemas.accounts.runner_counters import Counters

K = TypeVar("K")
V = TypeVar("V")
Hashes = Mapping[str, Mapping[str, object]]

MOST_ROWS_A_PART = 100
"""Rows, and folded slots with their lives, in one script call. Redis then stops for some milliseconds."""

MOST_FIELDS_A_PART = 250
"""Smaller fields of each kind in one call."""


class _Fields(Generic[K, V]):
    """The newest value of each field, and which are not confirmed."""

    def __init__(self) -> None:
        self.values: dict[K, V] = {}
        self.unsent: dict[K, None] = {}

    def take(self, news: Mapping[K, V]) -> None:
        for key, value in news.items():
            known = self.values.get(key)
            if known is not value and known != value:
                self.values[key] = value
                self.unsent[key] = None

    def drop(self, key: K) -> None:
        self.values.pop(key, None)
        self.unsent.pop(key, None)

    def next(self, most: int) -> dict[K, V]:
        return {key: self.values[key] for key in islice(self.unsent, most)}

    def confirm(self, keys: Iterable[K]) -> None:
        for key in keys:
            self.unsent.pop(key, None)

    def forget_confirmed(self) -> None:
        self.unsent = dict.fromkeys(self.values)


class Mirror:
    """Takes what changed, report by report, and divides what Redis lacks into parts. One thread at a time.

    A part counts as confirmed by `confirm`. After `forget_confirmed`, as at first, Redis lacks everything.
    """

    def __init__(self) -> None:
        self.is_whole = True
        """True if the next parts must have all state, since this Redis may lack any of it."""
        self.has_new_ends = False
        """True once what `ended` returns has changed, until `ends_written`."""
        self._unwritten: dict[SourceKey, None] = {}
        """Ended lives whose rows no part may have yet: books.json lacks them, and recorders go once Redis has them."""
        self._rows: _Fields[SourceKey, LedgerRow] = _Fields()
        self._counters: _Fields[SourceKey, Mapping[str, int]] = _Fields()
        self._folded: _Fields[int, FoldedLives] = _Fields()
        kinds = ("workers", "incarnations", "runner_state", "env_errors", "tasks")
        self._smaller: dict[str, _Fields[Any, Any]] = {kind: _Fields() for kind in kinds}
        """All other fields, as `Report` names them."""
        self._errors_gone: dict[str, None] = {}
        self._gone: dict[int, None] = {}
        self._newest = Report()
        self._is_first = False
        """True while the next part is the first of a report."""
        self._lives: dict[int, set[int]] = {}
        """By slot, folded lives whose rows this Redis may still have."""
        self._names: set[str] = set()
        """Names of all counters that Redis may have of a life."""
        self._groups: dict[str, Mirror] = {}
        """The books of each consumer group besides the learner's."""

    def ended(self) -> EndedLives:
        """Return the books of lives that have ended."""
        rows = [row for row in self._rows.values.values() if row.closed]
        counters = [dict(self._counters.values.get((row.slot, row.incarnation), {})) for row in rows]
        groups = {name: own.ended() for name, own in self._groups.items()}
        return EndedLives(folded=dict(self._folded.values), rows=rows, counters=counters, groups=groups)

    def ends_written(self) -> None:
        """Note that what `ended` returned last is in its file. Redis may have it now."""
        self.has_new_ends = False
        self._rows.unsent.update(self._unwritten)
        self._unwritten.clear()
        for own in self._groups.values():
            own.ends_written()

    def lifetime(self) -> tuple[dict[int, Counters], Mapping[str, SumsOfLife], Hashes, Hashes] | None:
        """Return the runners' counters, the sums, env failures and figures of tasks.

        Return None while those of before are not known.
        """
        sums, tasks = self._newest.metric_sums, self._newest.task_figures or {}
        if sums is None:
            return None
        return dict(self._smaller["runner_state"].values), sums, dict(self._smaller["env_errors"].values), tasks

    @property
    def _kinds(self) -> tuple[_Fields[Any, Any], ...]:
        return (self._rows, self._counters, self._folded, *self._smaller.values())

    @property
    def lacks_folded(self) -> bool:
        """Return whether some folded lives are not confirmed."""
        return bool(self._folded.unsent)

    def take(self, report: Report) -> None:
        """Take what changed."""
        self._newest, self._is_first = report, True
        self.has_new_ends = self.has_new_ends or bool(report.folded) or any(row.closed for row in report.rows)
        self._rows.take({(row.slot, row.incarnation): row for row in report.rows})
        self._hold_back((row.slot, row.incarnation) for row in report.rows if row.closed)
        self._counters.take(report.counters)
        self._folded.take(report.folded)
        for kind, fields in self._smaller.items():
            fields.take(getattr(report, kind) or {})
        self._remove_env_errors(report.env_errors)
        for slot in report.workers:
            self._gone.pop(slot, None)
        for slot in report.workers_gone:
            self._smaller["workers"].drop(slot)
            self._gone[slot] = None
        if report.folded:
            self.remove_folded([*self._rows.values, *self._counters.values])
        if report.groups is not None:
            self._take_groups(report.groups)

    def _take_groups(self, groups: Mapping[str, GroupBooks]) -> None:
        """Take what changed in the books of groups. Forget those that are gone."""
        for name in self._groups.keys() - groups.keys():
            del self._groups[name]
            self.has_new_ends = True
        for name, books in groups.items():
            own = self._groups.setdefault(name, Mirror())
            own.take(Report(rows=list(books.rows.values()), folded=books.folded))
            self.has_new_ends = self.has_new_ends or own.has_new_ends

    def _hold_back(self, lives: Iterable[SourceKey]) -> None:
        """Hold back the rows of those lives that are not confirmed, until `ends_written`."""
        for life in lives:
            if life in self._rows.unsent:
                del self._rows.unsent[life]
                self._unwritten[life] = None

    def _remove_env_errors(self, groups: Mapping[str, Mapping[str, object]] | None) -> None:
        """Have Redis remove the groups that were summed up with others. None: the groups are not known yet."""
        if groups is None:
            return
        for name in self._smaller["env_errors"].values.keys() - groups.keys():
            self._smaller["env_errors"].drop(name)
            self._errors_gone[name] = None
        for name in groups:
            self._errors_gone.pop(name, None)

    def of_group(self, name: str) -> Mirror | None:
        """Return the books of a consumer group besides the learner's; None for an unknown one."""
        return self._groups.get(name)

    def remove_folded(self, rows: Iterable[SourceKey]) -> None:
        """Have Redis remove those of `rows` whose lives are folded."""
        for slot, incarnation in set(rows):
            lives = self._folded.values.get(slot)
            if lives is not None and incarnation in lives:
                self._rows.drop((slot, incarnation))
                self._unwritten.pop((slot, incarnation), None)
                self._counters.drop((slot, incarnation))
                self._lives.setdefault(slot, set()).add(incarnation)
                self._folded.unsent[slot] = None

    def know_counters(self, names: Iterable[str]) -> None:
        """Note names of counters that Redis has."""
        self._names.update(names)

    def forget_confirmed(self) -> None:
        """Make the next parts send all state."""
        self.is_whole = self._is_first = True
        for fields in self._kinds:
            fields.forget_confirmed()
        self._hold_back(list(self._unwritten))
        for own in self._groups.values():
            own.forget_confirmed()

    def whole(self) -> Part:
        """Return all that Redis should hold, as one part. Rows of ended lives that books.json lacks are left out."""
        rows = [row for life, row in self._rows.values.items() if life not in self._unwritten]
        smaller: dict[str, Any] = {kind: fields.values for kind, fields in self._smaller.items()}
        books = {name: own.whole() for name, own in self._groups.items()}
        report = replace(
            self._newest,
            rows=rows,
            counters=self._counters.values,
            folded=self._folded.values,
            groups=_books_of(books, self._newest.groups),
            **smaller,
        )
        return Part(report)

    def next_part(self, most: int = MOST_ROWS_A_PART) -> Part | None:
        """Return the next part to send; None when Redis lacks nothing. The first part of a report has its gauges."""
        most //= 1 + len(self._groups)
        parts = {name: part for name, own in self._groups.items() if (part := own.next_part(most)) is not None}
        gone = self._gone or self._errors_gone or parts
        if not self._is_first and not gone and not any(fields.unsent for fields in self._kinds):
            return None
        folded = self._folded.next(most)
        rows = {} if folded else self._rows.next(most)
        counters = {} if folded else self._counters.next(most)
        counters |= {key: self._counters.values[key] for key in rows if key in self._counters.values}
        smaller: dict[str, Any] = {kind: fields.next(MOST_FIELDS_A_PART) for kind, fields in self._smaller.items()}
        report = replace(
            self._newest,
            rows=list(rows.values()),
            counters=counters,
            folded=folded,
            workers_gone=list(islice(self._gone, MOST_FIELDS_A_PART)),
            groups=_books_of(parts, self._newest.groups),
            **smaller,
        )
        self._learn_names(report)
        return Part(
            report,
            is_first=self._is_first,
            clears_workers=self._is_first and self.is_whole,
            lives={slot: sorted(self._lives[slot]) for slot in folded if slot in self._lives},
            counters=sorted(self._names) if folded else (),
            env_errors_gone=list(self._errors_gone),
            group_lives={name: part.lives for name, part in parts.items()},
        )

    def _learn_names(self, report: Report) -> None:
        for row in report.rows:
            self._names.update(row_counters(row))
        for values in report.counters.values():
            self._names.update(values)
        for lives in report.folded.values():
            self._names.update(folded_counters(lives))

    def confirm(self, part: Part) -> None:
        """Note that Redis has a part."""
        report = part.report
        self._is_first = self._is_first and not part.is_first
        self._rows.confirm((row.slot, row.incarnation) for row in report.rows)
        self._counters.confirm(report.counters)
        self._folded.confirm(report.folded)
        for kind, fields in self._smaller.items():
            fields.confirm(getattr(report, kind) or ())
        for name in part.env_errors_gone:
            self._errors_gone.pop(name, None)
        for slot in report.workers_gone:
            self._gone.pop(slot, None)
        for slot in part.lives:
            self._lives.pop(slot, None)
        for name, books in (report.groups or {}).items():
            own = Report(rows=list(books.rows.values()), folded=books.folded)
            self._groups[name].confirm(Part(own, lives=part.group_lives.get(name, {})))


def _books_of(parts: Mapping[str, Part], newest: Mapping[str, GroupBooks] | None) -> dict[str, GroupBooks] | None:
    """Return the state of each group with the books of its part, if it has one."""
    if newest is None:
        return None
    empty = Part(Report())
    reports = {name: parts.get(name, empty).report for name in newest}
    return {
        name: GroupBooks(newest[name].state, {(row.slot, row.incarnation): row for row in report.rows}, report.folded)
        for name, report in reports.items()
    }
