"""Parser of values read from Redis. Any program may have written there, so every value is checked.

A value that breaks the promise of the table of keys is left out and named in a sentence. It is never an error and never
runs as code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import Field, NonNegativeInt, TypeAdapter, ValidationError

from headrace.schemas.accounts.consumer_groups import GroupBooks, GroupRow
from headrace.schemas.accounts.env_errors import EnvErrorRow
from headrace.schemas.accounts.folded_lives import FoldedLives
from headrace.schemas.accounts.ledger import LedgerRow
from headrace.schemas.accounts.logged_metrics import LoggedMetric, SumsOfLife, is_metric_name
from headrace.schemas.accounts.process_state import ProcessState
from headrace.schemas.accounts.redis_keys import PAST, source_name
from headrace.schemas.accounts.runner_counters import Counters, read_counters
from headrace.schemas.basics.bounds import GROUP_PATTERN, MOST_EPOCH, MOST_LIVES, MOST_TASK_NAME

Hash = Mapping[bytes, bytes]
SourceKey = tuple[int, int]
_Word = Annotated[str, Field(max_length=256)]
_REFUSED = TypeAdapter(Annotated[list[tuple[_Word, _Word, NonNegativeInt]], Field(max_length=16)]).validate_json
K = TypeVar("K")
V = TypeVar("V")

_LARGEST = 1 << 53
"""Above this Lua's numbers, which are doubles, stop being exact."""

_COUNTS_OF_LEASE = ("connected", "waiting", "pid", "torch_threads", "cores")

_LATEST_UNIX_S = 1e11
"""More than three thousand years."""


@dataclass(slots=True)
class HashParser:
    """Parses the hashes of a fleet. `garbage` collects a sentence for each value that was left out."""

    garbage: list[str] = field(default_factory=list)

    def rows(self, raw: Hash) -> dict[SourceKey, LedgerRow]:
        """Parse the ledger, by (slot, incarnation)."""
        return self._parse("ledger", raw, _source, LedgerRow.model_validate_json)

    def folded(self, raw: Hash) -> dict[int, FoldedLives]:
        """Parse the folded lives, by slot."""
        return self._parse("folded", raw, _slot, FoldedLives.model_validate_json)

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
        return self._parse("workers", raw, _slot, _object)

    def processes(self, raw: Hash) -> dict[str, ProcessState]:
        """Parse the states of the supervisor's processes, by name."""
        return self._parse("processes", raw, str, ProcessState.model_validate_json)

    def incarnations(self, raw: Hash) -> dict[int, int]:
        """Parse the highest incarnation given out in each slot."""
        return self._parse("incarnations", raw, _slot, _incarnation)

    def runner_state(self, raw: Hash) -> dict[int, Counters]:
        """Parse the lifetime counters of the runner in each slot."""
        return self._parse("runner_state", raw, _slot, read_counters)

    def metrics(self, raw: Hash) -> dict[str, LoggedMetric]:
        """Parse what callbacks have logged, by name."""
        return self._parse("metrics", raw, _metric_name, LoggedMetric.model_validate_json)

    def metric_sums(self, raw: Hash) -> dict[str, SumsOfLife]:
        """Parse the sums that callbacks have logged, by slot as text, and of earlier lives under "past"."""
        return self._parse("metric_sums", raw, _slot_or_past, SumsOfLife.model_validate_json)

    def env_errors(self, raw: Hash) -> dict[str, EnvErrorRow]:
        """Parse the groups of failures of envs, by fingerprint."""
        return self._parse("errors", raw, str, _env_error)

    def policies(self, raw: Hash) -> dict[str, dict[str, float]]:
        """Parse the returns of each policy's agents, by module id."""
        return self._parse("policies", raw, str, _numbers)

    def policy_quantiles(self, raw: Hash) -> dict[str, dict[str, float]]:
        """Parse the quantiles of the returns of each policy's agents, by module id; empty where they are not told."""
        return self._parse("policies", raw, str, _quantiles)

    def task_figures(self, raw: Hash) -> dict[str, dict[str, float]]:
        """Parse the figures of tasks, by the task's name."""
        return self._parse("task_figures", raw, _task, _numbers)

    def groups(self, states: Hash, ledger: Hash, folded: Hash) -> dict[str, GroupBooks]:
        """Parse the books of consumer groups, by the group's name."""
        told = self._parse("consumer_groups", states, _group, GroupRow.model_validate_json)
        rows = self._parse("group_ledger", ledger, _of_group(_source), LedgerRow.model_validate_json)
        lives = self._parse("group_folded", folded, _of_group(_slot), FoldedLives.model_validate_json)
        return {
            name: GroupBooks(told.get(name, GroupRow()), _own(rows, name), _own(lives, name))
            for name in sorted({*told, *(group for group, _ in (*rows, *lives))})
        }

    def lease(self, raw: Hash) -> dict[str, Any]:
        """Parse the learner's lease; empty when there is none.

        The epoch, times, connected, waiting, pid, torch_threads and cores are numbers, the rest is text.
        """
        lease: dict[str, Any] = self._parse("lease", raw, str, str)
        moments = dict.fromkeys(
            (name for name in lease if name.endswith("unix_s") or name in _COUNTS_OF_LEASE), _moment
        )
        for name, read in {"epoch": _epoch, **moments}.items():
            if name in lease:
                kept = self._parse("lease", {name.encode(): lease.pop(name).encode()}, str, read)
                lease.update(kept)
        return lease

    def settings(self, raw: bytes | None) -> dict[str, Any]:
        """Parse the settings that the broker tells, by dotted key; empty when it tells none."""
        found = self._parse("fleet", {} if raw is None else {b"settings": raw}, str, _plain_values)
        return found.get("settings", {})

    def refused(self, raw: bytes | None) -> list[tuple[str, str, int]]:
        """Parse (peer, kind, count) of the messages that the broker refused most; none where it does not tell."""
        return self._parse("fleet", {} if raw is None else {b"refused": raw}, str, _REFUSED).get("refused", [])

    def moment(self, key: str, raw: bytes | None) -> float | None:
        """Parse a single time in unix seconds; None when it is absent."""
        found = self._parse(key, {} if raw is None else {b"time": raw}, str, _moment)
        return found.get("time")

    def _parse(self, key: str, raw: Hash, name: Callable[[str], K], value: Callable[[str], V]) -> dict[K, V]:
        parsed: dict[K, V] = {}
        for field_bytes, value_bytes in raw.items():
            try:
                field_name, text = field_bytes.decode(), value_bytes.decode()
                parsed[name(field_name)] = _named(field_name, value(text))
            except (ValueError, ValidationError):
                self.garbage.append(f"{key}: field {field_bytes[:60]!r} holds {value_bytes[:60]!r}, which is not valid")
        return parsed


def _named(field_name: str, value: V) -> V:
    own = field_name.split("/")  # without the group, if it has one
    if isinstance(value, LedgerRow) and "/".join(own[-2:]) != source_name(value.slot, value.incarnation):
        raise ValueError("a row of another incarnation")
    if isinstance(value, EnvErrorRow) and field_name != value.fingerprint:
        raise ValueError("a group of another name")
    if isinstance(value, FoldedLives) and own[-1] != str(value.row.slot):
        raise ValueError("the lives of another slot")
    if isinstance(value, ProcessState) and field_name != value.name:
        raise ValueError("the state of another process")
    return value


def _env_error(text: str) -> EnvErrorRow:
    row = EnvErrorRow.model_validate_json(text)
    for source in row.lives:
        _source(source)
    return row


def _source(text: str) -> SourceKey:
    slot, incarnation = text.split("/")
    return _slot(slot), _incarnation(incarnation)


def _group(text: str) -> str:
    if not re.fullmatch(GROUP_PATTERN, text):
        raise ValueError("not a group's name")
    return text


def _of_group(name: Callable[[str], K]) -> Callable[[str], tuple[str, K]]:
    """Return what parses group/name, where `name` parses the rest."""

    def parse(text: str) -> tuple[str, K]:
        group, _, own = text.partition("/")
        return _group(group), name(own)

    return parse


def _own(found: Mapping[tuple[str, K], V], group: str) -> dict[K, V]:
    return {name: value for (own, name), value in found.items() if own == group}


def _count(text: str) -> int:
    if len(text) > 16 or not (text.isascii() and text.isdigit()) or (value := int(text)) > _LARGEST:
        raise ValueError("not a count")
    return value


def _slot(text: str) -> int:
    return _bounded(text, MOST_LIVES)


def _incarnation(text: str) -> int:
    return _bounded(text, MOST_LIVES - 1)  # one at the bound has no next number; the same holds for epochs


def _epoch(text: str) -> int:
    return _bounded(text, MOST_EPOCH - 1)


def _bounded(text: str, most: int) -> int:
    if (value := _count(text)) > most:
        raise ValueError(f"above {most}")
    return value


def finite(text: str) -> float:
    """Parse a finite number. Raises `ValueError`."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("not a finite number")
    return value


def _moment(text: str) -> float:
    value = finite(text)
    if not 0 <= value <= _LATEST_UNIX_S:
        raise ValueError("not a time")
    return value


def _object(text: str) -> dict[str, Any]:
    value = orjson.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _plain_values(text: str) -> dict[str, Any]:
    values = _object(text)
    if not all(isinstance(value, int | float | str | None) for value in values.values()):
        raise ValueError("no plain values")
    return values


def _metric_name(text: str) -> str:
    if not is_metric_name(text):
        raise ValueError("not a metric's name")
    return text


def _task(text: str) -> str:
    if len(text) > MOST_TASK_NAME:
        raise ValueError("not a task's name")
    return text


def _slot_or_past(text: str) -> str:
    return text if text == PAST else str(_slot(text))


def _numbers(text: str) -> dict[str, float]:
    return {name: finite(str(value)) for name, value in _object(text).items() if name != "quantiles"}


def _quantiles(text: str) -> dict[str, float]:
    told = _object(text).get("quantiles", {})
    if not isinstance(told, dict):
        raise ValueError("no values by quantile")
    return {name: finite(str(value)) for name, value in told.items()}
