"""Reports of the consumer groups other than the learner's, and the folding of their finished lives."""

from __future__ import annotations

import time
from collections.abc import Mapping

from headrace.broker.reports.reporter import RedisReporter
from headrace.broker.sessions.consumer_group import ConsumerGroup
from headrace.broker.sessions.core import BrokerCore
from headrace.broker.sessions.lease import LearnerLease
from headrace.schemas.accounts import redis_keys as keys
from headrace.schemas.accounts.consumer_groups import MOST_TEXT, GroupBooks, GroupRow
from headrace.schemas.accounts.ledger import CountsByReason, LedgerRow, plus, total_of


class GroupReports:
    """Makes the part of a report that is about groups. Knows since when each has its reader."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core
        self._since: dict[str, tuple[LearnerLease, float]] = {}

    def fold(self, reporter: RedisReporter | None) -> None:
        """Fold what may fold. Call it before the core folds lives: a group takes over those folded before it began."""
        for name, group in self._core.groups.by_name.items():
            group.pass_over_folded(self._core.store.folded)
            stored = self._changed(group) if reporter is None else reporter.take_closed_rows(name)
            group.folding.stored((row for row in stored if row.closed), durable=reporter is not None)
            group.fold()

    def report(self, now: float) -> dict[str, GroupBooks]:
        """Return the state of each group, and what changed in its books.

        Call it before the core's changes are taken, so that both are of the same moment.
        """
        return {
            name: GroupBooks(
                self._row(group, now),
                {(row.slot, row.incarnation): row for row in self._changed(group)},
                group.folding.take_news(),
            )
            for name, group in self._core.groups.by_name.items()
        }

    def _changed(self, group: ConsumerGroup) -> list[LedgerRow]:
        return group.take_changed(self._core.sources, set(self._core.store.unreported))

    def _row(self, group: ConsumerGroup, now: float) -> GroupRow:
        store, lease, unix_s = group.store, group.learners.lease, time.time()
        settled = [source.settled for source in store.sources.values()]
        settled += [lives.row.settled for lives in store.folded.values()]
        dropped: CountsByReason = {}
        for one in settled:
            for reason, count in one.dropped.items():
                dropped[reason] = plus(dropped.get(reason, (0, 0)), count)
        row = GroupRow(
            on_slow=group.on_slow,
            declared=group.name in self._core.groups.declared,
            behind=not store.is_reconciled,
            connected=group.has_reader,
            held_batches=store.held_batches(),
            held_bytes=store.nbytes,
            lag_steps=group.lag_steps,
            oldest_s=max(0.0, group.oldest_age_s(now)),
            committed=total_of(one.committed for one in settled),
            dropped=dropped,
        )
        if lease is None:
            return row
        known, since = self._since.get(group.name, (None, unix_s))
        if known is not lease:
            self._since[group.name] = lease, unix_s
            since = unix_s
        of_reader = {
            "host": lease.hello.host[:MOST_TEXT],
            "pid": lease.hello.pid,
            "program": lease.hello.program[:MOST_TEXT],
            "since_unix_s": since,
            "heard_unix_s": unix_s - (now - lease.heard_at),
            "committed_unix_s": None if lease.committed_at is None else unix_s - (now - lease.committed_at),
            "waiting": lease.waits(now),
        }
        return row.model_copy(update=of_reader)


def gauges_of(groups: Mapping[str, GroupBooks]) -> dict[str, float]:
    """Return the gauges with the label `group`."""
    return {
        keys.labelled(figure, "group", name): value
        for name, books in groups.items()
        for figure, value in books.state.figures().items()
    }
