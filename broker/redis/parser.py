"""Parser of values read from Redis.

A value that is not of the form that the table of keys promises is left out and named in a sentence. It is never an
error and never runs as code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import Field, NonNegativeInt, TypeAdapter, ValidationError

from headrace.schemas.accounts.consumer_groups import GroupBooks, GroupRow
from headrace.schemas.accounts.env_errors import EnvErrorRow
from headrace.schemas.accounts.folded_lives import FoldedLives
from headrace.schemas.accounts.ledger import LedgerRow
from headrace.schemas.accounts.logged_metrics import LoggedMetric, SumsOfLife
from headrace.schemas.accounts.process_state import ProcessState
from headrace.schemas.accounts.runner_counters import Counters, read_counters

Hash = Mapping[bytes, bytes]
SourceKey = tuple[int, int]
_Word = Annotated[str, Field(max_length=256)]
_REFUSED = TypeAdapter(Annotated[list[tuple[_Word, _Word, NonNegativeInt]], Field(max_length=16)]).validate_json
K = TypeVar("K")
V = TypeVar("V")

_COUNTS_OF_LEASE = (b"connected", b"waiting", b"pid", b"torch_threads", b"cores")


@dataclass(slots=True)
class HashParser:
    """Parses the hashes of a fleet. `garbage` collects a sentence for each value that was left out."""

    garbage: list[str] = field(default_factory=list)

    def rows(self, raw: Hash) -> dict[SourceKey, LedgerRow]:
        """Parse the ledger, by (slot, incarnation)."""
        return self._parse("ledger", raw, _source, LedgerRow.model_validate_json)

    def folded(self, raw: Hash) -> dict[int, FoldedLives]:
        """Parse the folded lives, by slot."""
        return self._parse("folded", raw, _count, FoldedLives.model_validate_json)

    def totals(self, raw: Hash) -> dict[str, int]:
        """Parse lifetime counters by name."""
        return self._parse("totals", raw, str, _count)

    def sources(self, raw: Hash) -> dict[SourceKey, dict[str, int]]:
        """Parse what was merged so far, counter by counter, for each (slot, incarnation)."""
        lives: dict[str, SourceKey] = {}  # a life has many counters

        def counter(text: str) -> tuple[SourceKey, str]:
            slot, incarnation, name = text.split("/", 2)
            life = f"{slot}/{incarnation}"
            if life not in lives:
                lives[life] = _source(life)
            return lives[life], name

        found: dict[SourceKey, dict[str, int]] = {}
        for (life, name), value in self._parse("sources", raw, counter, _count).items():
            found.setdefault(life, {})[name] = value
        return found

    def gauges(self, raw: Hash) -> dict[str, float]:
        """Parse the newest values by name; finite numbers only."""
        return self._parse("gauges", raw, str, finite)

    def workers(self, raw: Hash) -> dict[int, dict[str, Any]]:
        """Parse the newest state of the worker in each slot."""
        return self._parse("workers", raw, _count, _object)

    def processes(self, raw: Hash) -> dict[str, ProcessState]:
        """Parse the states of the supervisor's processes, by name."""
        return self._parse("processes", raw, str, ProcessState.model_validate_json)

    def incarnations(self, raw: Hash) -> dict[int, int]:
        """Parse the highest incarnation given out in each slot."""
        return self._parse("incarnations", raw, _count, _count)

    def runner_state(self, raw: Hash) -> dict[int, Counters]:
        """Parse the lifetime counters of the runner in each slot."""
        return self._parse("runner_state", raw, _count, read_counters)

    def metrics(self, raw: Hash) -> dict[str, LoggedMetric]:
        """Parse what callbacks have logged, by name."""
        return self._parse("metrics", raw, str, LoggedMetric.model_validate_json)

    def metric_sums(self, raw: Hash) -> dict[str, SumsOfLife]:
        """Parse the sums that callbacks have logged, by slot as text, and of earlier lives under "past"."""
        return self._parse("metric_sums", raw, str, SumsOfLife.model_validate_json)

    def env_errors(self, raw: Hash) -> dict[str, EnvErrorRow]:
        """Parse the groups of failures of envs, by fingerprint."""
        return self._parse("errors", raw, str, EnvErrorRow.model_validate_json)

    def policies(self, raw: Hash) -> dict[str, dict[str, float]]:
        """Parse the returns of each policy's agents, by module id."""
        return self._parse("policies", raw, str, _numbers)

    def policy_quantiles(self, raw: Hash) -> dict[str, dict[str, float]]:
        """Parse the quantiles of the returns of each policy's agents, by module id; empty where they are not told."""
        return self._parse("policies", raw, str, _quantiles)

    def task_figures(self, raw: Hash) -> dict[str, dict[str, float]]:
        """Parse the figures of tasks, by the task's name."""
        return self._parse("task_figures", raw, str, _numbers)

    def groups(self, states: Hash, ledger: Hash, folded: Hash) -> dict[str, GroupBooks]:
        """Parse the books of consumer groups, by the group's name."""
        told = self._parse("consumer_groups", states, str, GroupRow.model_validate_json)
        rows = self._parse("group_ledger", ledger, _of_group(_source), LedgerRow.model_validate_json)
        lives = self._parse("group_folded", folded, _of_group(_count), FoldedLives.model_validate_json)
        return {
            name: GroupBooks(told.get(name, GroupRow()), _own(rows, name), _own(lives, name))
            for name in sorted({*told, *(group for group, _ in (*rows, *lives))})
        }

    def lease(self, raw: Hash) -> dict[str, Any]:
        """Parse the learner's lease; empty when there is none.

        The epoch, times, connected, waiting, pid, torch_threads and cores are numbers, the rest is text.
        """
        lease: dict[str, Any] = {}
        for name, value in raw.items():
            is_number = name.endswith(b"unix_s") or name in _COUNTS_OF_LEASE
            read: Callable[[str], Any] = _count if name == b"epoch" else finite if is_number else str
            lease |= self._parse("lease", {name: value}, str, read)
        return lease

    def settings(self, raw: bytes | None) -> dict[str, Any]:
        """Parse the settings that the broker tells, by dotted key; empty when it tells none."""
        found = self._parse("fleet", {} if raw is None else {b"settings": raw}, str, _object)
        return found.get("settings", {})

    def refused(self, raw: bytes | None) -> list[tuple[str, str, int]]:
        """Parse (peer, kind, count) of the messages that the broker refused most; none where it does not tell."""
        return self._parse("fleet", {} if raw is None else {b"refused": raw}, str, _REFUSED).get("refused", [])

    def moment(self, key: str, raw: bytes | None) -> float | None:
        """Parse a single time in unix seconds; None when it is absent."""
        found = self._parse(key, {} if raw is None else {b"time": raw}, str, finite)
        return found.get("time")

    def _parse(self, key: str, raw: Hash, name: Callable[[str], K], value: Callable[[str], V]) -> dict[K, V]:
        parsed: dict[K, V] = {}
        for field_bytes, value_bytes in raw.items():
            try:
                field_name, text = field_bytes.decode(), value_bytes.decode()
                parsed[name(field_name)] = value(text)
            except (ValueError, ValidationError):
                self.garbage.append(f"{key}: field {field_bytes[:60]!r} holds {value_bytes[:60]!r}, which is not valid")
        return parsed


def _source(text: str) -> SourceKey:
    slot, incarnation = text.split("/")
    return _count(slot), _count(incarnation)


def _of_group(name: Callable[[str], K]) -> Callable[[str], tuple[str, K]]:
    """Return what parses group/name, where `name` parses the rest."""

    def parse(text: str) -> tuple[str, K]:
        group, _, own = text.partition("/")
        return group, name(own)

    return parse


def _own(found: Mapping[tuple[str, K], V], group: str) -> dict[K, V]:
    return {name: value for (own, name), value in found.items() if own == group}


def _count(text: str) -> int:
    if (value := int(text)) < 0:
        raise ValueError("not a count")
    return value


def finite(text: str) -> float:
    """Parse a finite number. Raises `ValueError`."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("not a finite number")
    return value


def _object(text: str) -> dict[str, Any]:
    value = orjson.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _numbers(text: str) -> dict[str, float]:
    return {name: finite(str(value)) for name, value in _object(text).items() if name != "quantiles"}


def _quantiles(text: str) -> dict[str, float]:
    told = _object(text).get("quantiles", {})
    return {name: finite(str(value)) for name, value in told.items()}
